// The parts of an incident's page beside its evidence: where, what next, what happened, actions, deliveries, bundles.

import { h } from "preact";
import { ask, path } from "../app/api.js";
import { count, measured, words } from "../app/format.js";
import { put } from "../app/live.js";
import { Badge, Copyable, Empty, Facts, JobLink, NodeLink, Reading, Reason } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { Ago, Time } from "../app/times.js";
import { Verb, notify } from "../app/verbs.js";
import { NodeVerbs } from "./node_verbs.js";

/**
 * @typedef {import("../api").Dossier} Dossier
 * @typedef {import("../api").Action} Action
 * @typedef {import("../api").Whereabouts} Whereabouts
 * @typedef {import("../api").Evidence} Bundle
 * @typedef {import("../api").Explanation} Explanation
 */

/** @param {{dossier: Dossier}} props */
export function Where({ dossier }) {
  if (!dossier.where.length) return h(Empty, null, "No node is concerned.");
  return [
    dossier.where.map((one) => h(Place, { key: one.node, place: one })),
    dossier.where_left_out > 0 && h("p", { class: "quiet" }, `and ${count(dossier.where_left_out)} more nodes`),
  ];
}

const UNKNOWN = h("span", { class: "quiet" }, "not known");

/** @param {{place: Whereabouts}} props */
function Place({ place }) {
  const cards = place.gpus.map((gpu) =>
    h(
      "li",
      { key: gpu.uuid },
      h("span", { class: "strong" }, `device ${gpu.device} `),
      h("code", null, gpu.uuid),
      gpu.node !== place.node && [" (now in ", h(NodeLink, { name: gpu.node }), ")"],
      h("br", null),
      [gpu.model, gpu.pci_address && `PCI ${gpu.pci_address}`, gpu.serial && `serial ${gpu.serial}`].filter(Boolean).join(" · "),
    ),
  );
  return h(
    "div",
    { class: "panel place" },
    h("div", { class: "place-head" }, h(NodeLink, { name: place.node }), place.state && h(Badge, { state: place.state }), place.accused && h("span", { class: "quiet" }, "accused")),
    place.reason && h("p", { class: "quiet" }, h(Reason, { text: place.reason })),
    h(Facts, {
      class: "one",
      facts: [
        ["Rack", place.rack ?? UNKNOWN],
        ["Switch", place.switch ?? UNKNOWN],
        [place.device === null ? "GPUs" : "GPU", cards.length ? h("ul", { class: "cards" }, cards) : [place.device === null ? "" : `device ${place.device}, `, h("span", { class: "quiet" }, "UUID not known")]],
        ["Other jobs", place.other_jobs.length ? place.other_jobs.map((job) => h("div", { key: job }, h(JobLink, { name: job }))) : "none known"],
        ["Last report", h(Ago, { at: place.heard, none: "not since the server started" })],
      ],
    }),
    h("div", { class: "buttons" }, h(NodeVerbs, { node: place.node, state: place.state })),
  );
}

/** @param {{dossier: Dossier}} props */
export function Commands({ dossier }) {
  if (!dossier.commands.length) return h(Empty, null, "Nothing is left to do.");
  return h(
    "ol",
    { class: "panel commands" },
    dossier.commands.map((one) =>
      h(
        "li",
        { key: one.command },
        h("p", null, one.why.charAt(0).toUpperCase() + one.why.slice(1)),
        h(Copyable, { text: one.command, label: one.why }),
        one.undo && [h("p", { class: "quiet" }, "Undo"), h(Copyable, { text: one.undo, label: `undo: ${one.why}` })],
      ),
    ),
  );
}

/** @param {{dossier: Dossier}} props */
export function Story({ dossier }) {
  return [
    dossier.story_left_out > 0 && h("p", { class: "quiet" }, `${count(dossier.story_left_out)} older entries are left out.`),
    dossier.cut && h("p", { class: "quiet" }, "More is on record than is shown: see the audit trail."),
    h(
      "ol",
      { class: "panel story" },
      dossier.story.map((entry, at) =>
        h(
          "li",
          { key: at, class: `story-${entry.kind}` },
          h(Time, { at: entry.time }),
          h("span", { class: "story-kind" }, entry.kind),
          h("span", { class: "story-text" }, entry.text, entry.who && !["server", ""].includes(entry.who) && entry.kind !== "delivery" ? h("span", { class: "quiet" }, ` by ${entry.who}`) : null),
        ),
      ),
    ),
  ];
}

/** @param {{dossier: Dossier}} props */
export function Actions({ dossier }) {
  if (!dossier.actions.length) return h(Empty, null, "Nothing was asked of anyone.");
  return dossier.actions.toReversed().map((action) =>
    h(
      "div",
      { class: "panel place", key: action.id },
      h("div", { class: "place-head" }, h("span", { class: "strong" }, words(action.kind)), h(Badge, { state: action.state }), h("span", { class: "quiet" }, h(Time, { at: action.created }))),
      h(Facts, {
        class: "one",
        facts: [
          ["Takes out", action.exclude.length ? action.exclude.map((name) => h("div", { key: name }, h(NodeLink, { name }))) : null],
          ["Restarts", action.restart ? action.job : null],
          ["Expires", ["awaiting", "requested"].includes(action.state) ? h(Time, { at: action.expires }) : null],
          ["Why ended", action.reason],
          ["Repair", action.repair === "none" ? null : words(action.repair)],
          ["Id", h("code", null, action.id)],
        ],
      }),
      action.reports.length
        ? h(
            "ol",
            { class: "reports" },
            action.reports.map((report, at) =>
              h("li", { key: at }, h(Time, { at: report.time }), " ", h(Badge, { state: report.state }), ` ${report.detail}`, h("span", { class: "quiet" }, ` by ${report.who}`)),
            ),
          )
        : h("p", { class: "quiet" }, "No reports."),
    ),
  );
}

