// Where each node stands on the map: blocks of cells, one block a job, rack or switch. Pure: no element, no canvas.

import { byName } from "./format.js";

/**
 * @typedef {import("../api").NodeMap} NodeMap
 * @typedef {"job" | "rack" | "switch"} Grouping
 * @typedef {{name: string, nodes: number[], troubled: boolean}} Group `nodes` are places in the map's columns, by name
 * @typedef {{group: Group, first: number, x: number, y: number, columns: number}} Block
 *   `first`: how many cells stand before it; x and y are its first cell's, in pixels
 * @typedef {{blocks: Block[], pitch: number, size: number, height: number, sequence: Int32Array, cells: Int32Array}} Layout
 *   `size` of a cell within its `pitch`; `sequence` are the nodes in reading order, `cells` where in it each node is
 */

export const LABEL = 17; // pixels above a block for its name
const TROUBLE = new Set(["accused", "suspected"]);
const GAP = 14; // between blocks
const NARROWEST = 92; // a block's width, so that its name has room

/** How large a cell may be, by how many there are: a few dozen are to be seen, thousands to be overseen. @param {number} nodes */
export function pitchFor(nodes) {
  if (nodes <= 200) return 18;
  if (nodes <= 1000) return 14;
  if (nodes <= 4000) return 11;
  return 9;
}

/** The nodes by name, "n2" before "n10". For thousands of names a collator is too slow. @param {string[]} names */
export function sorted(names) {
  const keys = names.map((name) => name.replace(/\d+/g, (digits) => digits.padStart(10, "0")));
  return names.map((_, at) => at).sort((a, b) => ((keys[a] ?? "") < (keys[b] ?? "") ? -1 : 1));
}

/**
 * The groups by name, those with an accused or suspected node first; nodes that are in none come last.
 * @param {NodeMap} map @param {Grouping} by @param {number[]} order as `sorted` gave it
 * @returns {Group[]}
 */
export function groupsOf(map, by, order) {
  const names = by === "job" ? map.jobs : by === "rack" ? map.racks : map.switches;
  /** @type {number[][]} */
  const members = names.map(() => []);
  /** @type {number[]} */
  const others = [];
  for (const node of order) (members[map[by][node] ?? -1] ?? others).push(node);
  const group = (/** @type {string} */ name, /** @type {number[]} */ nodes) => ({
    name,
    nodes,
    troubled: nodes.some((node) => TROUBLE.has(map.standings[map.standing[node] ?? -1] ?? "")),
  });
  const groups = names.map((name, at) => group(name, members[at] ?? []));
  groups.sort((a, b) => Number(b.troubled) - Number(a.troubled) || byName(a.name, b.name));
  const none = by === "job" ? "in no job" : `${by} not known`;
  return others.length > 0 ? [...groups, group(none, others)] : groups;
}

/**
 * Blocks from left to right, row below row, in `width` pixels.
 * @param {Group[]} groups @param {number} width @param {number} pitch
 * @returns {Layout}
 */
export function layOut(groups, width, pitch) {
  const total = groups.reduce((sum, group) => sum + group.nodes.length, 0);
  const sequence = new Int32Array(total);
  const cells = new Int32Array(total);
  /** @type {Block[]} */
  const blocks = [];
  const most = Math.max(Math.floor(width / pitch), 1);
  let [x, y, rowHeight, first] = [0, 0, 0, 0];
  for (const group of groups) {
    const count = group.nodes.length;
    const square = Math.ceil(Math.sqrt(count * 2.2));
    const columns = Math.min(Math.max(square, Math.ceil(NARROWEST / pitch)), most);
    const blockWidth = columns * pitch;
    const blockHeight = Math.ceil(count / columns) * pitch + LABEL;
    if (x > 0 && x + blockWidth > width) {
      [x, y, rowHeight] = [0, y + rowHeight + GAP, 0];
    }
    blocks.push({ group, first, x, y: y + LABEL, columns });
    for (const node of group.nodes) {
      cells[node] = first;
      sequence[first++] = node;
    }
    x += blockWidth + GAP;
    rowHeight = Math.max(rowHeight, blockHeight);
  }
  return { blocks, pitch, size: pitch > 12 ? pitch - 3 : pitch - 2, height: y + rowHeight + 2, sequence, cells };
}

/** The block of the cell. @param {Layout} layout @param {number} cell @returns {Block | undefined} */
function blockOf({ blocks }, cell) {
  let [low, high] = [0, blocks.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((blocks[middle]?.first ?? 0) <= cell) low = middle;
    else high = middle - 1;
  }
  return blocks[low];
}

/** Where the cell's upper left corner is. @param {Layout} layout @param {number} cell */
export function corner(layout, cell) {
  const block = blockOf(layout, cell);
  if (!block) return { x: 0, y: 0 };
  const at = cell - block.first;
  return { x: block.x + (at % block.columns) * layout.pitch, y: block.y + Math.floor(at / block.columns) * layout.pitch };
}

/** The cell at a point, -1: none. @param {Layout} layout @param {number} x @param {number} y */
export function cellAt(layout, x, y) {
  for (const block of layout.blocks) {
    const column = Math.floor((x - block.x) / layout.pitch);
    const row = Math.floor((y - block.y) / layout.pitch);
    if (column < 0 || column >= block.columns || row < 0) continue;
    const at = row * block.columns + column;
    if (at < block.group.nodes.length) return block.first + at;
  }
  return -1;
}

/**
 * The cell to which a key leads, for the arrow keys, Home and End; null for other keys.
 * @param {Layout} layout @param {number} cell @param {string} key
 */
export function neighbour(layout, cell, key) {
  const last = layout.sequence.length - 1;
  const columns = blockOf(layout, cell)?.columns ?? 1;
  const steps = /** @type {Record<string, number>} */ ({
    ArrowRight: 1,
    ArrowLeft: -1,
    ArrowDown: columns,
    ArrowUp: -columns,
    Home: -last,
    End: last,
  });
  const step = steps[key];
  return step === undefined ? null : Math.min(Math.max(cell + step, 0), last);
}
