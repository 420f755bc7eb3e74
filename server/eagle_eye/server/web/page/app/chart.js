// Charts over time, drawn by uPlot: lines, a band between two of them, moments and stretches marked. What a chart shows is
// always there as text, too: its title and sentences, the legend, and the numbers in a table.

import { h } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { figure, measured } from "./format.js";
import { colours, onTheme } from "./theme_button.js";
import { local } from "./times.js";

/**
 * @typedef {"--series-1" | "--series-2" | "--series-3" | "--series-4" | "--series-5" | "--series-6" | "--series-7" | "--series-8"} SeriesColour
 * @typedef {"--ink" | "--quiet" | "--line" | "--edge" | "--accent" | "--good" | "--bad" | "--warn" | "--note" | "--idle" | "--panel" | SeriesColour} Colour
 * @typedef {(number | string | null)[]} Column as the API has it: null is "not observed", "+Inf" not finite
 * @typedef {{label: string, values: Column, colour: Colour, width?: number, dash?: number[], points?: boolean, recedes?: boolean}} Line
 *   `recedes`: one of many that the accused is seen against; the legend has them as one
 * @typedef {{label: string, low: Column, high: Column, colour: Colour}} Ribbon
 * @typedef {{at: string | number, label: string, colour: Colour, dash?: number[]}} Mark a moment
 * @typedef {{from: string | number, to: string | number, label: string, colour: Colour}} Stretch
 */

/** @type {readonly SeriesColour[]} */
const SERIES = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6", "--series-7", "--series-8"];
/** @type {readonly Colour[]} */
const COLOURS = ["--ink", "--quiet", "--line", "--edge", "--accent", "--good", "--bad", "--warn", "--note", "--idle", "--panel", ...SERIES];
const DASHES = [[], [6, 3], [2, 3]]; // told apart without colour, and beyond eight lines
const DRAG_PX = 6; // less is a click
const ROWS = 40; // of the table of numbers
const AXIS_PX = 60;
const DECIMALS_MAX = 6;
const COUNTED = new Set(["steps", "collectives", "errors", "tokens/s", "bool", "1"]); // the title says of what

/** How the lines of equals are told apart: no two of 24 look the same. @param {number} at @returns {{colour: Colour, dash?: number[]}} */
export function look(at) {
  const dash = DASHES[(Math.floor(at / SERIES.length) + (at % 2)) % DASHES.length] ?? [];
  return { colour: SERIES[at % SERIES.length] ?? "--ink", ...(dash.length ? { dash } : {}) };
}

/** Unix seconds of a moment as the API has it. @param {string | number} at */
export const seconds = (at) => (typeof at === "number" ? at : Date.parse(at) / 1000);

/** @param {string} colour "rgb(1, 2, 3)" @param {number} share */
const thin = (colour, share) => colour.replace(/^rgb\(/, "rgba(").replace(/\)$/, `, ${share})`);

/** @param {Column} column @returns {(number | null)[]} */
const plain = (column) => column.map((value) => (typeof value === "number" ? value : null));

/**
 * A uPlot that lives as long as its element: made anew for new options or another theme, given new data in place.
 * @param {(inks: Record<Colour, string>, width: number) => uPlot.Options} options
 * @param {uPlot.AlignedData} data
 * @param {unknown} version options are made anew when this changes
 */
export function usePlot(options, data, version) {
  const host = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {uPlot | null} */ (null));
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const place = host.current;
    if (!place) return undefined;
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(colours(COLOURS), place.clientWidth), latest.current, place);
    };
    make();
    const watcher = new ResizeObserver(() => {
      const made = plot.current;
      if (made && place.clientWidth > 0 && made.width !== place.clientWidth) {
        made.setSize({ width: place.clientWidth, height: made.height });
      }
    });
    watcher.observe(place);
    const end = onTheme(make);
    return () => {
      end();
      watcher.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [version]);
  useEffect(() => {
    const made = plot.current;
    if (made && made.data !== data) made.setData(data);
  }, [data]);
  return host;
}

/** How an axis writes moments: never more than a reader needs. @param {uPlot} _plot @param {number[]} splits */
export function momentsOf(_plot, splits) {
  const span = (splits.at(-1) ?? 0) - (splits[0] ?? 0);
  let day = "";
  return splits.map((at) => {
    const moment = new Date(at * 1000);
    const time = moment.toLocaleTimeString("en-GB", span < 600 ? {} : { hour: "2-digit", minute: "2-digit" });
    const date = moment.toLocaleDateString("en-US", { month: "short", day: "numeric" });
    const text = date !== day && (span > 86_400 || day !== "") ? `${date}\n${time}` : time;
    day = date;
    return text;
  });
}

