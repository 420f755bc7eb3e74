"""Types of the API's answers, from which /openapi.json is built and against which tests validate answers.

Most answers are records as ``views.plain`` shows them, so their types are derived from the records': a field added to a
record is described automatically. The others are declared here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import GenericAlias, MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from eagle_eye.server.accounts.goodput import By
from eagle_eye.server.accounts.trust import Sufficiency
from eagle_eye.server.api.nvrx import Recommendation
from eagle_eye.server.api.overview import Standing
from eagle_eye.server.charts.dossier import Kind
from eagle_eye.server.charts.plots import Form
from eagle_eye.server.engine.ledger import Phase
from eagle_eye.server.engine.settings import AskedKind, Mode
from eagle_eye.server.model import records
from eagle_eye.server.model import records as past

# Types are built from records as ``views.plain`` shows them, or from fields.

Time = Annotated[datetime, Meta(tz=True)]
Number = float | str  # JSON has no infinity: it is "+Inf" or "-Inf"
Named = dict[str, Any]


def shown(record: type[Struct], name: str = "", without: tuple[str, ...] = (), **more: Any) -> type[Struct]:
    """Return the type of ``views.plain`` of a record, without some fields and with others; all are required."""
    fields: dict[str, Any] = {}
    for field, hint in get_type_hints(record, include_extras=True).items():
        if field in without:
            continue
        if field.endswith("_s"):
            fields[field.removesuffix("_s")] = Time | None if type(None) in get_args(hint) else Time
        else:
            fields[field] = hint
    return made(name or record.__name__, **{**fields, **more})


def made(name: str, /, **fields: Any) -> type[Struct]:
    """Return the type of an object with exactly these fields, all required but those that may be UNSET."""
    given = [(field, hint, UNSET) if UnsetType in get_args(hint) else (field, hint) for field, hint in fields.items()]
    return msgspec.defstruct(name, given, forbid_unknown_fields=True, kw_only=True)


def many(item: Any) -> Any:
    """Return the type of a list."""
    return GenericAlias(list, (item,))


def page(item: type[Struct]) -> type[Struct]:
    """Return the type of a list's page; ``next`` is the cursor of the following one, null for none."""
    return made(f"{item.__name__}Page", items=many(item), next=str | None)


# Charts: an incident's chart and dossier, a job's progress and timeline. The types of records in a dossier are
# passed in: they are created with all other answers.

_PANEL: Named = {
    "metric": str,
    "unit": str,
    "form": Form,
    "evidence": str,
    "node": str | None,
    "device": int | None,
    "threshold": float | None,
}
_COLUMN = many(Number | None)
_COUNTS = many(int)
_TIMES: Named = {"time": many(float), "step_seconds": float}
Resolution = made("Resolution", start=Time, end=Time, resolution_seconds=float | None)
Panel = made("Panel", **_PANEL)
IncidentChart = made(
    "IncidentChart",
    incident_id=str,
    **_PANEL,
    shows=str,
    start=Time,
    end=Time,
    step_seconds=float,
    onset=Time,
    detected=Time,
    ended=Time | None,
    name=str,
    accused=list[str],
    accused_series=int,
    peers=made("ChartPeers", nodes=int, nodes_total=int, series=int, said=str),
    columns=made(
        "ChartColumns",
        time=many(float),
        accused=_COLUMN,
        low=_COLUMN,
        median=_COLUMN,
        high=_COLUMN,
        peers_seen=_COUNTS,
    ),
    silences=many(made("SilentTime", start=Time, end=Time)),
    said=list[str],
    resolutions=many(Resolution),
)
Command = made("Command", why=str, command=str, undo=str)
StoryEntry = made("StoryEntry", time=Time, kind=Kind, text=str, id=str, who=str)
Attempt = made(
    "Attempt",
    id=str,
    run=str,
    attempt=int,
    state=str,
    started=Time,
    ended=Time | None,
    end=past.AttemptEnd,
    nodes=int,
    gpus=int | None,
    first_step=float | None,
    last_step=float | None,
    step_seconds=float | None,
)
_MARKS: Named = {
    "job": str,
    "start": Time,
    "end": Time,
    "attempts": many(Attempt),
    "incidents": many(
        made(
            "IncidentMark",
            id=str,
            fault=str,
            node=str | None,
            nodes=list[str],
            attempt=int,
            state=records.IncidentState,
            onset=Time,
            detected=Time,
            ended=Time | None,
            summary=str,
        )
    ),
    "actions": many(
        made(
            "ActionMark",
            id=str,
            kind=str,
            state=records.ActionState,
            exclude=list[str],
            incident_id=str,
            created=Time,
            updated=Time,
        )
    ),
    "cut": bool,
}
_SPREAD = made(
    "SpreadSeries", **_TIMES, low=_COLUMN, median=_COLUMN, high=_COLUMN, ranks_seen=_COUNTS, not_finite=_COUNTS
)
TimePart = made(
    "TimePart",
    start=Time,
    end=Time,
    part=Literal["training", "slow", "startup", "redone", "stopped", "ending", "down", "unknown"],
    fault=str,
    node=str | None,
    incident_id=str | None,
    reason=str,
)
JobCourse = made(
    "JobCourse",
    **_MARKS,
    nodes=int,
    nodes_read=int,
    series=made(
        "JobSeries",
        step_seconds=_SPREAD,
        loss=_SPREAD,
        tokens_per_second=made("TotalSeries", **_TIMES, total=_COLUMN),
        goodput_ratio=made("GoodputSeries", **_TIMES, trailing_seconds=float, value=_COLUMN),
    ),
    parts=many(TimePart),
    resolutions=many(Resolution),
)
JobTimeline = made(
    "JobTimeline",
    **_MARKS,
    rows=many(
        made(
            "TimelineRow",
            label=str,
            nodes=list[str],
            size=int,
            ranks=list[int] | None,
            bars=many(made("TimelineBar", attempt_id=str, attempt=int, start=Time, end=Time, nodes=int)),
            incidents=list[str],
        )
    ),
    nodes=int,
    unknown=list[str],
)


