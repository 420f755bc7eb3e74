// Who took part when: a row for each node, or for neighbours where there are many, with attempts, incidents and actions.

import { h } from "preact";
import { useMemo, useRef } from "preact/hooks";
import { seconds, timeAxis, usePlot } from "../app/chart.js";
import { count, counted, few, words } from "../app/format.js";
import { Badge, Empty, NodeLink } from "../app/parts.js";
import { link } from "../app/router.js";
import { Table } from "../app/table.js";
import { Time } from "../app/times.js";

/**
 * @typedef {import("../api").JobTimeline} JobTimeline
 * @typedef {import("../api").TimelineRow} Row
 * @typedef {Record<import("../app/chart.js").Colour, string>} Inks
 */

const ROW_PX = 18;
const LABEL_PX = 150;
const LABEL_CHARS = 20;
const OVER_PX = 44; // axis and margin

/** @param {{timeline: JobTimeline}} props */
export function Lanes({ timeline }) {
  const { rows } = timeline;
  const latest = useRef(timeline);
  latest.current = timeline;
  const from = seconds(timeline.start);
  const to = seconds(timeline.end);
  const data = useMemo(() => /** @type {import("uplot").AlignedData} */ ([[from, to], [0, rows.length]]), [timeline]);
  const host = usePlot((inks, width) => options(latest, inks, width), data, `${rows.length} ${from} ${to} ${timeline.incidents.length} ${timeline.attempts.length}`);
  if (!rows.length) {
    return h(Empty, null, timeline.unknown.length ? "Who took part is no longer on record." : "No attempt is on record yet: the accounts look at jobs every ten seconds.");
  }
  const shared = rows.some((row) => row.size > 1);
  return [
    h(
      "div",
      { class: "panel lanes", tabIndex: 0, role: "region", "aria-label": "Nodes over time" },
      h("div", { class: "plot", ref: host, role: "img", "aria-label": said(timeline) }),
    ),
    h(
      "ul",
      { class: "chart-legend", "aria-hidden": "true" },
      h("li", null, h("span", { class: "key ribbon", style: { color: "var(--good)" } }), "took part"),
      h("li", null, h("span", { class: "key ribbon", style: { color: "var(--bad)" } }), "accused by an incident"),
      h("li", null, h("span", { class: "key ribbon", style: { color: "var(--warn)" } }), "concerned by one"),
      h("li", null, h("span", { class: "key line", style: { color: "var(--accent)" } }), "action"),
      shared && h("li", null, "of many nodes, neighbours share a row; whoever is accused has one alone"),
    ),
    h("p", { class: "said" }, said(timeline)),
    timeline.unknown.length > 0 && h("p", { class: "quiet" }, `${counted(timeline.unknown.length, "attempt")} without a record of the nodes that took part.`),
    h(Attempts, { timeline }),
  ];
}

/** @param {JobTimeline} timeline */
function said(timeline) {
  const accused = timeline.rows.filter((row) => row.incidents.length && row.size === 1).map((row) => row.label);
  const ended = timeline.attempts.filter((one) => one.ended).length;
  return [
    `${counted(timeline.attempts.length, "attempt")}, ${ended ? count(ended) : "none"} of them over, on ${counted(timeline.nodes, "node")}.`,
    accused.length ? `Incidents concern ${few(accused, 6)}.` : "No incident concerns a single node.",
  ].join(" ");
}

/** @param {{timeline: JobTimeline}} props */
function Attempts({ timeline }) {
  return h(Table, {
    label: "Attempts",
    items: timeline.attempts.toReversed(),
    most: 8,
    keyOf: (one) => one.id,
    columns: [
      { title: "attempt", cell: (one) => String(one.attempt) },
      { title: "began", cell: (one) => h(Time, { at: one.started }) },
      { title: "ended", cell: (one) => (one.ended ? h(Time, { at: one.ended }) : "goes on") },
      { title: "how", cell: (one) => h(Badge, { state: one.end || one.state }) },
      { title: "nodes", right: true, cell: (one) => String(one.nodes) },
      { title: "steps", cell: (one) => (one.first_step === null ? "none seen" : `${one.first_step} to ${one.last_step}`) },
      {
        title: "incidents",
        cell: (one) =>
          timeline.incidents
            .filter((incident) => incident.attempt === one.attempt)
            .map((incident) =>
              h("div", { key: incident.id }, h("a", { href: link("incidents", incident.id) }, words(incident.fault)), incident.node ? [" on ", h(NodeLink, { name: incident.node })] : null),
            ),
      },
    ],
  });
}

