// One incident: what suffers, who is to blame, why, what was done, whether it worked, and what to type next.

import { h } from "preact";
import { useRef } from "preact/hooks";
import { path } from "../app/api.js";
import { capital, duration, few, percent, words } from "../app/format.js";
import { link } from "../app/router.js";
import { put } from "../app/live.js";
import { Badge, JobLink, Missing, NodeLink, Owner, Reading, Section, isMissing } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { shownState, wordsOf } from "../app/states.js";
import { Ago, Time } from "../app/times.js";
import { Verb } from "../app/verbs.js";
import { ActionVerbs, asked } from "./approval.js";
import { Evidence } from "./incident_evidence.js";
import { Actions, Bundles, Commands, Deliveries, Rules, Story, Where } from "./incident_parts.js";
import { IncidentList } from "./incident_list.js";
import { EndSilence, SilenceSaid, SilenceVerb, SilencedMark, scopesOf } from "./silences.js";

/**
 * @typedef {import("../api").Dossier} Dossier
 * @typedef {import("../api").Incident} Incident
 * @typedef {import("../api").Action} Action
 */

const OPEN = ["suspected", "confirmed", "acting"];

/** @param {import("../app/views.js").ViewProps} props */
export const IncidentView = ({ name, query }) =>
  name === null ? h(IncidentList, { query }) : h(OneIncident, { id: name, query });

/** @param {{id: string, query: URLSearchParams}} props */
function OneIncident({ id, query }) {
  const places = useRef(/** @type {Set<string>} */ (new Set()));
  const mine = (/** @type {string} */ kind, /** @type {any} */ record) =>
    (kind === "incident" && record.id === id) ||
    (kind === "action" && record.incident_id === id) ||
    (kind === "delivery" && record.group === id) ||
    (kind === "node" && places.current.has(record.node)) ||
    kind === "silence";
  /** @type {import("../app/resource.js").Resource<Dossier>} */
  const resource = useResource(path`api/v1/incidents/${id}/dossier`, { every_ms: 15_000, concerns: mine });
  const dossier = resource.data;
  if (isMissing(resource)) return h(Missing, { view: "incidents", one: "incident", name: id });
  if (!dossier) return [h("h1", null, `Incident ${id}`), h(Reading, { resource, what: "the incident" })];
  const { incident } = dossier;
  places.current = new Set(dossier.where.map((one) => one.node));
  return h(
    "div",
    { class: "view-incident" },
    h(Head, { dossier }),
    h(Reading, { resource, what: "the incident" }),
    h(Outcome, { dossier }),
    h(
      "div",
      { class: "incident-columns" },
      h(
        "div",
        null,
        h(Section, { title: "Evidence", id: "evidence", aside: incident.detectors.length ? `found by ${incident.detectors.join(", ")}` : null },
          h(Evidence, { dossier, query })),
        h(Section, { title: "What happened", id: "story" }, h(Story, { dossier })),
      ),
      h(
        "div",
        null,
        h(Section, { title: "Next", id: "commands" }, h(Commands, { dossier })),
        h(Section, { title: "Where", id: "where" }, h(Where, { dossier })),
        h(Section, { title: "Evidence bundles", id: "bundles" }, h(Bundles, { dossier })),
        h(Section, { title: "Actions and reports", id: "actions" }, h(Actions, { dossier })),
        h(Section, { title: "Deliveries", id: "deliveries" }, h(Deliveries, { dossier })),
        h(Section, { title: "Policy, rule by rule", id: "policy" }, h(Rules, { incident })),
      ),
    ),
  );
}

/** @param {{dossier: Dossier}} props */
function Head({ dossier }) {
  const { incident, meaning } = dossier;
  const seconds = (Date.parse(incident.detected) - Date.parse(incident.onset)) / 1000;
  return [
    h(
      "div",
      { class: "incident-head" },
      h("h1", null, title(incident)),
      h(Badge, { state: shownState(incident, dossier.actions) }),
      incident.escalated && h(Badge, { state: "escalated", tone: "bad", words: "escalated" }),
      incident.flapping && h(Badge, { state: "flapping", tone: "warn", words: "comes and goes" }),
      h(SilencedMark, { silence: dossier.silence ?? undefined }),
      h("span", { class: "quiet" }, `${percent(incident.confidence)} sure`),
    ),
    h(
      "p",
      { class: "incident-line" },
      incident.job
        ? h("span", null, "Job ", h(JobLink, { name: incident.job }), `, attempt ${incident.attempt}`, dossier.owner ? ["; owner ", h(Owner, { name: dossier.owner })] : "; owner unknown")
        : h("span", null, "Its node had no job"),
      incident.node
        ? h("span", null, "Node ", h(NodeLink, { name: incident.node }), incident.device === null ? null : ` device ${incident.device}`)
        : h("span", null, incident.nodes.length ? `Nodes ${few(incident.nodes)}, none accused alone` : "No single node accused"),
      h("span", null, "Began ", h(Time, { at: incident.onset, zoned: true }), " (", h(Ago, { at: incident.onset }), ")"),
      h("span", null, "Found ", h(Time, { at: incident.detected, zoned: true }), `, ${duration(Math.max(0, seconds))} later`),
      incident.ended && h("span", null, "Over ", h(Time, { at: incident.ended, zoned: true })),
    ),
    h("p", { class: "incident-summary" }, incident.summary),
    meaning && h("p", { class: "quiet" }, `${words(incident.fault)}: ${meaning}`, dossier.repair === "none" ? null : ` Usual repair: ${words(dossier.repair)}.`),
  ];
}

