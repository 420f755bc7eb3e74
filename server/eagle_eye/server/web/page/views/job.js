// One job: how it goes, what happened to it and when, who takes part, where its time went.

import { h } from "preact";
import { useMemo } from "preact/hooks";
import { path } from "../app/api.js";
import { Chart, seconds } from "../app/chart.js";
import { count, counted, duration, figure, gpuHours, percent, words } from "../app/format.js";
import { link as live, records, useLive } from "../app/live.js";
import { Badge, Empty, Facts, Missing, NodeLink, Owner, Reading, Section, isMissing } from "../app/parts.js";
import { RangePicker, rangeOf, useTime, zoomOf } from "../app/range.js";
import { useKept, useResource } from "../app/resource.js";
import { link } from "../app/router.js";
import { shownState } from "../app/states.js";
import { Table } from "../app/table.js";
import { Ago, Time } from "../app/times.js";
import { title as incidentTitle } from "./incident.js";
import { IncidentTable } from "./incident_list.js";
import { JobList } from "./job_list.js";
import { Goodput } from "./job_goodput.js";
import { Lanes } from "./job_lanes.js";
import { SilenceVerb, Silenced, SilencedMark, useSilenced, useSilences } from "./silences.js";

/**
 * @typedef {import("../api").Job} Job
 * @typedef {import("../api").JobCourse} JobCourse
 * @typedef {import("../api").JobTimeline} JobTimeline
 * @typedef {import("../app/chart.js").Mark} Mark
 */

const OPEN = ["suspected", "confirmed", "acting"];
const FOLLOW_S = 30; // how often charts that end now move on

/** @param {import("../app/views.js").ViewProps} props */
export const JobView = ({ name, query }) => (name === null ? h(JobList, { query }) : h(OneJob, { name, query }));

/** @param {{name: string, query: URLSearchParams}} props */
function OneJob({ name, query }) {
  useLive("incident", "action", "fleet");
  const concerns = (/** @type {string} */ kind, /** @type {any} */ record) =>
    (kind === "job" || kind === "incident" || kind === "action") && record.job === name;
  /** @type {import("../app/resource.js").Resource<Job>} */
  const job = useResource(path`api/v1/jobs/${name}`, { every_ms: 5000, concerns });
  const wanted = rangeOf(query, useTime(FOLLOW_S));
  const range = new URLSearchParams(wanted ? { since: String(wanted.from), until: String(wanted.to) } : {});
  /** @type {import("../app/resource.js").Resource<JobCourse>} */
  const course = useResource(`${path`api/v1/jobs/${name}/course`}?${range}`, { every_ms: 30_000, concerns: (kind, record) => kind !== "job" && concerns(kind, record) });
  /** @type {import("../app/resource.js").Resource<JobTimeline>} */
  const timeline = useResource(`${path`api/v1/jobs/${name}/timeline`}?${range}`, { every_ms: 20_000, concerns });
  const drawn = useKept(course.data);
  const silences = useSilences({ job: name });
  const silenced = useSilenced();
  const incidents = [...records.incident.values()].filter((one) => one.job === name).reverse();
  const actions = [...records.action.values()].filter((one) => one.job === name).reverse();
  if (isMissing(job) && !live.fleet?.jobs.some((one) => one.job === name)) return h(Missing, { view: "jobs", one: "job", name });
  return h(
    "div",
    { class: "view-job" },
    h("div", { class: "incident-head" }, h("h1", null, `Job ${name}`), job.data && h(Badge, { state: job.data.state })),
    h(Reading, { resource: job, what: "the job" }),
    h("div", { class: "buttons node-verbs" }, h(SilenceVerb, { scopes: [[`job ${name}`, { jobs: [name] }]] })),
    silences.data?.items.map((one) => h(Silenced, { key: one.id, silence: one })),
    job.data && h(JobFacts, { job: job.data, timeline: timeline.data, goodput: present(course.data?.series.goodput_ratio.value) }),
    incidents.filter((one) => OPEN.includes(one.state)).map((one) =>
      h(
        "a",
        { key: one.id, class: `panel open-incident ${one.state === "suspected" ? "warn" : "bad"}`, href: link("incidents", one.id) },
        h(Badge, { state: shownState(one) }),
        h(SilencedMark, { silence: silenced.get(one.id) }),
        h("span", { class: "strong" }, incidentTitle(one)),
        h("span", null, one.summary),
      ),
    ),
    h(
      Section,
      { title: "Course", id: "course" },
      (course.error || !drawn) && h(Reading, { resource: course, what: "the course" }),
      drawn && h(RangePicker, { view: "jobs", name, query, shown: wanted ?? { from: seconds(drawn.start), to: seconds(drawn.end) }, home: "this run", subject: { job: name } }),
      drawn && h(Course, { course: drawn, wanted }),
    ),
    h(Section, { title: "Ranks and attempts", id: "timeline", aside: timeline.data && counted(timeline.data.nodes, "node") }, h(Reading, { resource: timeline, what: "the timeline" }), timeline.data && h(Lanes, { timeline: timeline.data })),
    h(Section, { title: "Where the time went", id: "goodput" }, h(Goodput, { job: name })),
    h(Section, { title: "Incidents", id: "incidents" }, incidents.length ? h(IncidentTable, { items: incidents, label: "Incidents of the job", most: 20 }) : h(Empty, null, "None.")),
    h(Section, { title: "Actions", id: "actions" }, actions.length ? h(ActionTable, { actions }) : h(Empty, null, "Nothing was asked of anyone.")),
    job.data && h(Section, { title: "Members", id: "members" }, h(Members, { job: job.data })),
  );
}

