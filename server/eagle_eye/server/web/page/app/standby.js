// What a person must know on the page of a server that stands by: who leads, and where what is shown comes from; of
// one that leads and must not decide at present: why; and which cells have no part in what is shown.

import { h } from "preact";
import { source } from "./api.js";
import { link, useLive } from "./live.js";
import { Time } from "./times.js";

export function Standby() {
  useLive("fleet", "link");
  const { leader, state } = link;
  if (state === "sign_in") return null;
  if (leader?.leads && leader.problem) {
    return h(
      "aside",
      { class: "standby alone", "aria-label": "Standby" },
      h("p", { role: "status" }, h("b", null, "Nothing is decided at present: "), leader.problem, ". ", UNDECIDED),
    );
  }
  if (!leader || leader.leads) return source.without ? h(Without, { cells: source.without }) : null;
  const reached = source.from === "leader";
  return h(
    "aside",
    { class: `standby ${reached ? "" : "alone"}`, "aria-label": "Standby" },
    h("p", { role: "status" }, h("b", null, "This server stands by: "), who(leader, reached), ". ", reached ? REACHED : UNREACHED),
  );
}

/** @param {{cells: string}} props */
const Without = ({ cells }) =>
  h("aside", { class: "standby alone", "aria-label": "Cells" }, h("p", { role: "status" }, h("b", null, `No answer of cell ${cells}: `), "what it alone knows is missing here."));

const REACHED = "What is shown comes from the leader, and what you do here is done there.";
const UNREACHED = "This is what the records hold, without what agents send now; nothing can be changed here until a server leads.";

const UNDECIDED = "Agents are heard all the while, and what they show is decided once this is over.";

/** @param {import("../api").Leader} leader @param {boolean} reached */
function who(leader, reached) {
  if (leader.problem) return `who leads is not known: ${leader.problem}`;
  const said = reached ? `${leader.leader} leads` : source.why;
  const asked = leader.nodes_in_vain ? `, and is asked to step down, for ${leader.nodes_in_vain} of the nodes that ask this server do not reach it` : "";
  return [said, ` (epoch ${leader.epoch}, seen since `, h(Time, { at: leader.seen_since }), `)${asked}`];
}
