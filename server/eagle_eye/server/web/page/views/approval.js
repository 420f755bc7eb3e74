// What a person may say to an action, and what approving it would do and cost.

import { h } from "preact";
import { path } from "../app/api.js";
import { capital, count, counted, duration, few, percent, words } from "../app/format.js";
import { put } from "../app/live.js";
import { Facts, Reading } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { Ago, Time } from "../app/times.js";
import { Verb } from "../app/verbs.js";

/**
 * @typedef {import("../api").Action} Action
 * @typedef {import("../api").ActionPreview} Preview
 */

/** What an action asks for, in words. @param {Action} action */
export function asked(action) {
  const nodes = action.exclude.length ? ` ${few(action.exclude)}` : "";
  const what = words(action.kind) + (action.kind === "restart_job" ? ` ${action.job}` : nodes);
  const without = action.exclude.length > 1 ? "them" : "it";
  return action.restart && action.kind !== "restart_job" ? `${what} and restart the job without ${without}` : what;
}

/**
 * What a person may say to an action now.
 * @param {{action: Action, mode: string, open: boolean, doubt: boolean}} props `mode` is policy's; `open`: the trouble
 *   goes on; `doubt`: policy may not ask for it now, or nobody may carry it out, so that no button is recommended
 */
export function ActionVerbs({ action, mode, open, doubt }) {
  const target = (/** @type {string} */ verb) => path`api/v1/actions/${action.id}/${verb}`;
  const onDone = (/** @type {Action} */ answer) => put("action", answer);
  const nobody = action.exclude.length ? few(action.exclude) : `job ${action.job}`;
  if (action.state === "awaiting") {
    return [
      h(Verb, {
        key: "approve",
        label: "Approve",
        target: target("approve"),
        tone: doubt ? "" : "primary",
        question: `${capital(asked(action))}?`,
        details: () => h(Consequences, { action }),
        done: "Approved: subscribers are asked now.",
        onDone,
      }),
      h(Verb, {
        key: "reject",
        label: "Reject",
        target: target("reject"),
        question: `Reject it? Nothing is done to ${nobody}, and it is not asked for again because of this incident.`,
        done: "Rejected.",
        onDone,
      }),
    ];
  }
  if (action.state === "requested" && mode !== "act") {
    return h(Verb, {
      key: "withdraw",
      label: "Withdraw",
      target: target("withdraw"),
      question: `Withdraw the approval? Nobody has taken it up yet; subscribers are told. ${open ? "While the trouble goes on, approval is asked for anew: reject that to have nothing done." : ""}`,
      done: "Withdrawn: subscribers are told.",
      onDone,
    });
  }
  if (action.state === "expired" && open && mode !== "observe") {
    return h(Verb, { key: "renew", label: "Ask again", target: target("renew"), done: "It awaits approval again.", onDone });
  }
  return null;
}

/** Whom it affects, what it costs, how fresh the data is, who carries it out. @param {{action: Action}} props */
function Consequences({ action }) {
  /** @type {import("../app/resource.js").Resource<Preview>} */
  const resource = useResource(path`api/v1/actions/${action.id}/preview`, { every_ms: 5000 });
  const it = resource.data;
  if (!it) return h(Reading, { resource, what: "what it would do" });
  return [
    h(Reading, { resource, what: "what it would do" }),
    h(Facts, {
      class: "one consequences",
      facts: [
        ["Confidence", percent(it.confidence)],
        ["Takes out", it.nodes.length ? `${few(it.nodes)}${it.gpus === null ? ", how many GPUs is not known" : `, ${counted(it.gpus, "GPU")}`}` : "no node"],
        ["Job", restarts(it)],
        ["Left afterwards", it.budgets.length ? it.budgets.map((one) => h("div", { key: one.what + one.of, class: one.left ? "" : "warn-ink strong" }, left(one))) : null],
        ["Data", h(Freshness, { it })],
        ["Carried out by", h(Carriers, { it })],
        ["Policy", it.hold_now && h("span", { class: "warn-ink strong" }, `would hold it now: ${it.hold_now}`)],
        ["Expires", h(Time, { at: action.expires })],
      ],
    }),
  ];
}

/** @param {Preview} it */
function restarts(it) {
  if (!it.job) return "none";
  const size = it.job_gpus === null ? "" : ` with ${counted(it.job_gpus, "GPU")}${it.job_nodes === null ? "" : ` on ${counted(it.job_nodes, "node")}`}`;
  return it.restart ? `${it.job}${size} is restarted` : `${it.job}${size}; no restart is asked for`;
}

/** @param {Preview["budgets"][number]} one */
const left = ({ what, of, left: rest, limit, window_seconds: window }) =>
  `${count(rest)} of ${count(limit)} ${what} of the ${of}${window === null ? "" : ` within ${duration(window)}`}`;

/** @param {{it: Preview}} props */
function Freshness({ it }) {
  const { job_nodes_heard: heard, job_nodes_known: known } = it;
  return [
    it.heard.slice(0, 4).map(({ node, heard: at }) => h("div", { key: node }, `${node} last reported `, at ? h(Ago, { at }) : h("span", { class: "warn-ink strong" }, "before the server started, or never"))),
    heard === null || known === null ? h("div", null, "no agent reports the job") : h("div", { class: heard < known ? "warn-ink strong" : "" }, `${count(heard)} of ${counted(known, "node")} of the job report`),
    it.progressed && h("div", null, "last step seen ", h(Ago, { at: it.progressed })),
  ];
}

/** @param {{it: Preview}} props */
function Carriers({ it }) {
  if (!it.carriers.length) return h("span", { class: "bad-ink strong" }, "no subscriber: nobody will");
  return it.carriers.map((one) =>
    h(
      "div",
      { key: one.subscription_id },
      `${one.subscription_id} (${one.url})`,
      one.failing_since && h("span", { class: "bad-ink strong" }, ", failing since ", h(Time, { at: one.failing_since }), one.last_error && `: ${one.last_error}`),
    ),
  );
}