def dossier(
    incident: type[Struct],
    action: type[Struct],
    evidence: type[Struct],
    delivery: type[Struct],
    gpu: type[Struct],
    phase: object,
    silence: type[Struct],
    carrier: type[Struct],
) -> type[Struct]:
    """Return the type of an incident's dossier."""
    where = made(
        "Whereabouts",
        node=str,
        accused=bool,
        state=records.NodeState | None,
        phase=phase | None,  # type: ignore[operator]
        reason=str,
        heard=Time | None,
        rack=str | None,
        switch=str | None,
        device=int | None,
        gpus=many(gpu),
        other_jobs=list[str],
    )
    return made(
        "Dossier",
        incident=incident,
        owner=str,
        aftermath=list[str],
        meaning=str,
        repair=str,
        mode=Mode,
        carriers=many(carrier) | None,
        hold_now=str,
        silence=silence | None,
        where=many(where),
        where_left_out=int,
        commands=many(Command),
        actions=many(action),
        gathered=many(evidence),
        deliveries=many(delivery),
        story=many(StoryEntry),
        story_left_out=int,
        cut=bool,
        panels=many(Panel),
    )


CHARTS: Mapping[tuple[str, str], type[Struct]] = {
    ("get", "/api/v1/incidents/{incident}/picture"): IncidentChart,
    ("get", "/api/v1/jobs/{job}/course"): JobCourse,
    ("get", "/api/v1/jobs/{job}/timeline"): JobTimeline,
}


# All other answers.

Silence = shown(records.NewsSilence, "Silence", incidents=list[str])
_OWN_BOOK = ("families", "held_by", "flap_times", "told_times", "untold", "escalated_s")