/** @param {{dossier: Dossier}} props */
export function Deliveries({ dossier }) {
  if (!dossier.deliveries.length) return h(Empty, null, "Nothing was sent about it: no subscription wants such events.");
  return h(
    "ul",
    { class: "panel lines" },
    dossier.deliveries.map((one) =>
      h(
        "li",
        { key: one.id },
        h(Time, { at: one.created }),
        " ",
        h(Badge, { state: one.state }),
        ` ${one.type.replace("eagle_eye.", "")} to ${one.subscription_id}`,
        one.state !== "delivered" && one.last_error
          ? h("p", { class: one.state === "silenced" ? "quiet" : "bad-ink" }, one.attempts ? `${one.attempts} tries: ${one.last_error}` : one.last_error)
          : null,
        one.state === "failed" &&
          h(Verb, { label: "Deliver again", target: path`api/v1/deliveries/${one.id}/redeliver`, done: "It is delivered again.", onDone: (answer) => put("delivery", answer) }),
      ),
    ),
  );
}

/** @param {{dossier: Dossier}} props */
export function Bundles({ dossier }) {
  const { incident, gathered } = dossier;
  const over = ["closed", "false"].includes(incident.state);
  return [
    gathered.length
      ? h(
          "ul",
          { class: "panel lines" },
          gathered.map((one) =>
            h(
              "li",
              { key: one.id },
              h(NodeLink, { name: one.node }),
              " ",
              h(Badge, { state: one.state }),
              ` ${words(one.kind)}`,
              one.bytes > 0 && `, ${measured(one.bytes, "bytes")}`,
              " ",
              h("span", { class: "quiet" }, h(Time, { at: one.created })),
              one.detail && h("p", { class: "quiet" }, one.detail),
              one.bundle && h("div", null, h("button", { type: "button", class: "small", onClick: () => void download(one) }, `Download${one.node ? ` ${one.node}` : ""}`)),
            ),
          ),
        )
      : h(Empty, null, "No evidence was collected: it was not requested, or no agent could."),
    !over &&
      h(
        "div",
        { class: "buttons" },
        h(Verb, { label: "Gather now", target: path`api/v1/incidents/${incident.id}/evidence`, body: {}, done: "The agents are asked.", question: "Have agents gather stacks, kernel logs and flight recorders from the suspects now? Training goes on." }),
      ),
  ];
}

/** The bundle as a file; a link could not send the token. @param {Bundle} bundle */
async function download(bundle) {
  try {
    const answer = await ask(path`api/v1/evidence/${bundle.id}/bundle`);
    const url = URL.createObjectURL(await answer.blob());
    const anchor = document.createElement("a");
    anchor.href = url;
    anchor.download = `evidence-${bundle.node.replace(/[^A-Za-z0-9._-]+/g, "_").slice(0, 80)}-${bundle.id}.tar.gz`;
    anchor.click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  } catch (error) {
    notify(`Download: ${error instanceof Error ? error.message : String(error)}`, "bad");
  }
}

const OUTCOMES = { pass: ["good", "passes"], hold: ["warn", "holds"], changes: ["note", "changes it"], not_applicable: ["idle", "has no say"] };

/** @param {{incident: import("../api").Incident}} props */
export function Rules({ incident }) {
  /** @type {import("../app/resource.js").Resource<Explanation>} */
  const resource = useResource(path`api/v1/incidents/${incident.id}/policy`, {
    concerns: (kind, record) => kind === "incident" && record.id === incident.id,
  });
  const said = resource.data;
  if (!said) return h(Reading, { resource, what: "the policy" });
  const words_ = said.rules.length ? said.rules : (said.asked.at(-1)?.rules ?? []);
  return [
    said.detail && h("p", { class: "quiet" }, said.detail.charAt(0).toUpperCase() + said.detail.slice(1), "."),
    said.decision && h("p", null, `Now: ${words(said.decision.kind)}, mode ${said.decision.mode}.`, said.decision.hold ? ` On hold: ${said.decision.hold}.` : ""),
    words_.length > 0 &&
      h(
        "details",
        { class: "rules" },
        h("summary", null, `${count(words_.length)} rules, ${count(words_.filter((one) => one.outcome === "hold").length)} hold`),
        h(
          "ul",
          { class: "panel lines" },
          words_.map((one) => {
            const [tone, text] = /** @type {[any, string]} */ (OUTCOMES[one.outcome]);
            return h("li", { key: one.rule }, h(Badge, { state: one.outcome, tone, words: text }), " ", h("span", { class: "strong" }, words(one.rule)), one.reason && h("p", { class: "quiet" }, one.reason));
          }),
        ),
      ),
  ];
}
