// The map's signs: each standing has a colour and a shape of its own, so that neither is needed to tell them apart.

import { LABEL } from "./map_layout.js";
import { colours } from "./theme_button.js";

/** @typedef {import("../api").NodeMap["standings"][number]} Standing */

/** The standings in words, as one says them of a node. @type {Record<Standing, string>} */
export const STANDING_WORDS = {
  accused: "accused",
  suspected: "suspected",
  excluded: "excluded",
  draining: "draining",
  checking: "being checked",
  silent: "silent",
  unheard: "no report since the server started",
  watched: "back, and watched",
  in_service: "in service",
};

const NAMES = /** @type {const} */ ([
  "--bad", "--warn", "--note", "--edge", "--quiet", "--panel", "--ink", "--accent", "--map-well", "--map-well-edge",
]);

/** @typedef {Record<typeof NAMES[number], string>} Palette */

export const palette = () => colours(NAMES);

/**
 * Draws one node's sign, `size` pixels wide, with its upper left corner at (0, 0).
 * @param {CanvasRenderingContext2D} to @param {Standing} standing @param {number} size @param {Palette} ink
 */
export function drawSign(to, standing, size, ink) {
  const line = Math.max(size / 7, 1.2);
  to.lineWidth = line;
  const frame = (/** @type {string} */ colour) => {
    to.strokeStyle = colour;
    to.strokeRect(line / 2, line / 2, size - line, size - line);
  };
  const stroke = (/** @type {string} */ colour, /** @type {[number, number][]} */ ...points) => {
    to.strokeStyle = colour;
    to.beginPath();
    points.forEach(([x, y], at) => (at % 2 === 0 ? to.moveTo(x * size, y * size) : to.lineTo(x * size, y * size)));
    to.stroke();
  };
  const fill = (/** @type {string} */ colour, /** @type {[number, number][]} */ ...points) => {
    to.fillStyle = colour;
    to.beginPath();
    points.forEach(([x, y], at) => (at === 0 ? to.moveTo(x * size, y * size) : to.lineTo(x * size, y * size)));
    to.fill();
  };
  const dot = (/** @type {string} */ colour, /** @type {number} */ radius) => {
    to.fillStyle = colour;
    to.beginPath();
    to.arc(size / 2, size / 2, radius * size, 0, 2 * Math.PI);
    to.fill();
  };
  switch (standing) {
    case "accused": // a full square with a cross
      fill(ink["--bad"], [0, 0], [1, 0], [1, 1], [0, 1]);
      stroke(ink["--panel"], [0.25, 0.25], [0.75, 0.75], [0.75, 0.25], [0.25, 0.75]);
      break;
    case "suspected": // a full triangle
      fill(ink["--warn"], [0.5, 0], [1, 1], [0, 1]);
      break;
    case "excluded": // an empty square, struck out
      frame(ink["--bad"]);
      stroke(ink["--bad"], [0.08, 0.92], [0.92, 0.08]);
      break;
    case "draining": // a square, half full
      fill(ink["--warn"], [0, 0.5], [1, 0.5], [1, 1], [0, 1]);
      frame(ink["--warn"]);
      break;
    case "checking": // an empty square with a dot
      frame(ink["--note"]);
      dot(ink["--note"], 0.2);
      break;
    case "silent": // an empty square
      frame(ink["--edge"]);
      break;
    case "unheard": // a small dot
      dot(ink["--edge"], 0.17);
      break;
    case "watched": // a full square with a hole
      fill(ink["--note"], [0, 0], [1, 0], [1, 1], [0, 1]);
      dot(ink["--panel"], 0.2);
      break;
    default: // in service: a quiet full square
      fill(ink["--map-well"], [0, 0], [1, 0], [1, 1], [0, 1]);
      to.lineWidth = 1;
      to.strokeStyle = ink["--map-well-edge"];
      to.strokeRect(0.5, 0.5, size - 1, size - 1);
  }
}

/**
 * Draws the whole map. Thousands of nodes are copies of a few signs.
 * @param {HTMLCanvasElement} canvas
 * @param {import("./map_layout.js").Layout} layout
 * @param {import("./map_layout.js").NodeMap} map
 * @param {{shown: (node: number) => boolean, chosen: number | null, width: number}} how `shown`: the others are dimmed;
 *   `chosen`: the node that the keyboard or the mouse is on
 */
export function drawMap(canvas, layout, map, how) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(how.width * scale);
  canvas.height = Math.round(layout.height * scale);
  canvas.style.height = `${layout.height}px`;
  const to = canvas.getContext("2d");
  if (!to) return;
  const ink = palette();
  const { pitch, size } = layout;
  const signs = map.standings.map((standing) => {
    const sign = document.createElement("canvas");
    sign.width = sign.height = Math.ceil(size * scale);
    const on = sign.getContext("2d");
    if (on) {
      on.scale(scale, scale);
      drawSign(on, standing, size, ink);
    }
    return sign;
  });
  to.scale(scale, scale);
  to.textBaseline = "alphabetic";
  for (const block of layout.blocks) {
    const { troubled } = block.group;
    to.globalAlpha = 1;
    to.font = `${troubled ? 650 : 400} 12px system-ui, sans-serif`;
    to.fillStyle = troubled ? ink["--bad"] : ink["--quiet"];
    to.fillText(fitted(to, block.group, block.columns * pitch), block.x, block.y - LABEL + 12);
    block.group.nodes.forEach((node, at) => {
      const sign = signs[map.standing[node] ?? -1];
      if (!sign) return;
      to.globalAlpha = how.shown(node) ? 1 : 0.15;
      const x = block.x + (at % block.columns) * pitch;
      const y = block.y + Math.floor(at / block.columns) * pitch;
      to.drawImage(sign, Math.round(x * scale) / scale, Math.round(y * scale) / scale, size, size);
      if (node === how.chosen) {
        to.globalAlpha = 1;
        to.strokeStyle = ink["--accent"];
        to.lineWidth = 2;
        to.strokeRect(x - 1.5, y - 1.5, size + 3, size + 3);
      }
    });
  }
}

/** A block's name and size, shortened to its width. @param {CanvasRenderingContext2D} to @param {{name: string, nodes: number[]}} group @param {number} width */
function fitted(to, group, width) {
  const full = `${group.name} · ${group.nodes.length}`;
  if (to.measureText(full).width <= width) return full;
  let text = group.name;
  while (text.length > 3 && to.measureText(`${text}…`).width > width) text = text.slice(0, -1);
  return text === group.name ? text : `${text}…`;
}