/** @param {{current: JobTimeline}} latest @param {Inks} inks @param {number} width @returns {import("uplot").Options} */
function options(latest, inks, width) {
  const { rows } = latest.current;
  const narrow = width < 560;
  return {
    width: Math.max(width, 120),
    height: rows.length * ROW_PX + OVER_PX,
    padding: [18, 26, 0, 0], // half of the last moment on the axis
    legend: { show: false },
    scales: {
      x: { time: true, range: () => [seconds(latest.current.start), seconds(latest.current.end)] },
      y: { dir: -1, range: () => [0, rows.length] },
    },
    series: [{}, { show: true, paths: () => null, points: { show: false } }],
    axes: [
      timeAxis(inks),
      {
        stroke: inks["--ink"],
        font: "11.5px system-ui, sans-serif",
        grid: { show: false },
        ticks: { show: false },
        size: narrow ? 92 : LABEL_PX,
        gap: 6,
        splits: () => rows.map((_, at) => at + 0.5),
        values: () => rows.map((row) => short(row, narrow ? 12 : LABEL_CHARS)),
      },
    ],
    cursor: { show: false },
    hooks: { draw: [(plot) => draw(plot, latest.current, inks)] },
  };
}

/** @param {Row} row @param {number} most */
function short(row, most) {
  const label = row.size > 1 ? `${row.label.split(" to ")[0]} +${row.size - 1}` : row.label;
  return label.length > most ? `…${label.slice(1 - most)}` : label;
}

/** @param {import("uplot")} plot @param {JobTimeline} timeline @param {Inks} inks */
function draw(plot, timeline, inks) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  const high = (bbox.height / Math.max(timeline.rows.length, 1)) * 0.66;
  const incidents = new Map(timeline.incidents.map((one) => [one.id, one]));
  const x = (/** @type {string} */ at) => Math.min(Math.max(plot.valToPos(seconds(at), "x", true), bbox.left), bbox.left + bbox.width);
  ctx.save();
  ctx.font = `${10 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  timeline.rows.forEach((row, at) => {
    const middle = plot.valToPos(at + 0.5, "y", true);
    for (const bar of row.bars) {
      const left = x(bar.start);
      const width = Math.max(x(bar.end) - left - ratio, ratio);
      ctx.globalAlpha = 0.18 + (0.22 * bar.nodes) / row.size;
      ctx.fillStyle = inks["--good"];
      ctx.fillRect(left, middle - high / 2, width, high);
      ctx.globalAlpha = 1;
      ctx.fillStyle = inks["--quiet"];
      const label = bar.nodes < row.size ? `attempt ${bar.attempt}, ${bar.nodes} of ${row.size}` : `attempt ${bar.attempt}`;
      if (timeline.attempts.length > 1 && ctx.measureText(label).width + 8 * ratio < width) ctx.fillText(label, left + 4 * ratio, middle);
    }
    for (const id of row.incidents) {
      const incident = incidents.get(id);
      if (!incident || incident.state === "false") continue;
      const accused = incident.node !== null && row.nodes.includes(incident.node);
      const left = x(incident.onset);
      ctx.globalAlpha = accused ? 0.85 : 0.5;
      ctx.fillStyle = inks[accused ? "--bad" : "--warn"];
      ctx.fillRect(left, middle - high / 2, Math.max(x(incident.ended ?? timeline.end) - left, 3 * ratio), high);
      ctx.globalAlpha = 1;
      const label = words(incident.fault);
      const width = x(incident.ended ?? timeline.end) - left;
      if (accused && ctx.measureText(label).width + 8 * ratio < width) {
        ctx.fillStyle = inks["--panel"];
        ctx.fillText(label, left + 4 * ratio, middle);
      }
    }
  });
  ctx.strokeStyle = inks["--accent"];
  ctx.lineWidth = 2 * ratio;
  for (const action of timeline.actions) {
    const left = plot.valToPos(seconds(action.created), "x", true);
    if (left < bbox.left || left > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}
