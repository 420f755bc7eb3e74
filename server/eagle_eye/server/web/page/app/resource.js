// What a view reads from the API by itself: read when it opens, again when something concerning it changed.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { SignIn, get } from "./api.js";
import { link, onRecord, run, useLive } from "./live.js";

/** @typedef {import("./live.js").Kind} Kind */

/**
 * @template T
 * @typedef {object} Resource
 * @property {T | null} data the last answer that came; it stays while a newer one is awaited or cannot be had
 * @property {Error | null} error why there is none, or none newer
 * @property {number | null} read when `data` was read, milliseconds by this machine's clock
 * @property {() => void} again reads it anew
 */

/** The last data that there was, while other data is awaited: what is drawn must not vanish at each zoom.
 * @template T @param {T | null} data @returns {T | null} */
export function useKept(data) {
  const kept = useRef(/** @type {T | null} */ (null));
  if (data !== null) kept.current = data;
  return kept.current;
}

/**
 * Reads `target` (see `path`), null: nothing. Reads it again `every_ms`, after a lost connection, and shortly after an event for
 * which `concerns` says true.
 * @template T
 * @param {string | null} target
 * @param {{every_ms?: number, concerns?: (kind: Kind, record: any) => boolean, settle_ms?: number}} [more]
 *   `settle_ms`: how long further events are waited for, since a storm of them must not become one of requests
 * @returns {Resource<T>}
 */
export function useResource(target, more = {}) {
  const [state, setState] = useState(
    /** @type {{target: string | null, data: T | null, error: Error | null, read: number | null}} */
    ({ target: null, data: null, error: null, read: null }),
  );
  const [turn, setTurn] = useState(0);
  const concerns = useRef(more.concerns);
  concerns.current = more.concerns;
  const again = useCallback(() => setTurn((count) => count + 1), []);
  useLive("link");
  const { returns } = link; // not the state: nothing is read twice when the page opens, or in vain while it is lost

  useEffect(() => {
    if (target === null) return undefined;
    const calling = new AbortController();
    get(target, calling.signal).then(
      (data) => setState({ target, data, error: null, read: Date.now() }),
      (error) => {
        if (calling.signal.aborted) return;
        if (error instanceof SignIn) void run();
        setState((old) => ({ ...(old.target === target ? old : { data: null, read: null }), target, error }));
      },
    );
    return () => calling.abort();
  }, [target, turn, returns]);

  useEffect(() => {
    if (target === null || !more.every_ms) return undefined;
    const timer = setInterval(() => {
      if (!document.hidden) again();
    }, more.every_ms);
    const shown = () => {
      if (!document.hidden) again();
    };
    document.addEventListener("visibilitychange", shown);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [target, more.every_ms]);

  useEffect(() => {
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const end = onRecord((kind, record) => {
      if (timer === undefined && concerns.current?.(kind, record)) {
        timer = setTimeout(() => {
          timer = undefined;
          again();
        }, more.settle_ms ?? 250);
      }
    });
    return () => {
      end();
      clearTimeout(timer);
    };
  }, []);

  const mine = state.target === target ? state : { data: null, error: null, read: null };
  return { data: mine.data, error: mine.error, read: mine.read, again };
}
