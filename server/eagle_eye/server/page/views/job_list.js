// All jobs, newest first.

import { h } from "preact";
import { byName, duration, figure } from "../app/format.js";
import { Badge, Empty, JobLink, Reading } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { Table } from "../app/table.js";
import { Ago } from "../app/times.js";

/** @typedef {import("../api").Job} Job */

export function JobList() {
  /** @type {import("../app/resource.js").Resource<import("../api").JobPage>} */
  const resource = useResource("api/v1/jobs?limit=1000", { every_ms: 10_000, concerns: (kind) => kind === "job" });
  const items = resource.data?.items ?? [];
  const progress = (/** @type {Job} */ job) => /** @type {import("../api").Progress | null} */ (job.progress);
  return [
    h("h1", null, "Jobs"),
    h(Reading, { resource, what: "the jobs" }),
    resource.data?.next && h("p", { class: "quiet" }, "The newest thousand are shown."),
    resource.data &&
      (items.length
        ? h(Table, {
            label: "Jobs",
            items,
            keyOf: (job) => job.job,
            columns: [
              { title: "job", cell: (job) => h(JobLink, { name: job.job }), compare: (a, b) => byName(a.job, b.job) },
              { title: "state", cell: (job) => h(Badge, { state: job.state }), compare: (a, b) => byName(a.state, b.state) },
              { title: "attempt", right: true, cell: (job) => String(job.attempt), compare: (a, b) => a.attempt - b.attempt },
              { title: "last progress", cell: (job) => h(Ago, { at: progress(job)?.progressed, none: "not seen" }) },
              { title: "step", right: true, cell: (job) => figure(progress(job)?.step) },
              { title: "a step takes", right: true, cell: (job) => duration(progress(job)?.step_seconds) },
              { title: "nodes", right: true, cell: (job) => String(job.nodes.length || new Set(job.ranks.map((/** @type {any} */ rank) => rank["node"])).size || "–") },
              { title: "restarted by", cell: (job) => job.restart_owner },
            ],
          })
        : h(Empty, null, "No jobs yet.")),
  ];
}