/** @param {(number | string | null)[] | undefined} column */
const lastOf = (column) => /** @type {number | null} */ (column?.findLast((value) => typeof value === "number") ?? null);

/** Of the newest step; null: it is not known now, whatever was reported before. @param {(number | string | null)[] | undefined} column */
const present = (column) => /** @type {number | null} */ (column?.at(-1) ?? null);

/** @param {{job: Job, timeline: JobTimeline | null, goodput: number | null}} props */
function JobFacts({ job, timeline, goodput }) {
  const progress = /** @type {import("../api").Progress | null} */ (job.progress);
  const now = live.fleet?.jobs.find((one) => one.job === job.job);
  const nodes = job.nodes.length || new Set(job.ranks.map((rank) => rank["node"])).size || (timeline?.nodes ?? 0);
  return h(
    "div",
    { class: "panel facts-box" },
    h(Facts, {
      facts: [
        ["Owner", h(Owner, { name: job.owner })],
        ["Last progress", progress ? [h("strong", null, h(Ago, { at: progress.progressed, none: "no step seen" })), progress.step === null ? "" : ` (step ${count(progress.step)})`] : "no agent reports it"],
        ["Its log", progress?.log || null],
        ["A step takes", progress?.step_seconds ? duration(progress.step_seconds) : "not known"],
        ["Memory checkpoint", progress?.memory_checkpoint ? checkpoint(progress.memory_checkpoint) : null],
        ["Goodput, last 10 min", goodput === null ? "cannot tell" : percent(goodput)],
        ["Attempt", [String(job.attempt), timeline && timeline.attempts.length > 1 ? ` (${counted(timeline.attempts.length, "attempt")} shown)` : ""]],
        ["Coverage", now ? coverage(now) : null],
        ["Losing now", now?.loss ? h("span", { class: "bad-ink" }, losing(now.loss)) : null],
        ["Takes part", `${counted(nodes, "node")}${job.ranks.length ? `, ${counted(job.ranks.length, "rank")}` : ""}`],
        ["Restarted by", job.restart_owner || (job.source === "agents" ? "unknown" : "eagle-eye")],
        ["Reported by", job.source],
        ["Scheduled as", job.scheduled_as],
        ["Its scheduler says", job.said],
        ["Time limit", job.ends ? h(Time, { at: job.ends }) : null],
        ["Conflict", job.conflict ? h("span", { class: "warn-ink" }, job.conflict) : null],
      ],
    }),
  );
}

