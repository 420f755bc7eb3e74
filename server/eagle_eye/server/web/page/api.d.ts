// What the API answers. Made by `python -m tests.page.api_types` of the server's own types; do not edit.
// Times are RFC 3339. Nothing of this is served.

export interface Accepted {
  accepted: number;
  duplicates: number;
  watermark: number;
  journal: string;
  spread_seconds?: number;
  resend_seconds?: number;
  requests?: Array<Record<string, any>>;
  unknown?: Array<string>;
}

export interface Account {
  wall: Amount;
  training: Amount;
  lost: Record<string, Amount>;
  unknown: Array<UnknownTime>;
  lost_gpu_seconds: number;
  ettr_ratio: number | null;
  goodput_ratio: number | null;
}

export interface Action {
  id: string;
  incident_id: string;
  kind: "checkpoint_now" | "drain_node" | "exclude_node" | "none" | "notify" | "restart_job";
  job: string;
  attempt: number;
  exclude: Array<string>;
  restart: boolean;
  fault: string;
  confidence: number;
  onset: string;
  detected: string;
  expires: string;
  repair: string;
  summary: string;
  evidence: Array<EvidenceItem>;
  ranks: Array<MemberRank>;
  state: "accepted" | "awaiting" | "done" | "expired" | "failed" | "refused" | "rejected" | "requested" | "running" | "withdrawn" | "would_act";
  node: string | null;
  created: string;
  updated: string;
  reports: Array<ReportOfAction>;
  preliminary: boolean;
  resume_from: ResumeFrom | null;
  restart_scope: "job" | "process_group" | "rank" | null;
  reason: string;
  report_to: string;
  cell?: string;
}

export interface ActionMark {
  id: string;
  kind: string;
  state: "accepted" | "awaiting" | "done" | "expired" | "failed" | "refused" | "rejected" | "requested" | "running" | "withdrawn" | "would_act";
  exclude: Array<string>;
  incident_id: string;
  created: string;
  updated: string;
}

export interface ActionPage {
  items: Array<Action>;
  next: string | null;
}

export interface ActionPreview {
  action_id: string;
  time: string;
  nodes: Array<string>;
  gpus: number | null;
  job: string;
  restart: boolean;
  job_nodes: number | null;
  job_gpus: number | null;
  confidence: number;
  budgets: Array<BudgetLeft>;
  heard: Array<HeardNode>;
  job_nodes_heard: number | null;
  job_nodes_known: number | null;
  progressed: string | null;
  carriers: Array<Carrier>;
  hold_now: string;
}

export interface Agent {
  heard: string;
  job: string | null;
  version: string;
  boot_id: string;
  interval_seconds: number;
  clock_offset_seconds: number | null;
  troubles: Record<string, string>;
  dropped: Record<string, number>;
}

export interface Alive {
  status: "up";
}

export interface Amount {
  seconds: number;
  gpu_seconds: number;
  seconds_without_gpu_count: number;
}

export interface Asked {
  action_id: string;
  created: string;
  kind: string;
  state: string;
  rules: Array<RuleWord>;
}

export interface AskedEvidence {
  items: Array<Evidence>;
}

export interface Attempt {
  id: string;
  run: string;
  attempt: number;
  state: string;
  started: string;
  ended: string | null;
  end: "" | "cancelled" | "failed" | "finished" | "gone" | "preempted" | "superseded" | "timeout";
  nodes: number;
  gpus: number | null;
  first_step: number | null;
  last_step: number | null;
  step_seconds: number | null;
}

export interface AuditEntry {
  time: string;
  who: string;
  verb: string;
  subject: string;
  detail: string;
}

export interface AuditEntryPage {
  items: Array<AuditEntry>;
  next: string | null;
}

export interface BudgetLeft {
  what: "exclusions" | "restarts";
  of: "fleet" | "job";
  left: number;
  limit: number;
  window_seconds: number | null;
}

