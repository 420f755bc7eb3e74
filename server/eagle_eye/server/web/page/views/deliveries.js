// The newest deliveries, what failed or waits first if one asks for it.

import { h } from "preact";
import { useState } from "preact/hooks";
import { path } from "../app/api.js";
import { byName, words } from "../app/format.js";
import { put, records, useLive } from "../app/live.js";
import { Badge, Empty, Section } from "../app/parts.js";
import { table } from "../app/table.js";
import { Time } from "../app/times.js";
import { Verb } from "../app/verbs.js";

/**
 * @typedef {import("../api").Delivery} Delivery
 * @typedef {import("../api").Subscription} Subscription
 */

const STATES = /** @type {const} */ (["", "pending", "delivered", "failed", "expired", "silenced"]);

/** @param {{subscriptions: Subscription[]}} props */
export function Deliveries({ subscriptions }) {
  useLive("delivery");
  const [state, setState] = useState("");
  const urls = new Map(subscriptions.map((one) => [one.id, one.url]));
  const items = [...records.delivery.values()]
    .filter((one) => state === "" || one.state === state)
    .sort((a, b) => (a.created < b.created ? 1 : -1));
  const filter = h(
    "label",
    { class: "inline" },
    "Show ",
    h(
      "select",
      { value: state, onChange: (/** @type {Event} */ event) => setState(/** @type {HTMLSelectElement} */ (event.target).value) },
      STATES.map((one) => h("option", { value: one }, one || "all")),
    ),
  );
  return h(
    Section,
    { title: "Deliveries", id: "deliveries", aside: filter },
    items.length === 0
      ? h(Empty, null, state ? `None of the newest is ${state}.` : "Nothing was sent yet.")
      : table({ columns: columns(urls), items, keyOf: (one) => one.id, label: "Deliveries, newest first", most: 50 }),
  );
}

/** @param {Map<string, string>} urls @returns {import("../app/table.js").Column<Delivery>[]} */
function columns(urls) {
  return [
    { title: "When", compare: (a, b) => (a.created < b.created ? -1 : 1), cell: (one) => h(Time, { at: one.created }), class: "nowrap" },
    { title: "Event", compare: (a, b) => byName(a.type, b.type), cell: (one) => one.type.replace("eagle_eye.", ""), class: "nowrap" },
    { title: "State", compare: (a, b) => byName(a.state, b.state), cell: (one) => h(Badge, { state: one.state }) },
    { title: "Attempts", right: true, compare: (a, b) => a.attempts - b.attempts, cell: (one) => one.attempts },
    { title: "Answer", right: true, cell: (one) => one.last_status ?? "–" },
    { title: "Why not", cell: (one) => one.last_error || words(one.reason) },
    { title: "To", cell: (one) => h("span", { class: "url" }, urls.get(one.subscription_id) ?? one.subscription_id) },
    {
      title: "Again",
      cell: (one) =>
        one.state === "failed"
          ? h(Verb, {
              label: "Redeliver",
              target: path`api/v1/deliveries/${one.id}/redeliver`,
              done: "It is delivered again.",
              onDone: (answer) => put("delivery", answer),
            })
          : null,
    },
  ];
}
