// Where events go, and how they fare: subscriptions with their health and verbs, and the newest deliveries.

import { h } from "preact";
import { useState } from "preact/hooks";
import { path } from "../app/api.js";
import { byName, count, counted, words } from "../app/format.js";
import { put, records, useLive } from "../app/live.js";
import { Badge, Copyable, Empty, Facts, Reading, Section } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { Ago, Time } from "../app/times.js";
import { Verb } from "../app/verbs.js";
import { Deliveries } from "./deliveries.js";
import { SilenceList } from "./silences.js";

/** @typedef {import("../api").Subscription} Subscription */

const DAY_S = 86_400;

export function SubscriptionsView() {
  useLive("link");
  const [ended, setEnded] = useState(false);
  /** @type {import("../app/resource.js").Resource<{items: Subscription[]}>} */
  const list = useResource("api/v1/subscriptions?limit=1000", {
    every_ms: 10_000, // health is no event of its own
    settle_ms: 1000,
    concerns: (kind) => kind === "subscription" || kind === "delivery",
  });
  const all = (list.data?.items ?? []).toSorted((a, b) => trouble(b) - trouble(a) || byName(a.url, b.url));
  const active = all.filter((one) => one.active);
  const others = all.filter((one) => !one.active);
  return [
    h("h1", null, "Subscriptions"),
    h(Reading, { resource: list, what: "the subscriptions" }),
    list.data && [
      h(
        Section,
        { title: "Where events go", id: "active", aside: counted(active.length, "active subscription") },
        active.length === 0
          ? h(Empty, null, "No subscriptions. To let an orchestrator act, or to notify people: eagle-eye subscriptions add URL")
          : h("ul", { class: "subscriptions panel" }, active.map((one) => h(Row, { key: one.id, subscription: one, changed: list.again }))),
      ),
      others.length > 0 &&
        h(
          "details",
          { class: "as-table", open: ended, onToggle: (/** @type {Event} */ event) => setEnded(/** @type {HTMLDetailsElement} */ (event.target).open) },
          h("summary", null, `${count(others.length)} paused or ended`),
          h("ul", { class: "subscriptions panel" }, others.map((one) => h(Row, { key: one.id, subscription: one, changed: list.again }))),
        ),
      h(SilenceList, {}),
      h(Deliveries, { subscriptions: all }),
    ],
  ];
}

/** How much a subscription needs to be looked at. @param {Subscription} one */
const trouble = (one) => (one.active ? 1 : 0) * (one.health.failures > 0 ? 1e6 + one.health.pending : one.health.pending);

/** @param {{subscription: Subscription, changed: () => void}} props */
function Row({ subscription: one, changed }) {
  const [secret, setSecret] = useState("");
  const failing = one.active && one.health.failures > 0;
  const verb = { onDone: (/** @type {any} */ answer) => done(answer, changed) };
  return h(
    "li",
    { class: `subscription ${failing ? "bad" : ""}` },
    h(
      "div",
      { class: "what" },
      h("p", { class: "headline" }, h("span", { class: "name" }, one.url)),
      h("p", { class: "quiet" }, `${one.id}; ${words(one.format)}; ${filters(one)}`),
      secret && [
        h("p", { class: "strong" }, "The new secret, shown only once:"),
        h(Copyable, { text: secret, label: "new secret" }),
      ],
    ),
    h("div", { class: "state" }, h(Health, { subscription: one })),
    h(
      "div",
      { class: "buttons verbs" },
      one.active && h(Verb, { ...verb, label: "Ping", target: path`api/v1/subscriptions/${one.id}/ping`, done: "A ping is on its way." }),
      failing || one.health.pending > 0 || one.health.last_error
        ? one.active &&
            h(Verb, {
              ...verb,
              label: "Redeliver",
              target: path`api/v1/subscriptions/${one.id}/redeliver`,
              body: { since: new Date(Date.now() - DAY_S * 1000).toISOString() },
              question: "Deliver again what failed in the last 24 hours? Events that have expired are not sent.",
              onDone: (answer) => done(answer, changed),
              done: "What failed is delivered again.",
            })
        : null,
      one.active &&
        h(Verb, {
          label: "Rotate secret",
          target: path`api/v1/subscriptions/${one.id}/rotate`,
          question: "Make a new signing secret? The old one also signs for a time, so that you can change the receiver.",
          done: "The secret is rotated.",
          onDone: (answer) => {
            setSecret(String(answer.secret));
            changed();
          },
        }),
      one.active
        ? h(Verb, {
            ...verb,
            label: "Pause",
            method: "PATCH",
            target: path`api/v1/subscriptions/${one.id}`,
            body: { active: false },
            question: "Pause it? What comes meanwhile does not go there, and what waits fails.",
            done: "Paused.",
          })
        : one.secrets > 0 &&
            h(Verb, { ...verb, label: "Resume", method: "PATCH", target: path`api/v1/subscriptions/${one.id}`, body: { active: true }, done: "It goes on." }),
    ),
  );
}

/** @param {any} answer @param {() => void} changed */
function done(answer, changed) {
  if (answer && records.subscription.has(answer.id)) put("subscription", answer);
  changed();
}

/** @param {{subscription: Subscription}} props */
function Health({ subscription: { active, health, ended_reason: reason, retiring } }) {
  if (!active) return h("p", null, h(Badge, { state: "ended", tone: "idle", words: reason || "ended" }));
  const state =
    health.failures > 0
      ? h(Badge, { state: "failing", tone: "bad", words: "failing" })
      : health.delivered
        ? h(Badge, { state: "delivered", words: "delivering" })
        : h(Badge, { state: "new", tone: "note", words: "nothing sent yet" });
  return [
    h("p", null, state, health.failures > 0 && [" for ", h(Ago, { at: health.failing_since, bare: true })]),
    health.failures > 0 && h("p", { class: "bad-ink" }, `${counted(health.failures, "attempt")}: ${health.last_error || `HTTP ${health.last_status}`}`),
    h(Facts, {
      class: "narrow",
      facts: [
        ["Last delivered", h(Ago, { at: health.delivered })],
        ["Waiting", health.pending > 0 ? counted(health.pending, "delivery", "deliveries") : null],
        ["Old secrets sign until", retiring.length > 0 ? h(Time, { at: retiring[0] }) : null],
      ],
    }),
  ];
}

/** @param {Subscription} one */
function filters(one) {
  const said = [
    one.types.length > 0 && `types ${one.types.map((type) => type.replace("eagle_eye.", "")).join(", ")}`,
    one.jobs.length > 0 && `jobs ${one.jobs.join(", ")}`,
    one.faults.length > 0 && `faults ${one.faults.join(", ")}`,
    one.matchers.length > 0 && `where ${one.matchers.join(", ")}`,
  ].filter(Boolean);
  return said.length > 0 ? said.join("; ") : "everything";
}
