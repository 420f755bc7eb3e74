// Numbers, times and names in words that an on-call engineer reads at once.

import { CHART_ENDINGS, METRIC_ENDINGS, METRIC_LABELS, THROTTLE_REASONS } from "./labels.js";

const SCALES = /** @type {const} */ ([
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
]);

/** 1247 → "1,247". @param {number} value */
export const count = (value) => value.toLocaleString("en-US");

/** "1 node", "1,247 nodes". @param {number} many @param {string} one @param {string} [more] */
export const counted = (many, one, more = `${one}s`) => `${count(many)} ${many === 1 ? one : more}`;

/** A number of steps in full, as everywhere: 32343 → "32,343". @param {number | null | undefined} value */
export const steps = (value) => (value === null || value === undefined ? "–" : count(value));

/** Three significant digits, with k, M, G: "1.25k", "0.031", "–" for what was not observed.
 * @param {number | string | null | undefined} value */
export function figure(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value; // "+Inf", "-Inf"
  const size = Math.abs(value);
  for (const [scale, letter] of SCALES) if (size >= scale * 10) return `${digits(value / scale)}${letter}`;
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return digits(value);
}

/** @param {number} value */
function digits(value) {
  const size = Math.abs(value);
  return value.toLocaleString("en-US", { maximumFractionDigits: size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3 });
}

/** A figure with its unit: "400 W", "1.25 GB/s", "62%" for ratios.
 * @param {number | string | null | undefined} value @param {string} unit as the API names it */
export function measured(value, unit) {
  if (value === null || value === undefined || typeof value === "string") return figure(value);
  if (unit === "ratio") return `${digits(value * 100)}%`;
  if (unit === "seconds" || unit === "s") return duration(value);
  if (unit === "bitmask") return throttledBy(value);
  if (unit === "bool") return value === 0 ? "no" : value === 1 ? "yes" : percent(value);
  const short = UNITS[unit] ?? unit;
  if (PREFIXED.has(short)) {
    const [scale, letter] = SCALES.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
    return `${digits(value / scale)} ${letter}${short}`;
  }
  if (COUNTABLE.has(short) && Number.isInteger(value)) return counted(value, short.slice(0, -1), short);
  return short ? `${figure(value)} ${short}` : figure(value);
}

const COUNTABLE = new Set(["collectives", "errors", "ranks", "steps"]);
const PREFIXED = new Set(["Hz", "B", "B/s"]);
/** @type {Record<string, string>} */
const UNITS = {
  watts: "W",
  celsius: "°C",
  hertz: "Hz",
  bytes: "B",
  bytes_per_second: "B/s",
  "bytes/s": "B/s",
  count: "",
  "1": "",
};

/** The reasons for which a GPU's clock is held down, of NVML's bit mask. @param {number} bits */
function throttledBy(bits) {
  const known = THROTTLE_REASONS.filter(([bit]) => bits & bit);
  const rest = known.reduce((left, [bit]) => left & ~bit, bits);
  return [...known.map(([, reason]) => reason), ...(rest ? [`bits 0x${rest.toString(16)}`] : [])].join(", ") || "no reason";
}

/** The title of a metric, or of what a detector derived from one. @param {string} name */
export function metricLabel(name) {
  for (const [ending, said] of Object.entries(METRIC_ENDINGS)) {
    const base = METRIC_LABELS[name.slice(0, -ending.length)];
    if (name.endsWith(ending) && base) return base + said;
  }
  return METRIC_LABELS[name] ?? words(name);
}

/** The title of a chart that draws a metric in this form. @param {string} name @param {string} form */
export const chartLabel = (name, form) => metricLabel(name) + (CHART_ENDINGS[form] ?? "");

/** A percentage of a share: 0.934 → "93%". @param {number | null | undefined} share @param {number} [decimals] */
export const percent = (share, decimals = 0) =>
  share === null || share === undefined ? "–" : `${(share * 100).toFixed(decimals)}%`;

/** 41 → "41 s", 0.25 → "250 ms", 312 → "5 min 12 s", 7500 → "2 h 5 min", 200000 → "2 d 7 h".
 * @param {number | null | undefined} seconds @returns {string} */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${digits(seconds * 1e6)} µs`;
  if (seconds < 1) return `${digits(seconds * 1000)} ms`;
  if (seconds < 10) return `${digits(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 600) return two(whole, 60, "min", 1, "s");
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 86_400) return two(whole, 3600, "h", 60, "min");
  return two(whole, 86_400, "d", 3600, "h");
}

/** @param {number} whole @param {number} large @param {string} largeName @param {number} small @param {string} smallName */
function two(whole, large, largeName, small, smallName) {
  const rest = Math.floor((whole % large) / small);
  return `${Math.floor(whole / large)} ${largeName}${rest ? ` ${rest} ${smallName}` : ""}`;
}

/** GPU-hours: "0.4", "12", "1,250". @param {number} hours */
export const gpuHours = (hours) =>
  hours.toLocaleString("en-US", { maximumFractionDigits: hours < 10 ? 1 : 0 });

/** A stable name as words: "thermal_throttle" → "thermal throttle". @param {string} name */
export const words = (name) => name.replaceAll("_", " ");

/** A sentence's beginning. @param {string} text */
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** The first few of many: "n1, n2, n3 and 9 more". @param {string[]} names @param {number} [shown] */
export function few(names, shown = 3) {
  if (names.length <= shown + 1) return names.join(", ");
  return `${names.slice(0, shown).join(", ")} and ${count(names.length - shown)} more`;
}

/** Compares names so that n2 comes before n10. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;
