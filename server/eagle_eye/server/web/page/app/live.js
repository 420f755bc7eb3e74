// The one store of live data: lists read once and then kept up by the server's events, and how the connection is.

import { useEffect, useReducer } from "preact/hooks";
import { FLEET, LEADER, Problem, SignIn, get, getAll, source } from "./api.js";
import { follow } from "./stream.js";

/**
 * @typedef {import("../api").Incident} Incident
 * @typedef {import("../api").Action} Action
 * @typedef {import("../api").Delivery} Delivery
 * @typedef {import("../api").Subscription} Subscription
 * @typedef {import("../api").Fleet} Fleet
 * @typedef {import("../api").Leader} Leader
 * @typedef {import("../api").Me} Me
 * @typedef {import("./stream.js").Message} Message
 * @typedef {"incident" | "action" | "delivery" | "subscription" | "job" | "node" | "silence" | "event"} Kind
 * @typedef {"connecting" | "live" | "lost" | "sign_in"} LinkState
 */

const RETRY_MS = [500, 1000, 2000, 5000, 10_000]; // the last one again and again
const FLEET_MS = 5000; // how often the jobs' progress is asked for: no event tells of a step
const INCIDENTS_OPEN_MAX = 1000;
const NEWEST = 200; // of what is over
const NO_GROUP = "no_group"; // the server knows the person and lets them see nothing
const TOKEN_WANTED = new Set(["no_token", "token"]); // what the form says by itself
const KEPT_MAX = 2000; // of a kind: a page that is open for weeks must not grow for weeks

/** What is known, by id. Replace nothing in here by hand. */
export const records = {
  /** @type {Map<string, Incident>} */ incident: new Map(),
  /** @type {Map<string, Action>} */ action: new Map(),
  /** @type {Map<string, Delivery>} */ delivery: new Map(),
  /** @type {Map<string, Subscription>} */ subscription: new Map(),
};

/** How the connection is; `since` is in milliseconds by this machine's clock. */
export const link = {
  /** @type {LinkState} */ state: "connecting",
  since: Date.now(),
  loaded: false,
  returns: 0, // how often the connection was lost and came back
  detail: "",
  /** @type {Fleet | null} the jobs at a glance and whether the server can judge, as of `fleetRead` */ fleet: null,
  fleetRead: 0, // milliseconds by this machine's clock
  fleetSeen: true, // whether the server that answered hears agents: one that has the records alone does not
  /** @type {Me | null} whom the server takes us for */ me: null,
  hasProvider: false, // whether people sign in here with the site's accounts; known once somebody has to
  /** @type {Leader | null} who leads while this server stands by, or cannot read its records; else null */ leader: null,
};

/** @type {Set<(kinds: ReadonlySet<string>) => void>} */
const listeners = new Set();
/** @type {Set<(kind: Kind, record: any) => void>} */
const takers = new Set();
/** @type {Set<string>} */
let stirred = new Set();
/** @type {string | null} */
let lastId = null;
let running = new AbortController();

/** Tells the listeners at the next frame that these kinds changed. @param {...string} kinds */
function stir(...kinds) {
  if (stirred.size === 0) {
    // A hidden page gets no frames; it must not save its changes up for hours, nor draw them one by one.
    setTimeout(() => {
      const kinds = stirred;
      stirred = new Set();
      for (const listener of listeners) listener(kinds);
    }, 50);
  }
  for (const kind of kinds) stirred.add(kind);
}

/** @param {LinkState} state @param {string} [detail] */
function say(state, detail = "") {
  if (link.state !== state) link.since = Date.now();
  link.state = state;
  link.detail = detail;
  stir("link");
}

/**
 * Draws the component again whenever one of the kinds changes ("link": the connection,
 * "fleet": the fleet at a glance).
 * @param {...(Kind | "link" | "fleet")} kinds
 */
export function useLive(...kinds) {
  const [, again] = useReducer((/** @type {number} */ count) => count + 1, 0);
  useEffect(() => {
    const listener = (/** @type {ReadonlySet<string>} */ changed) => {
      if (kinds.some((kind) => changed.has(kind))) again(undefined);
    };
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }, [kinds.join()]);
}

/**
 * Calls `take` with every record that the server's events bring; returns what ends that.
 * @param {(kind: Kind, record: any) => void} take
 */
export function onRecord(take) {
  takers.add(take);
  return () => void takers.delete(take);
}

/** Whether who looks is known, and shown the jobs of everybody. */
export const seesAllJobs = () => link.me !== null && !link.me.owners_only;

/** Puts a verb's answer in place before its event comes. @param {keyof typeof records} kind @param {any} record */
export function put(kind, record) {
  const known = records[kind];
  // A subscription's events come without its health.
  const old = known.get(record.id);
  known.delete(record.id);
  known.set(record.id, old ? { ...old, ...record } : record);
  if (known.size > KEPT_MAX) known.delete(known.keys().next().value ?? "");
  stir(kind);
}

