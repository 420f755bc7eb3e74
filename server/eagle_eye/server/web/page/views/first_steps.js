// What to type first: the fleet's page of a server that no agent has spoken to.

import { h } from "preact";
import { token } from "../app/api.js";
import { Copyable } from "../app/parts.js";

const USUAL = "127.0.0.1:8470"; // where commands look for the server

/** @typedef {{why: string, command: string}} Step */

/** The commands that bring a first node, and a first fault. @returns {Step[]} */
function steps() {
  const here = `${location.origin}${location.pathname}`.replace(/\/+$/, "");
  const server = location.protocol === "http:" && here.endsWith(`/${USUAL}`) ? "" : ` --server ${here}`;
  const trace = [
    { why: "See a fault judged: three minutes of four simulated nodes", command: "eagle-eye simulate lost-gpu --fault gpu_lost --nodes 4 --minutes 3 --seed 1" },
    { why: "and through this server, ten times as fast", command: `eagle-eye replay lost-gpu --speed 10${server}${token() ? " --token-file ADMIN-TOKEN" : ""}` },
  ];
  if (token() === null) {
    return [
      { why: "See a node appear, on any machine: its GPUs are simulated", command: `eagle-eye agent --simulate --node my-node${server}` },
      { why: "Watch a GPU host: the same on the host itself", command: `eagle-eye agent${server}` },
      ...trace,
    ];
  }
  return [
    { why: "Make a token for a node, on the server's host", command: "eagle-eye tokens create --scope agent --node my-node --out my-node.token" },
    { why: "Watch the node; --simulate where it has no GPU", command: `eagle-eye agent --node my-node --token-file my-node.token${server}` },
    ...trace,
  ];
}

export function FirstSteps() {
  return h(
    "section",
    { class: "panel first-steps", "aria-labelledby": "h-first" },
    h("h2", { id: "h-first" }, "No node reports yet"),
    h("p", null, "The server runs and waits for its first agent. Type one of these; this page follows by itself."),
    h(
      "ol",
      { class: "commands" },
      steps().map(({ why, command }) => h("li", { key: command }, h("p", null, why), h(Copyable, { text: command, label: why }))),
    ),
    h("p", { class: "quiet" }, "docs/get-started/quick-start.md goes on from here; install-hosts.md, install-slurm.md and install-kubernetes.md bring the agents to your fleet."),
  );
}