export interface Carrier {
  subscription_id: string;
  url: string;
  failing_since: string | null;
  last_error: string;
}

export interface Cell {
  cell: string;
  url: string;
  epoch: number;
  leads: boolean;
  nodes: number;
  jobs: number;
  drained: boolean;
  problem: string;
  updated: string;
}

export interface CellMoves {
  cell: string;
  moved: Array<string>;
  stays: Array<string>;
}

export interface CellOfJob {
  job: string;
  cell: string;
}

export interface Cells {
  items: Array<Cell>;
}

export interface ChartColumns {
  time: Array<number>;
  accused: Array<number | string | null>;
  low: Array<number | string | null>;
  median: Array<number | string | null>;
  high: Array<number | string | null>;
  peers_seen: Array<number>;
}

export interface ChartPeers {
  nodes: number;
  nodes_total: number;
  series: number;
  said: string;
}

export interface CheckOutcome {
  name: string;
  state: "could_not_check" | "passed" | "sick";
  reason?: string;
  duration_s?: number;
  expected?: boolean;
  values?: Array<Figure>;
}

export interface Claim {
  action_id: string;
  incident_id: string;
  created: string;
  state: string;
  kind: string;
  job: string;
  attempt: number;
  node: string | null;
  exclude: Array<string>;
  cell?: string;
  standing: "cannot_tell" | "pending" | "right" | "wrong";
  time: string | null;
  fault: string;
  confidence: number;
  detectors: Array<string>;
  why: string;
  detail: string;
}

export interface Command {
  why: string;
  command: string;
  undo: string;
}

export interface Comparison {
  check_id: string;
  node: string;
  time: string;
  seconds: number;
  operations: number;
  wrong_numbers: number;
}

export interface Decision {
  kind: string;
  exclude: Array<string>;
  restart: boolean;
  mode: "act" | "approve" | "observe";
  first: string | null;
  hold: string;
  rule: string;
  notes: Array<string>;
}

export interface Delivery {
  id: string;
  event_id: string;
  subscription_id: string;
  type: string;
  state: "delivered" | "expired" | "failed" | "pending" | "silenced";
  attempts: number;
  due: string;
  group: string;
  sequence: number;
  expires: string | null;
  last_status: number | null;
  last_error: string;
  reason: string;
  created: string;
  updated: string;
}

export interface DeliveryInFull {
  id: string;
  event_id: string;
  subscription_id: string;
  type: string;
  state: "delivered" | "expired" | "failed" | "pending" | "silenced";
  attempts: number;
  due: string;
  group: string;
  sequence: number;
  expires: string | null;
  last_status: number | null;
  last_error: string;
  reason: string;
  created: string;
  updated: string;
  event: Event | null;
}

export interface DeliveryPage {
  items: Array<Delivery>;
  next: string | null;
}

export interface Dossier {
  incident: Incident;
  owner: string;
  aftermath: Array<string>;
  meaning: string;
  repair: string;
  mode: "act" | "approve" | "observe";
  carriers: Array<Carrier> | null;
  hold_now: string;
  silence: Silence | null;
  where: Array<Whereabouts>;
  where_left_out: number;
  commands: Array<Command>;
  actions: Array<Action>;
  gathered: Array<Evidence>;
  deliveries: Array<Delivery>;
  story: Array<StoryEntry>;
  story_left_out: number;
  cut: boolean;
  panels: Array<Panel>;
}

export interface DriverError {
  id: string;
  node: string;
  device: number;
  uuid: string;
  kind: string;
  code: number;
  count: number;
  first: string;
  last: string;
}

export interface EndedSessions {
  person: string;
  ended: string;
  by: string;
}

export interface Enrolled {
  id: string;
  node: string;
  token: string;
}

export interface Event {
  specversion: "1.0";
  id: string;
  source: string;
  type: string;
  subject: string;
  time: string;
  datacontenttype: string;
  data: Record<string, any>;
}

