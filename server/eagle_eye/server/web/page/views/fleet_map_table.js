// The node map as a table, for who cannot see or does not like maps; what is in trouble comes first.

import { h } from "preact";
import { useState } from "preact/hooks";
import { byName, count } from "../app/format.js";
import { STANDING_WORDS } from "../app/map_drawing.js";
import { Badge, Empty, JobLink, NodeLink } from "../app/parts.js";
import { table } from "../app/table.js";

/**
 * @typedef {import("../app/map_layout.js").NodeMap} NodeMap
 * @typedef {{node: string, standing: number, job: string, rack: string, leaf: string}} Row
 */

/** @type {Record<import("../app/map_drawing.js").Standing, import("../app/states.js").Tone>} */
export const TONES = {
  accused: "bad",
  suspected: "warn",
  excluded: "bad",
  draining: "warn",
  checking: "note",
  silent: "idle",
  unheard: "idle",
  watched: "note",
  in_service: "good",
};

/** @param {{map: NodeMap, only: number, wanted: string}} props */
export function NodeTable({ map, only, wanted }) {
  const [open, setOpen] = useState(false);
  return h(
    "details",
    { class: "as-table", open, onToggle: (/** @type {Event} */ event) => setOpen(/** @type {HTMLDetailsElement} */ (event.target).open) },
    h("summary", null, "The same as a table"),
    open && h(Rows, { map, only, wanted }),
  );
}

/** @param {{map: NodeMap, only: number, wanted: string}} props */
function Rows({ map, only, wanted }) {
  const items = map.nodes
    .map((node, at) => ({
      node,
      standing: map.standing[at] ?? 0,
      job: map.jobs[map.job[at] ?? -1] ?? "",
      rack: map.racks[map.rack[at] ?? -1] ?? "",
      leaf: map.switches[map.switch[at] ?? -1] ?? "",
    }))
    .filter((row) => (only < 0 || row.standing === only) && (wanted === "" || row.node.includes(wanted)))
    .sort((a, b) => a.standing - b.standing || byName(a.node, b.node));
  if (items.length === 0) return h(Empty, null, "No node matches.");
  /** @type {import("../app/table.js").Column<Row>[]} */
  const columns = [
    { title: "Node", compare: (a, b) => byName(a.node, b.node), cell: (row) => h(NodeLink, { name: row.node }) },
    {
      title: "Standing",
      compare: (a, b) => a.standing - b.standing,
      cell: (row) => {
        const standing = map.standings[row.standing];
        return standing ? h(Badge, { state: standing, tone: TONES[standing], words: STANDING_WORDS[standing] }) : "–";
      },
    },
    { title: "Job", compare: (a, b) => byName(a.job, b.job), cell: (row) => (row.job ? h(JobLink, { name: row.job }) : "–") },
  ];
  if (map.racks.length > 0) columns.push({ title: "Rack", compare: (a, b) => byName(a.rack, b.rack), cell: (row) => row.rack || "–" });
  if (map.switches.length > 0) columns.push({ title: "Switch", compare: (a, b) => byName(a.leaf, b.leaf), cell: (row) => row.leaf || "–" });
  return table({ columns, items, keyOf: (row) => row.node, label: `${count(items.length)} nodes`, most: 200 });
}
