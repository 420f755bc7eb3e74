// All nodes of a fleet of any size: found by name, standing or job, those that keep failing on demand first.

import { h } from "preact";
import { useMemo } from "preact/hooks";
import { Filters, show } from "../app/filters.js";
import { byName, counted, figure } from "../app/format.js";
import { useLive } from "../app/live.js";
import { STANDING_WORDS } from "../app/map_drawing.js";
import { Badge, Empty, JobLink, NodeLink, Reading, Reason } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { filtered } from "../app/router.js";
import { table } from "../app/table.js";
import { Ago } from "../app/times.js";
import { noNodes } from "./fleet_map.js";
import { TONES } from "./fleet_map_table.js";

/**
 * @typedef {import("../app/map_layout.js").NodeMap} NodeMap
 * @typedef {{node: string, place: number, standing: number, job: string, rack: string, leaf: string, cell: string, heard: string | null,
 *   recurrence: number | null, reason: string}} Row `place`: where it stands by name
 */

const EVERY_MS = 15_000;

/** @param {{query: URLSearchParams}} props */
export function NodeList({ query }) {
  useLive("link");
  /** @type {import("../app/resource.js").Resource<NodeMap>} */
  const resource = useResource("api/v1/fleet/nodes?details=true", { every_ms: EVERY_MS, settle_ms: 1000, concerns: (kind) => kind === "node" || kind === "incident" });
  const map = resource.data;
  const values = Object.fromEntries(query);
  const rows = useMemo(() => (map ? rowsOf(map) : []), [map]);
  const items = useMemo(() => (map ? chosen(map, rows, values) : []), [map, rows, query.toString()]);
  if (!map) return [h("h1", null, "Nodes"), h(Reading, { resource, what: "the nodes" })];
  const { page, ...kept } = values;
  return [
    h("h1", null, "Nodes"),
    h(Filters, {
      view: "nodes",
      values,
      filters: [
        { name: "search", label: "Name", live: true },
        { name: "standing", label: "Standing", choices: [["", "any"], ...map.standings.map((one) => /** @type {[string, string]} */ ([one, STANDING_WORDS[one]]))] },
        { name: "job", label: "Job", known: map.jobs.slice(0, 200) },
        ...(map.cells ? [{ name: "cell", label: "Cell", choices: /** @type {[string, string][]} */ ([["", "any"], ...map.cells.map((one) => [one, one])]) }] : []),
      ],
    }),
    h(Reading, { resource, what: "the nodes" }),
    h("p", { class: "quiet", role: "status" }, items.length === rows.length ? counted(rows.length, "node") : `${counted(items.length, "node")} of ${rows.length.toLocaleString("en-US")}`),
    items.length === 0
      ? h(Empty, null, rows.length ? "No node matches." : noNodes())
      : table({
          columns: columnsOf(map),
          items,
          keyOf: (row) => row.node,
          label: "Nodes",
          order: values["sort"] ?? "",
          onOrder: (sort) => show("nodes", { ...kept, sort }),
          pages: { at: Math.max(0, Number.parseInt(page ?? "1", 10) - 1 || 0), to: (at) => filtered("nodes", { ...kept, page: at ? String(at + 1) : "" }) },
        }),
  ];
}

/** Every node as a row, the worst standing first. @param {NodeMap} map @returns {Row[]} */
function rowsOf(map) {
  const rows = map.nodes.map((node, at) => ({
    node,
    place: 0,
    standing: map.standing[at] ?? 0,
    job: map.jobs[map.job[at] ?? -1] ?? "",
    rack: map.racks[map.rack[at] ?? -1] ?? "",
    leaf: map.switches[map.switch[at] ?? -1] ?? "",
    cell: map.cells?.[map.cell?.[at] ?? -1] ?? "",
    heard: map.heard?.[at] ?? null,
    recurrence: map.recurrence_score?.[at] ?? null,
    reason: map.reasons?.[node] ?? "",
  }));
  rows.sort((a, b) => byName(a.node, b.node));
  // To compare names is slow, and a fleet of 12,500 is sorted at each click.
  rows.forEach((row, place) => (row.place = place));
  return rows.sort((a, b) => a.standing - b.standing || a.place - b.place);
}

/** @param {NodeMap} map @param {Row[]} rows @param {Record<string, string>} values */
function chosen(map, rows, { search = "", standing = "", job = "", cell = "" }) {
  const part = search.toLowerCase();
  const only = standing ? map.standings.findIndex((one) => one === standing) : -1;
  return rows.filter((row) => (!standing || row.standing === only) && (!job || row.job === job) && (!cell || row.cell === cell) && (!part || row.node.toLowerCase().includes(part)));
}

/** @param {NodeMap} map @returns {import("../app/table.js").Column<Row>[]} */
function columnsOf(map) {
  /** @type {import("../app/table.js").Column<Row>[]} */
  const columns = [
    { title: "Node", compare: (a, b) => a.place - b.place, cell: (row) => h(NodeLink, { name: row.node }) },
    {
      title: "Standing",
      compare: (a, b) => a.standing - b.standing || a.place - b.place,
      cell: (row) => {
        const standing = map.standings[row.standing];
        return standing ? h(Badge, { state: standing, tone: TONES[standing], words: standing === "unheard" ? "not heard" : STANDING_WORDS[standing] }) : "–";
      },
    },
    { title: "Job", compare: (a, b) => byName(a.job, b.job) || a.place - b.place, cell: (row) => (row.job ? h(JobLink, { name: row.job }) : "–") },
    {
      title: "Recurrence score",
      right: true,
      hint: "How often it was the culprit, compared with the fleet: 0 never, 1 always",
      compare: (a, b) => (a.recurrence ?? -1) - (b.recurrence ?? -1) || b.place - a.place,
      cell: (row) => figure(row.recurrence),
    },
    { title: "Last report", compare: (a, b) => Date.parse(a.heard ?? "") - Date.parse(b.heard ?? "") || Number(b.heard === null) - Number(a.heard === null), cell: (row) => h(Ago, { at: row.heard, none: "not since the start" }) },
    { title: "Why it is out", class: "wide", cell: (row) => h(Reason, { text: row.reason }) },
  ];
  if (map.cells) columns.splice(3, 0, { title: "Cell", hint: "Whose leader hears it", compare: (a, b) => byName(a.cell, b.cell) || a.place - b.place, cell: (row) => row.cell || "–" });
  if (map.switches.length) columns.splice(3, 0, { title: "Switch", compare: (a, b) => byName(a.leaf, b.leaf) || a.place - b.place, cell: (row) => row.leaf || "–" });
  if (map.racks.length) columns.splice(3, 0, { title: "Rack", compare: (a, b) => byName(a.rack, b.rack) || a.place - b.place, cell: (row) => row.rack || "–" });
  return columns;
}
