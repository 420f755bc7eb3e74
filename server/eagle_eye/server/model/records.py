"""The records that the server keeps: incidents, actions, deliveries, subscriptions, tokens, jobs, nodes, accounts.

All times are Unix seconds on the server's clock (``_s``); the API shows RFC 3339. A change is a new record of one id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from eagle_eye.schema.action import ActionKind, EvidenceItem, MemberRank, ReportedExit, RestartScope, ResumeFrom

# suspected: too little evidence to act; confirmed: enough; acting: an action was requested; recovered: gone for now;
# closed: over for good, or merged into another; false: marked as a false alarm by a person.
IncidentState = Literal["suspected", "confirmed", "acting", "recovered", "closed", "false"]
# would_act: held by observe mode; awaiting: approve mode, not answered yet.
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
DeliveryState = Literal["pending", "delivered", "failed", "expired", "silenced"]
# ended: its time is over, and what it withheld and still goes on has been sent.
SilenceState = Literal["active", "ended"]
# A CloudEvent; the body Alertmanager posts to webhooks; alerts for Alertmanager itself.
WebhookFormat = Literal["cloudevents", "alertmanager", "alertmanager_api"]
NodeState = Literal["in_service", "excluded", "draining"]
EvidenceKind = Literal["evidence", "bug_report"]
EvidenceState = Literal["asked", "received", "failed", "expired", "deleted"]
# asked: not yet started; running: started. The others are the three results.
NodeCheckState = Literal["asked", "running", "healthy", "sick", "cannot_tell"]
NodeCheckPurpose = Literal["readmit", "look", "idle"]  # its return after a pass, a look, between jobs
Scope = Literal["agent", "remote_write", "join", "read", "operate", "admin"]
# The effect of a policy rule: none, held or reduced the action, changed it, or not applicable.
Outcome = Literal["pass", "hold", "changes", "not_applicable"]


class RuleWord(msgspec.Struct, frozen=True):
    """One rule's word on one incident: its stable name, a sentence for people, and the values it weighed."""

    rule: str
    outcome: Outcome
    reason: str = ""
    values: dict[str, float | str | None] = {}


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of trouble in one attempt of a job, however many detectors and symptoms it has.

    ``family`` groups kinds of trouble, so that later symptoms are matched to it. ``kinds``, ``fact``,
    ``slowdown_ratio``, ``asks`` ("" the fault's default) and ``application`` are those of the verdict. ``seen_s`` is
    when a verdict last supported it. ``hold`` says why policy has not acted on it, "" when it has; ``hold_rule`` names
    the rule that held, ``held_by`` all rules that ever did. ``acknowledged_by`` is a person or "".

    ``since_s`` is when it was opened or last returned. ``flaps`` counts its returns, ``flap_times`` are the recent
    ones, and ``flapping`` says whether they are so frequent that notifications stop. ``merged`` are the incidents that
    turned out to be this one, ``families`` theirs; ``merged_into`` the one that this turned out to be, ``split_from``
    the one that it was taken for, each "" for none. ``escalation`` says why people have to look at it, "" if they need
    not, and ``escalated_s`` since when. ``told_times`` are the recent times at which subscribers were notified of
    changes, ``untold`` whether a notification was held back. ``accused`` are the nodes that it has named, the latest
    last.
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
    """Return whether this family stops the job: "stop", or "stop:" with a node whose GPU failed at the same time."""
    return family.partition(":")[0] == "stop"


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the subscribers because of an incident; ``reports`` keeps every answer, oldest first.

    ``preliminary`` marks a checkpoint before the incident's own action. ``policy`` has the results of the applicable
    rules at the time of the request, ``resume_from`` where the job could resume then, ``restart_scope`` the smallest
    safe restart. ``reason`` is why it was withdrawn, or "".
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
    """A CloudEvent for subscribers; ``group`` (an incident's id) orders deliveries.

    ``sequence`` is assigned by the store and increases; ``expires_s`` None: never stale.
    """

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
    """The delivery of one event to one subscription; ``attempts`` were made, the next one is due at ``due_s``.

    ``reason`` is why it failed or expired, in one stable word; "" while it is pending and once it is delivered.
    ``group``, ``sequence`` and ``expires_s`` are the event's. Within a subscription, the deliveries of one group go out
    in the order of ``sequence``; group "" has no order.
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
    """A destination for events. ``types``, ``jobs``, ``faults`` and ``matchers`` filter ([]: all); see ``filters``.

    ``secrets`` sign, newest first, as do those that retire; they leave the server once, when they are created.
    ``ended_reason`` says why an inactive one is inactive; one without secrets was deleted permanently.
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
    """The health of deliveries to one subscription; ``failures`` counts the failed attempts since the last success.

    ``delivered_s`` is when something was last delivered, ``failing_since_s`` when the first of the ``failures`` was;
    None: never, or not failing. ``last_status`` and ``last_error`` are those of the last attempt.
    """

    subscription_id: str
    delivered_s: float | None = None
    failures: int = 0
    failing_since_s: float | None = None
    last_status: int | None = None
    last_error: str = ""


class NewsSilence(msgspec.Struct, frozen=True, kw_only=True):
    """For a time people get no news of incidents of these ``faults``, ``jobs`` and ``nodes`` ([]: any).

    ``jobs`` and ``nodes`` are globs. Actions, records, metrics and the page go on. ``by`` made it; ``ended_by`` ended
    it before its time, at ``until_s``, "" for nobody.
    """

    id: str
    state: SilenceState
    faults: list[str]
    jobs: list[str]
    nodes: list[str]
    reason: str
    by: str
    created_s: float
    until_s: float
    ended_by: str = ""


class EndedSessions(msgspec.Struct, frozen=True, kw_only=True):
    """A person's sessions that had begun by ``ended_s`` are over, whatever their cookies say; ``by`` ended them."""

    person: str
    ended_s: float
    by: str


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A bearer token, stored only as the SHA-256 of its text; an agent's is bound to ``node``.

    A remote-write token covers nodes whose names match one of ``nodes``, of which it may name ``nodes_max`` unvouched
    ones (None: the setting's). A join token creates agents' tokens: for nodes whose names match (empty: any), and, with
    ``replaces``, also for those that already have one, which is then revoked.
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
    """A job as its launcher or scheduler last described it.

    ``source`` is the source of its attempt and members: "launcher", or a scheduler's name. ``nodes`` are its members
    where the source knows nodes and no ranks. ``scheduled_as`` is the scheduler's job that it is or runs in
    ("slurm:17"), "" if no scheduler knows it. ``state`` follows from ``declared_state``, the launcher's, and
    ``scheduled_state``, the scheduler's, each "" if there is none; ``said`` is the latter in the scheduler's own words.
    ``since_s`` is when the state was first known, ``ends_s`` when its time limit ends it, None if unknown. ``conflict``
    describes how launcher, scheduler and agents disagree, "" if they do not. ``owner`` is the job's user, from the
    launcher before the scheduler, "" if unknown. ``held_up_by`` are the ranks that keep the attempt from its first
    step, ``pace_left_ratio`` is the remaining pace without one of its nodes, None if a spare replaces it or it is
    unknown, and ``exits`` are ranks that a signal ended, or that exited with 0 before the others: all reported by its
    launcher.
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
    exits: list[ReportedExit] = []


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node's standing in the fleet; ``reason`` names the incident or person behind it.

    ``by`` is who set it: "server" for an action of ours, else a token's id, "local", or a scheduler's name; "" on older
    records. ``fault`` is what took the node out, "" if a person did; once the node is back it is what the node is
    watched for until ``watched_until_s``. ``check_id`` is the check that its return waits for, "" for none.
    ``relapsed`` are the latest times at which it went out again while it was watched. ``introduced_by`` is the
    remote-write token that named it while it was not vouched for, "" for none. ``cluster`` is the one that series named
    for this site's own nodes when it became known, "" for none.
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
    cluster: str = ""


class CellStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A cell as the server that leads it last said: where it is, how many nodes it hears and jobs it judges.

    ``nodes`` are those that somebody vouches for. ``drained``: it is given no new jobs. ``problem`` says why it cannot
    judge, "" if it can. Written every few seconds while there are several cells: one that is silent for longer has no
    leader.
    """

    cell: str
    url: str
    epoch: int
    nodes: int
    jobs: int
    problem: str
    updated_s: float
    drained: bool = False


class JobCell(msgspec.Struct, frozen=True, kw_only=True):
    """The cell that judges a job. A job without such a record is the default cell's.

    ``nodes`` is how many the job had when it was last said, ``by`` who gave it to the cell ("server", or a person) at
    ``since_s``. ``over_s`` is when the job ended, None while it goes on.
    """

    job: str
    cell: str
    nodes: int
    since_s: float
    by: str
    over_s: float | None = None


class ForgottenNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was forgotten at this time: earlier history does not make it known again."""

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
    """An active check that a node's agent was asked to run, and its result.

    ``fault`` is what it is to rule out, "" for nothing in particular; ``checks`` names what is run, [] for everything;
    ``gemm_seconds``, ``sdc_seconds`` 0: the checks' defaults. ``expires_s`` is when it counts as unanswered. ``run`` is
    the agent's id of its run, ``detail`` the answer's reason. ``outcomes`` are the report's, [] for none or an old one.
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


class EvidenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence that one node's agent was asked to gather because of an incident, and the result.

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


# Accounting: attempts of jobs, GPUs and their seats, driver errors, repair tickets.

# How an attempt ended, as far as reported. "": it is open. superseded: the next attempt began. gone: its agents no
# longer report it, and no reason is known.
AttemptEnd = Literal["", "finished", "failed", "cancelled", "preempted", "timeout", "superseded", "gone"]


class Gap(msgspec.Struct, frozen=True):
    """A time in which an attempt was not observed: the server was down, or none of its nodes was heard."""

    start_s: float
    end_s: float


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a job, from when it was first declared or seen to its end.

    ``run`` is the id of the first attempt of the same run: a job that starts again after it finished or was cancelled
    begins another run. ``nodes`` and ``gpus`` count its members; ``gpus`` are device rows, so local ranks where there
    are no GPUs, and None while unknown. ``node`` is the only one, "" with several. ``first_step`` is the first step,
    ``first_step_s`` when it ended; ``last_step_s`` when the newest one did: all None before the first. ``prior_step``
    is the highest step of the run before this attempt (None: none), ``caught_up_s`` when this attempt passed it (None:
    not yet). ``step_s`` is the typical duration of a step. ``seen_s`` is when it was last observed. If there are too
    many ``gaps`` the two nearest are merged.
    """

    id: str
    run: str
    job: str
    attempt: int
    started_s: float
    seen_s: float
    state: str = "running"
    declared: bool = False
    nodes: int = 0
    node: str = ""
    gpus: int | None = None
    first_step: float | None = None
    first_step_s: float | None = None
    last_step: float | None = None
    last_step_s: float | None = None
    step_s: float | None = None
    prior_step: float | None = None
    caught_up_s: float | None = None
    gaps: list[Gap] = []
    ended_s: float | None = None
    end: AttemptEnd = ""


class AttemptMembers(msgspec.Struct, frozen=True, kw_only=True):
    """The members of an attempt; ``id`` is the attempt's. A separate record because it is long and seldom changes."""

    id: str
    job: str
    started_s: float
    nodes: list[str]


class Seat(msgspec.Struct, frozen=True):
    """Where a GPU was, from the first report of it there until it was reported elsewhere."""

    node: str
    device: int
    since_s: float
    until_s: float


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU by its UUID, and its seat; ``moves`` are its earlier seats, oldest first.

    ``seen_s`` is when an agent last reported it. ``moves_dropped`` counts the oldest seats, which are no longer kept.
    ``pci_address`` is its address on its node's bus, ``serial`` the serial number of its board; "" if unknown.
    ``told_with`` is the number of GPUs, including itself, in its node's report then; 0 if unknown. ``nvlinks`` were up
    then (None: unknown), and ``nvlinks_most`` is the maximum in its current seat.
    """

    uuid: str
    node: str
    device: int
    model: str
    since_s: float
    first_seen_s: float
    seen_s: float
    moves: list[Seat] = []
    moves_dropped: int = 0
    pci_address: str = ""
    serial: str = ""
    told_with: int = 0
    nvlinks: int | None = None
    nvlinks_most: int = 0

    @property
    def moved(self) -> int:
        """1 if it has moved, else 0."""
        return int(bool(self.moves))


class Comparison(msgspec.Struct, frozen=True):
    """The result of one check for silent corruption of a GPU, on the node where it was then."""

    check_id: str
    node: str
    time_s: float
    seconds: float
    operations: float
    wrong_numbers: float


class GpuChecks(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of one GPU for silent corruption, in whatever seat; ``newest`` are the last of them, oldest first.

    Of those with wrong numbers the newest are kept longest. A passed check says nothing beyond its operations.
    """

    uuid: str
    checks: int
    seconds: float
    operations: float
    wrong_numbers: float
    first_s: float
    last_s: float
    newest: list[Comparison] = []


class DriverError(msgspec.Struct, frozen=True, kw_only=True):
    """How often one error code was reported for one device of a node; ``kind`` is xid or sxid.

    ``uuid`` is that of the GPU there at the time, "" if unknown or for the whole node (``device`` -1).
    """

    id: str
    node: str
    device: int
    uuid: str
    kind: str
    code: int
    count: int
    first_s: float
    last_s: float


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A repair ticket of the site's own system; ``id`` is that system's. ``closed_s`` None: still open."""

    id: str
    node: str
    opened_s: float
    closed_s: float | None
    text: str
    imported_s: float


class Watched(msgspec.Struct, frozen=True):
    """A device with samples since ``since_s``; ``code`` is the value of its last-error gauge.

    ``time_s`` is when that value was first seen; both None: no such gauge was seen. Unix seconds of the samples.
    ``gauges`` has the same of gauges that state other facts, by name: when its value was first seen, and the value.
    ``uuid`` is the GPU's, "" if its series do not say: what was seen of one GPU says nothing about another.
    """

    since_s: float
    time_s: float | None = None
    code: float | None = None
    uuid: str = ""
    gauges: dict[str, tuple[float, float]] = {}

    def last(self, gauge: str) -> tuple[float | None, float | None]:
        """Return when the gauge's last value was first seen, and the value; "": the last-error gauge."""
        return self.gauges.get(gauge, (None, None)) if gauge else (self.time_s, self.code)


class LastCodes(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one node."""

    node: str
    devices: dict[int, Watched] = {}


# The ids of actions and incidents: made from what they are about, so that a record that was lost gets the same again.

ID_DIGITS = 16
IDS_AT_ONCE = 32  # ids that are looked up together at most


class WantedAction(NamedTuple):
    """What an action asks for: those of the same attempt, kind and nodes are told apart by their number alone."""

    job: str
    attempt: int
    kind: ActionKind
    nodes: Sequence[str]


class OpenedIncident(NamedTuple):
    """What an incident is about: those of the same attempt and family are told apart by their number alone."""

    job: str
    attempt: int
    family: str


Derived = WantedAction | OpenedIncident


def derived_id(salt: str, what: Derived, number: int) -> str:
    """Return the id of what comes after so many of the same. ``salt`` is the records' own."""
    if isinstance(what, WantedAction):
        prefix, said = "act", [what.job, what.attempt, what.kind, sorted(what.nodes)]
    else:
        prefix, said = "inc", [what.job, what.attempt, what.family]
    digest = hashlib.sha256(json.dumps([salt, *said, number]).encode()).hexdigest()
    return f"{prefix}_{digest[:ID_DIGITS]}"


def new_id(salt: str, what: Derived, missing: Callable[[Sequence[str]], Sequence[str]]) -> str:
    """Return the id of what is to be made now; ``missing`` returns those of the ids that no record has.

    Each earlier one of the same, whatever became of it, has a number. A record that was lost had the same number.
    """
    first, together = 0, 1  # nearly always there was none before
    while True:
        found = missing([derived_id(salt, what, first + number) for number in range(together)])
        if found:
            return found[0]
        first, together = first + together, min(2 * together, IDS_AT_ONCE)