/** @param {Record<Colour, string>} inks @returns {uPlot.Axis} */
export const timeAxis = (inks) => ({
  stroke: inks["--quiet"],
  font: "11px system-ui, sans-serif",
  grid: { stroke: inks["--line"], width: 1 },
  ticks: { show: false },
  size: 26,
  gap: 4,
  space: 84,
  values: momentsOf,
});

/**
 * Draws stretches behind and moments before what a plot shows.
 * @param {uPlot} plot @param {Mark[]} marks @param {Stretch[]} stretches @param {Record<Colour, string>} inks
 */
export function drawMarks(plot, marks, stretches, inks) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top - 16 * ratio, bbox.width, bbox.height + 16 * ratio);
  ctx.clip();
  for (const stretch of stretches) {
    const from = plot.valToPos(seconds(stretch.from), "x", true);
    const to = plot.valToPos(seconds(stretch.to), "x", true);
    ctx.fillStyle = thin(inks[stretch.colour], 0.16);
    ctx.fillRect(from, bbox.top, Math.max(to - from, ratio), bbox.height);
  }
  ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "bottom";
  ctx.textAlign = "left";
  let free = -Infinity;
  for (const mark of marks.toSorted((a, b) => seconds(a.at) - seconds(b.at))) {
    const x = Math.round(plot.valToPos(seconds(mark.at), "x", true)) + 0.5;
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = inks[mark.colour];
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash((mark.dash ?? []).map((part) => part * ratio));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const width = ctx.measureText(mark.label).width;
    const fits = x + width < bbox.left + bbox.width;
    const left = fits ? x : x - width;
    if (left < free) continue; // its place is taken; the text below the chart has it
    ctx.fillText(mark.label, left, bbox.top - 3 * ratio);
    free = left + width + 6 * ratio;
  }
  ctx.restore();
}

/**
 * @param {{title: string, unit: string, times: number[], lines: Line[], ribbon?: Ribbon | null, marks?: Mark[],
 *   stretches?: Stretch[], threshold?: number | null, thresholdLabel?: string, height?: number, from?: number, to?: number,
 *   low?: number, high?: number, sync?: string, said?: string[], empty?: string, hint?: string, zoom?: import("./range.js").Zoom}} props
 *   `from`, `to`: the range of time, else that of `times`; `low`, `high`: what the vertical axis holds at least;
 *   `hint`: what is drawn; `zoom`: where dragging leads
 */
export function Chart(props) {
  const { title, unit, times, lines, ribbon = null, marks = [], stretches = [], threshold = null, height = 180, sync } = props;
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const latest = useRef({ marks, stretches, threshold });
  latest.current = { marks, stretches, threshold };
  const seen = lines.some((line) => line.values.some((value) => typeof value === "number"));
  const data = useMemo(
    () =>
      /** @type {uPlot.AlignedData} */ ([
        times,
        ...(ribbon ? [plain(ribbon.high), plain(ribbon.low)] : []),
        ...lines.map((line) => plain(line.values)),
        ...(threshold === null ? [] : [times.map(() => threshold)]),
      ]),
    [times, lines, ribbon, threshold],
  );
  const version = [unit, height, lines.map((line) => line.label), ribbon?.label, threshold === null, props.from, props.to].join();
  const host = usePlot(
    (inks, width) => options(props, latest, inks, width, setAt),
    data,
    `${version} ${marks.length} ${stretches.length} ${sync ?? ""} ${seen}`,
  );
  const prose = [props.hint && `${props.hint}.`, ...(props.said ?? [])].filter(Boolean);
  return h(
    "figure",
    { class: "chart" },
    h("figcaption", null, title, unit === "tokens/s" && h("span", { class: "hint" }, `, ${unit}`)),
    seen
      ? h("div", { class: "plot", ref: host, role: "img", "aria-label": [title, ...(props.said ?? [])].join(". ") })
      : h("p", { class: "empty chart-empty" }, props.empty ?? "Nothing of this was observed in this time."),
    seen && h(Legend, { ...props, at }),
    h(
      "div",
      { class: "chart-more" },
      prose.length > 0 && h("details", { class: "said" }, h("summary", null, "In words", h("span", { class: "visually-hidden" }, `: ${title}`)), h("p", null, prose.join(" "))),
      seen && h(Numbers, { title, unit, times, lines, ribbon }),
    ),
  );
}

/**
 * @param {Parameters<typeof Chart>[0]} props
 * @param {{current: {marks: Mark[], stretches: Stretch[], threshold: number | null}}} latest
 * @param {Record<Colour, string>} inks @param {number} width @param {(at: number | null) => void} setAt
 * @returns {uPlot.Options}
 */
