// The live page: reads the lists once, then follows /api/v1/events. Everything that comes from the server goes
// into the page as text, never as markup: names and summaries are other machines' words.
"use strict";

const KINDS = {
  incident: { list: "incidents", key: "id", shown: 30 },
  action: { list: "actions", key: "id", shown: 30 },
  job: { list: "jobs", key: "job", shown: 50 },
  node: { list: "nodes", key: "node", shown: 300 },
  delivery: { list: "deliveries", key: "id", shown: 30 },
};
const GOOD = new Set(["delivered", "done", "recovered", "closed", "finished", "in_service"]);
const BAD = new Set(["confirmed", "failed", "excluded", "refused", "acting"]);
const WARN = new Set([
  "suspected", "awaiting", "requested", "accepted", "would_act", "draining", "pending", "expired", "withdrawn", "preempted",
]);
const REFRESH_MS = 5000;
const RETRY_MS = 3000;

const records = {};
for (const kind of Object.keys(KINDS)) records[kind] = new Map();
let lastEventId = null;
let drawing = false;

const byId = (id) => document.getElementById(id);

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const child of children) {
    if (child === null || child === undefined) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

const toneOf = (state) => (GOOD.has(state) ? "good" : BAD.has(state) ? "bad" : WARN.has(state) ? "warn" : "");
const badge = (state) => element("span", `badge ${toneOf(state)}`, String(state).replaceAll("_", " "));

function clock(text) {
  if (!text) return "";
  const moment = new Date(text);
  const today = new Date().toDateString() === moment.toDateString();
  return today ? moment.toLocaleTimeString() : moment.toLocaleString();
}

function ago(text) {
  if (!text) return "never";
  const seconds = Math.max(0, (Date.now() - new Date(text).getTime()) / 1000);
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return clock(text);
}

function number(value) {
  if (typeof value !== "number") return value ?? "";
  return Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-3)
    ? value.toExponential(2)
    : String(Math.round(value * 1000) / 1000);
}

function table(titles, rows) {
  const head = element("tr", "", ...titles.map((title) => element("th", "", title)));
  const body = rows.map((cells) =>
    element("tr", "", ...cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : element("td", "", cell)))));
  return element("div", "scroll", element("table", "", element("thead", "", head), element("tbody", "", ...body)));
}

const time = (text) => element("td", "time", clock(text));
const figure = (value) => element("td", "number", number(value));

function drawIncident(incident) {
  const where = incident.device === null || incident.device === undefined ? "" : ` device ${incident.device}`;
  const card = element(
    "article", `card ${toneOf(incident.state)}`,
    element("div", "row",
      element("h3", "", incident.fault.replaceAll("_", " ")), badge(incident.state),
      element("span", "", `${incident.nodes.join(", ") || "no single node"}${where}`),
      element("span", "quiet", `${incident.job}, attempt ${incident.attempt}`),
      element("span", "quiet end", `${clock(incident.detected)} · ${Math.round(incident.confidence * 100)}%`)),
    element("p", "summary", incident.summary));
  if (incident.escalated) card.append(element("p", "", `Look at it: ${incident.escalation}`));
  if (incident.hold) card.append(element("p", "quiet", `On hold: ${incident.hold}`));
  if (incident.merged_into) card.append(element("p", "quiet", `It is ${incident.merged_into}`));
  if (incident.split_from) card.append(element("p", "quiet", `Taken for ${incident.split_from} at first`));
  if (incident.flaps) {
    const told = incident.flapping ? ": its comings and goings are not told any more" : "";
    card.append(element("p", "quiet", `Came back ${incident.flaps} times${told}`));
  }
  if (incident.acknowledged_by) card.append(element("p", "quiet", `Seen by ${incident.acknowledged_by}`));
  if (incident.evidence.length) {
    const details = element("details", "", element("summary", "", `Evidence (${incident.evidence.length})`));
    details.dataset.key = incident.id;
    details.append(table(
      ["metric", "node", "device", "value", "peers' median", "threshold", "unit"],
      incident.evidence.map((item) => [
        item.metric, item.node, item.device, figure(item.value), figure(item.peers_median),
        figure(item.threshold), item.unit,
      ])));
    card.append(details);
  }
  return card;
}

function drawJob(job) {
  const progress = job.progress ?? {};
  return [
    job.job, figure(job.attempt), badge(job.state), figure(progress.step), ago(progress.progressed),
    progress.step_seconds ? `${number(progress.step_seconds)} s` : "",
    new Set(job.ranks.map((rank) => rank.node)).size || "", job.restart_owner,
  ];
}

function drawNode(node) {
  const agent = node.agent;
  const card = element(
    "article", `card ${toneOf(node.state)}`,
    element("div", "row", element("strong", "", node.node), badge(node.state)),
    element("p", "quiet", agent ? `heard ${ago(agent.heard)}` : "not heard since the server started"));
  if (agent?.job) card.append(element("p", "quiet", agent.job));
  if (node.reason) card.append(element("p", "", node.reason));
  for (const [collector, said] of Object.entries(agent?.troubles ?? {})) {
    if (said.startsWith("failed")) card.append(element("p", "quiet", `${collector}: ${said}`));
  }
  return card;
}

