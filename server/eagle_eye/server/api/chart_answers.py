"""Types of the answers about charts: an incident's chart and dossier, a job's progress and timeline.

The types of records in them are passed in: they are created with all other answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from eagle_eye.server.api.shapes import Named, Number, Time, made, many
from eagle_eye.server.charts.drawing import Form
from eagle_eye.server.charts.story import Kind
from eagle_eye.server.engine.settings import Mode
from eagle_eye.server.model import account_records as past
from eagle_eye.server.model import records

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