export interface Evidence {
  id: string;
  incident_id: string;
  node: string;
  job: string;
  attempt: number;
  kind: "bug_report" | "evidence";
  state: "asked" | "deleted" | "expired" | "failed" | "received";
  within_seconds: number;
  asked_by: string;
  created: string;
  updated: string;
  expires: string;
  bytes: number;
  sha256: string;
  detail: string;
  bundle: string | null;
}

export interface EvidenceItem {
  metric: string;
  node: string | null;
  device: number | null;
  value: number | string | null;
  peers_median?: number | null;
  threshold?: number | null;
  unit?: string;
}

export interface EvidencePage {
  items: Array<Evidence>;
  next: string | null;
}

export interface Explanation {
  incident_id: string;
  job: string;
  fault: string;
  state: string;
  hold: string;
  hold_rule: string;
  detail: string;
  decision: Decision | null;
  rules: Array<RuleWord>;
  asked: Array<Asked>;
}

export interface FaultStep {
  fault: string;
  mode: "act" | "approve" | "observe";
  where: string;
  kinds: Array<"checkpoint_now" | "drain_node" | "exclude_node" | "restart_job">;
  elsewhere: Array<ModeOfJobs>;
  right: number;
  wrong: number;
  pending: number;
  cannot_tell: number;
  approved: number;
  precision: number | null;
  interval_95: [number, number] | null;
  saved: GpuHours;
  cost: GpuHours;
  next: "act" | "approve" | "observe" | null;
  verdict: "acts" | "cannot_tell" | "falls_short" | "suffices";
  detail: string;
  toml: string;
  in_place_of: string;
}

export interface FaultSteps {
  since: string;
  window_seconds: number;
  decisions_min: number;
  approve_precision_min: number;
  act_precision_min: number;
  cut: boolean;
  items: Array<FaultStep>;
}

export interface Figure {
  name: string;
  value: number | null;
  unit?: string;
  device?: string;
  threshold?: number | null;
  source?: string;
}

export interface Fleet {
  time: string;
  jobs: Array<FleetJob>;
  jobs_left_out: number;
  nodes: number;
  nodes_heard: number;
  nodes_recent: number;
  policy_mode: "act" | "approve" | "observe";
  grafana_url: string;
  readiness: Readiness;
}

export interface FleetJob {
  cell?: string;
  job: string;
  attempt: number;
  state: string;
  owner: string;
  restart_owner: string;
  started: string;
  ends: string | null;
  nodes: number;
  nodes_heard: number;
  gpus: number | null;
  not_seen: Array<string>;
  step: number | null;
  progressed: string | null;
  step_seconds: number | null;
  incidents: number;
  loss: FleetLoss | null;
}

export interface FleetLoss {
  kind: "slow" | "stopped" | "unexplained";
  since: string;
  gpus: number | null;
  gpu_hours: number | null;
  incident_id: string;
  fault: string;
}

export interface ForgottenNodes {
  forgotten: Array<string>;
  kept: Array<KeptNode>;
}

export interface Goodput {
  since: string;
  until: string;
  by: "fault" | "job" | "node";
  items: Array<Record<string, any>>;
  left_out: number;
  cut: boolean;
  total: Account;
  next: null;
}

export interface GoodputSeries {
  time: Array<number>;
  step_seconds: number;
  trailing_seconds: number;
  value: Array<number | string | null>;
}

export interface Gpu {
  uuid: string;
  node: string;
  device: number;
  model: string;
  since: string;
  first_seen: string;
  seen: string;
  moves: Array<Seat>;
  moves_dropped: number;
  pci_address: string;
  serial: string;
  told_with: number;
  nvlinks: number | null;
  nvlinks_most: number;
}

export interface GpuChecks {
  uuid: string;
  checks: number;
  seconds: number;
  operations: number;
  wrong_numbers: number;
  first: string;
  last: string;
  newest: Array<Comparison>;
}

