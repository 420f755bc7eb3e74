// What each state means at a glance: a tone (colour), a sign (shape, for those who see no colours) and a label.

import { STATE_LABELS } from "./labels.js";
import { records } from "./live.js";

/** @typedef {"good" | "bad" | "warn" | "note" | "idle"} Tone */

/** @type {Record<string, Tone>} */
const TONES = {
  // incidents
  suspected: "warn",
  confirmed: "bad",
  acting: "bad",
  action_requested: "bad",
  action_accepted: "bad",
  action_running: "bad",
  action_done: "note",
  recovered: "good",
  // actions
  would_act: "note",
  awaiting: "warn",
  requested: "warn",
  accepted: "warn",
  running: "note",
  done: "good",
  failed: "bad",
  refused: "bad",
  // jobs
  observed: "note",
  completing: "note",
  preempted: "warn",
  timeout: "warn",
  finished: "good",
  // nodes
  in_service: "good",
  excluded: "bad",
  draining: "warn",
  // evidence and checks
  asked: "note",
  received: "good",
  healthy: "good",
  sick: "bad",
  cannot_tell: "note",
  // deliveries
  pending: "note",
  delivered: "good",
  silenced: "note",
  // the ledger
  right: "good",
  wrong: "bad",
  suffices: "good",
  falls_short: "warn",
};

/** @type {Record<Tone, string>} */
export const SIGNS = { good: "✓", bad: "✕", warn: "!", note: "•", idle: "–" };

/** @param {string} state @returns {Tone} */
export const toneOf = (state) => TONES[state] ?? "idle";

/** @param {string} state */
export const wordsOf = (state) => STATE_LABELS[state] ?? state.replaceAll("_", " ");

/** The state that an incident is shown in: for one whose action was requested, how far that has come.
 * @param {{id: string, state: string}} incident @param {readonly {state: string, preliminary: boolean, incident_id: string}[]} [actions] the newest last */
export function shownState(incident, actions = [...records.action.values()]) {
  const last = actions.findLast((one) => one.incident_id === incident.id && !one.preliminary);
  if (incident.state !== "acting" || !last) return incident.state;
  return last.state === "awaiting" ? last.state : `action_${last.state}`;
}