function drawAction(action) {
  const reports = action.reports.map((report) =>
    element("div", "", `${clock(report.time)} ${report.state}${report.detail ? `: ${report.detail}` : ""}`));
  return [
    time(action.created), action.kind.replaceAll("_", " "), badge(action.state), action.job,
    action.exclude.join(", "), action.fault.replaceAll("_", " "), element("div", "", ...reports),
  ];
}

function drawDelivery(delivery) {
  return [
    time(delivery.created), delivery.type.replace("eagle_eye.", ""), badge(delivery.state), figure(delivery.attempts),
    figure(delivery.last_status), delivery.last_error, delivery.subscription_id,
  ];
}

function newest(kind, field) {
  const all = [...records[kind].values()];
  all.sort((a, b) => (a[field] < b[field] ? 1 : a[field] > b[field] ? -1 : 0));
  return all.slice(0, KINDS[kind].shown);
}

function place(id, content, empty) {
  const unfolded = new Set([...byId(id).querySelectorAll("details[open]")].map((open) => open.dataset.key));
  byId(id).replaceChildren(...(content.length ? content : [element("p", "empty", empty)]));
  for (const details of byId(id).querySelectorAll("details")) details.open = unfolded.has(details.dataset.key);
}

function draw() {
  drawing = false;
  place("incidents", newest("incident", "detected").map(drawIncident), "No incidents.");
  const jobs = newest("job", "updated").map(drawJob);
  const jobTitles = ["job", "attempt", "state", "step", "progressed", "a step takes", "nodes", "restarted by"];
  place("jobs", jobs.length ? [table(jobTitles, jobs)] : [], "No jobs yet.");
  const nodes = [...records.node.values()].sort((a, b) => a.node.localeCompare(b.node, undefined, { numeric: true }));
  place("nodes", nodes.slice(0, KINDS.node.shown).map(drawNode), "No agent has sent anything yet.");
  const actions = newest("action", "created").map(drawAction);
  const actionTitles = ["asked", "kind", "state", "job", "exclude", "fault", "reports"];
  place("actions", actions.length ? [table(actionTitles, actions)] : [], "Nothing was asked of anyone.");
  const deliveries = newest("delivery", "created").map(drawDelivery);
  const deliveryTitles = ["since", "type", "state", "attempts", "status", "error", "subscription"];
  place("deliveries", deliveries.length ? [table(deliveryTitles, deliveries)] : [], "Nothing was sent.");
}

function redraw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(draw);
}

function headers() {
  const token = sessionStorage.getItem("token");
  return token ? { Authorization: `Bearer ${token}` } : {};
}

class SignIn extends Error {}

async function ask(path, more = {}) {
  const answer = await fetch(path, { headers: { ...headers(), ...more.headers }, cache: "no-store", signal: more.signal });
  if (answer.status === 401 || answer.status === 403) throw new SignIn();
  if (!answer.ok && !more.any) throw new Error(`HTTP ${answer.status}`);
  return answer;
}

async function load(kind) {
  const { list, key, shown } = KINDS[kind];
  const answer = await (await ask(`api/v1/${list}?limit=${shown}`)).json();
  records[kind] = new Map(answer.items.map((item) => [item[key], item]));
}

async function refresh() {
  try {
    const readiness = await (await ask("readyz", { any: true })).json();
    byId("ready").textContent = readiness.ready ? "watching" : "cannot judge";
    byId("ready").className = `badge ${readiness.ready ? "good" : "bad"}`;
    byId("ready-why").textContent = Object.values(readiness.checks).filter((said) => said !== "ok").join("; ");
    await Promise.all([load("job"), load("node")]);
    redraw();
  } catch (error) {
    if (error instanceof SignIn) return;
    byId("ready").textContent = "server not reached";
    byId("ready").className = "badge bad";
  }
}

function take(message) {
  const fields = {};
  for (const line of message.split("\n")) {
    const at = line.indexOf(": ");
    if (at > 0) fields[line.slice(0, at)] = line.slice(at + 2);
  }
  if (fields.id) lastEventId = fields.id;
  if (fields.event === "reset") return true;
  const kind = KINDS[fields.event];
  if (kind) {
    const record = JSON.parse(fields.data);
    records[fields.event].set(record[kind.key], record);
    redraw();
  }
  return false;
}

async function follow() {
  const resume = lastEventId === null ? {} : { "Last-Event-ID": lastEventId };
  const answer = await ask("api/v1/events", { headers: resume });
  byId("live").textContent = "live";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const messages = (rest + value).split("\n\n");
    rest = messages.pop();
    for (const message of messages) if (take(message)) await loadAll();
  }
}

async function loadAll() {
  await Promise.all(Object.keys(KINDS).map(load));
  redraw();
}

async function run() {
  for (;;) {
    try {
      // The stream is opened first and nothing is lost between the lists and it: what the lists show twice is harmless.
      const following = follow();
      following.catch(() => {}); // awaited below, unless the lists fail first
      await loadAll();
      byId("sign-in").hidden = true;
      byId("main").hidden = false;
      await following;
    } catch (error) {
      if (error instanceof SignIn) {
        byId("sign-in").hidden = false;
        byId("main").hidden = true;
        byId("live").textContent = "";
        return;
      }
    }
    byId("live").textContent = "connecting again";
    await new Promise((wake) => setTimeout(wake, RETRY_MS));
  }
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value.trim());
  byId("token").value = "";
  refresh();
  run();
});
setInterval(refresh, REFRESH_MS);
refresh();
run();