/** What was done about it and whether it worked, with what a person may do now. @param {{dossier: Dossier}} props */
function Outcome({ dossier }) {
  const { incident } = dossier;
  const last = dossier.actions.findLast((action) => !action.preliminary);
  const over = ["false", "closed"].includes(incident.state);
  const target = (/** @type {string} */ verb) => path`api/v1/incidents/${incident.id}/${verb}`;
  const withdrawn = last && ["awaiting", "requested"].includes(last.state) ? " What it asked for is withdrawn." : "";
  return h(
    "section",
    { class: `panel outcome ${toneOf(incident, last)}`, "aria-label": "What was done" },
    h(
      "div",
      { class: "outcome-said" },
      h("p", { class: "strong" }, done(dossier, last)),
      dossier.carriers && h("p", { class: dossier.carriers.length ? "" : "bad-ink strong" }, carriedOut(dossier.carriers)),
      dossier.hold_now && h("p", { class: "warn-ink strong" }, `Policy would hold it now: ${dossier.hold_now}.`),
      h("p", null, worked(incident, last)),
      dossier.aftermath.length > 0 && [
        h("p", { class: "quiet strong" }, "Was it right?"),
        h("ul", { class: "aftermath" }, dossier.aftermath.map((/** @type {string} */ said) => h("li", { key: said }, said))),
      ],
      incident.escalation && h("p", { class: "bad-ink strong" }, incident.escalation),
      incident.merged_into && h("p", null, "It is part of ", h("a", { href: link("incidents", incident.merged_into) }, incident.merged_into), "."),
      incident.split_from && h("p", null, "At first it was taken for ", h("a", { href: link("incidents", incident.split_from) }, incident.split_from), "."),
      dossier.silence && h(SilenceSaid, { silence: dossier.silence }),
      incident.acknowledged_by && h("p", { class: "quiet" }, `${incident.acknowledged_by} is looking at it.`),
    ),
    h(
      "div",
      { class: "buttons outcome-verbs" },
      last && h(ActionVerbs, { action: last, mode: dossier.mode, open: OPEN.includes(incident.state), doubt: !dossier.carriers?.length || dossier.hold_now !== "" }),
      !incident.acknowledged_by && !over &&
        h(Verb, { label: "Acknowledge", target: target("acknowledge"), done: "Acknowledged.", onDone: (answer) => put("incident", answer) }),
      dossier.silence ? h(EndSilence, { silence: dossier.silence }) : !over && h(SilenceVerb, { scopes: scopesOf(incident) }),
      !over &&
        h(Verb, {
          label: "Resolve",
          target: target("resolve"),
          done: "Resolved.",
          question: `Close this incident as over?${withdrawn}`,
          onDone: (answer) => put("incident", answer),
        }),
      incident.state !== "false" &&
        h(Verb, {
          label: "False alarm",
          target: target("false"),
          done: "Marked as a false alarm.",
          question: `Mark it as a false alarm? The same claim is not made again in this attempt of the job.${withdrawn}`,
          tone: "danger",
          onDone: (answer) => put("incident", answer),
        }),
    ),
  );
}

/** @param {Incident} incident */
export function title(incident) {
  const fault = words(incident.fault);
  const where = incident.node ?? (incident.nodes.length === 1 ? incident.nodes[0] : incident.nodes.length ? `${incident.nodes.length} nodes` : incident.job);
  return `${capital(fault)} on ${where}`;
}

/** @param {Dossier} dossier @param {Action | undefined} last */
function done({ incident, mode }, last) {
  if (!last) {
    if (incident.hold) return `Nothing was asked for: ${incident.hold}.`;
    return ["notify", "none"].includes(incident.action) ? "No automatic action: notification only." : "No action has been requested yet.";
  }
  const what = asked(last);
  const word = last.reports.at(-1);
  const said = word?.["detail"] ? ` “${word["detail"]}”` : "";
  switch (last.state) {
    case "would_act":
      return `Would have asked to ${what}. Mode ${mode}: nothing was touched.`;
    case "awaiting":
      return `${capital(wordsOf(last.state))}: ${what}.`;
    case "requested":
      return `Requested: ${what}. Nobody has taken it up yet.`;
    case "accepted":
    case "running":
      return `Under way: ${what}.${said}`;
    case "done":
      return `Done: ${what}.${said}`;
    case "failed":
    case "refused":
      return `${last.state === "failed" ? "Failed" : "Refused"}: ${what}.${said}`;
    default:
      return `${capital(wordsOf(last.state))}: ${what}.${last.reason ? ` ${last.reason}.` : ""}`;
  }
}

/** Who carries out what waits to be approved or taken up. @param {import("../api").Carrier[]} carriers */
const carriedOut = (carriers) =>
  carriers.length ? `To be carried out by ${few(carriers.map((one) => one.subscription_id))}.` : "Nobody will carry it out: no subscription takes this action.";

/** @param {Incident} incident @param {Action | undefined} last */
function worked(incident, last) {
  if (incident.state === "false") return "A person called it a false alarm.";
  if (incident.state === "recovered" || incident.state === "closed") {
    return last?.state === "done" ? "It worked: the trouble is gone." : "The trouble is gone.";
  }
  if (last?.state === "done") return "Whether it worked is not known yet: the incident recovers when the new attempt makes steps.";
  return "The trouble goes on.";
}

/** @param {Incident} incident @param {Action | undefined} last */
function toneOf(incident, last) {
  if (incident.state === "recovered") return "good";
  if (["closed", "false"].includes(incident.state)) return "idle";
  if (incident.escalated || last?.state === "failed" || last?.state === "refused") return "bad";
  return last?.state === "awaiting" ? "warn" : incident.state === "suspected" ? "warn" : "bad";
}

