// The small pieces that every view is made of. Text is always a text node: nothing here or elsewhere makes markup of it.

import { h } from "preact";
import { Problem } from "./api.js";
import { byName } from "./format.js";
import { link } from "./router.js";
import { SIGNS, toneOf, wordsOf } from "./states.js";
import { Ago } from "./times.js";

/**
 * @typedef {import("preact").ComponentChildren} Children
 * @typedef {import("./states.js").Tone} Tone
 */

/** A record's state. @param {{state: string, tone?: Tone, words?: string}} props */
export function Badge({ state, tone = toneOf(state), words = wordsOf(state) }) {
  return h("span", { class: `badge ${tone}` }, h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[tone]), h("span", null, words));
}

/** @param {{name: string}} props */
export const NodeLink = ({ name }) => h("a", { href: link("nodes", name), class: "name", title: name }, name);

/** @param {{name: string}} props */
export const JobLink = ({ name }) => (name ? h("a", { href: link("jobs", name), class: "name", title: name }, name) : h("span", { class: "quiet" }, "none"));

/**
 * The column of whose each item is; none where the site has one cell.
 * @template {{cell?: string | null}} T
 * @param {T[]} items
 * @returns {import("./table.js").Column<T>[]}
 */
export const cellColumn = (items) =>
  items.some((item) => item.cell)
    ? [{ title: "Cell", hint: "Which of the site's leaders judges it", compare: (a, b) => byName(a.cell ?? "", b.cell ?? ""), cell: (item) => item.cell ?? "–" }]
    : [];

/**
 * The filter of it; none where the site has one cell.
 * @param {{cell?: string | null}[]} items
 * @param {Record<string, string>} values
 */
export const cellFilter = (items, values) => (values["cell"] || items.some((item) => item.cell) ? [{ name: "cell", label: "Cell" }] : []);

/** A reason that may name an incident, which is then a link: "hang: inc_1". @param {{text: string}} props */
export const Reason = ({ text }) => text.split(/\b(inc_\w+)/).map((part, at) => (at % 2 ? h("a", { key: at, href: link("incidents", part) }, part) : part));

/** Whose job it is; "" where nobody said. @param {{name: string}} props */
export const Owner = ({ name }) => (name ? h("span", { class: "owner", title: name }, name) : h("span", { class: "quiet" }, "unknown"));

/** A part of a view under a heading, with what may stand at the heading's right.
 * @param {{title: string, id: string, aside?: Children, children?: Children, class?: string}} props */
export function Section({ title, id, aside, children, class: more = "" }) {
  return h(
    "section",
    { class: `section ${more}`, "aria-labelledby": `h-${id}`, id },
    h("div", { class: "section-head" }, h("h2", { id: `h-${id}` }, title), aside && h("div", { class: "aside" }, aside)),
    children,
  );
}

/** Nothing to show, and what that means. @param {{children: Children}} props */
export const Empty = ({ children }) => h("p", { class: "empty" }, children);

/** Whether the server answered that there is no such thing. @param {import("./resource.js").Resource<unknown>} resource */
export const isMissing = ({ data, error }) => data === null && error instanceof Problem && error.status === 404;

/** What there is instead of a record that is not there. @param {{view: "incidents" | "jobs" | "nodes", one: string, name: string}} props */
export const Missing = ({ view, one, name }) => [
  h("h1", null, `No ${one} ${name}`),
  h("p", { class: "missing", role: "alert" }, `There is no ${one} called ${name} here. The address may be mistyped, or what it led to is no longer kept.`),
  h("p", null, h("a", { href: link(view) }, `All ${view}`), " · ", h("a", { href: link("fleet") }, "The fleet")),
];

/**
 * How a view's own reading fares: nothing while all is well; what went wrong, and since when what is shown is old.
 * @param {{resource: import("./resource.js").Resource<unknown>, what: string}} props
 */
export function Reading({ resource, what }) {
  const { data, error, read, again } = resource;
  if (error) {
    return h(
      "p",
      { class: "trouble", role: "alert" },
      `${what} cannot be read: ${error.message}.`,
      data && read ? [" This is what was known ", h(Ago, { at: new Date(read).toISOString() }), "."] : null,
      " ",
      h("button", { type: "button", class: "small", onClick: again }, "Try again"),
    );
  }
  return data === null ? h("p", { class: "empty", "aria-busy": "true" }, `Reading ${what}…`) : null;
}

/** A name beside a value, in a list of facts. @param {{facts: [string, Children][], class?: string}} props */
export function Facts({ facts, class: more = "" }) {
  return h(
    "dl",
    { class: `facts ${more}` },
    facts
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => h("div", { key: name }, h("dt", null, name), h("dd", null, value))),
  );
}

/** Text to be copied, such as a command. @param {{text: string, label: string}} props */
export function Copyable({ text, label }) {
  const copy = (/** @type {Event} */ event) => {
    const button = /** @type {HTMLElement} */ (event.currentTarget);
    void navigator.clipboard.writeText(text).then(
      () => {
        button.textContent = "Copied";
        setTimeout(() => (button.textContent = "Copy"), 1500);
      },
      () => (button.textContent = "Select it"),
    );
  };
  return h(
    "div",
    { class: "copyable" },
    h("code", { tabIndex: 0, "aria-label": label }, text),
    h("button", { type: "button", class: "small", onClick: copy, "aria-label": `Copy: ${label}` }, "Copy"),
  );
}
