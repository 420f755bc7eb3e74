// Open incidents in words that are understood in ten seconds: who, what, since when, and what is done about it.

import { h } from "preact";
import { path } from "../app/api.js";
import { capital, duration, few, percent, words } from "../app/format.js";
import { link as connection, put, records, useLive } from "../app/live.js";
import { Badge, Empty, JobLink, NodeLink, Section } from "../app/parts.js";
import { link } from "../app/router.js";
import { shownState } from "../app/states.js";
import { Ago } from "../app/times.js";
import { Verb } from "../app/verbs.js";
import { ActionVerbs } from "./approval.js";
import { SilencedMark, SilencesLink, useSilenced } from "./silences.js";

/**
 * @typedef {import("../api").Incident} Incident
 * @typedef {import("../api").Action} Action
 */

const RANK = /** @type {Record<string, number>} */ ({ acting: 0, confirmed: 1, suspected: 2, recovered: 3 });
const SHOWN = 20;

/** What each kind of action does, as a verb's stem: "would exclude", "exclude: done". */
const KINDS = /** @type {Record<string, string>} */ ({
  exclude_node: "exclude",
  restart_job: "restart the job",
  drain_node: "drain",
  checkpoint_now: "checkpoint",
  notify: "tell people",
  none: "record only",
});

/** The incidents that are not over, the gravest first, of the same gravity the oldest. @returns {Incident[]} */
export function openIncidents() {
  return [...records.incident.values()]
    .filter((one) => one.state in RANK && !one.merged_into && one.state !== "recovered")
    .sort((a, b) => grave(a) - grave(b) || (a.detected < b.detected ? -1 : 1));
}

/** @param {Incident} one */
const grave = (one) => (RANK[one.state] ?? 9) - (one.escalated ? 0.5 : 0);

export function Incidents() {
  useLive("incident", "action", "link");
  const open = openIncidents();
  const silenced = useSilenced();
  const all = [h(SilencesLink, {}), h("a", { href: link("incidents") }, "All incidents")];
  return h(
    Section,
    { title: "Incidents", id: "incidents", aside: all },
    open.length === 0
      ? h(Empty, null, connection.loaded ? "No open incident." : "Reading the incidents…")
      : h("ol", { class: "incidents panel" }, open.slice(0, SHOWN).map((one) => h(Row, { key: one.id, incident: one, silence: silenced.get(one.id) }))),
    open.length > SHOWN && h("p", { class: "quiet" }, `and ${open.length - SHOWN} more of less weight.`),
  );
}

/** @param {{incident: Incident, silence: import("../api").Silence | undefined}} props */
function Row({ incident, silence }) {
  const actions = [...records.action.values()].filter((one) => one.incident_id === incident.id && !one.preliminary);
  const tone = incident.state === "suspected" ? "warn" : "bad";
  const lasting = (Date.parse(incident.detected) - Date.parse(incident.onset)) / 1000;
  return h(
    "li",
    { class: `incident ${tone}` },
    h(
      "div",
      { class: "what" },
      h(
        "p",
        { class: "headline" },
        accused(incident),
        h("a", { href: link("incidents", incident.id), class: "fault" }, words(incident.fault)),
        h("span", { class: "quiet" }, " in "),
        h(JobLink, { name: incident.job }),
        incident.cell && h("span", { class: "quiet" }, `, cell ${incident.cell}`),
      ),
      h("p", { class: "why" }, incident.summary),
      incident.escalated && h("p", { class: "bad-ink strong" }, `Somebody has to look: ${incident.escalation}`),
    ),
    h(
      "div",
      { class: "state" },
      h("p", null, h(Badge, { state: shownState(incident, actions) }), " ", h(SilencedMark, { silence }), " ", h(Ago, { at: incident.onset, bare: true })),
      h("p", { class: "quiet" }, `found after ${duration(Math.max(lasting, 0))}, ${percent(incident.confidence)} sure`),
    ),
    h("div", { class: "done" }, response(incident, actions.at(-1))),
    h("div", { class: "verbs" }, seen(incident)),
  );
}

/** @param {Incident} incident */
function accused(incident) {
  if (incident.node) {
    const device = incident.device === null ? "" : ` GPU ${incident.device}`;
    return [h(NodeLink, { name: incident.node }), device, h("span", { class: "quiet" }, ": ")];
  }
  if (incident.nodes.length > 0) return [h("span", { class: "name" }, few(incident.nodes)), h("span", { class: "quiet" }, ": ")];
  return h("span", { class: "quiet" }, "No single node: ");
}

/** What was done about it, or why nothing was. @param {Incident} incident @param {Action | undefined} action */
function response(incident, action) {
  if (!action) {
    if (incident.hold) return h("p", null, h("span", { class: "strong" }, "On hold: "), incident.hold);
    if (incident.action === "notify") return h("p", { class: "quiet" }, "Notification only: there is no node to exclude.");
    return h("p", { class: "quiet" }, incident.state === "suspected" ? "Not sure enough to act." : "Nothing was asked for.");
  }
  const what = `${KINDS[action.kind] ?? words(action.kind)} ${few(action.exclude, 2)}`.trim();
  if (action.state === "would_act") return h("p", null, h("span", { class: "strong" }, `Would ${what}`), ", but policy only observes.");
  const last = action.reports.at(-1);
  return [
    h("p", null, h("span", { class: "strong" }, capital(what)), " ", h(Badge, { state: action.state })),
    last?.detail && h("p", { class: "quiet" }, last.detail),
    h("div", { class: "buttons start" }, h(ActionVerbs, { action, mode: connection.fleet?.policy_mode ?? "", open: true, doubt: true })),
  ];
}

/** @param {Incident} incident */
function seen(incident) {
  if (incident.acknowledged_by) return h("span", { class: "quiet" }, `Seen by ${incident.acknowledged_by}`);
  return h(Verb, {
    label: "Acknowledge",
    target: path`api/v1/incidents/${incident.id}/acknowledge`,
    done: "Acknowledged.",
    onDone: (answer) => put("incident", answer),
  });
}
