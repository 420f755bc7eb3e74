// What a node's agent measured: around its incident, in the last hour, or whenever is asked for.

import { h } from "preact";
import { useMemo } from "preact/hooks";
import { Chart, look, seconds } from "../app/chart.js";
import { measured, metricLabel } from "../app/format.js";
import { Reading } from "../app/parts.js";
import { RangePicker, rangeOf, useTime, zoomOf } from "../app/range.js";
import { useKept, useResource } from "../app/resource.js";

/**
 * @typedef {import("../api").QueryRange} QueryRange
 * @typedef {import("../api").Incident} Incident
 * @typedef {import("../app/range.js").Range} Range
 */

const HOUR_S = 3600;
const AROUND_S = 300; // before the onset and after the verdict, at least
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 10_800];
const STEPS = 300; // a screen has few more columns
const SPARSE = 2.5; // an agent's intervals in a step: with fewer a late report is a gap
const FOLLOW_S = 15; // how often charts that end now move on
/** Metric, statistic of a step, and what the vertical axis holds at least.
 * @type {readonly [string, "mean" | "max", {low?: number, high?: number}][]} */
export const METRICS = [
  ["train_step_seconds", "mean", { low: 0 }],
  ["gpu_utilization_ratio", "mean", { low: 0, high: 1 }],
  ["gpu_power_watts", "mean", { low: 0 }],
  ["gpu_temperature_celsius", "max", {}],
  ["gpu_sm_clock_hertz", "mean", {}],
  ["gpu_memory_used_bytes", "mean", { low: 0 }],
  ["node_cpu_utilization_ratio", "mean", { low: 0, high: 1 }],
  ["node_memory_used_ratio", "mean", { low: 0, high: 1 }],
  ["node_network_rx_bytes_per_second", "mean", { low: 0 }],
];

/** @param {{name: string, query: URLSearchParams, incidents: Incident[], interval_s: number, known: string | null, job: string | null}} props
 *   `incidents`: the open ones that concern the node, the newest last; `known`: since when there is such a node; `job`: null,
 *   or the one for whose time alone the node is shown */
export function NodeCharts({ name, query, incidents, interval_s, known, job }) {
  const time = useTime(FOLLOW_S);
  const incident = incidents.at(-1);
  const range = rangeOf(query, time) ?? (incident ? around(incident, time) : { from: Math.max(time - HOUR_S, known ? seconds(known) - FOLLOW_S : 0), to: time });
  const accused = new Set(incidents.flatMap((one) => (one.node === name && one.device !== null ? [one.device] : [])));
  const shared = { name, job, accused, incident, interval_s, ...range };
  return [
    h(RangePicker, { view: "nodes", name, query, shown: range, home: incident ? "around the incident" : "last hour", subject: { node: name } }),
    h("div", { class: "charts" }, METRICS.map(([metric, statistic, holds]) => h(NodeChart, { key: metric, metric, statistic, holds, ...shared }))),
  ];
}

/** @param {Incident} incident @param {number} time @returns {Range} */
function around(incident, time) {
  const [onset, detected] = [seconds(incident.onset), seconds(incident.detected)];
  const room = Math.max(AROUND_S, detected - onset);
  return { from: onset - room, to: Math.min(time, detected + room) };
}

/** @param {{name: string, job: string | null, metric: string, statistic: string, holds: {low?: number, high?: number}, accused: Set<number>,
 *   incident: Incident | undefined, interval_s: number} & Range} props */
function NodeChart({ name, job, metric, statistic, holds, accused, incident, interval_s, from, to }) {
  const title = metricLabel(metric);
  const step = STEPS_S.find((one) => one >= Math.max((to - from) / STEPS, SPARSE * interval_s)) ?? 86_400;
  const [start, end] = [Math.floor(from / step) * step, Math.ceil(to / step) * step];
  const query = new URLSearchParams({ metric, node: name, statistic, step: String(step), start: String(start), end: String(end), ...(job === null ? {} : { job }) });
  /** @type {import("../app/resource.js").Resource<QueryRange>} */
  const resource = useResource(`api/v1/query_range?${query}`);
  const answer = useKept(useMemo(() => (resource.data ? { data: resource.data, start, end } : null), [resource.data]));
  const who = [...accused].join();
  const drawn = useMemo(() => (answer ? columnsOf(answer.data, answer.start, answer.end, accused) : null), [answer, who]);
  const marks = useMemo(() => (incident ? marksOf(incident) : []), [incident?.id, incident?.detected]);
  const zoom = useMemo(() => zoomOf("nodes", name), [name]);
  if (!drawn) return h("figure", { class: "chart" }, h("figcaption", null, title), h(Reading, { resource, what: title }));
  return [
    h(Chart, { title, height: 140, sync: `node ${name}`, marks, zoom, from, to, ...holds, ...drawn }),
    resource.error && h(Reading, { resource, what: title }),
  ];
}

/** @param {Incident} incident @returns {import("../app/chart.js").Mark[]} */
const marksOf = (incident) => [
  { at: incident.onset, label: "onset", colour: "--bad" },
  { at: incident.detected, label: "verdict", colour: "--ink" },
];

/**
 * A query's series as columns of one time axis; steps without an observation stay empty. Where a device is accused it is
 * drawn last, above the others, which recede.
 * @param {QueryRange} answer @param {number} from @param {number} to @param {ReadonlySet<number>} accused
 */
export function columnsOf(answer, from, to, accused) {
  const step = answer.step_seconds;
  const times = Array.from({ length: Math.max(1, Math.round((to - from) / step)) }, (_, at) => from + at * step);
  const some = answer.series.some((one) => accused.has(Number(one.device ?? -1)));
  const lines = answer.series.map((one, at) => {
    /** @type {(number | string | null)[]} */
    const values = times.map(() => null);
    for (const [moment, value] of one.points) {
      const place = Math.round((Date.parse(/** @type {string} */ (moment)) / 1000 - from) / step);
      if (place >= 0 && place < values.length) values[place] = /** @type {number | string} */ (value);
    }
    return { label: one.device === null ? "node" : `device ${one.device}`, values, ...style(at, some, one.device !== null && accused.has(Number(one.device))) };
  });
  const last = lines.flatMap((line) => {
    const value = line.values.findLast((one) => typeof one === "number");
    return typeof value === "number" ? [value] : [];
  });
  const least = Math.min(...last);
  const most = Math.max(...last);
  const said = last.length === 0 ? [] : [least === most ? `Last ${measured(most, answer.unit)}.` : `Last between ${measured(least, answer.unit)} and ${measured(most, answer.unit)} over ${last.length} series.`];
  return { unit: answer.unit, times, lines: lines.toSorted((a, b) => Number(a.width === ACCUSED_PX) - Number(b.width === ACCUSED_PX)), said };
}

const ACCUSED_PX = 3;

/** @param {number} at @param {boolean} some whether any is accused @param {boolean} mine whether this one is
 * @returns {{colour: import("../app/chart.js").Colour, width: number, dash?: number[], recedes?: boolean}} */
function style(at, some, mine) {
  if (mine) return { colour: "--bad", width: ACCUSED_PX };
  return some ? { colour: "--edge", width: 1, recedes: true } : { ...look(at), width: 1.5 };
}
