"""What records hold, for type checkers; made by ``python -m tests.client.record_types`` of the server's own types.

They are plain dictionaries. Times are RFC 3339. A newer server may send more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class ActionDict(TypedDict):
    """``Action`` of /openapi.json."""

    id: str
    incident_id: str
    kind: str
    job: str
    attempt: int
    exclude: list[str]
    restart: bool
    fault: str
    confidence: float
    onset: str
    detected: str
    expires: str
    repair: str
    summary: str
    evidence: list[EvidenceItemDict]
    ranks: list[MemberRankDict]
    state: str
    node: str | None
    created: str
    updated: str
    reports: list[ReportOfActionDict]
    preliminary: bool
    resume_from: ResumeFromDict | None
    restart_scope: str | None
    reason: str
    report_to: str
    cell: NotRequired[str]


class AgentDict(TypedDict):
    """``Agent`` of /openapi.json."""

    heard: str
    job: str | None
    version: str
    boot_id: str
    interval_seconds: float
    clock_offset_seconds: float | None
    troubles: dict[str, str]
    dropped: dict[str, int]


class AuditEntryDict(TypedDict):
    """``AuditEntry`` of /openapi.json."""

    time: str
    who: str
    verb: str
    subject: str
    detail: str


class EvidenceDict(TypedDict):
    """``Evidence`` of /openapi.json."""

    id: str
    incident_id: str
    node: str
    job: str
    attempt: int
    kind: str
    state: str
    within_seconds: float
    asked_by: str
    created: str
    updated: str
    expires: str
    bytes: int
    sha256: str
    detail: str
    bundle: str | None


class EvidenceItemDict(TypedDict):
    """``EvidenceItem`` of /openapi.json."""

    metric: str
    node: str | None
    device: int | None
    value: float | str | None
    peers_median: NotRequired[float | None]
    threshold: NotRequired[float | None]
    unit: NotRequired[str]


class IncidentDict(TypedDict):
    """``Incident`` of /openapi.json."""

    id: str
    job: str
    attempt: int
    fault: str
    nodes: list[str]
    node: str | None
    device: int | None
    confidence: float
    state: str
    onset: str
    detected: str
    updated: str
    ended: str | None
    detectors: list[str]
    summary: str
    evidence: list[EvidenceItemDict]
    action: str
    family: str
    kinds: list[str]
    fact: bool
    slowdown_ratio: float
    asks: str
    application: bool
    seen: str
    hold: str
    hold_rule: str
    acknowledged_by: str
    since: str
    flaps: int
    flapping: bool
    merged: list[str]
    merged_into: str
    split_from: str
    escalation: str
    accused: list[str]
    escalated: bool
    cell: NotRequired[str]


class IncidentInFullDict(TypedDict):
    """``IncidentInFull`` of /openapi.json."""

    id: str
    job: str
    attempt: int
    fault: str
    nodes: list[str]
    node: str | None
    device: int | None
    confidence: float
    state: str
    onset: str
    detected: str
    updated: str
    ended: str | None
    detectors: list[str]
    summary: str
    evidence: list[EvidenceItemDict]
    action: str
    family: str
    kinds: list[str]
    fact: bool
    slowdown_ratio: float
    asks: str
    application: bool
    seen: str
    hold: str
    hold_rule: str
    acknowledged_by: str
    since: str
    flaps: int
    flapping: bool
    merged: list[str]
    merged_into: str
    split_from: str
    escalation: str
    accused: list[str]
    escalated: bool
    gathered: list[EvidenceDict]
    history: list[AuditEntryDict]
    silence: SilenceDict | None
    cell: NotRequired[str]


class JobDict(TypedDict):
    """``Job`` of /openapi.json."""

    job: str
    attempt: int
    state: str
    ranks: list[MemberRankDict]
    restart_owner: str
    updated: str
    source: str
    nodes: list[str]
    scheduled_as: str
    declared_state: str
    scheduled_state: str
    said: str
    since: str | None
    ends: str | None
    conflict: str
    owner: str
    held_up_by: list[int]
    pace_left_ratio: float | None
    exits: list[ReportedExitDict]
    nodes_total: int | None
    progress: ProgressDict | None
    cell: NotRequired[str]


class MemberRankDict(TypedDict):
    """``MemberRank`` of /openapi.json."""

    rank: int
    node: str
    device: int
    role: NotRequired[str]


class MemoryDict(TypedDict):
    """``Memory`` of /openapi.json."""

    incidents_30_days: int
    recurrence_score: float | None
    recurrent: bool
    recurrence_reason: str
    recurrence_signals: list[RecurrenceSignalDict]
    lemon_score: float | None
    lemon: bool
    lemon_reason: str
    lemon_signals: list[RecurrenceSignalDict]
    scored: str


class MemoryCheckpointDict(TypedDict):
    """``MemoryCheckpoint`` of /openapi.json."""

    step: int
    age_steps: float
    copies: int
    copies_wanted: int
    persisted_step: int | None


class NodeDict(TypedDict):
    """``Node`` of /openapi.json."""

    node: str
    state: str
    reason: str
    updated: str
    known_since: str | None
    by: str
    fault: str
    check_id: str
    watched_until: str | None
    relapsed: list[str]
    introduced_by: str
    cluster: str
    phase: str
    agent: AgentDict | None
    vouched: bool
    memory: MemoryDict | None
    cell: NotRequired[str | None]


class ProgressDict(TypedDict):
    """``Progress`` of /openapi.json."""

    step: float | None
    progressed: str | None
    step_seconds: float | None
    memory_checkpoint: MemoryCheckpointDict | None
    log: str


class RecurrenceSignalDict(TypedDict):
    """``RecurrenceSignal`` of /openapi.json."""

    signal: str
    value: float | None
    usual: float | None
    adds: float


class ReportOfActionDict(TypedDict):
    """``ReportOfAction`` of /openapi.json."""

    state: str
    detail: str
    who: str
    time: str
    claim: str
    epoch: int


class ReportedExitDict(TypedDict):
    """``ReportedExit`` of /openapi.json."""

    rank: int
    exit_code: int


class ResumeFromDict(TypedDict):
    """``ResumeFrom`` of /openapi.json."""

    step: int
    where: str
    nodes: list[str]


class SilenceDict(TypedDict):
    """``Silence`` of /openapi.json."""

    id: str
    state: str
    faults: list[str]
    jobs: list[str]
    nodes: list[str]
    reason: str
    by: str
    created: str
    until: str
    ended_by: str
    incidents: list[str]
