// Silences: for a time, no news is sent of a fault, a node or a job. What is done about it goes on.

import { h } from "preact";
import { useState } from "preact/hooks";
import { path } from "../app/api.js";
import { count, counted, few, words } from "../app/format.js";
import { link as connection, useLive } from "../app/live.js";
import { Badge, Empty, Reading, Section } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { link } from "../app/router.js";
import { table } from "../app/table.js";
import { Time } from "../app/times.js";
import { Verb } from "../app/verbs.js";

/**
 * @typedef {import("../api").Silence} Silence
 * @typedef {import("../api").Incident} Incident
 * @typedef {{faults?: string[], nodes?: string[], jobs?: string[]}} Scope
 * @typedef {import("../app/resource.js").Resource<{items: Silence[]}>} Silences
 */

const HOUR_S = 3600;
/** @type {[number, string][]} */
const LENGTHS = [[HOUR_S, "1 hour"], [4 * HOUR_S, "4 hours"], [24 * HOUR_S, "1 day"], [7 * 24 * HOUR_S, "7 days"], [30 * 24 * HOUR_S, "30 days"]];
const ENDED_SHOWN = 50;

/** The silences in force; with a filter those that name this node or job. @param {{node?: string, job?: string}} [filter] @returns {Silences} */
export function useSilences(filter = {}) {
  const query = new URLSearchParams({ state: "active", limit: "1000", ...filter });
  return useResource(`api/v1/silences?${query}`, { every_ms: 60_000, settle_ms: 1000, concerns: (kind) => kind === "silence" || kind === "incident" });
}

/** Which silence silences each incident now. @returns {Map<string, Silence>} */
export const useSilenced = () =>
  new Map((useSilences().data?.items ?? []).toReversed().flatMap((one) => one.incidents.map((/** @type {string} */ id) => [id, one])));

/** A mark beside an incident's state. @param {{silence: Silence | undefined}} props */
export const SilencedMark = ({ silence }) =>
  silence ? h("span", { title: `Silenced by ${silence.by}: ${silence.reason}. Actions go on.` }, h(Badge, { state: "silenced" })) : null;

/** Who silenced what, until when and why. @param {{silence: Silence}} props */
export const SilenceSaid = ({ silence }) =>
  h("p", null, `News of ${scopeWords(silence)} is silenced by ${silence.by} until `, h(Time, { at: silence.until }), ": ", silence.reason, ". ", h("strong", null, "Actions go on."));

/** The same with a mark, and what ends it. @param {{silence: Silence}} props */
export const Silenced = ({ silence }) =>
  h("div", { class: "panel silenced" }, h(Badge, { state: "silenced" }), h(SilenceSaid, { silence }), h(EndSilence, { silence }));

/** @param {{silence: Silence, again?: () => void}} props */
export const EndSilence = ({ silence, again }) =>
  h(Verb, {
    label: "End silence",
    target: path`api/v1/silences/${silence.id}/end`,
    done: "The silence is over: what was withheld and still goes on is sent.",
    onDone: () => again?.(),
  });

/** What of an incident may be silenced, the narrowest first. @param {Incident} incident @returns {[string, Scope][]} */
export function scopesOf({ fault, nodes, job }) {
  const said = words(fault);
  /** @type {[string, Scope][]} */
  const found = [];
  if (nodes.length) found.push([`${said} on ${few(nodes)}`, { faults: [fault], nodes }], [`${few(nodes)}, whatever the fault`, { nodes }]);
  if (job) found.push([`${said} in job ${job}`, { faults: [fault], jobs: [job] }], [`job ${job}, whatever the fault`, { jobs: [job] }]);
  return [...found, [`${said}, wherever it is`, { faults: [fault] }]];
}

