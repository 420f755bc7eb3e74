"""The records that the server keeps: incidents, actions, deliveries, subscriptions, tokens, jobs, nodes.

All times are Unix seconds on the server's clock (``_s``); the API shows RFC 3339. A change is a new record of one id.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from eagle_eye.schema.action import ActionKind, EvidenceItem, MemberRank, RestartScope, ResumeFrom

# suspected: too little evidence to act on; confirmed: enough; acting: something was asked for; recovered: gone for now;
# closed: over for good, or merged into another; false: a false alarm, on a person's word.
IncidentState = Literal["suspected", "confirmed", "acting", "recovered", "closed", "false"]
# would_act: observe mode kept it; awaiting: approve mode, nobody answered yet.
ActionState = Literal[
    "would_act",
    "awaiting",
    "requested",
    "accepted",
    "running",
    "done",
    "failed",
    "refused",
    "rejected",
    "expired",
    "withdrawn",
]
DeliveryState = Literal["pending", "delivered", "failed", "expired"]
# A CloudEvent; what Alertmanager sends to its webhooks; what Alertmanager itself is sent.
WebhookFormat = Literal["cloudevents", "alertmanager", "alertmanager_api"]
NodeState = Literal["in_service", "excluded", "draining"]
EvidenceKind = Literal["evidence", "bug_report"]
EvidenceState = Literal["asked", "received", "failed", "expired", "deleted"]
# asked: not yet taken up; running: begun. The others are the three answers.
NodeCheckState = Literal["asked", "running", "healthy", "sick", "cannot_tell"]
NodeCheckPurpose = Literal["readmit", "look", "idle"]  # its return once it has passed, curiosity, between jobs
Scope = Literal["agent", "remote_write", "join", "read", "operate", "admin"]
# What a rule of policy did: nothing, held the action or made it less, altered it, or it had nothing to judge.
Outcome = Literal["pass", "hold", "changes", "not_applicable"]


class RuleWord(msgspec.Struct, frozen=True):
    """One rule's word on one incident: its stable name, a sentence for people, and the values it weighed."""

    rule: str
    outcome: Outcome
    reason: str = ""
    values: dict[str, float | str | None] = {}


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of trouble in one attempt of a job, however many detectors and symptoms it has.

    ``family`` is what kinds of trouble it stands for, so that later symptoms find it. ``kinds``, ``fact``,
    ``slowdown_ratio``, ``asks`` ("" the fault's default) and ``application`` are those of the verdict. ``seen_s`` is
    when a verdict last supported it. ``hold`` says why policy has not acted on it, "" when it has; ``hold_rule`` names
    the rule that held, ``held_by`` all rules that ever did. ``acknowledged_by`` is a person or "".

    ``since_s`` is when it was opened or came back last. ``flaps`` counts how often it came back, ``flap_times`` when of
    late, ``flapping`` whether that is so often that nobody is told any more. ``merged`` are the incidents that turned
    out to be this one, ``families`` theirs; ``merged_into`` the one that this turned out to be, ``split_from`` the one
    that it was taken for, each "" for none. ``escalation`` says why people have to look at it, "" while they need not,
    and ``escalated_s`` since when. ``told_times`` is when subscribers heard of changes of late, ``untold`` whether one
    was kept from them. ``accused`` are the nodes that it has named, the latest last.
    """

    id: str
    job: str
    attempt: int
    fault: str
    nodes: list[str]
    node: str | None
    device: int | None
    confidence: float
    state: IncidentState
    onset_s: float
    detected_s: float
    updated_s: float
    ended_s: float | None
    detectors: list[str]
    summary: str
    evidence: list[EvidenceItem]
    action: ActionKind
    family: str = ""
    kinds: list[str] = []
    fact: bool = False
    slowdown_ratio: float = 0.0
    asks: str = ""
    application: bool = False
    seen_s: float = 0.0
    hold: str = ""
    hold_rule: str = ""
    held_by: list[str] = []
    acknowledged_by: str = ""
    since_s: float = 0.0
    flaps: int = 0
    flap_times: list[float] = []
    flapping: bool = False
    merged: list[str] = []
    families: list[str] = []
    merged_into: str = ""
    split_from: str = ""
    escalation: str = ""
    escalated_s: float | None = None
    told_times: list[float] = []
    accused: list[str] = []
    untold: bool = False


def is_of_a_stop(family: str) -> bool:
    """Return whether what is of the family stops the job: "stop", or "stop:" and a node whose GPU failed beside it."""
    return family.partition(":")[0] == "stop"


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something asked of the subscribers because of an incident; ``reports`` keeps every answer, oldest first.

    ``preliminary`` marks a checkpoint before the incident's own action. ``policy`` is what the rules with something to
    judge said at first, ``resume_from`` where the job could go on then, ``restart_scope`` the smallest restart that is
    safe. ``reason`` is why it was taken back, or "".
    """

    id: str
    incident_id: str
    kind: ActionKind
    job: str
    attempt: int
    exclude: list[str]
    restart: bool
    fault: str
    confidence: float
    onset_s: float
    detected_s: float
    expires_s: float
    repair: str
    summary: str
    evidence: list[EvidenceItem]
    ranks: list[MemberRank]
    state: ActionState
    node: str | None = None  # the one accused, whether or not it is to be excluded
    created_s: float
    updated_s: float
    reports: list[dict[str, Any]] = []
    preliminary: bool = False
    policy: list[RuleWord] = []
    resume_from: ResumeFrom | None = None
    restart_scope: RestartScope | None = None
    reason: str = ""


class OutboundEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A CloudEvent that subscribers are to get. ``group`` (an incident's id) orders deliveries; ``sequence``
    is assigned by the store and grows; ``expires_s`` None: never stale.
    """  # noqa: D205 - one thought

    id: str
    type: str
    subject: str
    job: str
    time_s: float
    group: str
    data: dict[str, Any]
    expires_s: float | None = None
    sequence: int = 0


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One event on its way to one subscription; ``attempts`` were made, the next one is due at ``due_s``.

    ``reason`` is why it failed or expired, in one stable word; "" while it is pending and once it is delivered.
    ``group``, ``sequence`` and ``expires_s`` are the event's. Within a subscription, the deliveries of one group
    go out in the order of ``sequence``; group "" is bound to no order.
    """

    id: str
    event_id: str
    subscription_id: str
    type: str
    state: DeliveryState
    attempts: int
    due_s: float
    group: str = ""
    sequence: int = 0
    expires_s: float | None = None
    last_status: int | None = None
    last_error: str = ""
    reason: str = ""
    created_s: float = 0.0
    updated_s: float = 0.0


class Retiring(msgspec.Struct, frozen=True):
    """A signing secret that was replaced; it signs beside the new one until ``until_s``."""

    secret: str
    until_s: float


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """Where events go. ``types``, ``jobs``, ``faults`` and ``matchers`` filter ([]: all); see ``filters``.

    ``secrets`` sign, newest first, as do those that retire; they leave the server once, when they are made.
    ``ended_reason`` says why an inactive one is; one without secrets was deleted and stays so.
    """

    id: str
    url: str
    format: WebhookFormat
    types: list[str]
    jobs: list[str]
    secrets: list[str]
    active: bool
    created_s: float
    ended_reason: str = ""
    faults: list[str] = []
    matchers: list[str] = []
    retiring: list[Retiring] = []


class SubscriptionHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How deliveries to one subscription fare; ``failures`` are the attempts that failed since the last success.

    ``delivered_s`` is when something last arrived, ``failing_since_s`` when the first of the ``failures`` was; None:
    never, or not failing. ``last_status`` and ``last_error`` are those of the last attempt.
    """

    subscription_id: str
    delivered_s: float | None = None
    failures: int = 0
    failing_since_s: float | None = None
    last_status: int | None = None
    last_error: str = ""


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A bearer token, kept only as the SHA-256 of its text; an agent's is bound to ``node``.

    A remote-write token speaks for nodes whose names match one of ``nodes``, of which it may name ``nodes_max`` that
    nobody vouches for (None: the setting's). A join token buys agents' tokens: for nodes whose names match (empty:
    any), and, with ``replaces``, also for those that have one already, which is revoked then.
    """

    id: str
    sha256: str
    scope: Scope
    node: str | None
    created_s: float
    expires_s: float | None = None
    revoked: bool = False
    nodes: list[str] = []
    replaces: bool = False
    nodes_max: int | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its launcher or scheduler described it last.

    ``source`` is whose word its attempt and members are: "launcher", or a scheduler's name. ``nodes`` are its members
    where the source knows nodes and no ranks. ``scheduled_as`` is the scheduler's job that it is or runs in
    ("slurm:17"), "" where no scheduler knows it. ``state`` is what follows from ``declared_state``, the launcher's
    word, and ``scheduled_state``, the scheduler's, each "" where there is none; ``said`` is the latter in the
    scheduler's own words. ``since_s`` is when the state began to be known, ``ends_s`` when its time limit ends it,
    None where nobody said. ``conflict`` is in what launcher, scheduler and agents differ, "" where they do not.
    ``owner`` is the user whose job it is, by the launcher's word before the scheduler's, "" where nobody said.
    ``held_up_by`` are the ranks that keep the attempt from its first step, and ``pace_left_ratio`` what is left of its
    pace without one of its nodes, None where a spare takes its place or nobody said: both by its launcher's word.
    """

    job: str
    attempt: int
    state: str
    ranks: list[MemberRank]
    restart_owner: str
    updated_s: float
    source: str = "launcher"
    nodes: list[str] = []
    scheduled_as: str = ""
    declared_state: str = ""
    scheduled_state: str = ""
    said: str = ""
    since_s: float | None = None
    ends_s: float | None = None
    conflict: str = ""
    owner: str = ""
    held_up_by: list[int] = []
    pace_left_ratio: float | None = None


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node's standing in the fleet; ``reason`` names the incident or person behind it.

    ``by`` is whose word it is: "server" for an action of ours, else a token's id, "local", or a scheduler's name; ""
    on records from before it was kept. ``fault`` is what took the node out, "" where a person did; once the node is
    back it is what the node is watched for until ``watched_until_s``. ``check_id`` is the check that its return waits
    for, "" for none. ``relapsed`` are the latest times at which it went out again while it was watched.
    ``introduced_by`` is the remote-write token that named it while nobody vouched for it, "" for none.
    """

    node: str
    state: NodeState
    reason: str
    updated_s: float
    known_since_s: float | None = None  # None: from before it was kept
    by: str = ""
    fault: str = ""
    check_id: str = ""
    watched_until_s: float | None = None
    relapsed: list[float] = []
    introduced_by: str = ""


class ForgottenNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was forgotten then: what the history heard of it before makes it known no more."""

    node: str
    forgotten_s: float


class Figure(msgspec.Struct, frozen=True):
    """One figure of a check; ``value`` None: it was not finite, ``threshold`` None: it judges nothing."""

    name: str
    value: float | None
    unit: str = ""
    device: str = ""
    threshold: float | None = None
    source: str = ""


class CheckOutcome(msgspec.Struct, frozen=True):
    """What one check of a report says."""

    name: str
    state: Literal["passed", "sick", "could_not_check"]
    reason: str = ""
    duration_s: float = 0.0
    expected: bool = True
    values: list[Figure] = []


class NodeCheck(msgspec.Struct, frozen=True, kw_only=True):
    """An active check that a node's agent was asked to make, and what came of it.

    ``fault`` is what it is to rule out, "" for nothing in particular; ``checks`` names what is run, [] for everything;
    ``gemm_seconds``, ``sdc_seconds`` 0: as they like. ``expires_s`` is when it counts as not answered. ``run`` is the
    agent's mark of its run, ``detail`` the answer's reason. ``outcomes`` are the report's, [] for none or an old one.
    """

    id: str
    node: str
    purpose: NodeCheckPurpose
    fault: str
    state: NodeCheckState
    asked_by: str
    reason: str
    checks: list[str]
    deadline_seconds: float
    created_s: float
    updated_s: float
    expires_s: float
    gemm_seconds: float = 0.0
    sdc_seconds: float = 0.0
    began_s: float | None = None
    run: str = ""
    detail: str = ""
    outcomes: list[CheckOutcome] = []


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What one node's agent was asked to gather because of an incident, and what became of it.

    ``within_seconds`` is how long it may take, ``expires_s`` until when the request is handed out. ``bytes`` and
    ``sha256`` are the bundle's once it is received; ``detail`` says why there is none. ``asked_by`` is a token's id,
    "local" or "server". The id is unguessable.
    """

    id: str
    incident_id: str
    node: str
    job: str
    attempt: int
    kind: EvidenceKind
    state: EvidenceState
    within_seconds: float
    asked_by: str
    created_s: float
    updated_s: float
    expires_s: float
    bytes: int = 0
    sha256: str = ""
    detail: str = ""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what to which record; ``who`` is a token's id, "local" without tokens, or "server". Never changed."""

    time_s: float
    who: str
    verb: str
    subject: str
    detail: str = ""
