// One node: its standing and why, what it does now, and everything that happened to it.

import { h } from "preact";
import { useState } from "preact/hooks";
import { get, path } from "../app/api.js";
import { byName, count, counted, duration, figure, measured, words } from "../app/format.js";
import { AUTHOR_LABELS } from "../app/labels.js";
import { link as connection, records, seesAllJobs, useLive } from "../app/live.js";
import { Badge, Empty, Facts, JobLink, Missing, NodeLink, Reading, Reason, Section, isMissing } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { link } from "../app/router.js";
import { shownState } from "../app/states.js";
import { Table } from "../app/table.js";
import { Ago, Time } from "../app/times.js";
import { title as incidentTitle } from "./incident.js";
import { NodeCharts } from "./node_charts.js";
import { NodeList } from "./node_list.js";
import { NodeVerbs } from "./node_verbs.js";
import { SilenceVerb, Silenced, SilencedMark, useSilenced, useSilences } from "./silences.js";

/**
 * @typedef {import("../api").Node} NodeRecord
 * @typedef {import("../api").NodeHistory} NodeHistory
 * @typedef {import("../api").NodeCheck} NodeCheck
 */

const OPEN = ["suspected", "confirmed", "acting"];
const FIGURES_SHOWN = 6; // of one outcome
const PURPOSES = { readmit: "before its return", look: "a look", idle: "while it had no job" };

/** @param {import("../app/views.js").ViewProps} props */
export const NodeView = ({ name, query }) => (name === null ? h(NodeList, { query }) : h(OneNode, { name, query }));

/** @param {{name: string, query: URLSearchParams}} props */
function OneNode({ name, query }) {
  useLive("incident", "link");
  const mine = (/** @type {string} */ kind, /** @type {any} */ record) => kind === "node" && record.node === name;
  const concerned = (/** @type {string} */ kind, /** @type {any} */ record) =>
    mine(kind, record) || (kind === "incident" && record.nodes.includes(name)) || (kind === "action" && record.exclude.includes(name));
  /** @type {import("../app/resource.js").Resource<NodeRecord>} */
  const node = useResource(path`api/v1/nodes/${name}`, { every_ms: 10_000, concerns: mine });
  /** @type {import("../app/resource.js").Resource<NodeHistory>} */
  const history = useResource(path`api/v1/nodes/${name}/history`, { every_ms: 60_000, concerns: concerned });
  /** @type {import("../app/resource.js").Resource<import("../api").NodeCheckPage>} */
  const checks = useResource(path`api/v1/nodes/${name}/checks?limit=20`, { every_ms: 10_000, concerns: mine });
  const silences = useSilences({ node: name });
  const silenced = useSilenced();
  const open = [...records.incident.values()].filter((one) => OPEN.includes(one.state) && one.nodes.includes(name));
  const record = node.data;
  const ours = record?.agent?.job ?? null; // where people see their own jobs alone: the one of theirs that runs on it
  // What took it out, in words: the reason alone may be no more than an incident's id.
  const because = history.data?.items.find((item) => item["kind"] === "incident" && record?.reason.includes(item["id"]));
  const again = () => {
    node.again();
    checks.again();
    history.again();
  };
  if (isMissing(node)) return h(Missing, { view: "nodes", one: "node", name });
  return h(
    "div",
    { class: "view-node" },
    h(
      "div",
      { class: "incident-head" },
      h("h1", null, `Node ${name}`),
      record && h(Badge, { state: record.state }),
      record && record.phase !== record.state && h(Badge, { state: record.phase, tone: "note" }),
      record?.memory?.recurrent && h(Badge, { state: "recurrent", tone: "warn", words: "keeps failing" }),
    ),
    h(Reading, { resource: node, what: "the node" }),
    record && [
      record.reason && h("p", { class: "incident-summary" }, h(Reason, { text: record.reason })),
      because && h("p", null, because["summary"]),
      h(Standing, { record }),
      h("div", { class: "buttons node-verbs" }, h(NodeVerbs, { node: name, state: record.state, again, all: true }), h(SilenceVerb, { scopes: [[`node ${name}`, { nodes: [name] }]] })),
      silences.data?.items.map((one) => h(Silenced, { key: one.id, silence: one })),
    ],
    open.map((one) =>
      h(
        "a",
        { key: one.id, class: `panel open-incident ${one.state === "suspected" ? "warn" : "bad"}`, href: link("incidents", one.id) },
        h(Badge, { state: shownState(one) }),
        h(SilencedMark, { silence: silenced.get(one.id) }),
        h("span", { class: "strong" }, incidentTitle(one)),
        h("span", null, one.summary),
      ),
    ),
    connection.me?.owners_only &&
      h(Empty, null, ours ? `Its metrics are shown for the time in which it works for ${ours}.` : "Its metrics are shown while a job of yours runs on it (sign_in.jobs_visible); operators see all."),
    (seesAllJobs() || ours) && h(
      Section,
      { title: "Metrics", id: "metrics" },
      (record || node.error) &&
        h(NodeCharts, { name, query, incidents: open, interval_s: record?.agent?.interval_seconds ?? 1, known: record?.known_since ?? null, job: seesAllJobs() ? null : ours }),
    ),
    h(Section, { title: "GPUs", id: "gpus" }, history.data ? h(Gpus, { history: history.data }) : h(Reading, { resource: history, what: "the history" })),
    h(Section, { title: "Checks", id: "checks" }, checks.data ? h(Checks, { checks: checks.data.items, gpus: history.data?.gpus ?? [] }) : h(Reading, { resource: checks, what: "the checks" })),
    record && h(Section, { title: "How often it fails", id: "memory" }, h(Memory, { record })),
    h(Section, { title: "History", id: "history" }, h(Reading, { resource: history, what: "the history" }), history.data && h(Chapters, { key: name, name, history: history.data })),
  );
}

