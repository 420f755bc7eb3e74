// All incidents, newest first.

import { h } from "preact";
import { byName, few, percent, words } from "../app/format.js";
import { records, useLive } from "../app/live.js";
import { Badge, Empty, JobLink, NodeLink } from "../app/parts.js";
import { link } from "../app/router.js";
import { Table } from "../app/table.js";
import { Time } from "../app/times.js";

/** @typedef {import("../api").Incident} Incident */

/** @param {{query: URLSearchParams}} props */
export function IncidentList({ query }) {
  useLive("incident");
  const job = query.get("job");
  const node = query.get("node");
  const items = [...records.incident.values()]
    .filter((one) => (job === null || one.job === job) && (node === null || one.nodes.includes(node)))
    .reverse();
  return [
    h("h1", null, "Incidents"),
    h("p", { class: "quiet" }, "All that are open and the newest of those that are over."),
    items.length ? h(IncidentTable, { items, label: "Incidents" }) : h(Empty, null, "No incidents."),
  ];
}

/** @param {{items: Incident[], label: string, most?: number}} props */
export const IncidentTable = ({ items, label, most = 100 }) =>
  h(Table, {
    label,
    items,
    most,
    keyOf: (one) => one.id,
    columns: [
      { title: "state", cell: (one) => h(Badge, { state: one.state }), compare: (a, b) => byName(a.state, b.state) },
      { title: "fault", cell: (one) => h("a", { href: link("incidents", one.id), class: "strong" }, words(one.fault)), compare: (a, b) => byName(a.fault, b.fault) },
      { title: "node", cell: (one) => (one.node ? h(NodeLink, { name: one.node }) : few(one.nodes)), compare: (a, b) => byName(a.node ?? "", b.node ?? "") },
      { title: "job", cell: (one) => [h(JobLink, { name: one.job }), h("span", { class: "quiet" }, ` attempt ${one.attempt}`)], compare: (a, b) => byName(a.job, b.job) },
      { title: "found", cell: (one) => h("span", { class: "nowrap" }, h(Time, { at: one.detected })), compare: (a, b) => Date.parse(a.detected) - Date.parse(b.detected) },
      { title: "sure", right: true, cell: (one) => percent(one.confidence), compare: (a, b) => a.confidence - b.confidence },
      { title: "what was seen", class: "wide", cell: (one) => one.summary },
    ],
  });
