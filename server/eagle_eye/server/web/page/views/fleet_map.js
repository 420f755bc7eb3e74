// The node map: one sign a node, grouped by job, rack or switch; by mouse, by keyboard, and as a table.

import { h } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { count } from "../app/format.js";
import { link as live } from "../app/live.js";
import { STANDING_WORDS, drawMap, drawSign, palette } from "../app/map_drawing.js";
import { cellAt, corner, groupsOf, layOut, neighbour, pitchFor, sorted } from "../app/map_layout.js";
import { Empty, Reading, Section } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { link } from "../app/router.js";
import { onTheme } from "../app/theme_button.js";
import { NodeTable } from "./fleet_map_table.js";

/**
 * @typedef {import("../app/map_layout.js").NodeMap} NodeMap
 * @typedef {import("../app/map_layout.js").Layout} Layout
 * @typedef {import("../app/map_layout.js").Grouping} Grouping
 */

const EVERY_MS = 10_000; // silence is no event
const [EDGE_X, EDGE_Y] = [12, 10]; // the panel's padding, as its style has it
const GROUPINGS = /** @type {const} */ (["job", "rack", "switch"]);

export function NodeMapSection() {
  /** @type {import("../app/resource.js").Resource<NodeMap>} */
  const resource = useResource("api/v1/fleet/nodes", {
    every_ms: EVERY_MS,
    settle_ms: 1000,
    concerns: (kind) => kind === "node" || kind === "incident",
  });
  const map = resource.data;
  const [by, setBy] = useState(/** @type {Grouping} */ ("job"));
  const [only, setOnly] = useState(-1);
  const [wanted, setWanted] = useState("");
  const aside = map && h(Controls, { map, by, setBy, wanted, setWanted });
  return h(
    Section,
    { title: "Nodes", id: "nodes", aside },
    h(Reading, { resource, what: "the nodes" }),
    map && map.nodes.length === 0 && h(Empty, null, noNodes()),
    map && map.nodes.length > 0 && [
      h(Legend, { map, only, setOnly }),
      h(Canvas, { map, by, only, wanted }),
      h(NodeTable, { map, only, wanted }),
    ],
  );
}

/** Why there is no node to show. */
export function noNodes() {
  if (live.state !== "live") return "Not known: the server does not answer.";
  return live.fleetSeen ? "No agent has sent anything yet." : "The records name no node.";
}

/** @param {{map: NodeMap, by: Grouping, setBy: (by: Grouping) => void, wanted: string, setWanted: (name: string) => void}} props */
function Controls({ map, by, setBy, wanted, setWanted }) {
  const usable = GROUPINGS.filter((one) => one === "job" || (one === "rack" ? map.racks : map.switches).length > 0);
  return h(
    "div",
    { class: "controls" },
    usable.length > 1 &&
      h(
        "label",
        { class: "inline" },
        "Grouped by ",
        h(
          "select",
          { value: by, onChange: (/** @type {Event} */ event) => setBy(/** @type {Grouping} */ (/** @type {HTMLSelectElement} */ (event.target).value)) },
          usable.map((one) => h("option", { value: one }, one)),
        ),
      ),
    h(
      "label",
      { class: "inline" },
      "Find ",
      h("input", {
        type: "search",
        size: 14,
        value: wanted,
        placeholder: "part of a name",
        onInput: (/** @type {Event} */ event) => setWanted(/** @type {HTMLInputElement} */ (event.target).value),
        onKeyDown: (/** @type {KeyboardEvent} */ event) => {
          const found = map.nodes.find((name) => name.includes(wanted));
          if (event.key === "Enter" && wanted && found !== undefined) location.hash = link("nodes", found);
        },
      }),
    ),
  );
}

/** What the signs mean, how many there are of each, and a button that shows one alone.
 * @param {{map: NodeMap, only: number, setOnly: (standing: number) => void}} props */
function Legend({ map, only, setOnly }) {
  const counts = new Int32Array(map.standings.length);
  for (const standing of map.standing) counts[standing] = (counts[standing] ?? 0) + 1;
  return h(
    "ul",
    { class: "legend", "aria-label": "How many nodes stand how" },
    map.standings.map((standing, at) =>
      (counts[at] ?? 0) > 0 || only === at
        ? h(
            "li",
            { key: standing },
            h(
              "button",
              { type: "button", class: "small", "aria-pressed": only === at ? "true" : "false", onClick: () => setOnly(only === at ? -1 : at) },
              h(Sign, { standing }),
              ` ${count(counts[at] ?? 0)} ${STANDING_WORDS[standing]}`,
            ),
          )
        : null,
    ),
  );
}

/** @param {{standing: import("../app/map_drawing.js").Standing}} props */
function Sign({ standing }) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  useEffect(() => {
    const draw = () => {
      const to = canvas.current?.getContext("2d");
      if (!canvas.current || !to) return;
      const scale = devicePixelRatio || 1;
      canvas.current.width = canvas.current.height = 11 * scale;
      to.scale(scale, scale);
      drawSign(to, standing, 11, palette());
    };
    draw();
    return onTheme(draw);
  }, [standing]);
  return h("canvas", { ref: canvas, class: "sign-canvas", "aria-hidden": "true" });
}