export interface GpuHours {
  gpu_seconds: number | null;
  cannot_tell: number;
}

export interface GpuInFull {
  uuid: string;
  node: string;
  device: number;
  model: string;
  since: string;
  first_seen: string;
  seen: string;
  moves: Array<Seat>;
  moves_dropped: number;
  pci_address: string;
  serial: string;
  told_with: number;
  nvlinks: number | null;
  nvlinks_most: number;
  driver_errors: Array<DriverError>;
  incidents: Array<Incident>;
  checks: GpuChecks | null;
}

export interface GpuPage {
  items: Array<Gpu>;
  next: string | null;
}

export interface HeardNode {
  node: string;
  heard: string | null;
}

export interface ImportedTickets {
  new: number;
  changed: number;
  unchanged: number;
  left_out_columns: Array<string>;
  unknown_nodes: Array<string>;
  unknown_nodes_count: number;
}

export interface Incident {
  id: string;
  job: string;
  attempt: number;
  fault: string;
  nodes: Array<string>;
  node: string | null;
  device: number | null;
  confidence: number;
  state: "acting" | "closed" | "confirmed" | "false" | "recovered" | "suspected";
  onset: string;
  detected: string;
  updated: string;
  ended: string | null;
  detectors: Array<string>;
  summary: string;
  evidence: Array<EvidenceItem>;
  action: "checkpoint_now" | "drain_node" | "exclude_node" | "none" | "notify" | "restart_job";
  family: string;
  kinds: Array<string>;
  fact: boolean;
  slowdown_ratio: number;
  asks: string;
  application: boolean;
  seen: string;
  hold: string;
  hold_rule: string;
  acknowledged_by: string;
  since: string;
  flaps: number;
  flapping: boolean;
  merged: Array<string>;
  merged_into: string;
  split_from: string;
  escalation: string;
  accused: Array<string>;
  escalated: boolean;
  cell?: string;
}

export interface IncidentChart {
  incident_id: string;
  metric: string;
  unit: string;
  form: "behind" | "bits" | "growth" | "value";
  evidence: string;
  node: string | null;
  device: number | null;
  threshold: number | null;
  shows: string;
  start: string;
  end: string;
  step_seconds: number;
  onset: string;
  detected: string;
  ended: string | null;
  name: string;
  accused: Array<string>;
  accused_series: number;
  peers: ChartPeers;
  columns: ChartColumns;
  silences: Array<SilentTime>;
  said: Array<string>;
  resolutions: Array<Resolution>;
}

export interface IncidentInFull {
  id: string;
  job: string;
  attempt: number;
  fault: string;
  nodes: Array<string>;
  node: string | null;
  device: number | null;
  confidence: number;
  state: "acting" | "closed" | "confirmed" | "false" | "recovered" | "suspected";
  onset: string;
  detected: string;
  updated: string;
  ended: string | null;
  detectors: Array<string>;
  summary: string;
  evidence: Array<EvidenceItem>;
  action: "checkpoint_now" | "drain_node" | "exclude_node" | "none" | "notify" | "restart_job";
  family: string;
  kinds: Array<string>;
  fact: boolean;
  slowdown_ratio: number;
  asks: string;
  application: boolean;
  seen: string;
  hold: string;
  hold_rule: string;
  acknowledged_by: string;
  since: string;
  flaps: number;
  flapping: boolean;
  merged: Array<string>;
  merged_into: string;
  split_from: string;
  escalation: string;
  accused: Array<string>;
  escalated: boolean;
  gathered: Array<Evidence>;
  history: Array<AuditEntry>;
  silence: Silence | null;
  cell?: string;
}

export interface IncidentMark {
  id: string;
  fault: string;
  node: string | null;
  nodes: Array<string>;
  attempt: number;
  state: "acting" | "closed" | "confirmed" | "false" | "recovered" | "suspected";
  onset: string;
  detected: string;
  ended: string | null;
  summary: string;
}

