// The fleet: what is wrong, which jobs suffer, what it costs, and where in the fleet it is.

import { h } from "preact";
import { source } from "../app/api.js";
import { link, useLive } from "../app/live.js";
import { count, counted, gpuHours } from "../app/format.js";
import { Empty } from "../app/parts.js";
import { FirstSteps } from "./first_steps.js";
import { Incidents, openIncidents } from "./fleet_incidents.js";
import { Jobs } from "./fleet_jobs.js";
import { LedgerGlance } from "./fleet_ledger.js";
import { NodeMapSection } from "./fleet_map.js";

/** @type {Record<string, string>} */
const MODES = {
  observe: "observes only: nothing is asked of anyone",
  approve: "asks a person before it acts",
  act: "acts by itself, within its budgets",
};

export function FleetView() {
  useLive("fleet", "link", "incident");
  const { fleet } = link;
  const heading = h("h1", { class: "visually-hidden" }, "Fleet");
  if (fleet && link.state === "live" && link.fleetSeen && link.loaded && fleet.nodes === 0 && openIncidents().length === 0) return [heading, h(FirstSteps, {})];
  return [
    heading,
    fleet ? h(Summary, { fleet }) : h(Empty, null, "Reading the fleet…"),
    h(Incidents, {}),
    h(Jobs, {}),
    h(NodeMapSection, {}),
    h(LedgerGlance, {}),
  ];
}

/** @param {{fleet: import("../api").Fleet}} props */
function Summary({ fleet }) {
  const open = openIncidents().length;
  return h(
    "ul",
    { class: "summary", "aria-label": "The fleet in figures" },
    figure(link.loaded ? count(open) : "…", open === 1 ? "open incident" : "open incidents", open ? "bad-ink" : ""),
    ...(link.fleetSeen ? observed(fleet) : [figure("–", "jobs and nodes: only the leader hears agents", "warn-ink")]),
    h("li", { class: "mode" }, h("span", { class: "quiet" }, `Policy ${MODES[fleet.policy_mode] ?? fleet.policy_mode}.`)),
  );
}

/** What agents tell. @param {import("../api").Fleet} fleet */
function observed(fleet) {
  const burning = fleet.jobs.reduce((sum, job) => sum + (job.loss?.gpus ?? 0), 0);
  const burnt = fleet.jobs.reduce((sum, job) => sum + (job.loss?.gpu_hours ?? 0), 0);
  // What a job loses is not known where nobody says how many GPUs it has, or none of its nodes is heard.
  const unsized = fleet.jobs.filter((job) => job.loss?.gpus === null || (job.state === "running" && job.nodes_heard === 0)).length;
  const besides = unsized ? `; unknown for ${counted(unsized, "job")}` : "";
  const silent = fleet.nodes_recent - fleet.nodes_heard;
  const rest = source.without ? `nodes reporting; those of cell ${source.without} are unknown` : "nodes, all reporting";
  return [
    burning > 0
      ? figure(gpuHours(burnt), `GPU-hours lost, ${gpuHours(burning)} more each hour${besides}`, "bad-ink")
      : figure(unsized ? "–" : "0", `GPU-hours burning${besides}`, unsized ? "warn-ink" : ""),
    figure(count(fleet.jobs.length + fleet.jobs_left_out), fleet.jobs.length === 1 ? "running job" : "running jobs"),
    figure(
      count(fleet.nodes_heard),
      silent > 0 ? `of ${count(fleet.nodes_recent)} nodes reporting` : rest,
      silent > 0 || source.without ? "warn-ink" : "",
    ),
  ];
}

/** @param {string} value @param {string} words @param {string} [tone] */
const figure = (value, words, tone = "") =>
  h("li", null, h("span", { class: `value ${tone}` }, value), " ", h("span", { class: "quiet" }, words));