Evidence = shown(records.EvidenceRequest, "Evidence", bundle=str | None)
AuditEntry = shown(records.AuditEntry)
# Only where a site has several.
CellName = str | UnsetType
Incident = shown(records.Incident, without=_OWN_BOOK, escalated=bool, cell=CellName)
IncidentInFull = shown(
    records.Incident,
    "IncidentInFull",
    _OWN_BOOK,
    escalated=bool,
    gathered=many(Evidence),
    history=many(AuditEntry),
    silence=Silence | None,
    cell=CellName,
)
ReportOfAction = made("ReportOfAction", state=str, detail=str, who=str, time=Time, claim=str, epoch=int)
Action = shown(records.Action, without=("policy",), report_to=str, reports=many(ReportOfAction), cell=CellName)
Carrier = made("Carrier", subscription_id=str, url=str, failing_since=Time | None, last_error=str)
ActionPreview = made(
    "ActionPreview",
    action_id=str,
    time=Time,
    nodes=list[str],
    gpus=int | None,
    job=str,
    restart=bool,
    job_nodes=int | None,
    job_gpus=int | None,
    confidence=float,
    budgets=many(
        made(
            "BudgetLeft",
            what=Literal["exclusions", "restarts"],
            of=Literal["job", "fleet"],
            left=int,
            limit=int,
            window_seconds=float | None,
        )
    ),
    heard=many(made("HeardNode", node=str, heard=Time | None)),
    job_nodes_heard=int | None,
    job_nodes_known=int | None,
    progressed=Time | None,
    carriers=many(Carrier),
    hold_now=str,
)
NvrxLog = made("NvrxLog", submitted=bool, normalized_path=str, mode=str)
NvrxAttribution = made(
    "NvrxAttribution",
    mode=str,
    log_file=str,
    status=Literal["pending", "completed"],
    result=made("NvrxResult", module=str, state=str, result=str, result_id=str),
    recommendation=made("NvrxRecommendation", action=Recommendation, reason=str, source=str),
)
Decision = made(
    "Decision",
    kind=str,
    exclude=list[str],
    restart=bool,
    mode=Mode,
    first=str | None,
    hold=str,
    rule=str,
    notes=list[str],
)
Asked = made("Asked", action_id=str, created=Time, kind=str, state=str, rules=list[records.RuleWord])
Explanation = made(
    "Explanation",
    incident_id=str,
    job=str,
    fault=str,
    state=str,
    hold=str,
    hold_rule=str,
    detail=str,
    decision=Decision | None,
    rules=list[records.RuleWord],
    asked=many(Asked),
)
MemoryCheckpoint = made(
    "MemoryCheckpoint", step=int, age_steps=float, copies=int, copies_wanted=int, persisted_step=int | None
)
Progress = made(
    "Progress",
    step=float | None,
    progressed=Time | None,
    step_seconds=float | None,
    memory_checkpoint=MemoryCheckpoint | None,
    log=str,
)
Job = shown(records.Job, nodes_total=int | None, progress=Progress | None, cell=CellName)
Signal = made("RecurrenceSignal", signal=str, value=float | None, usual=float | None, adds=float)
Memory = made(
    "Memory",
    incidents_30_days=int,
    recurrence_score=float | None,
    recurrent=bool,
    recurrence_reason=str,
    recurrence_signals=many(Signal),
    lemon_score=float | None,
    lemon=bool,
    lemon_reason=str,
    lemon_signals=many(Signal),
    scored=Time,
)
Agent = made(
    "Agent",
    heard=Time,
    job=str | None,
    version=str,
    boot_id=str,
    interval_seconds=float,
    clock_offset_seconds=float | None,
    troubles=dict[str, str],
    dropped=dict[str, int],
)
_NODE: Named = {"phase": Phase, "relapsed": many(Time), "agent": Agent | None, "vouched": bool}
ReturningNode = shown(records.Node, "ReturningNode", **_NODE)
# Null: no cell hears the node.
Node = shown(records.Node, **_NODE, memory=Memory | None, cell=str | None | UnsetType)
KeptNode = made("KeptNode", node=str, reason=str, detail=str)
ForgottenNodes = made("ForgottenNodes", forgotten=list[str], kept=many(KeptNode))
NodeCheck = shown(records.NodeCheck, without=("run",))
Readiness = made("Readiness", ready=bool, checks=dict[str, str], blind=dict[str, str], notes=dict[str, str])
Leader = made("Leader", leads=bool, leader=str, epoch=int, seen_since=Time | None, problem=str, nodes_in_vain=int)
Cell = made(
    "Cell",
    cell=str,
    url=str,
    epoch=int,
    leads=bool,
    nodes=int,
    jobs=int,
    drained=bool,
    problem=str,
    updated=Time,
)
CellMoves = made("CellMoves", cell=str, moved=list[str], stays=list[str])
FleetLoss = made(
    "FleetLoss",
    kind=Literal["stopped", "slow", "unexplained"],
    since=Time,
    gpus=float | None,
    gpu_hours=float | None,
    incident_id=str,
    fault=str,
)
FleetJob = made(
    "FleetJob",
    cell=CellName,
    job=str,
    attempt=int,
    state=str,
    owner=str,
    restart_owner=str,
    started=Time,
    ends=Time | None,
    nodes=int,
    nodes_heard=int,
    gpus=int | None,
    not_seen=list[str],
    step=float | None,
    progressed=Time | None,
    step_seconds=float | None,
    incidents=int,
    loss=FleetLoss | None,
)
Fleet = made(
    "Fleet",
    time=Time,
    jobs=many(FleetJob),
    jobs_left_out=int,
    nodes=int,
    nodes_heard=int,
    nodes_recent=int,
    policy_mode=Mode,
    grafana_url=str,
    readiness=Readiness,
)
NodeMap = made(
    "NodeMap",
    time=Time,
    standings=many(Standing),
    jobs=list[str],
    racks=list[str],
    switches=list[str],
    nodes=list[str],
    standing=list[int],
    job=list[int],
    rack=list[int],
    switch=list[int],
    heard=GenericAlias(list, (Time | None,)) | None,
    recurrence_score=list[float | None] | None,
    lemon_score=list[float | None] | None,
    reasons=dict[str, str] | None,
    cells=list[str] | UnsetType,
    cell=list[int] | UnsetType,
)
Event = made(
    "Event",
    specversion=Literal["1.0"],
    id=str,
    source=str,
    type=str,
    subject=str,
    time=Time,
    datacontenttype=str,
    data=Named,
)
Delivery = shown(records.Delivery)
DeliveryInFull = shown(records.Delivery, "DeliveryInFull", event=Event | None)
Health = shown(records.SubscriptionHealth, without=("subscription_id",), pending=int)
_SUBSCRIPTION: Named = {"secrets": int, "retiring": many(Time), "health": Health}
Subscription = shown(records.Subscription, **_SUBSCRIPTION)
SubscriptionWithSecret = shown(records.Subscription, "SubscriptionWithSecret", **_SUBSCRIPTION, secret=str)
Seat = shown(past.Seat)
DriverError = shown(past.DriverError)
Gpu = shown(past.Gpu, moves=many(Seat))
Comparison = shown(past.Comparison)
GpuChecks = shown(past.GpuChecks, newest=many(Comparison))
GpuInFull = shown(
    past.Gpu,
    "GpuInFull",
    moves=many(Seat),
    driver_errors=many(DriverError),
    incidents=many(Incident),
    checks=GpuChecks | None,
)
Ticket = shown(past.Ticket)
Dossier = dossier(Incident, Action, Evidence, Delivery, Gpu, Phase, Silence, Carrier)
NodeHistory = made(
    "NodeHistory",
    node=str,
    state=records.NodeState,
    memory=Memory,
    gpus=many(Gpu),
    gpu_checks=many(GpuChecks),
    items=list[Named],  # a chapter's fields beside its time, kind, id and summary depend on its kind
    next=str | None,
    cut=list[str],
)
_AMOUNT: Named = {"seconds": float, "gpu_seconds": float, "seconds_without_gpu_count": float}
Amount = made("Amount", **_AMOUNT)
Unknown = made("UnknownTime", reason=str, **_AMOUNT)
_ACCOUNT: Named = {
    "wall": Amount,
    "training": Amount,
    "lost": GenericAlias(dict, (str, Amount)),
    "unknown": many(Unknown),
    "lost_gpu_seconds": float,
    "ettr_ratio": float | None,
    "goodput_ratio": float | None,
}
Goodput = made(
    "Goodput",
    since=Time,
    until=Time,
    by=By,
    items=list[Named],  # a job's account with its causes, or the losses caused by one node or fault
    left_out=int,
    cut=bool,
    total=made("Account", **_ACCOUNT),
    next=None,
)
_CLAIM: Named = {"fault": str, "confidence": float, "detectors": list[str], "why": str, "detail": str}
Claim = made(
    "Claim",
    action_id=str,
    incident_id=str,
    created=Time,
    state=str,
    kind=str,
    job=str,
    attempt=int,
    node=str | None,
    exclude=list[str],
    cell=CellName,
    standing=Literal["right", "wrong", "pending", "cannot_tell"],
    time=Time | None,
    **_CLAIM,
)
Precision = made(
    "Precision",
    right=int,
    wrong=int,
    pending=int,
    cannot_tell=int,
    precision=float | None,
    interval_95=tuple[float, float] | None,
)
Ledger = made(
    "Ledger",
    since=Time,
    window_seconds=float,
    items=many(Claim),
    next=str | None,
    cut=bool,
    total=Precision,
    by_fault=GenericAlias(dict, (str, Precision)),
    by_detector=GenericAlias(dict, (str, Precision)),
)
Hours = made("GpuHours", gpu_seconds=float | None, cannot_tell=int)
FaultStep = made(
    "FaultStep",
    fault=str,
    mode=Mode,
    where=str,
    kinds=list[AskedKind],
    elsewhere=many(made("ModeOfJobs", where=str, jobs=list[str], kinds=list[AskedKind], mode=Mode)),
    right=int,
    wrong=int,
    pending=int,
    cannot_tell=int,
    approved=int,
    precision=float | None,
    interval_95=tuple[float, float] | None,
    saved=Hours,
    cost=Hours,
    next=Mode | None,
    verdict=Sufficiency,
    detail=str,
    toml=str,
    in_place_of=str,
)
FaultSteps = made(
    "FaultSteps",
    since=Time,
    window_seconds=float,
    decisions_min=int,
    approve_precision_min=float,
    act_precision_min=float,
    cut=bool,
    items=many(FaultStep),
)
Imported = made(
    "ImportedTickets",
    new=int,
    changed=int,
    unchanged=int,
    left_out_columns=list[str],
    unknown_nodes=list[str],
    unknown_nodes_count=int,
)
Source = made("Source", source=Literal["embedded", "remote_store"], start=Time, end=Time, problem=str | None)
Series = made("Series", node=str, device=int | str | None, points=list[tuple[Time, Number]])
QueryRange = made(
    "QueryRange",
    metric=str,
    unit=str,
    step_seconds=float,
    statistic=str,
    resolutions=many(Resolution),
    series=many(Series),
    sources=many(Source),
)


