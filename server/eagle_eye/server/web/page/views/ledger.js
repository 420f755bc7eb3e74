// The ledger: what would have been done, against what happened afterwards. It is how an operator comes to trust it.

import { h } from "preact";
import { useState } from "preact/hooks";
import { Filters } from "../app/filters.js";
import { byName, duration, few, percent, words } from "../app/format.js";
import { Badge, cellColumn, cellFilter, Empty, JobLink, NodeLink, Reading, Section } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { link } from "../app/router.js";
import { table } from "../app/table.js";
import { Time } from "../app/times.js";

/**
 * @typedef {import("../api").Claim} Claim
 * @typedef {import("../api").Precision} Precision
 * @typedef {import("../api").Ledger} Ledger
 */

const SHOWN = 500;
const STANDINGS = /** @type {const} */ ([
  ["", "all"],
  ["right", "right"],
  ["wrong", "wrong"],
  ["pending", "pending"],
  ["cannot_tell", "cannot tell"],
]);

/** What became of it, in words; the names are the API's. @type {Record<string, string>} */
const WHY = {
  marked_false: "a person called it a false alarm",
  node_failed: "a fact accused the same node later",
  checked_sick: "a check found the node sick",
  ticket: "a repair ticket was opened on it",
  job_stopped: "the job made no further step",
  went_on: "the job made steps, in the same attempt",
  ran_on: "the job ran on with it, and nothing happened",
  waiting: "its time is not up yet",
  taken_out: "somebody took the node out, which proves nothing",
  left_out: "the job went on without it, which proves nothing",
  job_ended: "the job ended first",
  persisted: "it lasted and no action was taken",
  out_of_sight: "not observed",
};

/** @param {{query: URLSearchParams}} props */
export function LedgerView({ query }) {
  const [standing, setStanding] = useState("");
  const values = Object.fromEntries(query);
  const asked = new URLSearchParams({ limit: String(SHOWN) });
  if (standing) asked.set("standing", standing);
  if (values["cell"]) asked.set("cell", values["cell"]);
  /** @type {import("../app/resource.js").Resource<Ledger>} */
  const ledger = useResource(`api/v1/ledger?${asked}`, {
    every_ms: 60_000,
    settle_ms: 2000,
    concerns: (kind) => kind === "action",
  });
  const { data } = ledger;
  const filters = cellFilter(data?.items ?? [], values);
  return [
    h("h1", null, "Ledger"),
    h(
      "p",
      { class: "prose quiet" },
      "What policy would have done in mode observe, or was not allowed to do, compared with what happened afterwards",
      data ? ` (${duration(data.window_seconds)})` : "",
      ". Where it has been right often enough, let it act: ",
      h("a", { href: link("trust") }, "trust in steps"),
      ".",
    ),
    filters.length > 0 && h(Filters, { view: "ledger", values, filters }),
    h(Reading, { resource: ledger, what: "the ledger" }),
    data && [
      h("p", { class: "verdict" }, precisionWords(data.total)),
      h(
        "div",
        { class: "pair" },
        h(Section, { title: "By fault", id: "by-fault" }, h(Totals, { totals: data.by_fault, label: "Precision by fault" })),
        h(Section, { title: "By detector", id: "by-detector" }, h(Totals, { totals: data.by_detector, label: "Precision by detector" })),
      ),
      h(
        Section,
        { title: "Claims", id: "claims", aside: h(Filter, { standing, setStanding }) },
        data.items.length === 0
          ? h(Empty, null, standing ? "None with that standing." : "Nothing yet.")
          : h(ClaimTable, { claims: data.items, label: "Claims" }),
        (data.next !== null || data.cut) && h("p", { class: "quiet" }, `The newest ${SHOWN} are shown; eagle-eye ledger lists all.`),
      ),
    ],
  ];
}

