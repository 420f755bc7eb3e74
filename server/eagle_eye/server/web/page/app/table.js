// A table whose columns sort by click or key; on a narrow screen each row is a card, with a list to sort by.

import { h } from "preact";
import { useState } from "preact/hooks";
import { count } from "./format.js";

/**
 * @template T
 * @typedef {object} Column
 * @property {string} title
 * @property {(item: T) => import("preact").ComponentChildren} cell
 * @property {(a: T, b: T) => number} [compare] ascending; without it the column does not sort
 * @property {boolean} [right] for figures
 * @property {string} [hint] what the title means, on hover
 * @property {string} [class] of its cells
 */

/**
 * @template T
 * @typedef {{columns: Column<T>[], items: T[], keyOf: (item: T) => string, label: string, rowClass?: (item: T) => string,
 *   most?: number, order?: string, onOrder?: (order: string) => void, pages?: {at: number, to: (at: number) => string}}} TableProps
 *   `label` says what it lists, to screen readers; `most`: how many rows are drawn before "show all", or on each of the
 *   `pages`, of which `at` is shown; `order` by which column, "-Node" for descending, is kept outside where `onOrder` is
 */

/**
 * A table of these items; the types agree, which h(Table, …) could not see to.
 * @template T
 * @param {TableProps<T>} props
 */
export const table = (props) => h(Table, props);

/** @param {TableProps<any>} props */
export function Table({ columns, items, keyOf, label, rowClass, most = 100, order: given, onOrder, pages }) {
  const [mine, setMine] = useState("");
  const [all, setAll] = useState(false);
  const order = orderOf(columns, given ?? mine);
  const setOrder = (/** @type {{at: number, down: boolean}} */ { at, down }) => (onOrder ?? setMine)(`${down ? "-" : ""}${columns[at]?.title}`);
  const compare = order === null ? undefined : columns[order.at]?.compare;
  let rows = items;
  if (order && compare) rows = items.toSorted((a, b) => (order.down ? compare(b, a) : compare(a, b)));
  const last = Math.max(0, Math.ceil(rows.length / most) - 1);
  const page = pages ? Math.min(pages.at, last) : 0;
  const shown = all ? rows : rows.slice(page * most, (page + 1) * most);
  return h(
    "div",
    { class: "table-box" },
    columns.some((column) => column.compare) && h(SortBy, { columns, order, setOrder, label }),
    h(
      "div",
      { class: "scroll", tabIndex: 0, role: "region", "aria-label": `${label} (table)` },
      h(
        // The roles are those that a table has by itself, and loses in some browsers where its rows are shown as cards.
        "table",
        { class: "stacks", role: "table" },
        h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, columns.map((column, at) => head(column, at, order, setOrder)))),
        h(
          "tbody",
          { role: "rowgroup" },
          shown.map((item) =>
            h(
              "tr",
              { key: keyOf(item), class: rowClass?.(item) ?? "", role: "row" },
              columns.map((column) =>
                h("td", { class: `${column.right ? "right" : ""} ${column.class ?? ""}`.trim(), role: "cell", "data-title": column.title }, column.cell(item)),
              ),
            ),
          ),
        ),
      ),
    ),
    pages && last > 0 && h(Pager, { at: page, last, to: pages.to, words: `${count(page * most + 1)} to ${count(page * most + shown.length)} of ${count(rows.length)}` }),
    !pages && shown.length < rows.length &&
      h("button", { type: "button", class: "small more", onClick: () => setAll(true) }, `Show all ${rows.length}`),
  );
}

/** @param {Column<any>[]} columns @param {string} text as TableProps has it @returns {{at: number, down: boolean} | null} */
function orderOf(columns, text) {
  const down = text.startsWith("-");
  const at = columns.findIndex((column) => column.compare && column.title === text.slice(down ? 1 : 0));
  return at < 0 ? null : { at, down };
}

/** What sorts where there are no headings to click. @param {{columns: Column<any>[], order: {at: number, down: boolean} | null,
 *   setOrder: (order: {at: number, down: boolean}) => void, label: string}} props */
function SortBy({ columns, order, setOrder, label }) {
  return h(
    "label",
    { class: "inline sort-by" },
    "Sort by ",
    h(
      "select",
      {
        "aria-label": `Sort ${label} by`,
        value: order ? String(order.at) : "",
        onChange: (/** @type {Event} */ event) => {
          const { value } = /** @type {HTMLSelectElement} */ (event.target);
          if (value !== "") setOrder({ at: Number(value), down: false });
        },
      },
      !order && h("option", { value: "" }, "–"),
      columns.map((column, at) => column.compare && h("option", { key: column.title, value: String(at) }, column.title)),
    ),
    order && h("button", { type: "button", class: "small", "aria-label": order.down ? "Descending" : "Ascending", onClick: () => setOrder({ ...order, down: !order.down }) }, order.down ? "▾" : "▴"),
  );
}

/** @param {{at: number, last: number, to: (at: number) => string, words: string}} props */
function Pager({ at, last, to, words }) {
  return h(
    "nav",
    { class: "pager", "aria-label": "Pages" },
    at > 0 && h("a", { href: to(0) }, "First"),
    at > 0 && h("a", { href: to(at - 1), rel: "prev" }, "Previous"),
    h("span", { class: "quiet" }, words),
    at < last && h("a", { href: to(at + 1), rel: "next" }, "Next"),
    at < last && h("a", { href: to(last) }, "Last"),
  );
}

/**
 * @param {Column<any>} column @param {number} at @param {{at: number, down: boolean} | null} order
 * @param {(order: {at: number, down: boolean}) => void} setOrder
 */
function head(column, at, order, setOrder) {
  const mine = order?.at === at ? order : null;
  const sort = mine ? (mine.down ? "descending" : "ascending") : undefined;
  return h(
    "th",
    { scope: "col", role: "columnheader", class: column.right ? "right" : "", title: column.hint, "aria-sort": sort },
    column.compare
      ? h(
          "button",
          { type: "button", class: "sort", onClick: () => setOrder({ at, down: mine ? !mine.down : false }) },
          column.title,
          h("span", { "aria-hidden": "true", class: "arrow" }, mine ? (mine.down ? "▾" : "▴") : ""),
        )
      : column.title,
  );
}
