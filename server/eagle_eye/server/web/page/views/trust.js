// From observe to act, fault by fault: what is on record, whether it is enough for the next mode, and the lines that set it.

import { h } from "preact";
import { byName, counted, duration, gpuHours, percent, words } from "../app/format.js";
import { Badge, Copyable, Empty, Reading, Section } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { link } from "../app/router.js";
import { wordsOf } from "../app/states.js";
import { table } from "../app/table.js";
import { Time } from "../app/times.js";

/**
 * @typedef {import("../api").FaultStep} FaultStep
 * @typedef {import("../api").FaultSteps} FaultSteps
 */

const HOUR_S = 3600;
/** @type {FaultStep["verdict"][]} */
const ORDER = ["suffices", "falls_short", "cannot_tell", "acts"];

export function TrustView() {
  /** @type {import("../app/resource.js").Resource<FaultSteps>} */
  const steps = useResource("api/v1/ledger/steps", { every_ms: 60_000, settle_ms: 2000, concerns: (kind) => kind === "action" || kind === "incident" });
  const { data } = steps;
  const items = (data?.items ?? []).toSorted((a, b) => ORDER.indexOf(a.verdict) - ORDER.indexOf(b.verdict) || known(b) - known(a) || byName(a.fault, b.fault));
  const recorded = items.filter((item) => decisions(item) > 0);
  const others = items.filter((item) => decisions(item) === 0);
  return [
    h("h1", null, "Trust in steps"),
    h(
      "p",
      { class: "prose quiet" },
      "From observe to approve to act, one fault at a time: how often policy would have been right, by the ",
      h("a", { href: link("ledger") }, "the ledger"),
      " and by what people said, and the lines for the server's configuration that take the next step. No record is no reason to trust.",
    ),
    h(Reading, { resource: steps, what: "the ledger" }),
    data && [
      h("p", { class: "verdict" }, summary(items)),
      h(
        "p",
        { class: "quiet" },
        `approve needs ${data.decisions_min} decisions with a known outcome and a precision of at least ${data.approve_precision_min.toFixed(2)} with 95% confidence, act ${data.act_precision_min.toFixed(2)}. Each incident counts once, since `,
        h(Time, { at: data.since }),
        `; its outcome is looked for in the ${duration(data.window_seconds)} after it.`,
      ),
      h(
        Section,
        { title: "With decisions on record", id: "recorded" },
        recorded.length === 0
          ? h(Empty, null, "None yet. In mode observe each action that policy would have asked for is kept, and compared with what happened later.")
          : h(Steps, { items: recorded, label: "Faults with decisions" }),
        data.cut && h("p", { class: "quiet" }, "There is more on record than is read; the oldest is left out."),
      ),
      others.length > 0 &&
        h(
          "details",
          { class: "as-table" },
          h("summary", null, `${counted(others.length, "fault")} without a decision on record: unknown`),
          h(Steps, { items: others, label: "Faults without decisions" }),
        ),
    ],
  ];
}

/** @param {{items: FaultStep[], label: string}} props */
const Steps = ({ items, label }) => table({ columns: COLUMNS, items, keyOf: (item) => item.fault, label });

/** @param {FaultStep} item */
const known = (item) => item.right + item.wrong;

/** @param {FaultStep} item */
const decisions = (item) => known(item) + item.pending + item.cannot_tell;

/** @param {FaultStep[]} items */
function summary(items) {
  const ready = items.filter((item) => item.verdict === "suffices");
  if (ready.length === 0) return "No fault has enough on record for its next step yet.";
  return `Enough for the next step: ${ready.map((item) => `${words(item.fault)} (${item.next})`).join(", ")}.`;
}

/** @type {import("../app/table.js").Column<FaultStep>[]} */
const COLUMNS = [
  { title: "Fault", compare: (a, b) => byName(a.fault, b.fault), cell: (item) => words(item.fault), class: "nowrap" },
  { title: "Now", hint: "its mode, and the key that sets it", compare: (a, b) => byName(a.mode, b.mode), cell: (item) => h(Now, { item }) },
  {
    title: "Right",
    right: true,
    compare: (a, b) => a.right - b.right,
    cell: (item) => (item.approved ? `${item.right} (${item.approved} by approval)` : item.right),
  },
  { title: "Wrong", right: true, compare: (a, b) => a.wrong - b.wrong, cell: (item) => item.wrong },
  {
    title: "Unknown",
    hint: "pending, or unknown for good",
    right: true,
    compare: (a, b) => a.pending + a.cannot_tell - b.pending - b.cannot_tell,
    cell: (item) => item.pending + item.cannot_tell,
  },
  {
    title: "Precision",
    hint: "right / (right + wrong), with Wilson's 95% interval; its lower end counts",
    right: true,
    cell: (item) => (item.interval_95 ? `${percent(item.precision)} (${percent(item.interval_95[0])}–${percent(item.interval_95[1])})` : "cannot tell"),
  },
  { title: "Saved GPU-hours", hint: "what the right ones would have saved that were not carried out", right: true, cell: (item) => atStake(item.saved) },
  { title: "Cost GPU-hours", hint: "what the wrong ones would have cost that were not carried out", right: true, cell: (item) => atStake(item.cost) },
  { title: "Next step", compare: (a, b) => ORDER.indexOf(a.verdict) - ORDER.indexOf(b.verdict), cell: (item) => h(Next, { item }), class: "next-step" },
];

/** @param {import("../api").GpuHours} amount */
function atStake(amount) {
  if (amount.gpu_seconds === null) return amount.cannot_tell > 0 ? "cannot tell" : "–";
  return `${gpuHours(amount.gpu_seconds / HOUR_S)}${amount.cannot_tell > 0 ? " or more" : ""}`;
}

/** @param {{item: FaultStep}} props */
const Now = ({ item }) => [
  h("span", { title: item.where }, item.mode),
  item.elsewhere.map((rule) => h("span", { key: rule.where, class: "quiet elsewhere nowrap", title: rule.where }, `${rule.mode}: ${rule.jobs.join(", ")}`)),
];

/** @param {{item: FaultStep}} props */
function Next({ item }) {
  const said = item.verdict === "suffices" ? `enough for ${item.next}` : wordsOf(item.verdict);
  return [
    h("p", null, h(Badge, { state: item.verdict, words: said })),
    h("p", { class: "quiet" }, item.detail),
    item.next &&
      (item.toml
        ? h(
            "details",
            { open: item.verdict === "suffices" },
            h("summary", null, `Set ${item.next}${item.in_place_of ? `, in place of ${item.in_place_of}` : ""}`),
            h(Copyable, { text: item.toml, label: `lines that set ${item.next} for ${words(item.fault)}` }),
          )
        : h("p", null, `No line alone sets ${item.next}: change ${item.where}.`)),
  ];
}