/** "9 of 10 right: 90% (60% to 98%); 3 pending, 1 cannot tell." @param {Precision} total */
export function precisionWords(total) {
  const judged = total.right + total.wrong;
  const rest = [
    total.pending > 0 && `${total.pending} pending`,
    total.cannot_tell > 0 && `${total.cannot_tell} cannot tell`,
  ].filter(Boolean);
  if (judged === 0) return rest.length ? `Nothing can be judged yet: ${rest.join(", ")}.` : "Nothing to judge yet.";
  const range = total.interval_95
    ? ` (95% interval ${percent(total.interval_95[0])} to ${percent(total.interval_95[1])})`
    : "";
  return `${total.right} of ${judged} right in hindsight: ${percent(total.precision)}${range}${rest.length ? `; ${rest.join(", ")}` : ""}.`;
}

/** @param {{standing: string, setStanding: (standing: string) => void}} props */
function Filter({ standing, setStanding }) {
  return h(
    "label",
    { class: "inline" },
    "Show ",
    h(
      "select",
      { value: standing, onChange: (/** @type {Event} */ event) => setStanding(/** @type {HTMLSelectElement} */ (event.target).value) },
      STANDINGS.map(([value, name]) => h("option", { value }, name)),
    ),
  );
}

/** @param {{totals: Record<string, Precision>, label: string}} props */
function Totals({ totals, label }) {
  const items = Object.entries(totals).map(([name, total]) => ({ name, total }));
  if (items.length === 0) return h(Empty, null, "None yet.");
  return table({ columns: TOTAL_COLUMNS, items, keyOf: (item) => item.name, label });
}

/** @type {import("../app/table.js").Column<{name: string, total: Precision}>[]} */
const TOTAL_COLUMNS = [
  { title: "Name", compare: (a, b) => byName(a.name, b.name), cell: (item) => words(item.name) },
  { title: "Right", right: true, compare: (a, b) => a.total.right - b.total.right, cell: (item) => item.total.right },
  { title: "Wrong", right: true, compare: (a, b) => a.total.wrong - b.total.wrong, cell: (item) => item.total.wrong },
  { title: "Pending", right: true, compare: (a, b) => a.total.pending - b.total.pending, cell: (item) => item.total.pending },
  { title: "Cannot tell", right: true, compare: (a, b) => a.total.cannot_tell - b.total.cannot_tell, cell: (item) => item.total.cannot_tell },
  {
    title: "Precision",
    hint: "right / (right + wrong), with Wilson's 95% interval",
    right: true,
    cell: ({ total }) =>
      total.interval_95
        ? `${percent(total.precision)} (${percent(total.interval_95[0])}–${percent(total.interval_95[1])})`
        : "–",
  },
];

/** @param {{claims: Claim[], label: string}} props */
export function ClaimTable({ claims, label }) {
  return table({ columns: [...CLAIM_COLUMNS, ...cellColumn(claims)], items: claims, keyOf: (claim) => claim.action_id, label });
}

/** @type {import("../app/table.js").Column<Claim>[]} */
const CLAIM_COLUMNS = [
  { title: "When", compare: (a, b) => (a.created < b.created ? -1 : 1), cell: (claim) => h(Time, { at: claim.created }), class: "nowrap" },
  {
    title: "Would have",
    cell: (claim) => [
      `${words(claim.kind)} `,
      claim.exclude.length === 1 ? h(NodeLink, { name: claim.exclude[0] ?? "" }) : few(claim.exclude),
    ],
  },
  { title: "Because of", compare: (a, b) => byName(a.fault, b.fault), cell: (claim) => h("a", { href: link("incidents", claim.incident_id) }, words(claim.fault)) },
  { title: "Sure", right: true, compare: (a, b) => a.confidence - b.confidence, cell: (claim) => percent(claim.confidence) },
  { title: "Job", compare: (a, b) => byName(a.job, b.job), cell: (claim) => h(JobLink, { name: claim.job }) },
  {
    title: "In hindsight",
    compare: (a, b) => (a.standing < b.standing ? -1 : 1),
    cell: (claim) => h(Badge, { state: claim.standing }),
  },
  { title: "Because", cell: (claim) => claim.detail || (WHY[claim.why] ?? words(claim.why)) },
];