/** @param {Message} message */
function take(message) {
  if (message.id) lastId = message.id;
  if (message.event === "reset") {
    void load(running.signal).catch(() => running.abort());
    return;
  }
  const kind = /** @type {Kind} */ (message.event);
  const record = JSON.parse(message.data);
  if (kind in records) put(/** @type {keyof typeof records} */ (kind), record);
  else stir(kind);
  for (const taker of takers) taker(kind, record);
}

/** @param {AbortSignal} signal */
async function load(signal) {
  const keyed = (/** @type {any[]} */ items) => new Map(items.map((item) => [item.id, item]));
  // What is wrong comes first: a browser asks six things at a time.
  const [me, open, incidents, actions] = await Promise.all([
    get("api/v1/me", signal),
    getAll("api/v1/incidents?state=live", INCIDENTS_OPEN_MAX, signal),
    getAll("api/v1/incidents", NEWEST, signal),
    getAll("api/v1/actions", NEWEST, signal),
  ]);
  link.me = me;
  records.incident = keyed([...incidents, ...open].reverse());
  records.action = keyed(actions.reverse());
  link.loaded = true;
  stir("incident", "action", "job", "node");
  if (me.owners_only) return; // these are of all jobs
  const [deliveries, subscriptions] = await Promise.all([
    getAll("api/v1/deliveries", NEWEST, signal),
    getAll("api/v1/subscriptions", 1000, signal),
  ]);
  records.delivery = keyed(deliveries.reverse());
  records.subscription = keyed(subscriptions.reverse());
  stir("delivery", "subscription");
}

/** Whether people sign in here with the site's accounts. @param {AbortSignal} signal */
async function hasProvider(signal) {
  try {
    return (await get("api/v1/sign-in", signal)).provider === true;
  } catch {
    return false; // the form for tokens is there all the same
  }
}

/** Follows the server until it wants a token: comes back after every break, later each time. */
export async function run() {
  running.abort();
  const mine = (running = new AbortController());
  for (let failures = 0; !mine.signal.aborted; ) {
    const turn = new AbortController();
    mine.signal.addEventListener("abort", () => turn.abort(), { once: true });
    try {
      // The stream is opened first, so that nothing is lost between the lists and it; twice does no harm.
      /** @type {() => void} */
      let opened = () => undefined;
      const open = new Promise((done) => (opened = () => done(undefined)));
      const following = follow(lastId, opened, take, turn.signal);
      await Promise.race([open, following]);
      await load(turn.signal);
      failures = 0;
      if (link.state === "lost") link.returns++;
      say("live");
      void readFleet();
      await following;
      say("lost", "the server ended the connection");
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof SignIn || (error instanceof Problem && error.reason === NO_GROUP)) {
        link.me = null;
        link.hasProvider = await hasProvider(mine.signal);
        say("sign_in", TOKEN_WANTED.has(error.reason) ? "" : error.message);
        return;
      }
      say(link.loaded ? "lost" : "connecting", error instanceof Error ? error.message : String(error));
    } finally {
      turn.abort();
    }
    const wait = RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)] ?? 0;
    await pause(wait * (0.75 + Math.random() / 2), mine.signal);
  }
}

/** Waits, less long when the page is looked at again or the network returns. @param {number} ms @param {AbortSignal} signal */
function pause(ms, signal) {
  return new Promise((done) => {
    const end = () => {
      clearTimeout(timer);
      removeEventListener("online", end);
      document.removeEventListener("visibilitychange", end);
      signal.removeEventListener("abort", end);
      done(undefined);
    };
    const timer = setTimeout(end, ms);
    addEventListener("online", end);
    document.addEventListener("visibilitychange", end);
    signal.addEventListener("abort", end);
  });
}

/** Reads the fleet at a glance now and then, while somebody looks. */
export async function watchFleet() {
  if (!document.hidden && link.state !== "sign_in") await readFleet();
  setTimeout(watchFleet, FLEET_MS);
}

/** Reads the fleet at a glance now. */
async function readFleet() {
  let refused = true;
  try {
    link.fleet = await get(FLEET);
    refused = false;
    link.fleetRead = Date.now();
    link.fleetSeen = source.from !== "records";
  } catch {
    // That nothing answers, or that a token is wanted, is the stream's to tell; what is shown says how old it is.
  }
  try {
    /** @type {Leader | null} */
    const found = source.from || refused ? await get(LEADER) : null;
    const before = link.leader;
    // The server reckons the moment anew each time; what is read out must not change by a fraction of a second.
    const same = found && before && found.leader === before.leader && found.epoch === before.epoch;
    link.leader = same ? { ...found, seen_since: before.seen_since } : found;
  } catch {
    // Likewise; who led when it was last known is still said.
  }
  stir("fleet");
}