function options(props, latest, inks, width, setAt) {
  const { unit, lines, ribbon, threshold = null, height = 180, low, high, sync, from, to, zoom } = props;
  /** @type {uPlot.Series[]} */
  const series = [{}];
  if (ribbon) {
    const edge = { stroke: thin(inks[ribbon.colour], 0.5), width: 1, points: { show: false } };
    series.push({ ...edge, label: `${ribbon.label} high` }, { ...edge, label: `${ribbon.label} low` });
  }
  for (const line of lines) {
    series.push({
      label: line.label,
      stroke: inks[line.colour],
      width: line.width ?? 1.75,
      ...(line.dash ? { dash: line.dash } : {}),
      points: { show: line.points ?? false, size: 4, fill: inks[line.colour] },
    });
  }
  if (threshold !== null) {
    series.push({ label: "threshold", stroke: inks["--warn"], width: 1.5, dash: [6, 4], points: { show: false } });
  }
  return {
    width: Math.max(width, 120),
    height,
    padding: [18, 22, 0, 0],
    series,
    ...(ribbon ? { bands: [{ series: [1, 2], fill: thin(inks[ribbon.colour], 0.22) }] } : {}),
    legend: { show: false },
    scales: {
      x: { time: true, ...(from === undefined || to === undefined ? {} : { range: () => [from, to] }) },
      y: { range: (_plot, least, most) => range(least, most, low, high) },
    },
    axes: [
      timeAxis(inks),
      {
        stroke: inks["--quiet"],
        font: "11px system-ui, sans-serif",
        grid: { stroke: inks["--line"], width: 1 },
        ticks: { show: false },
        size: (_plot, values) => Math.max(AXIS_PX, 12 + 6.5 * Math.max(0, ...(values ?? []).map((text) => text.length))),
        gap: 6,
        space: 24,
        values: (_plot, splits) => ticks(splits, unit),
      },
    ],
    cursor: {
      y: false,
      points: { size: 6 },
      ...(sync ? { sync: { key: sync, filters: { pub: (type) => !type.startsWith("mouse") || type === "mousemove" || type === "mouseleave" } } } : {}),
      drag: { x: zoom !== undefined, y: false, setScale: false },
      bind: { dblclick: () => () => { zoom?.reset(); return null; } },
    },
    hooks: {
      drawAxes: [(plot) => drawMarks(plot, [], latest.current.stretches, inks)],
      draw: [(plot) => drawMarks(plot, latest.current.marks, [], inks)],
      setCursor: [(plot) => setAt(plot.cursor.idx ?? null)],
      setSelect: [(plot) => {
        const { left, width: wide } = plot.select;
        if (wide === 0) return;
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        if (!zoom || wide < DRAG_PX) return;
        zoom.to(plot.posToVal(left, "x"), plot.posToVal(left + wide, "x"));
      }],
    },
  };
}

/** How many decimals tell a gap between ticks exactly. @param {number} gap */
function decimals(gap) {
  const off = (/** @type {number} */ at) => Math.abs(gap * 10 ** at - Math.round(gap * 10 ** at));
  let digits = 0;
  while (digits < DECIMALS_MAX && off(digits) > 1e-6 * gap * 10 ** digits) digits += 1;
  return digits;
}

/** What an axis says: as few digits as tell its ticks apart. @param {number[]} splits @param {string} unit */
function ticks(splits, unit) {
  if (unit === "bool") return splits.map((value) => (value === 0 || value === 1 ? measured(value, unit) : ""));
  const texts = splits.map((value) => (COUNTED.has(unit) ? figure(value) : measured(value, unit)));
  const gap = Math.abs((splits[1] ?? 1) - (splits[0] ?? 0)) * (unit === "ratio" ? 100 : 1);
  const digits = decimals(gap);
  // Rounded to three digits, ticks 0.025 apart would seem now 0.02 apart and now 0.03.
  const cut = digits > 2 && digits < DECIMALS_MAX && texts.every((text, at) => text === figure(splits[at]));
  if (!cut && new Set(texts).size === texts.length) return texts;
  const style = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return splits.map((value) => (unit === "ratio" ? `${(value * 100).toLocaleString("en-US", style)}%` : value.toLocaleString("en-US", style)));
}

/** @param {number | null} least @param {number | null} most @param {number | undefined} low @param {number | undefined} high
 * @returns {[number, number]} */