export interface IncidentPage {
  items: Array<Incident>;
  next: string | null;
}

export interface Job {
  job: string;
  attempt: number;
  state: string;
  ranks: Array<MemberRank>;
  restart_owner: string;
  updated: string;
  source: string;
  nodes: Array<string>;
  scheduled_as: string;
  declared_state: string;
  scheduled_state: string;
  said: string;
  since: string | null;
  ends: string | null;
  conflict: string;
  owner: string;
  held_up_by: Array<number>;
  pace_left_ratio: number | null;
  exits: Array<ReportedExit>;
  nodes_total: number | null;
  progress: Progress | null;
  cell?: string;
}

export interface JobCourse {
  job: string;
  start: string;
  end: string;
  attempts: Array<Attempt>;
  incidents: Array<IncidentMark>;
  actions: Array<ActionMark>;
  cut: boolean;
  nodes: number;
  nodes_read: number;
  series: JobSeries;
  parts: Array<TimePart>;
  resolutions: Array<Resolution>;
}

export interface JobPage {
  items: Array<Job>;
  next: string | null;
}

export interface JobSeries {
  step_seconds: SpreadSeries;
  loss: SpreadSeries;
  tokens_per_second: TotalSeries;
  goodput_ratio: GoodputSeries;
}

export interface JobTimeline {
  job: string;
  start: string;
  end: string;
  attempts: Array<Attempt>;
  incidents: Array<IncidentMark>;
  actions: Array<ActionMark>;
  cut: boolean;
  rows: Array<TimelineRow>;
  nodes: number;
  unknown: Array<string>;
}

export interface KeptNode {
  node: string;
  reason: string;
  detail: string;
}

export interface Leader {
  leads: boolean;
  leader: string;
  epoch: number;
  seen_since: string | null;
  problem: string;
  nodes_in_vain: number;
}

export interface Leading {
  leads: boolean;
  leader: string;
  epoch: number;
}

export interface Ledger {
  since: string;
  window_seconds: number;
  items: Array<Claim>;
  next: string | null;
  cut: boolean;
  total: Precision;
  by_fault: Record<string, Precision>;
  by_detector: Record<string, Precision>;
}

export interface Me {
  who: string;
  person: string;
  scope: "admin" | "agent" | "join" | "operate" | "read" | "remote_write";
  groups: Array<string>;
  session_ends: string | null;
  owners_only: boolean;
}

export interface MemberRank {
  rank: number;
  node: string;
  device: number;
  role?: string;
}

export interface Memory {
  incidents_30_days: number;
  recurrence_score: number | null;
  recurrent: boolean;
  recurrence_reason: string;
  recurrence_signals: Array<RecurrenceSignal>;
  lemon_score: number | null;
  lemon: boolean;
  lemon_reason: string;
  lemon_signals: Array<RecurrenceSignal>;
  scored: string;
}

export interface MemoryCheckpoint {
  step: number;
  age_steps: number;
  copies: number;
  copies_wanted: number;
  persisted_step: number | null;
}

export interface ModeOfJobs {
  where: string;
  jobs: Array<string>;
  kinds: Array<"checkpoint_now" | "drain_node" | "exclude_node" | "restart_job">;
  mode: "act" | "approve" | "observe";
}

export interface Node {
  node: string;
  state: "draining" | "excluded" | "in_service";
  reason: string;
  updated: string;
  known_since: string | null;
  by: string;
  fault: string;
  check_id: string;
  watched_until: string | null;
  relapsed: Array<string>;
  introduced_by: string;
  cluster: string;
  phase: "checking" | "draining" | "excluded" | "in_service" | "watched";
  agent: Agent | null;
  vouched: boolean;
  memory: Memory | null;
  cell?: string | null;
}

