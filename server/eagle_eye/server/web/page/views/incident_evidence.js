// An incident's evidence drawn: the accused against the band of its peers, the threshold, onset and verdict.

import { h } from "preact";
import { useMemo } from "preact/hooks";
import { path } from "../app/api.js";
import { Chart, seconds } from "../app/chart.js";
import { counted, figure, measured, words } from "../app/format.js";
import { Empty, NodeLink, Reading } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { Table } from "../app/table.js";

/**
 * @typedef {import("../api").Dossier} Dossier
 * @typedef {import("../api").Panel} Panel
 * @typedef {import("../api").IncidentChart} IncidentChart
 * @typedef {import("../api").Incident} Incident
 * @typedef {Record<string, any>} Item
 */

const OPEN = ["suspected", "confirmed", "acting"];

/** @param {{dossier: Dossier}} props */
export function Evidence({ dossier }) {
  const { incident, panels } = dossier;
  const items = /** @type {Item[]} */ (incident.evidence);
  return [
    h(Observations, { items }),
    panels.length
      ? h(
          "div",
          { class: "charts evidence-charts" },
          panels.map((panel) => h(PanelChart, { key: `${panel.metric} ${panel.node} ${panel.device}`, incident, panel, marks: dossier.actions })),
        )
      : h(Empty, null, "None of this evidence can be drawn over time."),
  ];
}

/** What the detectors weighed, as they wrote it down. @param {{items: Item[]}} props */
function Observations({ items }) {
  if (!items.length) return h(Empty, null, "The detectors left no observations.");
  return h(Table, {
    label: "Observations",
    items: items.map((item, at) => ({ item, at })),
    keyOf: ({ at }) => String(at),
    columns: [
      { title: "observed", cell: ({ item }) => words(item["metric"]) },
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

/** @param {unknown} what @param {string} unit */
const value = (what, unit) =>
  typeof what === "number" && unit === "bitmask" ? `0x${what.toString(16)}` : (typeof what === "number" ? measured(what, unit) : typeof what === "string" ? what : figure(null));

/** @param {{incident: Incident, panel: Panel, marks: import("../api").Action[]}} props */
function PanelChart({ incident, panel, marks: actions }) {
  const query = new URLSearchParams({ metric: panel.metric });
  if (panel.node !== null) query.set("node", panel.node);
  if (panel.device !== null) query.set("device", String(panel.device));
  /** @type {import("../app/resource.js").Resource<IncidentChart>} */
  const resource = useResource(`${path`api/v1/incidents/${incident.id}/picture`}?${query}`, {
    every_ms: OPEN.includes(incident.state) ? 20_000 : 0,
  });
  const picture = resource.data;
  const drawn = useMemo(() => (picture ? chartOf(picture) : null), [picture]);
  const name = words(panel.metric);
  if (!picture || !drawn) return h("figure", { class: "chart" }, h("figcaption", null, name), h(Reading, { resource, what: name }));
  return h(Chart, {
    ...drawn,
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
    { label: alone ? `median of ${counted(picture.peers.series, "series", "series")}` : "peers' median", values: columns.median, colour: /** @type {import("../app/chart.js").Colour} */ (alone ? "--ink" : "--note"), width: 1.5 },
  ];
  if (!alone) lines.push({ label: picture.name, values: columns.accused, colour: "--bad", width: 2.25 });
  return {
    unit: picture.unit,
    times: columns.time,
    lines,
    ribbon: picture.peers.series >= 3 ? { label: "peers, 5% to 95%", low: columns.low, high: columns.high, colour: /** @type {const} */ ("--note") } : null,
    stretches: picture.silences.map((one) => ({ from: one.start, to: one.end, label: `no data from ${picture.name}`, colour: /** @type {const} */ ("--warn") })),
    threshold: picture.threshold,
    from: seconds(picture.start),
    to: seconds(picture.end),
    ...(picture.form === "bits" ? { low: 0, high: 1 } : {}),
    said: picture.said,
    empty: "No data in the history: it was not observed, or is no longer kept.",
  };
}
