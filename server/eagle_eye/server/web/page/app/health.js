// The server's health: whether it can judge, what is blind, and how old what is shown is.

import { h } from "preact";
import { useRef, useState } from "preact/hooks";
import { closing, useClosing } from "./closing.js";
import { link, useLive } from "./live.js";
import { Badge } from "./parts.js";
import { counted, words } from "./format.js";
import { Ago } from "./times.js";

export function Health() {
  useLive("link", "fleet");
  const [open, setOpen] = useState(false);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  useClosing(box, open, () => setOpen(false));
  const { fleet, state } = link;
  const readiness = state === "live" ? fleet?.readiness : null;
  const wrong = readiness ? Object.entries(readiness.checks).filter(([, said]) => said !== "ok") : [];
  const blind = readiness ? Object.entries(readiness.blind) : [];
  const notes = readiness ? Object.entries(readiness.notes) : [];
  // Of a server that no agent has spoken to nothing is wrong: there is nothing to judge yet.
  const begins = fleet?.nodes === 0 && wrong.length === 1 && wrong[0]?.[0] === "agents";
  return h(
    "div",
    { class: "health" },
    h("span", { role: "status" }, connectionBadge(state)),
    // Outside the status: what counts up would be read out each second.
    state === "lost" && h("span", { class: "stale" }, h("span", { class: "said" }, "shown is "), h(Ago, { at: new Date(link.since).toISOString(), bare: true }), " old"),
    readiness &&
      h(
        "details",
        { class: "health-details in-bar", ...closing(box, open, setOpen) },
        h(
          "summary",
          null,
          readiness.ready
            ? inPart(fleet)
              ? h(Badge, { state: "ready", tone: "note", words: "judging a part" })
              : h(Badge, { state: "ready", tone: "good", words: "judging" })
            : begins
              ? h(Badge, { state: "begins", tone: "note", words: "waiting for the first agent" })
              : h(Badge, { state: "blind", tone: "bad", words: "cannot judge" }),
          !begins && blind.length > 0 && h("span", { class: "quiet blind" }, ` · ${counted(blind.length, "detector")} without data`),
          notes.length > 0 && h("span", { class: "quiet" }, ` · ${counted(notes.length, "warning")}`),
        ),
        h(
          "div",
          { class: "health-box bar-box" },
          wrong.length > 0 && section(begins ? "Nothing to judge yet" : "Cannot judge", wrong),
          notes.length > 0 && section("Warnings", notes),
          blind.length > 0 && section("Detectors without data", blind),
          wrong.length + notes.length + blind.length === 0 && h("p", null, "Storage, detection and agents work; every detector has its data."),
        ),
      ),
  );
}

/** Whether nodes are silent, or no job is known that they work for. Some idle nodes are no news. @param {import("../api").Fleet | null} fleet */
const inPart = (fleet) => !!fleet && (fleet.nodes_heard < fleet.nodes_recent || (fleet.nodes_heard > 0 && fleet.jobs.length + fleet.jobs_left_out === 0));

/** @param {string} title @param {[string, string][]} items */
function section(title, items) {
  return [
    h("h2", null, title),
    h("dl", { class: "facts" }, items.map(([name, said]) => h("div", { key: name }, h("dt", null, words(name)), h("dd", null, said)))),
  ];
}

/** @param {import("./live.js").LinkState} state */
function connectionBadge(state) {
  if (state === "live") return h(Badge, { state, tone: "good", words: "live" });
  if (state === "sign_in") return null;
  if (state === "connecting") return h(Badge, { state, tone: "note", words: "connecting" });
  return h(Badge, { state, tone: "bad", words: "connection lost" });
}