export interface NodeCheck {
  id: string;
  node: string;
  purpose: "idle" | "look" | "readmit";
  fault: string;
  state: "asked" | "cannot_tell" | "healthy" | "running" | "sick";
  asked_by: string;
  reason: string;
  checks: Array<string>;
  deadline_seconds: number;
  created: string;
  updated: string;
  expires: string;
  gemm_seconds: number;
  sdc_seconds: number;
  began: string | null;
  detail: string;
  outcomes: Array<CheckOutcome>;
}

export interface NodeCheckPage {
  items: Array<NodeCheck>;
  next: string | null;
}

export interface NodeHistory {
  node: string;
  state: "draining" | "excluded" | "in_service";
  memory: Memory;
  gpus: Array<Gpu>;
  gpu_checks: Array<GpuChecks>;
  items: Array<Record<string, any>>;
  next: string | null;
  cut: Array<string>;
}

export interface NodeMap {
  time: string;
  standings: Array<"accused" | "checking" | "draining" | "excluded" | "in_service" | "silent" | "suspected" | "unheard" | "watched">;
  jobs: Array<string>;
  racks: Array<string>;
  switches: Array<string>;
  nodes: Array<string>;
  standing: Array<number>;
  job: Array<number>;
  rack: Array<number>;
  switch: Array<number>;
  heard: Array<string | null> | null;
  recurrence_score: Array<number | null> | null;
  lemon_score: Array<number | null> | null;
  reasons: Record<string, string> | null;
  cells?: Array<string>;
  cell?: Array<number>;
}

export interface NodePage {
  items: Array<Node>;
  next: string | null;
}

export interface NvrxAttribution {
  mode: string;
  log_file: string;
  status: "completed" | "pending";
  result: NvrxResult;
  recommendation: NvrxRecommendation;
}

export interface NvrxLog {
  submitted: boolean;
  normalized_path: string;
  mode: string;
}

export interface NvrxRecommendation {
  action: "RESTART" | "STOP" | "UNKNOWN";
  reason: string;
  source: string;
}

export interface NvrxResult {
  module: string;
  state: string;
  result: string;
  result_id: string;
}

export interface Panel {
  metric: string;
  unit: string;
  form: "behind" | "bits" | "growth" | "value";
  evidence: string;
  node: string | null;
  device: number | null;
  threshold: number | null;
}

export interface Pinged {
  event_id: string;
}

export interface Precision {
  right: number;
  wrong: number;
  pending: number;
  cannot_tell: number;
  precision: number | null;
  interval_95: [number, number] | null;
}

export interface Progress {
  step: number | null;
  progressed: string | null;
  step_seconds: number | null;
  memory_checkpoint: MemoryCheckpoint | null;
  log: string;
}

export interface QueryRange {
  metric: string;
  unit: string;
  step_seconds: number;
  statistic: string;
  resolutions: Array<Resolution>;
  series: Array<Series>;
  sources: Array<Source>;
}

export interface Readiness {
  ready: boolean;
  checks: Record<string, string>;
  blind: Record<string, string>;
  notes: Record<string, string>;
}

export interface RecurrenceSignal {
  signal: string;
  value: number | null;
  usual: number | null;
  adds: number;
}

export interface Redelivered {
  redelivered: number;
  more: boolean;
}

export interface ReportOfAction {
  state: string;
  detail: string;
  who: string;
  time: string;
  claim: string;
  epoch: number;
}

export interface ReportedExit {
  rank: number;
  exit_code: number;
}

export interface Resolution {
  start: string;
  end: string;
  resolution_seconds: number | null;
}

export interface ResumeFrom {
  step: number;
  where: "memory" | "storage";
  nodes: Array<string>;
}

export interface ReturningNode {
  node: string;
  state: "draining" | "excluded" | "in_service";
  reason: string;
  updated: string;
  known_since: string | null;
  by: string;
  fault: string;
  check_id: string;
  watched_until: string | null;
  relapsed: Array<string>;
  introduced_by: string;
  cluster: string;
  phase: "checking" | "draining" | "excluded" | "in_service" | "watched";
  agent: Agent | null;
  vouched: boolean;
}

