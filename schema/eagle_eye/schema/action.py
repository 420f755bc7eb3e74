"""Messages between server and subscribers: action requests, reports and job updates."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

ActionKind = Literal["exclude_node", "restart_job", "drain_node", "checkpoint_now", "notify", "none"]
RestartScope = Literal["process_group", "rank", "job"]
ReportState = Literal["accepted", "running", "done", "failed", "refused"]

EPOCH_MAX = 1 << 62
# With 409: the highest epoch that a subscriber has seen, which refuses an event for its lower one.
EPOCH_HEADER = "Eagle-Eye-Epoch"
LEASE_SECONDS_MAX = 3_600.0
CLAIM_CHARACTERS_MAX = 128

INCIDENT_OPENED = "eagle_eye.incident.opened"
INCIDENT_UPDATED = "eagle_eye.incident.updated"
INCIDENT_RESOLVED = "eagle_eye.incident.resolved"
ACTION_REQUESTED = "eagle_eye.action.requested"
ACTION_EXPIRED = "eagle_eye.action.expired"
ACTION_WITHDRAWN = "eagle_eye.action.withdrawn"
NODE_READMITTED = "eagle_eye.node.readmitted"
HEARTBEAT = "eagle_eye.heartbeat"
PING = "eagle_eye.ping"

EVENT_TYPES = (
    INCIDENT_OPENED,
    INCIDENT_UPDATED,
    INCIDENT_RESOLVED,
    ACTION_REQUESTED,
    ACTION_EXPIRED,
    ACTION_WITHDRAWN,
    NODE_READMITTED,
    HEARTBEAT,
    PING,
)


class EvidenceItem(msgspec.Struct, frozen=True):
    """One observation that a person can check; ``peers_median`` and ``threshold`` are null where none applies."""

    metric: str
    node: str | None
    device: int | None
    value: float | str | None
    peers_median: float | None = None
    threshold: float | None = None
    unit: str = ""


class MemberRank(msgspec.Struct, frozen=True):
    """Where a rank of the job runs; ``role`` groups comparable ranks."""

    rank: int
    node: str
    device: int
    role: str = ""


class ResumeFrom(msgspec.Struct, frozen=True):
    """The newest step from which the job can go on, and where it is; ``nodes`` hold its copies in memory."""

    step: int
    where: Literal["memory", "storage"]
    nodes: list[str]


class ActionRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ``data`` of an ``eagle_eye.action.requested`` event. Times are RFC 3339.

    A subscriber refuses it after ``expires`` and if ``attempt`` is older than the job's own. ``onset`` is when the
    fault began: after a fault of loss or data, a checkpoint written later must not be trusted. ``resume_from`` is
    present if the server knows a trustworthy step to resume from. ``restart_scope``, for actions that restart, is the
    smallest safe restart: ``process_group`` renews the communicators of the surviving processes, ``rank`` ends the
    culprit's processes first, ``job`` renews every process. ``epoch`` rises with each change of the server that leads,
    0 where there is only one: a subscriber refuses an action with a lower one than it has seen. Where nobody answers a
    claim for two times ``lease_seconds``, no other server leads.
    """

    action_id: str
    kind: ActionKind
    job: str
    attempt: int
    exclude: list[str]
    restart: bool
    fault: str
    confidence: float
    onset: str
    detected: str
    expires: str
    incident_id: str
    repair: str
    summary: str
    evidence: list[EvidenceItem]
    ranks: list[MemberRank]
    report_to: str
    resume_from: ResumeFrom | None = None
    restart_scope: RestartScope | None = None
    epoch: int = 0
    lease_seconds: Annotated[float, msgspec.Meta(ge=0, le=LEASE_SECONDS_MAX)] = 0.0


class Report(msgspec.Struct, frozen=True):
    """A subscriber's word on an action; ``detail`` is free text for people."""

    state: ReportState
    detail: str = ""


class ActionClaim(Report, frozen=True):
    """A report; with ``claim`` the word ``accepted`` asks whether the subscriber of that name may begin.

    It is told no (409) if the action is over, withdrawn or another's. ``epoch`` is the one that the action came with.
    """

    claim: Annotated[str, msgspec.Meta(max_length=CLAIM_CHARACTERS_MAX)] = ""
    epoch: Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)] = 0


class PaceLeft(msgspec.Struct, frozen=True):
    """What is left of a job's pace without one of its nodes, from whoever restarts it by plan; as of JobUpdate."""

    pace_left_ratio: float | None


class ReportedExit(msgspec.Struct, frozen=True):
    """How a rank's process ended, as its parent saw it: ``exit_code`` is negative for a signal."""

    rank: int
    exit_code: int


class JobUpdate(msgspec.Struct, frozen=True):
    """A job's state from whoever schedules it.

    ``state`` is one of running, completing, cancelled, preempted, timeout, maintenance, failed, finished.
    ``ranks`` is the membership of ``attempt``. ``restart_owner`` names who restarts the job, ``owner`` whose it is: a
    user's name, "" where the sender cannot tell. ``held_up_by`` are the ranks that keep the attempt from its first
    step: stopped, not come to the rendezvous long after the others, or ended because they did not reach them.
    ``pace_left_ratio`` is what is left of the job's pace without one of its nodes, whose place no spare takes: 0 where
    it could not run. None: a spare takes it, or nobody knows. ``exits`` are ranks of the attempt that a signal ended,
    or that exited with 0 while others went on: agents may have seen nothing of them.
    """

    attempt: int
    state: str
    ranks: list[MemberRank] = []
    restart_owner: str = ""
    owner: str = ""
    held_up_by: list[int] = []
    pace_left_ratio: float | None = None
    exits: list[ReportedExit] = []
