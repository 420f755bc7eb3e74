// The range of time that all charts of a page show. It is in the address, so that a link shows the same to everybody.

import { h } from "preact";
import { useEffect, useState } from "preact/hooks";
import { now } from "./api.js";
import { GrafanaLink } from "./grafana.js";
import { link } from "./router.js";
import { local } from "./times.js";

/**
 * @typedef {{from: number, to: number}} Range Unix seconds
 * @typedef {{to: (from: number, to: number) => void, reset: () => void}} Zoom
 */

/** @type {readonly [name: string, seconds: number, words: string][]} */
const LENGTHS = [
  ["15m", 900, "last 15 minutes"],
  ["1h", 3600, "last hour"],
  ["6h", 21_600, "last 6 hours"],
  ["1d", 86_400, "last day"],
  ["7d", 604_800, "last 7 days"],
];
const LEAST_S = 10;
const MOST_S = 13 * 86_400; // the server draws 14 days at most, in whole steps
const OWN = "own"; // neither the view's range nor one that ends now

/** Now in Unix seconds, in steps of `every_s`; draws the component again with each. @param {number} every_s */
export function useTime(every_s) {
  const current = () => Math.ceil(now() / 1000 / every_s) * every_s;
  const [time, setTime] = useState(current);
  useEffect(() => {
    const timer = setInterval(() => {
      if (!document.hidden) setTime(current());
    }, every_s * 1000);
    return () => clearInterval(timer);
  }, [every_s]);
  return time;
}

/** The range that an address asks for, null: the view's own. @param {URLSearchParams} query @param {number} time now, Unix seconds
 * @returns {Range | null} */
export function rangeOf(query, time) {
  const since = query.get("since") ?? "";
  const length = LENGTHS.find(([name]) => name === since);
  const from = length ? time - length[1] : moment(since);
  const to = moment(query.get("until") ?? "") ?? time;
  return from !== null && from < to ? { from, to } : null;
}

/** @param {string} text Unix seconds or RFC 3339 */
function moment(text) {
  const value = /^\d+(\.\d+)?$/.test(text) ? Number(text) : Date.parse(text) / 1000;
  return Number.isFinite(value) ? value : null;
}

/** The ways to another range for the charts of a view. @param {"incidents" | "jobs" | "nodes"} view @param {string} name @returns {Zoom} */
export function zoomOf(view, name) {
  return {
    to: (from, to) => {
      const span = Math.min(Math.max(to - from, LEAST_S), MOST_S);
      const middle = (from + to) / 2;
      const last = Math.min(middle + span / 2, Math.ceil(now() / 1000));
      show(view, name, { since: String(Math.floor(last - span)), until: String(Math.ceil(last)) });
    },
    reset: () => show(view, name, {}),
  };
}

/** @param {"incidents" | "jobs" | "nodes"} view @param {string} name @param {Record<string, string>} range */
function show(view, name, range) {
  const query = new URLSearchParams(range).toString();
  location.hash = `${link(view, name)}${query ? `?${query}` : ""}`;
}

/**
 * What chooses the range: the view's own, one that ends now, or another by zoom and shift. Dragging on a chart does, too.
 * @param {{view: "incidents" | "jobs" | "nodes", name: string, query: URLSearchParams, shown: Range | null, home: string,
 *   subject: import("./grafana.js").Subject}} props
 *   `shown`: what the charts show now; `home`: what the view's own range is; `subject`: of what the charts are
 */
export function RangePicker({ view, name, query, shown, home, subject }) {
  const since = query.get("since") ?? "";
  const chosen = !since ? "" : !query.get("until") && LENGTHS.some(([one]) => one === since) ? since : OWN;
  const zoom = zoomOf(view, name);
  const button = (/** @type {string} */ sign, /** @type {string} */ label, /** @type {number} */ left, /** @type {number} */ right) =>
    h(
      "button",
      {
        type: "button",
        class: "small",
        "aria-label": label,
        title: label,
        disabled: !shown,
        onClick: () => shown && zoom.to(shown.from + left * (shown.to - shown.from), shown.to + right * (shown.to - shown.from)),
      },
      sign,
    );
  return h(
    "div",
    { class: "range", role: "group", "aria-label": "Time range of the charts" },
    h(
      "select",
      {
        "aria-label": "Time range",
        value: chosen,
        onChange: (/** @type {Event} */ event) => {
          const { value } = /** @type {HTMLSelectElement} */ (event.target);
          if (value !== OWN) show(view, name, value ? { since: value } : {});
        },
      },
      h("option", { value: "" }, home),
      LENGTHS.map(([one, , words]) => h("option", { key: one, value: one }, words)),
      chosen === OWN && h("option", { value: OWN }, "own range"),
    ),
    button("◀", "Earlier", -0.5, -0.5),
    button("▶", "Later", 0.5, 0.5),
    button("+", "Zoom in", 0.25, -0.25),
    button("−", "Zoom out", -0.5, 0.5),
    since && h("button", { type: "button", class: "small", onClick: zoom.reset }, "Reset"),
    shown && h("span", { class: "quiet nowrap" }, `${local(new Date(shown.from * 1000))} to ${local(new Date(shown.to * 1000))}`),
    shown && h(GrafanaLink, { subject, times: LENGTHS.some(([one]) => one === chosen) ? { from: `now-${chosen}`, to: "now" } : { from: Math.floor(shown.from * 1000), to: Math.ceil(shown.to * 1000) } }),
  );
}