/** @param {import("../api").MemoryCheckpoint} one */
function checkpoint(one) {
  const copies = `${count(one.copies)} of ${counted(one.copies_wanted, "copy", "copies")}`;
  return [
    h("strong", null, `step ${count(one.step)}`),
    `, ${counted(one.age_steps, "step")} ago, `,
    one.copies < one.copies_wanted ? h("span", { class: "warn-ink" }, copies) : copies,
    one.persisted_step === null ? "" : `; step ${count(one.persisted_step)} on storage`,
  ];
}

/** How many of its nodes are heard, and what of it nobody observes. @param {import("../api").FleetJob} job */
function coverage(job) {
  const heard = job.nodes_heard < job.nodes ? h("span", { class: "warn-ink" }, `${count(job.nodes_heard)} of ${counted(job.nodes, "node")} heard`) : `all ${counted(job.nodes, "node")} heard`;
  return [heard, job.not_seen.length ? `; not seen: ${job.not_seen.join(", ")}` : ""];
}

/** @param {NonNullable<import("../api").FleetJob["loss"]>} loss */
function losing(loss) {
  const what = loss.kind === "stopped" ? "it stands still" : loss.kind === "slow" ? "it is slowed down" : "no step, cause unknown";
  return loss.gpu_hours === null ? what : `${what}; ${gpuHours(loss.gpu_hours)} GPU-hours so far`;
}

/** Incidents, actions and attempts on the axis of time. @param {JobCourse | JobTimeline} what @returns {Mark[]} */
export function marksOf(what) {
  return [
    ...what.attempts.filter((one) => one.attempt > 0 || what.attempts.length > 1).map((one) => ({ at: one.started, label: `attempt ${one.attempt}`, colour: /** @type {const} */ ("--quiet") })),
    ...what.incidents.filter((one) => one.state !== "false").map((one) => ({ at: one.onset, label: words(one.fault), colour: /** @type {const} */ ("--bad") })),
    ...what.actions.map((one) => ({ at: one.created, label: `${words(one.kind)}${one.state === "would_act" ? " (would have)" : ""}`, colour: /** @type {const} */ ("--accent"), dash: [4, 3] })),
  ];
}

/** @type {Record<string, [string, import("../app/chart.js").Colour]>} */
export const PARTS = {
  slow: ["slowed down", "--warn"],
  startup: ["starting", "--note"],
  redone: ["steps done again", "--note"],
  stopped: ["stopped", "--bad"],
  down: ["down", "--bad"],
  ending: ["ending", "--idle"],
  unknown: ["cannot tell", "--idle"],
};