/** @param {{map: NodeMap, by: Grouping, only: number, wanted: string}} props */
function Canvas({ map, by, only, wanted }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const [width, setWidth] = useState(0);
  const [cell, setCell] = useState(/** @type {{cell: number, byKey: boolean} | null} */ (null));
  const [theme, setTheme] = useState(0);
  const order = useOrder(map.nodes);
  const groups = useMemo(() => groupsOf(map, by, order), [map, by, order]);
  const layout = useMemo(() => (width > 0 ? layOut(groups, width, pitchFor(map.nodes.length)) : null), [groups, width]);
  const chosen = layout && cell ? (layout.sequence[cell.cell] ?? null) : null;

  useLayoutEffect(() => {
    if (!box.current) return undefined;
    setWidth(box.current.clientWidth);
    const watch = new ResizeObserver(([entry]) => {
      if (entry) setWidth(Math.floor(entry.contentRect.width));
    });
    watch.observe(box.current);
    const end = onTheme(() => setTheme((turn) => turn + 1));
    return () => {
      watch.disconnect();
      end();
    };
  }, []);

  useLayoutEffect(() => {
    if (!layout || !canvas.current) return;
    const shown = (/** @type {number} */ node) =>
      (only < 0 || map.standing[node] === only) && (wanted === "" || (map.nodes[node] ?? "").includes(wanted));
    drawMap(canvas.current, layout, map, { shown, chosen, width });
    performance.mark("eagle-eye-map-drawn");
  }, [layout, map, only, wanted, chosen, theme, width]);

  useEffect(() => {
    if (cell?.byKey && layout && box.current) {
      const { y } = corner(layout, cell.cell);
      const { scrollTop, clientHeight } = box.current;
      if (y < scrollTop || y + layout.pitch > scrollTop + clientHeight) box.current.scrollTop = y - clientHeight / 2;
    }
  }, [cell, layout]);

  const open = () => {
    const name = chosen === null ? undefined : map.nodes[chosen];
    if (name !== undefined) location.hash = link("nodes", name);
  };
  return h(
    "div",
    { class: "map panel" },
    h(
      "div",
      { class: "map-box", ref: box },
      h("canvas", {
        ref: canvas,
        tabIndex: 0,
        role: "application",
        "aria-label": `Map of ${count(map.nodes.length)} nodes: arrow keys go from node to node, Enter opens one. The same is in the table below.`,
        "aria-describedby": "map-said",
        onMouseMove: (/** @type {MouseEvent} */ event) => {
          if (!layout) return;
          const found = cellAt(layout, event.offsetX, event.offsetY);
          if (found !== cell?.cell) setCell(found < 0 ? null : { cell: found, byKey: false });
        },
        onMouseLeave: () => setCell(null),
        onBlur: () => setCell(null),
        onFocus: () => {
          if (!cell && canvas.current?.matches(":focus-visible")) setCell({ cell: 0, byKey: true });
        },
        onClick: open,
        onKeyDown: (/** @type {KeyboardEvent} */ event) => {
          if (!layout) return;
          if (event.key === "Enter") open();
          const next = neighbour(layout, cell?.cell ?? 0, event.key);
          if (next === null) return;
          event.preventDefault();
          setCell({ cell: next, byKey: true });
        },
      }),
    ),
    layout && chosen !== null && cell && h(Tip, { map, node: chosen, at: corner(layout, cell.cell), width, pitch: layout.pitch, scrolled: box.current?.scrollTop ?? 0 }),
    h("p", { id: "map-said", class: "visually-hidden", "aria-live": "polite" }, cell?.byKey && chosen !== null ? said(map, chosen).join(", ") : ""),
  );
}

/** The nodes' order, worked out anew only when their names changed. @param {string[]} names */
function useOrder(names) {
  const kept = useRef(/** @type {{names: string[], order: number[]} | null} */ (null));
  const same = kept.current?.names.length === names.length && kept.current.names.every((name, at) => name === names[at]);
  if (!kept.current || !same) kept.current = { names, order: sorted(names) };
  return kept.current.order;
}

/** What is known of a node, in words. @param {NodeMap} map @param {number} node */
function said(map, node) {
  const standing = map.standings[map.standing[node] ?? -1];
  const job = map.jobs[map.job[node] ?? -1];
  const rack = map.racks[map.rack[node] ?? -1];
  const leaf = map.switches[map.switch[node] ?? -1];
  return [
    map.nodes[node] ?? "",
    standing ? STANDING_WORDS[standing] : "",
    job ? `job ${job}` : "in no job",
    rack ? `rack ${rack}` : "",
    leaf ? `switch ${leaf}` : "",
  ].filter(Boolean);
}

/** @param {{map: NodeMap, node: number, at: {x: number, y: number}, width: number, pitch: number, scrolled: number}} props */
function Tip({ map, node, at, width, pitch, scrolled }) {
  const [name, ...rest] = said(map, node);
  const right = at.x > width / 2;
  /** @type {Record<string, string>} */
  const style = { top: `${EDGE_Y + at.y - scrolled + pitch + 4}px` };
  style[right ? "right" : "left"] = `${EDGE_X + (right ? width - at.x - pitch : at.x)}px`;
  return h("div", { class: "tip", style, "aria-hidden": "true" }, h("div", { class: "name" }, name), rest.map((text) => h("div", { key: text }, text)));
}
