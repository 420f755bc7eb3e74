// An incident's evidence drawn: the accused against the band of its peers, the threshold, onset and verdict.

import { h } from "preact";
import { useCallback, useEffect, useMemo, useState } from "preact/hooks";
import { path } from "../app/api.js";
import { Chart, seconds } from "../app/chart.js";
import { chartLabel, counted, figure, measured, metricLabel, words } from "../app/format.js";
import { Empty, NodeLink, Reading } from "../app/parts.js";
import { RangePicker, rangeOf, useTime, zoomOf } from "../app/range.js";
import { useKept, useResource } from "../app/resource.js";
import { Table } from "../app/table.js";

/**
 * @typedef {import("../api").Dossier} Dossier
 * @typedef {import("../api").Panel} Panel
 * @typedef {import("../api").IncidentChart} IncidentChart
 * @typedef {import("../api").Incident} Incident
 * @typedef {import("../app/range.js").Range} Range
 * @typedef {Record<string, any>} Item
 */

const OPEN = ["suspected", "confirmed", "acting"];

const FOLLOW_S = 15; // how often charts that end now move on

/** @param {{dossier: Dossier, query: URLSearchParams}} props */
export function Evidence({ dossier, query }) {
  const { incident, panels } = dossier;
  const items = /** @type {Item[]} */ (incident.evidence);
  const [drawn, setDrawn] = useState(/** @type {Record<string, Range>} */ ({}));
  const onDrawn = useCallback((/** @type {string} */ key, /** @type {Range} */ range) => {
    setDrawn((old) => (old[key]?.from === range.from && old[key]?.to === range.to ? old : { ...old, [key]: range }));
  }, []);
  const asked = rangeOf(query, useTime(FOLLOW_S));
  const range = asked ?? together(Object.values(drawn));
  return [
    h(Observations, { items }),
    panels.length > 0 && h(RangePicker, { view: "incidents", name: incident.id, query, shown: range, home: "around the incident", subject: { job: incident.job, node: incident.node } }),
    panels.length
      ? h(
          "div",
          { class: "charts evidence-charts" },
          panels.map((panel) => {
            const key = `${panel.metric} ${panel.node} ${panel.device}`;
            return h(PanelChart, { key, id: key, incident, panel, marks: dossier.actions, asked, range, onDrawn });
          }),
        )
      : h(Empty, null, "None of this evidence can be drawn over time."),
  ];
}

/** What shows all of these ranges. @param {Range[]} ranges @returns {Range | null} */
const together = (ranges) => (ranges.length ? { from: Math.min(...ranges.map((one) => one.from)), to: Math.max(...ranges.map((one) => one.to)) } : null);

/** What the detectors weighed, as they wrote it down. @param {{items: Item[]}} props */
function Observations({ items }) {
  if (!items.length) return h(Empty, null, "The detectors left no observations.");
  return h(Table, {
    label: "Observations",
    items: items.map((item, at) => ({ item, at })),
    keyOf: ({ at }) => String(at),
    columns: [
      { title: "observed", cell: ({ item }) => metricLabel(item["metric"]) },
      {
        title: "on",
        cell: ({ item }) =>
          item["node"] ? [h(NodeLink, { name: item["node"] }), item["device"] === null ? null : ` device ${item["device"]}`] : "the job",
      },
      { title: "value", right: true, class: "strong", cell: ({ item }) => value(item["value"], item["unit"]) },
      { title: "peers' median", right: true, cell: ({ item }) => value(item["peers_median"], item["unit"]) },
      { title: "threshold", right: true, cell: ({ item }) => value(item["threshold"], item["unit"]) },
    ],
  });
}

/** A mask may come as text, "0x20". @param {unknown} what @param {string} unit */
function value(what, unit) {
  if (unit === "bitmask" && Number.isInteger(Number(what ?? Number.NaN))) return h("span", { class: "wrapped" }, measured(Number(what), unit));
  return typeof what === "number" ? measured(what, unit) : typeof what === "string" ? what : figure(null);
}

/** @param {{id: string, incident: Incident, panel: Panel, marks: import("../api").Action[], asked: Range | null, range: Range | null,
 *   onDrawn: (id: string, range: Range) => void}} props `asked`: the range to read, null: the server's; `range`: the one that all charts show */
function PanelChart({ id, incident, panel, marks: actions, asked, range, onDrawn }) {
  const query = new URLSearchParams({ metric: panel.metric });
  if (panel.node !== null) query.set("node", panel.node);
  if (panel.device !== null) query.set("device", String(panel.device));
  if (asked) {
    query.set("start", String(asked.from));
    query.set("end", String(asked.to));
  }
  /** @type {import("../app/resource.js").Resource<IncidentChart>} */
  const resource = useResource(`${path`api/v1/incidents/${incident.id}/picture`}?${query}`, {
    every_ms: OPEN.includes(incident.state) ? 20_000 : 0,
  });
  const picture = useKept(resource.data);
  const drawn = useMemo(() => (picture ? chartOf(picture) : null), [picture]);
  const zoom = useMemo(() => zoomOf("incidents", incident.id), [incident.id]);
  useEffect(() => {
    // One without data would only stretch the others.
    if (picture && picture.accused_series + picture.peers.series > 0) onDrawn(id, { from: seconds(picture.start), to: seconds(picture.end) });
  }, [picture]);
  const name = chartLabel(panel.metric, panel.form);
  if (!picture || !drawn) return h("figure", { class: "chart" }, h("figcaption", null, name), h(Reading, { resource, what: name }));
  return h(Chart, {
    ...drawn,
    ...range,
    zoom,
    title: `${panel.evidence ? "" : "Beside it: "}${name}`,
    hint: picture.shows,
    marks: [
      { at: picture.onset, label: "onset", colour: "--bad" },
      { at: picture.detected, label: "verdict", colour: "--ink" },
      ...actions.map((action) => ({ at: action.created, label: words(action.kind), colour: /** @type {const} */ ("--accent"), dash: [4, 3] })),
    ],
    sync: incident.id,
    height: panel.evidence ? 210 : 170,
  });
}

/** @param {IncidentChart} picture */
function chartOf(picture) {
  const { columns } = picture;
  const alone = picture.accused_series === 0;
  const lines = [
    { label: alone ? `median of ${counted(picture.peers.series, "series", "series")}` : "peers' median", values: columns.median, colour: /** @type {import("../app/chart.js").Colour} */ (alone ? "--ink" : "--quiet"), width: 1.5 },
  ];
  if (!alone) lines.push({ label: picture.name, values: columns.accused, colour: "--bad", width: 3 });
  return {
    unit: picture.unit,
    times: columns.time,
    lines,
    ribbon: picture.peers.series >= 3 ? { label: "peers, 5% to 95%", low: columns.low, high: columns.high, colour: /** @type {const} */ ("--idle") } : null,
    stretches: picture.silences.map((one) => ({ from: one.start, to: one.end, label: `no data from ${picture.name}`, colour: /** @type {const} */ ("--warn") })),
    threshold: picture.threshold,
    ...(picture.form === "bits" ? { low: 0, high: 1 } : {}),
    said: picture.said,
    empty: "No data in the history: it was not observed, or is no longer kept.",
  };
}