/** @param {{course: JobCourse, wanted: import("../app/range.js").Range | null}} props `wanted`: the range asked for, whose course may be awaited */
function Course({ course, wanted }) {
  const common = useMemo(() => {
    const stretches = course.parts.flatMap((part) => {
      const known = PARTS[part.part];
      return known ? [{ from: part.start, to: part.end, label: known[0], colour: known[1] }] : [];
    });
    return { marks: marksOf(course), stretches, from: wanted?.from ?? seconds(course.start), to: wanted?.to ?? seconds(course.end), sync: course.job, zoom: zoomOf("jobs", course.job) };
  }, [course, wanted?.from, wanted?.to]);
  const { step_seconds: step, loss, tokens_per_second: tokens, goodput_ratio: goodput } = course.series;
  const part = course.nodes_read < course.nodes ? ` Read from ${course.nodes_read} of ${counted(course.nodes, "node")}.` : "";
  const infinite = loss.not_finite.reduce((sum, many) => sum + many, 0);
  return h(
    "div",
    { class: "charts" },
    h(Chart, {
      ...common,
      title: "Step time",
      unit: "seconds",
      times: step.time,
      lines: [{ label: "median of the ranks", values: step.median, colour: "--ink" }],
      ribbon: { label: "5% to 95%", low: step.low, high: step.high, colour: "--note" },
      low: 0,
      said: [latest("The last step took", step.median, (value) => duration(value)) + part],
      empty: "No step times: the job has no hook, and its log has none.",
    }),
    h(Chart, {
      ...common,
      title: "Throughput, all ranks",
      unit: "tokens/s",
      times: tokens.time,
      lines: [{ label: "tokens per second", values: tokens.total, colour: "--ink" }],
      low: 0,
      said: [latest("Last", tokens.total, (value) => `${figure(value)} tokens/s`) + (part && " Estimated from the nodes that were read.")],
      empty: "No throughput: no rank reports tokens.",
    }),
    h(Chart, {
      ...common,
      title: "Loss",
      unit: "1",
      times: loss.time,
      lines: [{ label: "median of the ranks", values: loss.median, colour: "--ink" }],
      ribbon: { label: "5% to 95%", low: loss.low, high: loss.high, colour: "--note" },
      said: [latest("Last", loss.median, (value) => figure(value)) + (infinite ? ` ${figure(infinite)} values were not finite and are not drawn.` : "")],
      empty: "No loss: no rank reports it.",
    }),
    h(Chart, {
      ...common,
      title: `Goodput of the last ${duration(goodput.trailing_seconds)}`,
      unit: "ratio",
      times: goodput.time,
      lines: [{ label: "time that counted", values: goodput.value, colour: "--ink" }],
      low: 0,
      high: 1,
      said: [present(goodput.value) === null ? "Now: cannot tell." : `Now ${percent(present(goodput.value))}.`],
      empty: "How much of the time counted is not on record.",
    }),
  );
}

/** @param {string} head @param {(number | string | null)[]} column @param {(value: number) => string} say */
function latest(head, column, say) {
  const value = lastOf(column);
  return value === null ? "" : `${head} ${say(value)}.`;
}

/** @param {{actions: import("../api").Action[]}} props */
function ActionTable({ actions }) {
  return h(Table, {
    label: "Actions of the job",
    items: actions,
    most: 20,
    keyOf: (one) => one.id,
    columns: [
      { title: "asked", cell: (one) => h("span", { class: "nowrap" }, h(Time, { at: one.created })) },
      { title: "what", cell: (one) => h("a", { href: link("incidents", one.incident_id) }, words(one.kind)) },
      { title: "state", cell: (one) => h(Badge, { state: one.state }) },
      { title: "takes out", cell: (one) => one.exclude.slice(0, 4).map((/** @type {string} */ name) => h("div", { key: name }, h(NodeLink, { name }))) },
      { title: "because of", cell: (one) => words(one.fault) },
      { title: "latest report", class: "wide", cell: (one) => { const said = one.reports.at(-1); return said ? `${said.state}: ${said.detail}` : one.reason; } },
    ],
  });
}

/** @param {{job: Job}} props */
function Members({ job }) {
  /** @type {Map<string, number[]>} */
  const nodes = new Map(job.nodes.map((node) => [node, []]));
  for (const rank of job.ranks) nodes.set(rank["node"], [...(nodes.get(rank["node"]) ?? []), rank["rank"]]);
  const roles = new Map(job.ranks.map((rank) => [rank["node"], rank["role"]]));
  if (!nodes.size) return h(Empty, null, "It is not known who takes part.");
  return h(
    "details",
    null,
    h("summary", null, `${counted(nodes.size, "node")} of attempt ${job.attempt}`),
    h(Table, {
      label: "Members",
      items: [...nodes],
      most: 256,
      keyOf: ([node]) => node,
      columns: [
        { title: "node", cell: ([node]) => h(NodeLink, { name: node }) },
        { title: "ranks", cell: ([, ranks]) => (ranks.length ? `${Math.min(...ranks)}${ranks.length > 1 ? ` to ${Math.max(...ranks)}` : ""}` : "not known") },
        { title: "role", cell: ([node]) => roles.get(node) ?? "" },
      ],
    }),
  );
}