/** @param {{record: NodeRecord}} props */
function Standing({ record }) {
  const agent = /** @type {import("../api").Agent | null} */ (record.agent);
  const troubles = Object.entries(agent?.troubles ?? {});
  const dropped = Object.entries(agent?.dropped ?? {}).filter(([, many]) => many > 0);
  return h(
    "div",
    { class: "panel facts-box" },
    h(Facts, {
      facts: [
        ["Works for", agent?.job ? h(JobLink, { name: agent.job }) : agent ? "no job" : "not known"],
        ["Last report", agent ? h(Ago, { at: agent.heard }) : "not since the server started"],
        ["Standing since", h(Time, { at: record.updated })],
        ["Set by", AUTHOR_LABELS[record.by] ?? record.by],
        ["Out because of", record.fault ? words(record.fault) : null],
        ["Watched until", record.watched_until ? h(Time, { at: record.watched_until }) : null],
        ["Waits for check", record.check_id ? h("code", null, record.check_id) : null],
        ["Relapsed", record.relapsed.length ? record.relapsed.map((at) => h("div", { key: at }, h(Time, { at }))) : null],
        ["Known since", record.known_since ? h(Time, { at: record.known_since }) : null],
        ["Agent", agent ? `${agent.version}, every ${duration(agent.interval_seconds)}` : null],
        ["Clock", agent && agent.clock_offset_seconds !== null && Math.abs(agent.clock_offset_seconds) > 0.5 ? h("span", { class: "warn-ink" }, `${duration(Math.abs(agent.clock_offset_seconds))} ${agent.clock_offset_seconds > 0 ? "behind" : "ahead"}`) : null],
        ["Dropped", dropped.length ? dropped.map(([why, many]) => h("div", { key: why }, `${words(why)}: ${count(many)}`)) : null],
      ],
    }),
    h(Facts, {
      class: "one",
      facts: [["Cannot see", troubles.length ? troubles.map(([name, said]) => h("div", { key: name, class: said.startsWith("failed") ? "warn-ink" : "" }, `${words(name)}: ${said}`)) : null]],
    }),
  );
}

