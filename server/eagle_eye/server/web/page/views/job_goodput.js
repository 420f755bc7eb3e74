// Where a job's time went, and because of what.

import { h } from "preact";
import { path } from "../app/api.js";
import { duration, gpuHours, percent, words } from "../app/format.js";
import { Empty, Facts, NodeLink, Reading } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { link } from "../app/router.js";
import { Table } from "../app/table.js";

/** @typedef {Record<string, any>} Account */

/** @param {{job: string}} props */
export function Goodput({ job }) {
  /** @type {import("../app/resource.js").Resource<import("../api").Goodput>} */
  const resource = useResource(path`api/v1/goodput?job=${job}`, {
    every_ms: 30_000,
    concerns: (kind, record) => kind === "incident" && record.job === job,
  });
  const mine = /** @type {Account | undefined} */ (resource.data?.items.find((item) => item["job"] === job));
  if (!resource.data) return h(Reading, { resource, what: "the accounts" });
  if (!mine) return h(Empty, null, "Nothing is on record yet: the accounts look at jobs every ten seconds.");
  const causes = /** @type {Account[]} */ (mine["causes"]);
  const unknown = /** @type {Account[]} */ (mine["unknown"]);
  return [
    h(
      "div",
      { class: "panel facts-box" },
      h(Facts, {
        facts: [
          ["Goodput", percent(mine["goodput_ratio"], 1)],
          ["Effective training time", percent(mine["ettr_ratio"], 1)],
          ["Lost", `${gpuHours(mine["lost_gpu_seconds"] / 3600)} GPU-hours`],
          ["Training", duration(mine["training"]["seconds"])],
          ["In all", `${duration(mine["wall"]["seconds"])} in seven days`],
          ["Cannot tell", unknown.length ? unknown.map((one) => h("div", { key: one["reason"] }, `${duration(one["seconds"])}: ${one["reason"]}`)) : null],
        ],
      }),
    ),
    causes.length > 0 &&
      h(Table, {
        label: "What time was lost on",
        items: causes.map((cause, at) => ({ cause, at })),
        most: 10,
        keyOf: ({ at }) => String(at),
        columns: [
          { title: "lost as", cell: ({ cause }) => words(cause["part"]) },
          {
            title: "because of",
            cell: ({ cause }) =>
              cause["incident_id"] ? h("a", { href: link("incidents", cause["incident_id"]) }, words(cause["fault"])) : words(cause["fault"]),
          },
          { title: "node", cell: ({ cause }) => (cause["node"] ? h(NodeLink, { name: cause["node"] }) : "") },
          { title: "time", right: true, cell: ({ cause }) => duration(cause["seconds"]), compare: (a, b) => a.cause["seconds"] - b.cause["seconds"] },
          { title: "GPU-hours", right: true, cell: ({ cause }) => gpuHours(cause["gpu_seconds"] / 3600), compare: (a, b) => a.cause["gpu_seconds"] - b.cause["gpu_seconds"] },
        ],
      }),
  ];
}