function range(least, most, low, high) {
  let from = Math.min(least ?? Infinity, low ?? Infinity);
  let to = Math.max(most ?? -Infinity, high ?? -Infinity);
  if (!Number.isFinite(from) || !Number.isFinite(to)) return [0, 1];
  if (from === to && from > 0) return [0, to * 1.08]; // a flat line: enlarged it would look like a course
  const room = (to - from) * 0.08 || Math.abs(to) * 0.08 || 1;
  if (from !== low) from = least !== null && least >= 0 ? Math.max(0, from - room) : from - room;
  if (to !== high) to += room;
  return [from, to];
}

/** @param {Parameters<typeof Chart>[0] & {at: number | null}} props */
function Legend({ unit, times, lines, ribbon, threshold = null, thresholdLabel = "threshold", marks = [], stretches = [], at }) {
  const value = (/** @type {Column} */ column) => (at === null ? null : measured(column[at] ?? null, unit));
  const moment = at === null ? undefined : times[at];
  const others = lines.filter((line) => line.recedes);
  return h(
    "ul",
    { class: "chart-legend", "aria-hidden": "true" },
    h("li", { class: "moment" }, moment === undefined ? "" : local(new Date(moment * 1000))),
    lines.filter((line) => !line.recedes).map((line) => item(line.label, line.colour, line.dash ? "dash" : "line", value(line.values))),
    others.length > 0 && item(others.length === 1 ? (others[0]?.label ?? "") : `${others.length} others`, "--edge", "line", spread(others.map((line) => (at === null ? null : line.values[at])), unit)),
    ribbon &&
      item(
        ribbon.label,
        ribbon.colour,
        "ribbon",
        at === null ? null : `${measured(ribbon.low[at] ?? null, unit)} to ${measured(ribbon.high[at] ?? null, unit)}`,
      ),
    threshold !== null && item(thresholdLabel, "--warn", "dash", measured(threshold, unit)),
    marks.slice(0, 8).map((mark) => item(`${mark.label} ${local(new Date(seconds(mark.at) * 1000))}`, mark.colour, "mark", null)),
    [...new Map(stretches.map((one) => [one.label, one])).values()].map((one) => item(one.label, one.colour, "ribbon", null)),
  );
}

/** From the least to the greatest. @param {(number | string | null | undefined)[]} values @param {string} unit */
function spread(values, unit) {
  const known = values.filter((value) => typeof value === "number");
  if (known.length === 0) return null;
  const [least, most] = [measured(Math.min(...known), unit), measured(Math.max(...known), unit)];
  return least === most ? least : `${least} to ${most}`;
}

/** @param {string} label @param {Colour} colour @param {string} kind @param {string | null} value */
const item = (label, colour, kind, value) =>
  h(
    "li",
    { key: `${kind} ${label}` },
    h("span", { class: `key ${kind}`, style: { color: `var(${colour})` } }, kind === "mark" ? "│" : ""),
    label,
    value !== null && h("strong", null, ` ${value}`),
  );

/** The same as numbers. @param {{title: string, unit: string, times: number[], lines: Line[], ribbon: Ribbon | null}} props */
function Numbers({ title, unit, times, lines, ribbon }) {
  const [open, setOpen] = useState(false);
  const every = Math.ceil(times.length / ROWS);
  const rows = times.map((_, at) => at).filter((at) => at % every === 0);
  const columns = [
    ...lines.map((line) => ({ label: line.label, values: line.values })),
    ...(ribbon ? [{ label: `${ribbon.label}, from`, values: ribbon.low }, { label: "to", values: ribbon.high }] : []),
  ];
  return h(
    "details",
    { class: "numbers", onToggle: (/** @type {Event} */ event) => setOpen(/** @type {HTMLDetailsElement} */ (event.currentTarget).open) },
    h("summary", null, "Numbers", h("span", { class: "visually-hidden" }, ` of ${title}`)),
    open &&
      h(
        "div",
        { class: "scroll", tabIndex: 0, role: "region", "aria-label": `Numbers of ${title}` },
        h(
          "table",
          null,
          h("caption", { class: "visually-hidden" }, `${title}, in ${unit}; one row in ${every}`),
          h("thead", null, h("tr", null, h("th", { scope: "col" }, "time"), columns.map((one) => h("th", { scope: "col", class: "right" }, one.label)))),
          h(
            "tbody",
            null,
            rows.map((at) =>
              h(
                "tr",
                { key: at },
                h("td", { class: "nowrap" }, local(new Date((times[at] ?? 0) * 1000))),
                columns.map((one) => h("td", { class: "right" }, unit === "seconds" ? `${figure(one.values[at])}` : measured(one.values[at], unit))),
              ),
            ),
          ),
        ),
      ),
  );
}