export interface RuleWord {
  rule: string;
  outcome: "changes" | "hold" | "not_applicable" | "pass";
  reason?: string;
  values?: Record<string, number | string | null>;
}

export interface Seat {
  node: string;
  device: number;
  since: string;
  until: string;
}

export interface Series {
  node: string;
  device: number | string | null;
  points: Array<[string, number | string]>;
}

export interface Silence {
  id: string;
  state: "active" | "ended";
  faults: Array<string>;
  jobs: Array<string>;
  nodes: Array<string>;
  reason: string;
  by: string;
  created: string;
  until: string;
  ended_by: string;
  incidents: Array<string>;
}

export interface SilencePage {
  items: Array<Silence>;
  next: string | null;
}

export interface SilentTime {
  start: string;
  end: string;
}

export interface Source {
  source: "embedded" | "remote_store";
  start: string;
  end: string;
  problem: string | null;
}

export interface SpreadSeries {
  time: Array<number>;
  step_seconds: number;
  low: Array<number | string | null>;
  median: Array<number | string | null>;
  high: Array<number | string | null>;
  ranks_seen: Array<number>;
  not_finite: Array<number>;
}

export interface StoryEntry {
  time: string;
  kind: "action" | "delivery" | "evidence" | "fault" | "incident" | "person" | "report";
  text: string;
  id: string;
  who: string;
}

export interface Subscription {
  id: string;
  url: string;
  format: "alertmanager" | "alertmanager_api" | "cloudevents";
  types: Array<string>;
  jobs: Array<string>;
  secrets: number;
  active: boolean;
  created: string;
  ended_reason: string;
  faults: Array<string>;
  matchers: Array<string>;
  retiring: Array<string>;
  health: SubscriptionHealth;
}

export interface SubscriptionHealth {
  delivered: string | null;
  failures: number;
  failing_since: string | null;
  last_status: number | null;
  last_error: string;
  pending: number;
}

export interface SubscriptionPage {
  items: Array<Subscription>;
  next: string | null;
}

export interface SubscriptionWithSecret {
  id: string;
  url: string;
  format: "alertmanager" | "alertmanager_api" | "cloudevents";
  types: Array<string>;
  jobs: Array<string>;
  secrets: number;
  active: boolean;
  created: string;
  ended_reason: string;
  faults: Array<string>;
  matchers: Array<string>;
  retiring: Array<string>;
  health: SubscriptionHealth;
  secret: string;
}

export interface Ticket {
  id: string;
  node: string;
  opened: string;
  closed: string | null;
  text: string;
  imported: string;
}

export interface TicketPage {
  items: Array<Ticket>;
  next: string | null;
}

export interface TimePart {
  start: string;
  end: string;
  part: "down" | "ending" | "redone" | "slow" | "startup" | "stopped" | "training" | "unknown";
  fault: string;
  node: string | null;
  incident_id: string | null;
  reason: string;
}

export interface TimelineBar {
  attempt_id: string;
  attempt: number;
  start: string;
  end: string;
  nodes: number;
}

export interface TimelineRow {
  label: string;
  nodes: Array<string>;
  size: number;
  ranks: Array<number> | null;
  bars: Array<TimelineBar>;
  incidents: Array<string>;
}

export interface TotalSeries {
  time: Array<number>;
  step_seconds: number;
  total: Array<number | string | null>;
}

export interface UnknownTime {
  reason: string;
  seconds: number;
  gpu_seconds: number;
  seconds_without_gpu_count: number;
}

export interface Whereabouts {
  node: string;
  accused: boolean;
  state: "draining" | "excluded" | "in_service" | null;
  phase: "checking" | "draining" | "excluded" | "in_service" | "watched" | null;
  reason: string;
  heard: string | null;
  rack: string | null;
  switch: string | null;
  device: number | null;
  gpus: Array<Gpu>;
  other_jobs: Array<string>;
}
