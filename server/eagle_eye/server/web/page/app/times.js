// Moments: shown in the reader's zone, in UTC on hover and to screen readers' machines.

import { h } from "preact";
import { useEffect, useReducer } from "preact/hooks";
import { now } from "./api.js";
import { duration } from "./format.js";

/** @type {Set<() => void>} */
const clocks = new Set();
setInterval(() => {
  if (!document.hidden) for (const tick of clocks) tick();
}, 1000);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) for (const tick of clocks) tick();
});

/** The server's time in milliseconds; draws the component again each second. */
export function useNow() {
  const [, again] = useReducer((/** @type {number} */ count) => count + 1, 0);
  useEffect(() => {
    const tick = () => again(undefined);
    clocks.add(tick);
    return () => void clocks.delete(tick);
  }, []);
  return now();
}

/** @param {Date} moment */
const utc = (moment) => `${moment.toISOString().replace("T", " ").slice(0, 19)} UTC`;

/** "14:03:07" today, "Nov 21, 14:03:07" before: where there is little room. @param {Date} moment */
export function local(moment) {
  const today = new Date(now()).toDateString() === moment.toDateString();
  return today ? moment.toLocaleTimeString("en-GB") : dated(moment);
}

/** "Nov 21, 14:03:07", with the year if it is another one. @param {Date} moment */
function dated(moment) {
  const other = new Date(now()).getFullYear() !== moment.getFullYear();
  const day = moment.toLocaleDateString("en-US", { month: "short", day: "numeric", ...(other ? { year: "numeric" } : {}) });
  return `${day}, ${moment.toLocaleTimeString("en-GB")}`;
}

/** The reader's zone at a moment: "UTC", "GMT+1", "EST". @param {Date} moment */
export const zone = (moment) =>
  new Intl.DateTimeFormat("en-US", { timeZoneName: "short" }).formatToParts(moment).find((part) => part.type === "timeZoneName")?.value ?? "";

/**
 * A moment with its date; `at` is RFC 3339 as the API has it, null: never. `zoned`: with the zone, where people copy it.
 * @param {{at: string | null | undefined, none?: string, zoned?: boolean}} props
 */
export function Time({ at, none = "–", zoned = false }) {
  if (!at) return none;
  const moment = new Date(at);
  return h("time", { dateTime: at, title: utc(moment) }, zoned ? `${dated(moment)} ${zone(moment)}` : dated(moment));
}

/** How long ago, counting up: "41 s ago". @param {{at: string | null | undefined, none?: string, bare?: boolean}} props */
export function Ago({ at, none = "never", bare = false }) {
  const current = useNow();
  if (!at) return none;
  const moment = new Date(at);
  const seconds = Math.max(0, Math.round((current - moment.getTime()) / 1000));
  return h("time", { dateTime: at, title: `${local(moment)} (${utc(moment)})` }, `${duration(seconds)}${bare ? "" : " ago"}`);
}
