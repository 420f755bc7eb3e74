"""The records that the server keeps: incidents, actions, deliveries, subscriptions, tokens, jobs, nodes.

All times are Unix seconds on the server's clock (``_s``); the API turns them into RFC 3339. Records are
immutable: a change is a new record under the same id.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from eagle_eye.schema.action import ActionKind, EvidenceItem, MemberRank

IncidentState = Literal["open", "acting", "recovered", "closed", "false"]
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
NodeState = Literal["in_service", "excluded", "draining"]
EvidenceKind = Literal["evidence", "bug_report"]
EvidenceState = Literal["asked", "received", "failed", "expired", "deleted"]
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
    the rule that held.
    ``acknowledged_by`` is a person or "".
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
    acknowledged_by: str = ""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something asked of the subscribers because of an incident; ``reports`` keeps every answer, oldest first.

    ``preliminary`` marks a checkpoint that is asked for before the incident's own action. ``policy`` is what the rules
    said when it was asked for, without those that had nothing to judge.
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
    created_s: float = 0.0
    updated_s: float = 0.0


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """Where events go. ``types`` and ``jobs`` filter ([]: all).

    ``secrets`` sign, newest first; they leave the server once, when they are made. ``ended_reason`` says why an
    inactive one is.
    """

    id: str
    url: str
    format: Literal["cloudevents"]
    types: list[str]
    jobs: list[str]
    secrets: list[str]
    active: bool
    created_s: float
    ended_reason: str = ""


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A bearer token, kept only as the SHA-256 of its text; an agent's is bound to ``node``.

    A remote-write token speaks for nodes whose names match one of ``nodes``.
    A join token buys agents' tokens: for nodes whose names match one of ``nodes`` (glob patterns, empty: any), and,
    with ``replaces``, also for those that have one already, which is revoked then.
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


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its scheduler or launcher described it last."""

    job: str
    attempt: int
    state: str
    ranks: list[MemberRank]
    restart_owner: str
    updated_s: float


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node's standing in the fleet; ``reason`` names the incident or person behind it."""

    node: str
    state: NodeState
    reason: str
    updated_s: float


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