/** @param {{history: NodeHistory}} props */
function Gpus({ history: { gpus, gpu_checks } }) {
  const checks = new Map(gpu_checks.map((one) => [one.uuid, one]));
  if (!gpus.length) return h(Empty, null, "Its agent reports no GPU.");
  return h(Table, {
    label: "GPUs",
    items: gpus,
    keyOf: (gpu) => gpu.uuid,
    columns: [
      { title: "device", right: true, cell: (gpu) => String(gpu.device) },
      { title: "UUID", cell: (gpu) => h("code", null, gpu.uuid) },
      { title: "model", cell: (gpu) => gpu.model },
      { title: "PCI address", cell: (gpu) => gpu.pci_address || "–" },
      { title: "serial", cell: (gpu) => gpu.serial || "–" },
      { title: "here since", cell: (gpu) => h(Time, { at: gpu.since }) },
      { title: "sat before in", cell: (gpu) => (gpu.moves.length ? gpu.moves.map((/** @type {any} */ seat, /** @type {number} */ at) => h("div", { key: at }, h(NodeLink, { name: seat.node }), ` device ${seat.device}`)) : "–") },
      { title: "compared", cell: (gpu) => h(Compared, { checks: checks.get(gpu.uuid) }) },
    ],
  });
}

/** What checks for silent corruption found: nothing found is no proof. @param {{checks: import("../api").GpuChecks | undefined}} props */
function Compared({ checks }) {
  if (!checks) return h("span", { class: "quiet" }, "never");
  const found = checks.wrong_numbers ? h("span", { class: "bad-ink" }, `${count(checks.wrong_numbers)} wrong numbers`) : "nothing found";
  return [found, ` in ${count(checks.operations)} products, ${duration(checks.seconds)}`];
}

/** @param {{checks: NodeCheck[], gpus: NodeHistory["gpus"]}} props */
function Checks({ checks, gpus }) {
  if (!checks.length) return h(Empty, null, "It has never been checked.");
  return h(
    "ul",
    { class: "panel lines checks" },
    checks.map((check) => {
      const outcomes = /** @type {Record<string, any>[]} */ (check.outcomes);
      return h(
        "li",
        { key: check.id },
        h(Time, { at: check.created }),
        " ",
        h(Badge, { state: check.state }),
        ` ${PURPOSES[check.purpose]}${check.fault ? `, for ${words(check.fault)}` : ""}`,
        h("span", { class: "quiet" }, ` by ${check.asked_by}`),
        check.detail && h("p", null, check.detail),
        outcomes.length > 0 &&
          h(
            "details",
            null,
            h("summary", null, counted(outcomes.length, "check")),
            h(Table, {
              label: `Outcomes of ${check.id}`,
              items: outcomes,
              keyOf: (one) => one["name"],
              columns: [
                { title: "check", cell: (one) => words(one["name"]) },
                { title: "outcome", cell: (one) => h(Badge, { state: one["state"], tone: one["state"] === "passed" ? "good" : one["state"] === "sick" ? "bad" : "note" }) },
                { title: "took", right: true, cell: (one) => duration(one["duration_s"]) },
                { title: "figures", cell: (one) => h(Figures, { values: one["values"], gpus }) },
                { title: "why", class: "wide", cell: (one) => one["reason"] },
              ],
            }),
          ),
      );
    }),
  );
}

