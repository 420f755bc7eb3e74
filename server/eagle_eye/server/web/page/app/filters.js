// The filters above a list: what they say stands in the address, so that a link shows the same to everybody.

import { h } from "preact";
import { filtered } from "./router.js";

/**
 * @typedef {object} Filter
 * @property {string} name of the parameter in the address
 * @property {string} label
 * @property {[value: string, words: string][]} [choices] a list to choose from; without, text is typed
 * @property {string[]} [known] what may be meant by the text
 * @property {boolean} [live] whether each letter counts at once; otherwise Enter, or leaving the field, does
 */

/** Shows the list with these filters, without a step back for each. @param {"jobs" | "incidents" | "nodes" | "ledger"} view @param {Record<string, string>} filters */
export function show(view, filters) {
  history.replaceState(null, "", filtered(view, filters));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** @param {{view: "jobs" | "incidents" | "nodes" | "ledger", filters: Filter[], values: Record<string, string>}} props `values`: those of the address */
export function Filters({ view, filters, values }) {
  const set = (/** @type {string} */ name) => (/** @type {Event} */ event) => {
    const value = /** @type {HTMLInputElement | HTMLSelectElement} */ (event.target).value;
    const { page, cursor, ...kept } = values;
    if (value !== (values[name] ?? "")) show(view, { ...kept, [name]: value });
  };
  const active = filters.some(({ name }) => values[name]);
  return h(
    "form",
    { class: "filters", role: "search", "aria-label": `Filters of the ${view}`, onSubmit: (/** @type {Event} */ event) => event.preventDefault() },
    filters.map((filter) => h("label", { key: filter.name, class: "field" }, filter.label, field(filter, values[filter.name] ?? "", set(filter.name)))),
    active && h("a", { href: filtered(view, {}) }, "Clear"),
  );
}

/** @param {Filter} filter @param {string} value @param {(event: Event) => void} set */
function field({ name, choices, known, live }, value, set) {
  if (choices) {
    const there = choices.some(([one]) => one === value) ? choices : [...choices, /** @type {[string, string]} */ ([value, value])];
    return h("select", { name, value, onChange: set }, there.map(([one, words]) => h("option", { key: one, value: one }, words)));
  }
  const list = known?.length ? `known-${name}` : undefined;
  return [
    h("input", { type: "search", name, value, list, size: 16, autoComplete: "off", spellcheck: false, ...(live ? { onInput: set } : { onChange: set }) }),
    list && h("datalist", { id: list }, known?.map((one) => h("option", { key: one, value: one }))),
  ];
}
