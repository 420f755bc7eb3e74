// All nodes.

import { h } from "preact";
import { byName, figure } from "../app/format.js";
import { Badge, Empty, JobLink, NodeLink, Reading } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { Table } from "../app/table.js";
import { Ago } from "../app/times.js";

/** @typedef {import("../api").Node} NodeRecord */

export function NodeList() {
  /** @type {import("../app/resource.js").Resource<import("../api").NodePage>} */
  const resource = useResource("api/v1/nodes?limit=1000", { every_ms: 30_000, concerns: (kind) => kind === "node" });
  const items = (resource.data?.items ?? []).toSorted((a, b) => Number(a.state === "in_service") - Number(b.state === "in_service") || byName(a.node, b.node));
  const agent = (/** @type {NodeRecord} */ node) => /** @type {import("../api").Agent | null} */ (node.agent);
  return [
    h("h1", null, "Nodes"),
    h(Reading, { resource, what: "the nodes" }),
    resource.data?.next && h("p", { class: "quiet" }, "A thousand are listed; the map of the fleet has all."),
    resource.data &&
      (items.length
        ? h(Table, {
            label: "Nodes",
            items,
            keyOf: (node) => node.node,
            columns: [
              { title: "node", cell: (node) => h(NodeLink, { name: node.node }), compare: (a, b) => byName(a.node, b.node) },
              { title: "standing", cell: (node) => h(Badge, { state: node.state }), compare: (a, b) => byName(a.state, b.state) },
              { title: "job", cell: (node) => { const job = agent(node)?.job; return job ? h(JobLink, { name: job }) : ""; }, compare: (a, b) => byName(agent(a)?.job ?? "", agent(b)?.job ?? "") },
              { title: "heard", cell: (node) => h(Ago, { at: agent(node)?.heard, none: "not since the start" }) },
              { title: "incidents, 30 days", right: true, cell: (node) => figure(node.memory?.incidents_30_days), compare: (a, b) => (a.memory?.incidents_30_days ?? 0) - (b.memory?.incidents_30_days ?? 0) },
              { title: "lemon score", right: true, cell: (node) => figure(node.memory?.lemon_score), compare: (a, b) => (a.memory?.lemon_score ?? -1) - (b.memory?.lemon_score ?? -1) },
              { title: "reason", class: "wide", cell: (node) => node.reason },
            ],
          })
        : h(Empty, null, "No agent has sent anything yet.")),
  ];
}