/** The first few figures of an outcome; of eight GPUs' those that should be 0 and are not. @param {{values: any[], gpus: {uuid: string, device: number}[]}} props */
function Figures({ values, gpus }) {
  const named = new Map(gpus.map((gpu) => [gpu.uuid, `GPU ${gpu.device}`]));
  const rank = (/** @type {any} */ f) => (f.threshold === 0 && f.value > 0 ? 0 : f.threshold === null ? 2 : 1);
  const shown = [...values].sort((a, b) => rank(a) - rank(b)).slice(0, FIGURES_SHOWN);
  return [
    shown.map((f, at) => h("div", { key: at, class: rank(f) ? "" : "bad-ink" }, `${words(f.name)}${f.device ? ` ${named.get(f.device) ?? f.device}` : ""}: ${measured(f.value, f.unit)}${f.threshold === null ? "" : ` (limit ${measured(f.threshold, f.unit)})`}`)),
    values.length > shown.length && h("div", { class: "quiet" }, `and ${count(values.length - shown.length)} more`),
  ];
}

/** @param {{record: NodeRecord}} props */
function Memory({ record }) {
  const { memory } = record;
  if (!memory) return h(Empty, null, "The records it is computed from cannot be read.");
  return [
    h(
      "div",
      { class: "panel facts-box" },
      h(Facts, {
        facts: [
          ["Incidents in 30 days", count(memory.incidents_30_days)],
          ["Recurrence score", memory.recurrence_score === null ? "cannot tell" : [h("strong", null, figure(memory.recurrence_score)), " of 1; recurrent from 0.75"]],
          ["Why", memory.recurrence_reason],
        ],
      }),
    ),
    memory.recurrence_signals.length > 0 &&
      h(Table, {
        label: "What the score is made of",
        items: memory.recurrence_signals,
        keyOf: (one) => one.signal,
        columns: [
          { title: "signal", cell: (one) => words(one.signal) },
          { title: "here", right: true, cell: (one) => figure(one.value) },
          { title: "usual", right: true, cell: (one) => figure(one.usual) },
          { title: "adds", right: true, cell: (one) => figure(one.adds), compare: (a, b) => a.adds - b.adds },
        ],
      }),
  ];
}

/** @param {{name: string, history: NodeHistory}} props */
function Chapters({ name, history }) {
  const [more, setMore] = useState(/** @type {{items: Record<string, any>[], next: string | null} | null} */ (null));
  const [kind, setKind] = useState("");
  const items = [...history.items, ...(more?.items ?? [])];
  const next = more ? more.next : history.next;
  const kinds = [...new Set(items.map((item) => String(item["kind"])))].sort(byName);
  const shown = items.filter((item) => kind === "" || item["kind"] === kind);
  if (!items.length) return h(Empty, null, "Nothing has happened to it yet.");
  const read = () =>
    void get(path`api/v1/nodes/${name}/history?cursor=${next ?? ""}`).then(
      (/** @type {NodeHistory} */ page) => setMore({ items: [...(more?.items ?? []), ...page.items], next: page.next }),
      () => setMore(null), // the list has changed meanwhile: begin again
    );
  return [
    h(
      "label",
      { class: "field inline" },
      "Show ",
      h(
        "select",
        { value: kind, onChange: (/** @type {Event} */ event) => setKind(/** @type {HTMLSelectElement} */ (event.target).value) },
        h("option", { value: "" }, "everything"),
        kinds.map((one) => h("option", { key: one, value: one }, words(one))),
      ),
    ),
    h(
      "ol",
      { class: "panel story" },
      shown.map((item, at) =>
        h(
          "li",
          { key: at },
          h(Time, { at: item["time"] }),
          h("span", { class: "story-kind" }, words(item["kind"])),
          h(
            "span",
            { class: "story-text" },
            item["kind"] === "incident" && item["id"] ? h("a", { href: link("incidents", item["id"]) }, words(item["fault"])) : null,
            item["kind"] === "incident" ? [item["job"] ? [" in ", h(JobLink, { name: item["job"] })] : null, ": "] : null,
            h(Reason, { text: item["summary"] }),
          ),
        ),
      ),
    ),
    history.cut.length > 0 && h("p", { class: "quiet" }, `Not all ${history.cut.map(words).join(", ")} are shown.`),
    next && h("button", { type: "button", class: "small", onClick: read }, "Older"),
  ];
}
