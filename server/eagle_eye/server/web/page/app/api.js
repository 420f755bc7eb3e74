// Requests to this server's API, with the token that a person typed.

const TOKEN = "token";
export const LEADER = "api/v1/leader"; // each server answers it for itself
export const FLEET = "api/v1/fleet"; // what all cells have a part in

/** The server does not know who asks; `reason` is its word for why, the message what it said. */
export class SignIn extends Error {
  /** @param {string} message @param {string} [reason] */
  constructor(message, reason = "") {
    super(message);
    this.reason = reason;
  }
}

/** The server's refusal (RFC 9457): `message` says what is wrong and what to do, `reason` is one stable word. */
export class Problem extends Error {
  /** @param {number} status @param {string} reason @param {string} detail */
  constructor(status, reason, detail) {
    super(detail);
    this.status = status;
    this.reason = reason;
  }
}

/** Unreachable: nothing answered, or what answered is not this server. */
export class Unreachable extends Error {}

/** Milliseconds to add to this machine's clock to have the server's; its answers' Date header tells, to a second. */
export let clockOffsetMs = 0;

/**
 * Where the last answer to a GET came from: "" this server itself; "leader": it stands by and passed on the leader's;
 * "records": it stands by and read the records, for `why` it had no answer of the leader.
 * `without`: the cells that had no part in the last answer to FLEET, "" for none.
 * @type {{from: "" | "leader" | "records", why: string, without: string}}
 */
export let source = { from: "", why: "", without: "" };

/** The time by the server's clock, in milliseconds since 1970. */
export const now = () => Date.now() + clockOffsetMs;

export const token = () => sessionStorage.getItem(TOKEN);

/** @param {string | null} text */
export function setToken(text) {
  if (text) sessionStorage.setItem(TOKEN, text);
  else sessionStorage.removeItem(TOKEN);
}

/**
 * A path with its parameters encoded: path`api/v1/nodes/${name}`. Names are other machines' words.
 * @param {TemplateStringsArray} texts
 * @param {...(string | number)} values
 */
export function path(texts, ...values) {
  return texts.reduce((all, text, at) => all + encodeURIComponent(values[at - 1] ?? "") + text);
}

/**
 * The server's answer, whatever its type. Throws SignIn, Problem, Unreachable; AbortError when it was called off.
 * @param {string} target relative to the page
 * @param {{method?: string, body?: unknown, headers?: Record<string, string>, signal?: AbortSignal | null,
 *          accept?: number[]}} [more] `accept` lists statuses that are no errors though they are not 2xx
 */
export async function ask(target, more = {}) {
  const mine = token();
  /** @type {Record<string, string>} */
  const headers = { ...more.headers };
  if (mine) headers["Authorization"] = `Bearer ${mine}`;
  if (more.body !== undefined) headers["Content-Type"] = "application/json";
  if (more.method) headers["Eagle-Eye-Request"] = "1"; // no page of another origin can send it
  /** @type {Response} */
  let answer;
  try {
    answer = await fetch(target, {
      method: more.method ?? "GET",
      headers,
      body: more.body === undefined ? null : JSON.stringify(more.body),
      cache: "no-store",
      signal: more.signal ?? null,
    });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Unreachable("the server does not answer");
  }
  noteClock(answer);
  if (!more.method && !target.endsWith(LEADER)) noteSource(answer, target);
  if (answer.status === 401) {
    const said = await problem(answer);
    throw new SignIn(said.message, said.reason);
  }
  if (answer.ok || more.accept?.includes(answer.status)) return answer;
  throw await problem(answer);
}

/**
 * The JSON that is answered to a GET.
 * @param {string} target
 * @param {AbortSignal | null} [signal]
 * @returns {Promise<any>}
 */
export async function get(target, signal = null) {
  return (await ask(target, { signal })).json();
}

/**
 * Carries out a verb; returns the answer's JSON, null where there is none.
 * @param {"POST" | "PUT" | "PATCH" | "DELETE"} method
 * @param {string} target
 * @param {unknown} [body]
 * @returns {Promise<any>}
 */
export async function send(method, target, body) {
  const answer = await ask(target, { method, body });
  return answer.status === 204 ? null : answer.json();
}

/**
 * All items of a list, page after page, `most` at the most.
 * @param {string} target without limit and cursor
 * @param {number} most
 * @param {AbortSignal | null} [signal]
 * @returns {Promise<any[]>}
 */
export async function getAll(target, most, signal = null) {
  const join = target.includes("?") ? "&" : "?";
  /** @type {any[]} */
  const items = [];
  let cursor = "";
  while (items.length < most) {
    const limit = Math.min(1000, most - items.length);
    const more = cursor ? `&cursor=${encodeURIComponent(cursor)}` : "";
    const answer = await get(`${target}${join}limit=${limit}${more}`, signal);
    items.push(...answer.items);
    if (!answer.next) break;
    cursor = answer.next;
  }
  return items;
}

/** @param {Response} answer */
async function problem(answer) {
  try {
    const said = await answer.json();
    return new Problem(answer.status, String(said.reason), String(said.detail));
  } catch {
    return new Problem(answer.status, "unknown", `HTTP ${answer.status}`);
  }
}

/** @param {Response} answer */
function noteClock(answer) {
  const said = Date.parse(answer.headers.get("Date") ?? "");
  // The header has whole seconds: a difference below that is none.
  if (Number.isFinite(said)) clockOffsetMs = Math.abs(said - Date.now()) < 1500 ? 0 : said - Date.now();
}

/** @param {Response} answer @param {string} target */
function noteSource(answer, target) {
  const why = answer.headers.get("Eagle-Eye-Standby");
  // Most answers come from the records, which no cell need add to: they tell nothing of cells.
  const without = target === FLEET ? (answer.headers.get("Eagle-Eye-Without-Cells") ?? "") : source.without;
  if (why !== null) source = { from: "records", why, without };
  else source = { from: answer.headers.has("Eagle-Eye-Leader") ? "leader" : "", why: "", without };
}
