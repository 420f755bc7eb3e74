// Verbs: a button that asks once more where that is wise, carries the verb out, and says what became of it.

import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { SignIn, send } from "./api.js";
import { link, run, useLive } from "./live.js";

/** @typedef {{text: string, tone: "good" | "bad", id: number}} Notice */

/** @type {Set<(notice: Notice | null) => void>} */
const shows = new Set();
let notices = 0;

/** Says a sentence to people, screen readers too. @param {string} text @param {"good" | "bad"} [tone] */
export function notify(text, tone = "good") {
  const notice = { text, tone, id: ++notices };
  for (const show of shows) show(notice);
}

/** Where notices are said: once in the shell. */
export function Notices() {
  const [notice, setNotice] = useState(/** @type {Notice | null} */ (null));
  useEffect(() => {
    shows.add(setNotice);
    return () => void shows.delete(setNotice);
  }, []);
  useEffect(() => {
    if (!notice || notice.tone === "bad") return undefined;
    const timer = setTimeout(() => setNotice(null), 6000);
    return () => clearTimeout(timer);
  }, [notice?.id]);
  return h(
    "div",
    { class: "notices", role: "status", "aria-live": "polite" },
    notice &&
      h(
        "div",
        { class: `notice ${notice.tone}` },
        h("span", null, notice.text),
        h("button", { type: "button", class: "small plain", "aria-label": "Dismiss", onClick: () => setNotice(null) }, "✕"),
      ),
  );
}

/** Whether who looks may also act; those who may not are shown no buttons, and told why at the top of the page. */
export const mayAct = () => link.me === null || link.me.scope !== "read";

/**
 * A button for a verb of the API; nothing for somebody who may only look.
 * @param {{label: string, method?: "POST" | "DELETE" | "PATCH", target: string, body?: unknown | ((why: string) => unknown), done?: string | ((answer: any) => string),
 *   question?: string, details?: () => import("preact").ComponentChildren, reason?: string,
 *   tone?: "primary" | "danger" | "", disabled?: boolean, onDone?: (answer: any) => void}} props
 *   `question`: what is asked in a dialog before, `details` what is shown below it; `reason`: the label of a line of text
 *   that is sent as ?reason=; a `body` that is a function takes the line instead, which must then be filled in; `done`: the
 *   sentence said afterwards, or what makes it of the answer's JSON; `onDone` gets the answer's JSON
 */
export function Verb(props) {
  const { label, method = "POST", target, body, done, question, details, reason, tone = "", disabled = false, onDone } = props;
  const away = useAway();
  const [busy, setBusy] = useState(false);
  const [asking, setAsking] = useState(false);

  const carryOut = async (/** @type {string} */ why) => {
    setAsking(false);
    setBusy(true);
    const join = target.includes("?") ? "&" : "?";
    try {
      const answer =
        typeof body === "function"
          ? await send(method, target, body(why))
          : await send(method, why ? `${target}${join}reason=${encodeURIComponent(why)}` : target, body);
      notify(typeof done === "function" ? done(answer) : (done ?? `${label}: done.`));
      onDone?.(answer);
    } catch (error) {
      if (error instanceof SignIn) void run();
      notify(`${label}: ${error instanceof Error ? error.message : String(error)}`, "bad");
    } finally {
      setBusy(false);
    }
  };

  if (!mayAct()) return null;
  return [
    h(
      "button",
      {
        type: "button",
        class: tone,
        disabled: busy || disabled || away !== "",
        title: away || undefined,
        "aria-busy": busy ? "true" : undefined,
        onClick: () => (question || reason ? setAsking(true) : void carryOut("")),
      },
      label,
    ),
    asking && h(Question, { label, question, details, reason, needed: typeof body === "function", tone, away, answer: carryOut, cancel: () => setAsking(false) }),
  ];
}

/** Why nothing can be done now, "" if something can: the server is away, or stands by while nobody leads. */
function useAway() {
  useLive("link", "fleet");
  if (link.state !== "live") return "The server does not answer: nothing can be done here until it does.";
  return link.fleetSeen ? "" : "No server leads: nothing can be done here until one does.";
}

/**
 * @param {{label: string, question: string | undefined, details: (() => import("preact").ComponentChildren) | undefined,
 *   reason: string | undefined, needed: boolean, tone: string, away: string, answer: (why: string) => void, cancel: () => void}} props
 */
function Question({ label, question, details, reason, needed, tone, away, answer, cancel }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const [why, setWhy] = useState("");
  useEffect(() => dialog.current?.showModal(), []);
  return h(
    "dialog",
    { ref: dialog, onClose: cancel, "aria-label": label },
    h("p", null, question ?? `${label}?`),
    details?.(),
    away && h("p", { class: "trouble", role: "alert" }, away),
    reason &&
      h(
        "label",
        { class: "field" },
        reason,
        h("input", {
          type: "text",
          maxLength: 1000,
          required: needed,
          value: why,
          onInput: (/** @type {Event} */ event) => setWhy(/** @type {HTMLInputElement} */ (event.target).value),
        }),
      ),
    h(
      "div",
      { class: "buttons" },
      h("button", { type: "button", onClick: () => dialog.current?.close() }, "Cancel"),
      h("button", { type: "button", class: tone || "primary", disabled: away !== "" || (needed && why.trim() === ""), onClick: () => answer(why.trim()) }, label),
    ),
  );
}
