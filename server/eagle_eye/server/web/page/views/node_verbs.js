// What a person may do with a node.

import { h } from "preact";
import { path } from "../app/api.js";
import { capital } from "../app/format.js";
import { Verb } from "../app/verbs.js";

/** @param {{node: string, state: string | null, again?: () => void, all?: boolean}} props `all`: those, too, that are seldom wanted */
export function NodeVerbs({ node, state, again, all = false }) {
  const target = (/** @type {string} */ verb) => path`api/v1/nodes/${node}/${verb}`;
  if (state === null) return null;
  const out = state !== "in_service";
  const readmitted = (/** @type {import("../api").Node} */ answer) =>
    answer.state === "in_service" ? `${node} is in service. ${capital(answer.reason)}.` : `${node} returns once its check has passed.`;
  const returned = (/** @type {any} */ answer) => {
    void answer;
    again?.();
  };
  return [
    out &&
      h(Verb, {
        key: "readmit",
        label: "Readmit",
        target: target("readmit"),
        tone: "primary",
        reason: "Reason, kept with the node",
        question: `Return ${node} to service? Where a fault took it out and its agent makes checks, it is checked first.`,
        done: readmitted,
        onDone: returned,
      }),
    out && all &&
      h(Verb, {
        key: "force",
        label: "Readmit by force",
        target: `${target("readmit")}?force=true`,
        tone: "danger",
        reason: "Reason, kept with the node",
        question: `Return ${node} to service at once, whatever stands against it: an administrator's drain, its probation, a failed check?`,
        done: readmitted,
        onDone: returned,
      }),
    !out &&
      h(Verb, {
        key: "exclude",
        label: "Exclude",
        target: target("exclude"),
        tone: "danger",
        reason: "Reason, kept with the node",
        question: `Count ${node} as out of service? Nobody is asked to stop its job.`,
        done: `${node} is excluded.`,
        onDone: returned,
      }),
    state === "in_service" && all &&
      h(Verb, {
        key: "drain",
        label: "Drain",
        target: target("drain"),
        reason: "Reason, kept with the node",
        question: `Count ${node} as leaving when its job ends?`,
        done: `${node} is draining.`,
        onDone: returned,
      }),
    all &&
      h(Verb, {
        key: "check",
        label: "Check",
        target: target("check"),
        question: `Have the agent of ${node} check whether it is sick? It waits while somebody trains there.`,
        done: `${node}: a check is asked for.`,
        onDone: returned,
      }),
  ];
}
