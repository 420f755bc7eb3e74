// All incidents, newest first, page by page; those of a page are kept up by the server's events.

import { h } from "preact";
import { useMemo } from "preact/hooks";
import { now } from "../app/api.js";
import { Filters } from "../app/filters.js";
import { byName, few, percent, words } from "../app/format.js";
import { records } from "../app/live.js";
import { Badge, cellColumn, cellFilter, Empty, JobLink, NodeLink, Reading } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { link } from "../app/router.js";
import { shownState, wordsOf } from "../app/states.js";
import { Table } from "../app/table.js";
import { Time } from "../app/times.js";
import { Turn } from "./job_list.js";
import { SilencedMark, useSilenced } from "./silences.js";

/** @typedef {import("../api").Incident} Incident */

const STATES = ["suspected", "confirmed", "acting", "recovered", "closed", "false"];
/** @type {[string, string, number][]} */
const AGES = [["1h", "the last hour", 3_600], ["1d", "the last day", 86_400], ["7d", "the last 7 days", 604_800], ["30d", "the last 30 days", 2_592_000]];

/** @param {{query: URLSearchParams}} props */
export function IncidentList({ query }) {
  const values = Object.fromEntries(query);
  const asked = useMemo(() => asking(values), [query.toString()]);
  /** @type {import("../app/resource.js").Resource<import("../api").IncidentPage>} */
  const resource = useResource(`api/v1/incidents?${asked}`, { every_ms: 60_000, settle_ms: 1000, concerns: (kind) => kind === "incident" });
  const page = resource.data;
  const { cursor, ...kept } = values;
  const faults = [...new Set([...records.incident.values()].map((one) => one.fault))].sort();
  return [
    h("h1", null, "Incidents"),
    h(Filters, {
      view: "incidents",
      values,
      filters: [
        { name: "state", label: "State", choices: [["", "any"], ["live", "trouble that goes on"], ...STATES.map((one) => /** @type {[string, string]} */ ([one, wordsOf(one)]))] },
        { name: "fault", label: "Fault", known: faults },
        { name: "job", label: "Job" },
        { name: "node", label: "Node" },
        ...cellFilter(page?.items ?? [], values),
        { name: "since", label: "Found in", choices: [["", "any time"], ...AGES.map(([value, said]) => /** @type {[string, string]} */ ([value, said]))] },
      ],
    }),
    h(Reading, { resource, what: "the incidents" }),
    page && (page.items.length ? h(IncidentTable, { items: page.items, label: "Incidents" }) : h(Empty, null, query.size ? "No incident matches." : "No incidents.")),
    page && h(Turn, { view: "incidents", kept, cursor, next: page.next }),
  ];
}

/** What the server is asked for; an age counts from now, anything else is a moment as the API takes it. @param {Record<string, string>} values */
function asking(values) {
  const asked = new URLSearchParams({ limit: "100" });
  for (const name of ["state", "job", "node", "cell", "cursor"]) if (values[name]) asked.set(name, values[name]);
  if (values["fault"]) asked.set("fault", values["fault"].trim().replaceAll(" ", "_"));
  const age = AGES.find(([value]) => value === values["since"]);
  if (age) asked.set("since", String(Math.floor(now() / 1000) - age[2]));
  else if (values["since"]) asked.set("since", values["since"]);
  return asked.toString();
}

/** @param {{items: Incident[], label: string, most?: number}} props */
export function IncidentTable({ items, label, most = 100 }) {
  const silenced = useSilenced();
  return h(Table, {
    label,
    items,
    most,
    keyOf: (one) => one.id,
    columns: [
      { title: "State", cell: (one) => [h(Badge, { state: shownState(one) }), " ", h(SilencedMark, { silence: silenced.get(one.id) })], compare: (a, b) => byName(a.state, b.state) },
      { title: "Fault", cell: (one) => h("a", { href: link("incidents", one.id), class: "strong" }, words(one.fault)), compare: (a, b) => byName(a.fault, b.fault) },
      { title: "Node", cell: (one) => (one.node ? h(NodeLink, { name: one.node }) : few(one.nodes)), compare: (a, b) => byName(a.node ?? "", b.node ?? "") },
      { title: "Job", cell: (one) => [h(JobLink, { name: one.job }), one.job && h("span", { class: "quiet" }, ` attempt ${one.attempt}`)], compare: (a, b) => byName(a.job, b.job) },
      ...cellColumn(items),
      { title: "Found", cell: (one) => h("span", { class: "nowrap" }, h(Time, { at: one.detected })), compare: (a, b) => Date.parse(a.detected) - Date.parse(b.detected) },
      { title: "Sure", right: true, cell: (one) => percent(one.confidence), compare: (a, b) => a.confidence - b.confidence },
      { title: "What was seen", class: "wide", cell: (one) => one.summary },
    ],
  });
}
