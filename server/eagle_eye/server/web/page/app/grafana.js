// The link from the charts to the same range in Grafana, on the dashboard of the node or job that they show.

import { h } from "preact";
import { link, useLive } from "./live.js";

/**
 * @typedef {{job?: string, node?: string | null}} Subject what the charts show
 * @typedef {{from: number | string, to: number | string}} Times milliseconds, or as Grafana writes times that move: "now-1h"
 */

/**
 * The dashboards' addresses and variables are those of dashboards/grafana; their links lead back to this page.
 * @param {string} base Grafana's own address @param {Subject} subject @param {Times} times
 */
export function dashboard(base, { job, node }, { from, to }) {
  const board = node ? "node" : job ? "job" : "incidents";
  const query = new URLSearchParams({ from: String(from), to: String(to) });
  if (job) query.set("var-job", job);
  if (node) query.set("var-node", node);
  query.set("var-page", `${location.origin}${location.pathname}`.replace(/\/+$/, ""));
  return `${base}/d/eagle-eye-${board}?${query}`;
}

/** Nothing where the site has not said where its Grafana is. @param {{subject: Subject, times: Times}} props */
export function GrafanaLink({ subject, times }) {
  useLive("fleet");
  const base = link.fleet?.grafana_url;
  return base ? h("a", { href: dashboard(base, subject, times), target: "_blank", rel: "noopener noreferrer", class: "nowrap" }, "Open in Grafana") : null;
}
