// All jobs, newest first, page by page.

import { h } from "preact";
import { Filters } from "../app/filters.js";
import { count, duration, steps } from "../app/format.js";
import { Badge, cellColumn, cellFilter, Empty, JobLink, Owner, Reading } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { filtered } from "../app/router.js";
import { wordsOf } from "../app/states.js";
import { table } from "../app/table.js";
import { Ago } from "../app/times.js";

/** @typedef {import("../api").Job} Job */

const STATES = ["running", "observed", "ended", "pending", "suspended", "completing", "failed", "cancelled", "preempted", "timeout", "maintenance", "finished"];
const SHOWN = 100;

/** @param {Job} job */
const progress = (job) => /** @type {import("../api").Progress | null} */ (job.progress);

/** @param {{query: URLSearchParams}} props */
export function JobList({ query }) {
  const values = Object.fromEntries(query);
  const asked = new URLSearchParams({ members: "false", limit: String(SHOWN) });
  for (const name of ["search", "state", "node", "cell", "cursor"]) if (values[name]) asked.set(name, values[name]);
  /** @type {import("../app/resource.js").Resource<import("../api").JobPage>} */
  const resource = useResource(`api/v1/jobs?${asked}`, { every_ms: 10_000, settle_ms: 1000, concerns: (kind) => kind === "job" });
  const page = resource.data;
  const { cursor, ...kept } = values;
  return [
    h("h1", null, "Jobs"),
    h(Filters, {
      view: "jobs",
      values,
      filters: [
        { name: "search", label: "Name" },
        { name: "state", label: "State", choices: [["", "any"], ...STATES.map((one) => /** @type {[string, string]} */ ([one, one === "observed" ? "running, by its agents alone" : wordsOf(one)]))] },
        { name: "node", label: "On node" },
        ...cellFilter(page?.items ?? [], values),
      ],
    }),
    h(Reading, { resource, what: "the jobs" }),
    page && (page.items.length ? table({ label: "Jobs", items: page.items, keyOf: (job) => job.job, columns: [...COLUMNS, ...cellColumn(page.items)], most: 2 * SHOWN }) : h(Empty, null, query.size ? "No job matches." : "No jobs yet.")),
    page && h(Turn, { view: "jobs", kept, cursor, next: page.next }),
  ];
}

/** To older items and back to the newest. @param {{view: "jobs" | "incidents", kept: Record<string, string>, cursor: string | undefined, next: string | null}} props */
export function Turn({ view, kept, cursor, next }) {
  if (!cursor && !next) return null;
  return h(
    "nav",
    { class: "pager", "aria-label": "Pages" },
    cursor && h("a", { href: filtered(view, kept) }, "Newest"),
    next && h("a", { href: filtered(view, { ...kept, cursor: next }), rel: "next" }, "Older"),
  );
}

/** @type {import("../app/table.js").Column<Job>[]} */
const COLUMNS = [
  { title: "Job", cell: (job) => [h(JobLink, { name: job.job }), job.attempt > 0 && h("span", { class: "quiet" }, ` attempt ${job.attempt}`)] },
  { title: "State", cell: (job) => h(Badge, { state: job.state }) },
  { title: "Owner", cell: (job) => h(Owner, { name: job.owner }) },
  { title: "Last step", cell: (job) => h(Ago, { at: progress(job)?.progressed, none: "not seen" }) },
  { title: "Step", right: true, cell: (job) => steps(progress(job)?.step) },
  { title: "A step takes", right: true, cell: (job) => duration(progress(job)?.step_seconds) },
  { title: "Nodes", right: true, cell: (job) => (job.nodes_total ? count(job.nodes_total) : "–") },
  { title: "Updated", cell: (job) => h(Ago, { at: job.updated }) },
  { title: "Reported by", cell: (job) => job.source },
];
