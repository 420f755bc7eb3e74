// What a node's agent measured in the last hour.

import { h } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { now } from "../app/api.js";
import { Chart } from "../app/chart.js";
import { measured } from "../app/format.js";
import { Reading } from "../app/parts.js";
import { useResource } from "../app/resource.js";

/** @typedef {import("../api").QueryRange} QueryRange */

const HOUR_S = 3600;
const STEP_S = 15;
const AGAIN_MS = 60_000;
/** Metric, title, statistic of a step, and what the vertical axis holds at least.
 * @type {readonly [string, string, "mean" | "max", {low?: number, high?: number}][]} */
const METRICS = [
  ["train_step_seconds", "Step time", "mean", { low: 0 }],
  ["gpu_utilization_ratio", "GPU utilization", "mean", { low: 0, high: 1 }],
  ["gpu_power_watts", "GPU power", "mean", { low: 0 }],
  ["gpu_temperature_celsius", "GPU temperature", "max", {}],
  ["gpu_sm_clock_hertz", "SM clock", "mean", {}],
  ["gpu_memory_used_bytes", "GPU memory in use", "mean", { low: 0 }],
  ["node_cpu_utilization_ratio", "CPU utilization", "mean", { low: 0, high: 1 }],
  ["node_memory_used_ratio", "Memory in use", "mean", { low: 0, high: 1 }],
  ["node_network_rx_bytes_per_second", "Network received", "mean", { low: 0 }],
];
/** @type {import("../app/chart.js").Colour[]} */
const INKS = ["--accent", "--bad", "--good", "--warn", "--ink", "--note", "--quiet", "--idle"];

/** @param {{name: string}} props */
export function NodeCharts({ name }) {
  return h("div", { class: "charts" }, METRICS.map(([metric, title, statistic, holds]) => h(NodeChart, { key: metric, name, metric, title, statistic, holds })));
}

/** @param {{name: string, metric: string, title: string, statistic: string, holds: {low?: number, high?: number}}} props */
function NodeChart({ name, metric, title, statistic, holds }) {
  const current = () => Math.ceil(now() / 1000 / STEP_S) * STEP_S;
  const [end, setEnd] = useState(current);
  useEffect(() => {
    const timer = setInterval(() => {
      if (!document.hidden) setEnd(current());
    }, AGAIN_MS);
    return () => clearInterval(timer);
  }, []);
  const query = new URLSearchParams({ metric, node: name, statistic, step: String(STEP_S), start: String(end - HOUR_S), end: String(end) });
  /** @type {import("../app/resource.js").Resource<QueryRange>} */
  const resource = useResource(`api/v1/query_range?${query}`);
  const shown = useRef(/** @type {ReturnType<typeof columnsOf> | null} */ (null));
  const drawn = useMemo(() => (resource.data ? columnsOf(resource.data, end) : shown.current), [resource.data]);
  shown.current = drawn;
  if (!drawn) return h("figure", { class: "chart" }, h("figcaption", null, title), h(Reading, { resource, what: title }));
  return [
    h(Chart, { title, height: 140, sync: `node ${name}`, ...holds, ...drawn }),
    resource.error && h(Reading, { resource, what: title }),
  ];
}

/** A query's series as columns of one time axis; steps without an observation stay empty. @param {QueryRange} answer @param {number} end */
function columnsOf(answer, end) {
  const from = end - HOUR_S;
  const times = Array.from({ length: HOUR_S / STEP_S }, (_, at) => from + at * STEP_S);
  const lines = answer.series.map((one, at) => {
    /** @type {(number | string | null)[]} */
    const values = times.map(() => null);
    for (const [moment, value] of one.points) {
      values[Math.round((Date.parse(/** @type {string} */ (moment)) / 1000 - from) / STEP_S)] = /** @type {number | string} */ (value);
    }
    return { label: one.device === null ? "node" : `device ${one.device}`, values, colour: INKS[at % INKS.length] ?? "--ink", width: 1.25, ...(at >= INKS.length ? { dash: [3, 2] } : {}) };
  });
  const last = lines.flatMap((line) => {
    const value = line.values.findLast((one) => typeof one === "number");
    return typeof value === "number" ? [value] : [];
  });
  const least = Math.min(...last);
  const most = Math.max(...last);
  const said = last.length === 0 ? [] : [least === most ? `Last ${measured(most, answer.unit)}.` : `Last between ${measured(least, answer.unit)} and ${measured(most, answer.unit)} over ${last.length} series.`];
  return { unit: answer.unit, times, lines, said, from, to: end };
}