/** A button that silences one of the scopes. @param {{scopes: [string, Scope][], again?: () => void}} props */
export function SilenceVerb({ scopes, again }) {
  useLive("fleet");
  const [chosen, setChosen] = useState(0);
  const [seconds, setSeconds] = useState(4 * HOUR_S);
  const [said, scope] = scopes[Math.min(chosen, scopes.length - 1)] ?? ["", {}];
  const approving = connection.fleet?.policy_mode === "approve";
  return h(Verb, {
    label: "Silence news",
    target: "api/v1/silences",
    body: (/** @type {string} */ why) => ({ ...scope, seconds, reason: why }),
    reason: "Reason, for those who ask why they were not told",
    question: scopes.length > 1 ? "Send nobody news of it for a time?" : `Send nobody news of ${said} for a time?`,
    details: () => [
      scopes.length > 1 && h(Choice, { label: "News of", value: chosen, choices: scopes.map(([one], at) => /** @type {[number, string]} */ ([at, one])), set: setChosen }),
      h(Choice, { label: "For", value: seconds, choices: LENGTHS, set: setSeconds }),
      h(
        "p",
        { class: "quiet" },
        "Only news to people is withheld: webhooks about incidents, Alertmanager's alerts among them. ",
        h("strong", null, "Actions go on"),
        ", as do this page, metrics and records. To hold actions, set a maintenance window: [[policy.maintenance]] in the server's configuration. " +
          "What still goes on when the silence ends is sent then.",
      ),
      approving && h("p", { class: "warn-ink strong" }, "Policy asks before it acts: that an action awaits approval is news, too. Look here for it."),
    ],
    done: `Silenced: ${said}.`,
    onDone: () => again?.(),
  });
}

/** @param {{label: string, value: number, choices: [number, string][], set: (value: number) => void}} props */
const Choice = ({ label, value, choices, set }) =>
  h(
    "label",
    { class: "field" },
    label,
    h(
      "select",
      { value: String(value), onChange: (/** @type {Event} */ event) => set(Number(/** @type {HTMLSelectElement} */ (event.target).value)) },
      choices.map(([one, said]) => h("option", { key: one, value: String(one) }, said)),
    ),
  );

/** How many are in force, as a link to their list; nothing where none is. */
export function SilencesLink() {
  const many = useSilences().data?.items.length ?? 0;
  return many ? [h("a", { href: link("subscriptions") }, `${counted(many, "silence")} in force`), " · "] : null;
}

/** The silences in force, and the newest of those that have ended. */
export function SilenceList() {
  const active = useSilences();
  /** @type {Silences} */
  const ended = useResource(`api/v1/silences?state=ended&limit=${ENDED_SHOWN}`, { concerns: (kind) => kind === "silence" });
  const past = ended.data?.items ?? [];
  return h(
    Section,
    { title: "Silences", id: "silences" },
    h(Reading, { resource: active, what: "the silences" }),
    active.data && (active.data.items.length ? silences(active.data.items, "Silences in force", active.again) : h(Empty, null, "No silence: all news is sent.")),
    past.length > 0 && h("details", { class: "as-table" }, h("summary", null, `${count(past.length)} ended`), silences(past, "Silences that ended")),
  );
}

/** @param {Silence[]} items @param {string} label @param {() => void} [again] */
function silences(items, label, again) {
  return table({
    label,
    items,
    keyOf: (one) => one.id,
    columns: [
      { title: "News of", cell: (one) => h("span", { class: "strong" }, scopeWords(one)) },
      { title: "Until", cell: (one) => h(Time, { at: one.until }), class: "nowrap", compare: (a, b) => Date.parse(a.until) - Date.parse(b.until) },
      { title: "By", cell: (one) => one.by },
      { title: "Reason", class: "wide", cell: (one) => one.reason },
      {
        title: again ? "Silences now" : "Ended by",
        cell: (one) => (again ? one.incidents.map((/** @type {string} */ id, /** @type {number} */ at) => [at > 0 && ", ", h("a", { key: id, href: link("incidents", id) }, id)]) : one.ended_by || "its time"),
      },
      ...(again ? [{ title: "End", cell: (/** @type {Silence} */ one) => h(EndSilence, { silence: one, again }) }] : []),
    ],
  });
}

/** "hang on n1 in job llm". @param {Silence} one */
function scopeWords({ faults, nodes, jobs }) {
  const fault = faults.map(words).join(", ");
  const on = nodes.length ? `${fault ? "on" : "node"} ${few(nodes)}` : "";
  return [fault, on, jobs.length ? `${fault || on ? "in " : ""}job ${few(jobs)}` : ""].filter(Boolean).join(" ");
}
