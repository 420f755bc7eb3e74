// Server-sent events by fetch: EventSource cannot send a token.

import { ask } from "./api.js";

const SILENT_MS = 40_000; // the server says something every 15 s: after this long the connection is dead

/**
 * @typedef {{id: string, event: string, data: string}} Message an empty string where the message had no such field
 */

/**
 * Follows /api/v1/events until the connection ends. Throws what `ask` throws, and AbortError.
 * @param {string | null} after the last message's id that was seen; null: from now on
 * @param {() => void} opened is called once the server has begun to answer
 * @param {(message: Message) => void} take
 * @param {AbortSignal} signal
 */
export async function follow(after, opened, take, signal) {
  const dead = new AbortController();
  const stop = () => dead.abort();
  signal.addEventListener("abort", stop);
  let timer = setTimeout(stop, SILENT_MS);
  try {
    /** @type {Record<string, string>} */
    const headers = after === null ? {} : { "Last-Event-ID": after };
    const answer = await ask("api/v1/events", { headers, signal: dead.signal });
    if (!answer.body) return;
    opened();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(stop, SILENT_MS);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop() ?? "";
      for (const part of parts) {
        const message = parse(part);
        if (message) take(message);
      }
    }
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", stop);
  }
}

/**
 * One message, or null for a comment.
 * @param {string} text
 * @returns {Message | null}
 */
export function parse(text) {
  const message = { id: "", event: "", data: "" };
  for (const line of text.split("\n")) {
    const at = line.indexOf(":");
    const name = line.slice(0, at);
    if (at > 0 && (name === "id" || name === "event" || name === "data")) {
      message[name] = line.slice(at + 1).trimStart();
    }
  }
  return message.event ? message : null;
}