class Accepted(Struct, forbid_unknown_fields=True):
    """What an agent is answered; the fields that may be absent are described in docs/reference/wire.md."""

    accepted: int
    duplicates: int
    watermark: int
    journal: str
    spread_seconds: float | UnsetType = UNSET
    resend_seconds: float | UnsetType = UNSET
    requests: list[Named] | UnsetType = UNSET
    unknown: list[str] | UnsetType = UNSET


# By method and path: the answer to a successful request. Those without a body, or with one that is not JSON, are
# in description.py.
ANSWERS: Mapping[tuple[str, str], type[Struct]] = MappingProxyType(
    {
        ("get", "/healthz"): made("Alive", status=Literal["up"]),
        ("get", "/leadz"): made("Leading", leads=bool, leader=str, epoch=int),
        ("get", "/readyz"): Readiness,
        ("get", "/api/v1/leader"): Leader,
        ("get", "/api/v1/cells"): made("Cells", items=many(Cell)),
        ("post", "/api/v1/cells/{cell}/jobs/{job}"): made("CellOfJob", job=str, cell=str),
        ("post", "/api/v1/cells/{cell}/drain"): CellMoves,
        ("post", "/api/v1/cells/{cell}/fill"): CellMoves,
        ("get", "/api/v1/me"): made(
            "Me", who=str, person=str, scope=records.Scope, groups=list[str], session_ends=Time | None, owners_only=bool
        ),
        ("post", "/api/v1/sessions/end"): shown(records.EndedSessions),
        ("get", "/api/v1/fleet"): Fleet,
        ("get", "/api/v1/fleet/nodes"): NodeMap,
        ("get", "/api/v1/jobs"): page(Job),
        ("get", "/api/v1/jobs/{job}"): Job,
        ("put", "/api/v1/jobs/{job}"): Job,
        ("put", "/api/v1/jobs/{job}/pace-left"): Job,
        ("get", "/api/v1/nodes"): page(Node),
        ("post", "/api/v1/nodes/forget"): ForgottenNodes,
        ("get", "/api/v1/nodes/{node}"): Node,
        ("post", "/api/v1/nodes/{node}/exclude"): Node,
        ("post", "/api/v1/nodes/{node}/drain"): Node,
        ("post", "/api/v1/nodes/{node}/readmit"): ReturningNode,
        ("get", "/api/v1/nodes/{node}/checks"): page(NodeCheck),
        ("post", "/api/v1/nodes/{node}/check"): NodeCheck,
        ("get", "/api/v1/node-checks/{check}"): NodeCheck,
        ("put", "/api/v1/node-checks/{check}"): NodeCheck,
        ("get", "/api/v1/nodes/{node}/history"): NodeHistory,
        ("get", "/api/v1/gpus"): page(Gpu),
        ("get", "/api/v1/gpus/{gpu_uuid}"): GpuInFull,
        ("get", "/api/v1/incidents"): page(Incident),
        ("get", "/api/v1/incidents/{incident}"): IncidentInFull,
        ("get", "/api/v1/incidents/{incident}/policy"): Explanation,
        ("get", "/api/v1/incidents/{incident}/dossier"): Dossier,
        ("post", "/api/v1/incidents/{incident}/acknowledge"): Incident,
        ("post", "/api/v1/incidents/{incident}/resolve"): Incident,
        ("post", "/api/v1/incidents/{incident}/false"): Incident,
        ("post", "/api/v1/incidents/{incident}/evidence"): made("AskedEvidence", items=many(Evidence)),
        ("get", "/api/v1/evidence"): page(Evidence),
        ("get", "/api/v1/evidence/{evidence}"): Evidence,
        ("put", "/api/v1/evidence/{evidence}"): Evidence,
        ("get", "/api/v1/actions"): page(Action),
        ("get", "/api/v1/actions/{action}"): Action,
        ("get", "/api/v1/actions/{action}/preview"): ActionPreview,
        ("post", "/api/v1/actions/{action}/withdraw"): Action,
        ("post", "/api/v1/actions/{action}/renew"): Action,
        ("post", "/api/v1/actions/{action}/reports"): Action,
        ("post", "/api/v1/actions/{action}/approve"): Action,
        ("post", "/api/v1/actions/{action}/reject"): Action,
        ("get", "/api/v1/deliveries"): page(Delivery),
        ("get", "/api/v1/deliveries/{delivery}"): DeliveryInFull,
        ("post", "/api/v1/deliveries/{delivery}/redeliver"): Delivery,
        ("get", "/api/v1/subscriptions"): page(Subscription),
        ("get", "/api/v1/subscriptions/{subscription}"): Subscription,
        ("post", "/api/v1/subscriptions"): SubscriptionWithSecret,
        ("patch", "/api/v1/subscriptions/{subscription}"): Subscription,
        ("post", "/api/v1/subscriptions/{subscription}/ping"): made("Pinged", event_id=str),
        ("post", "/api/v1/subscriptions/{subscription}/rotate"): SubscriptionWithSecret,
        ("post", "/api/v1/subscriptions/{subscription}/redeliver"): made("Redelivered", redelivered=int, more=bool),
        ("get", "/api/v1/silences"): page(Silence),
        ("get", "/api/v1/silences/{silence}"): Silence,
        ("post", "/api/v1/silences"): Silence,
        ("post", "/api/v1/silences/{silence}/end"): Silence,
        ("post", "/api/v1/frames"): Accepted,
        ("post", "/api/v1/enrol"): made("Enrolled", id=str, node=str, token=str),
        ("get", "/api/v1/goodput"): Goodput,
        ("get", "/api/v1/ledger"): Ledger,
        ("get", "/api/v1/ledger/steps"): FaultSteps,
        ("get", "/api/v1/tickets"): page(Ticket),
        ("post", "/api/v1/tickets"): Imported,
        ("get", "/api/v1/audit"): page(AuditEntry),
        ("get", "/api/v1/query_range"): QueryRange,
        ("post", "/api/v1/nvrx/logs"): NvrxLog,
        ("post", "/api/v1/nvrx/{job}/logs"): NvrxLog,
        ("get", "/api/v1/nvrx/logs"): NvrxAttribution,
        ("get", "/api/v1/nvrx/{job}/logs"): NvrxAttribution,
        **CHARTS,
    }
)


def schemas(reference: str) -> tuple[dict[tuple[str, str], Any], dict[str, Any]]:
    """Return the schema of each answer, and the components that they refer to by ``reference`` ("…/{name}")."""
    found, components = msgspec.json.schema_components(ANSWERS.values(), ref_template=reference)
    return dict(zip(ANSWERS, found, strict=True)), components
