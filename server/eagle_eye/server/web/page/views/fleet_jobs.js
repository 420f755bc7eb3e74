// The running jobs, the longest without a step first: that is the one to look at.

import { h } from "preact";
import { now } from "../app/api.js";
import { byName, count, counted, duration, gpuHours, words } from "../app/format.js";
import { link, useLive } from "../app/live.js";
import { Badge, cellColumn, Empty, JobLink, Owner, Section } from "../app/parts.js";
import { link as address } from "../app/router.js";
import { table } from "../app/table.js";
import { Ago, Time, useNow } from "../app/times.js";

/** @typedef {import("../api").FleetJob} FleetJob */

const STALE_MS = 20_000;
const SHOWN = 12;
const SHOWN_MAX = 50;

export function Jobs() {
  useLive("fleet");
  const { fleet } = link;
  if (!fleet) return null;
  const total = fleet.jobs.length + fleet.jobs_left_out;
  return h(
    Section,
    { title: "Running jobs", id: "jobs", aside: h(Fresh, { read: link.fleetRead }) },
    total === 0
      ? h(Empty, null, link.fleetSeen ? "No job runs, or no agent reports one." : "Not known without the leader: only it hears agents.")
      : table({ columns: [...COLUMNS, ...cellColumn(fleet.jobs)], items: fleet.jobs, keyOf: (job) => job.job, label: "Running jobs", rowClass, most: shown(fleet.jobs) }),
    fleet.jobs_left_out > 0 && h("p", { class: "quiet" }, `${counted(fleet.jobs_left_out, "job")} more are left out.`),
  );
}

/** Says how they are ordered, or how old they are once nothing newer comes. @param {{read: number}} props */
function Fresh({ read }) {
  useNow();
  if (Date.now() - read < STALE_MS) return "the longest without a step first";
  return h("span", { class: "stale" }, "as of ", h(Ago, { at: new Date(read).toISOString() }));
}

/** How many are listed at first: a dozen, or as many as it takes to have all that lose something. @param {FleetJob[]} jobs */
const shown = (jobs) => Math.min(Math.max(jobs.findLastIndex((job) => job.loss !== null) + 1, SHOWN), SHOWN_MAX);

/** @param {FleetJob} job */
const progressed = (job) => Date.parse(job.progressed ?? job.started);

/** @param {FleetJob} job */
const rowClass = (job) => (job.loss?.kind === "stopped" ? "row-bad" : job.loss ? "row-warn" : "");

/** @type {import("../app/table.js").Column<FleetJob>[]} */
const COLUMNS = [
  {
    title: "Job",
    compare: (a, b) => byName(a.job, b.job),
    cell: (job) => [h(JobLink, { name: job.job }), job.attempt > 0 && h("span", { class: "quiet" }, ` attempt ${job.attempt}`)],
  },
  { title: "Owner", hint: "As its launcher or scheduler reports it", compare: (a, b) => byName(a.owner, b.owner), cell: (job) => h(Owner, { name: job.owner }) },
  {
    title: "Last step",
    hint: "How long ago the last step was seen to finish",
    compare: (a, b) => progressed(a) - progressed(b),
    cell: (job) => h(Progress, { job }),
  },
  {
    title: "GPU-hours burning",
    hint: "GPU-hours that are lost each hour, and since it began",
    compare: (a, b) => (b.loss?.gpus ?? 0) - (a.loss?.gpus ?? 0),
    cell: (job) => h(Burning, { job }),
  },
  {
    title: "Coverage",
    hint: "How many of its nodes report, and what no source observes",
    compare: (a, b) => a.nodes_heard / (a.nodes || 1) - b.nodes_heard / (b.nodes || 1),
    cell: coverage,
  },
  { title: "GPUs", right: true, compare: (a, b) => (a.gpus ?? 0) - (b.gpus ?? 0), cell: (job) => (job.gpus === null ? "–" : count(job.gpus)) },
  { title: "Step", right: true, compare: (a, b) => (a.step ?? 0) - (b.step ?? 0), cell: (job) => (job.step === null ? "–" : count(job.step)) },
  {
    title: "A step takes",
    right: true,
    compare: (a, b) => (a.step_seconds ?? 0) - (b.step_seconds ?? 0),
    cell: (job) => (job.step_seconds === null ? "–" : duration(job.step_seconds)),
  },
  { title: "Restarted by", hint: "Who owns its restarts", compare: (a, b) => byName(a.restart_owner, b.restart_owner), cell: (job) => job.restart_owner || h("span", { class: "quiet" }, "not said") },
  { title: "Running since", compare: (a, b) => Date.parse(a.started) - Date.parse(b.started), cell: (job) => h(Time, { at: job.started }) },
];

/** @param {{job: FleetJob}} props */
function Progress({ job }) {
  if (job.state !== "running") return h(Badge, { state: job.state });
  if (job.progressed === null && job.nodes_heard === 0) return "–";
  if (job.progressed === null) {
    const said = job.not_seen.includes("steps") ? "steps are not seen" : "no step yet";
    return h("span", { class: "quiet" }, said);
  }
  const late = job.loss?.kind === "stopped" || job.loss?.kind === "unexplained";
  return h("span", { class: `nowrap ${late ? "bad-ink strong" : ""}` }, h(Ago, { at: job.progressed }));
}

/** @param {{job: FleetJob}} props */
function Burning({ job }) {
  useNow();
  const { loss } = job;
  if (!loss) return h("span", { class: "quiet" }, "–");
  const why = loss.incident_id
    ? h("a", { href: address("incidents", loss.incident_id) }, words(loss.fault))
    : "no step; no incident says why";
  if (loss.gpus === null) return [h("span", { class: "bad-ink strong" }, loss.kind), " ", h("span", { class: "quiet" }, why)];
  const hours = (loss.gpus * Math.max(0, now() - Date.parse(loss.since))) / 3_600_000;
  return [
    h("span", { class: loss.kind === "stopped" ? "bad-ink strong" : "warn-ink strong" }, `${gpuHours(loss.gpus)} each hour`),
    h("span", { class: "quiet" }, `, ${gpuHours(hours)} so far: `),
    why,
  ];
}

/** @param {FleetJob} job */
function coverage(job) {
  const missing = job.nodes - job.nodes_heard;
  const heard = missing
    ? h("span", { class: "warn-ink strong" }, `${count(job.nodes_heard)} of ${counted(job.nodes, "node")}`)
    : counted(job.nodes, "node");
  if (job.nodes_heard === 0) return [heard, h("span", { class: "quiet" }, "; its health is unknown")];
  return [heard, job.not_seen.length > 0 && h("span", { class: "quiet" }, `; ${job.not_seen.join(", ")} not seen`)];
}
