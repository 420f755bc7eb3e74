// What each state means at a glance: a tone (colour), a sign (shape, for those who see no colours) and words.

/** @typedef {"good" | "bad" | "warn" | "note" | "idle"} Tone */

/** @type {Record<string, [Tone, string]>} */
const STATES = {
  // incidents
  suspected: ["warn", "suspected"],
  confirmed: ["bad", "confirmed"],
  acting: ["bad", "action asked for"],
  recovered: ["good", "recovered"],
  closed: ["idle", "closed"],
  false: ["idle", "false alarm"],
  // actions
  would_act: ["note", "would have acted"],
  awaiting: ["warn", "awaits approval"],
  requested: ["warn", "asked"],
  accepted: ["warn", "accepted"],
  running: ["note", "running"],
  done: ["good", "done"],
  failed: ["bad", "failed"],
  refused: ["bad", "refused"],
  rejected: ["idle", "rejected"],
  expired: ["idle", "expired"],
  withdrawn: ["idle", "withdrawn"],
  // jobs
  observed: ["note", "running"],
  completing: ["note", "completing"],
  cancelled: ["idle", "cancelled"],
  preempted: ["warn", "preempted"],
  timeout: ["warn", "timed out"],
  maintenance: ["idle", "maintenance"],
  finished: ["good", "finished"],
  // nodes
  in_service: ["good", "in service"],
  excluded: ["bad", "excluded"],
  draining: ["warn", "draining"],
  // evidence and checks
  asked: ["note", "asked"],
  received: ["good", "received"],
  deleted: ["idle", "deleted"],
  healthy: ["good", "healthy"],
  sick: ["bad", "sick"],
  cannot_tell: ["note", "cannot tell"],
  // deliveries
  pending: ["note", "pending"],
  delivered: ["good", "delivered"],
  // the ledger
  right: ["good", "right"],
  wrong: ["bad", "wrong"],
};

/** @type {Record<Tone, string>} */
export const SIGNS = { good: "✓", bad: "✕", warn: "!", note: "•", idle: "–" };

/** @param {string} state @returns {Tone} */
export const toneOf = (state) => STATES[state]?.[0] ?? "idle";

/** @param {string} state */
export const wordsOf = (state) => STATES[state]?.[1] ?? state.replaceAll("_", " ");
