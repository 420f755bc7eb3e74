// What a person must know on the page of a server that stands by: who leads, and where what is shown comes from.

import { h } from "preact";
import { source } from "./api.js";
import { link, useLive } from "./live.js";
import { Time } from "./times.js";

export function Standby() {
  useLive("fleet", "link");
  const { leader, state } = link;
  if (!leader || leader.leads || state === "sign_in") return null;
  const reached = source.from === "leader";
  return h(
    "aside",
    { class: `standby ${reached ? "" : "alone"}`, "aria-label": "Standby" },
    h("p", { role: "status" }, h("b", null, "This server stands by: "), who(leader, reached), ". ", reached ? REACHED : UNREACHED),
  );
}

const REACHED = "What is shown comes from the leader, and what you do here is done there.";
const UNREACHED = "This is what the records hold, without what agents send now; nothing can be changed here until a server leads.";

/** @param {import("../api").Leader} leader @param {boolean} reached */
function who(leader, reached) {
  if (leader.problem) return `who leads is not known: ${leader.problem}`;
  const said = reached ? `${leader.leader} leads` : source.why;
  const asked = leader.nodes_in_vain ? `, and is asked to step down, for ${leader.nodes_in_vain} of the nodes that ask this server do not reach it` : "";
  return [said, ` (epoch ${leader.epoch}, seen since `, h(Time, { at: leader.seen_since }), `)${asked}`];
}
