// What a person must know on the page of a server that stands by: who leads, and where what is shown comes from.

import { h } from "preact";
import { source } from "./api.js";
import { link, useLive } from "./live.js";
import { Time } from "./times.js";

export function Standby() {
  useLive("fleet", "link");
  const { leader } = link;
  if (!leader || leader.leads || link.state === "sign_in") return null;
  const reached = source.from === "leader";
  return h(
    "aside",
    { class: `standby ${reached ? "" : "alone"}`, "aria-label": "Standby" },
    h("p", { role: "status" }, h("b", null, "This server stands by."), " ", who(leader), " ", reached ? REACHED : unreached()),
  );
}

const REACHED = "What is shown comes from the leader, and what you do here is done there.";

const unreached = () =>
  `Shown is what the records hold, without what agents send now, since the leader does not answer: ${source.why}. Nothing can be done here until a server leads.`;

/** @param {import("../api").Leader} leader */
function who(leader) {
  if (leader.problem) return `Who leads is not known: ${leader.problem}.`;
  const since = h(Time, { at: leader.seen_since });
  if (!leader.leader) return ["Nobody leads, as seen since ", since, "."];
  return [h("span", { class: "name" }, leader.leader), ` leads (epoch ${leader.epoch}), as seen since `, since, "."];
}
