"""A job's past as contiguous spans: how each moment was spent, and for what cause. Pure.

Every second between the start of a run's first attempt and the end of its last one is in exactly one span, so that sums
over spans add up to the total.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.server.accounts.attempts import UNWATCHED_S
from eagle_eye.server.model.account_records import Attempt
from eagle_eye.server.model.records import Incident, is_of_a_stop

# training: steps beyond earlier progress; startup: until the first step; redone: steps repeated; stopped: no step,
# because of trouble; ending: after the last step of an attempt that ended as intended; down: between two attempts of
# a run; unknown.
Part = Literal["training", "startup", "redone", "stopped", "ending", "down", "unknown"]

LATE_STEPS = 3.0  # for this many typical steps after the last one the next is not yet overdue
LATE_FLOOR_S = 60.0
CAUSE_LATE_S = 60.0  # an incident detected this long after an attempt's end can still be its cause
MEANT_ENDS = frozenset({"finished", "cancelled", "preempted", "timeout"})

NO_STEP = "no step was seen: without steps it is unknown what the time was spent on"
NOT_WATCHED = "nobody watched: the server was down, or none of the job's nodes was heard"
STANDSTILL = "no step since then, and no incident says why"
FIRST_START = "start"  # the fault of a run's first start-up, which has no culprit
UNEXPLAINED = "unexplained"


class LossCause(NamedTuple):
    """Why time was lost: a fault of ours, or a reason for the attempt's end; ``node`` "": none, or several."""

    fault: str
    node: str = ""
    incident_id: str = ""


class TimelineSpan(NamedTuple):
    """How a period was spent; ``slow_ratio`` is the share of it lost to slowness, 0 except in training.

    ``cause`` is None where nothing was lost. ``gpus`` None: unknown number. ``stepping``: a step of the run was seen.
    """

    start_s: float
    end_s: float
    part: Part
    attempt_id: str
    gpus: int | None
    cause: LossCause | None = None
    reason: str = ""
    slow_ratio: float = 0.0
    stepping: bool = True

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_s - self.start_s


def timeline(attempts: Iterable[Attempt], incidents: Iterable[Incident], now_s: float) -> list[TimelineSpan]:
    """Return the spans of one job's attempts up to ``now_s``, in order; ``incidents`` are the job's, in any order.

    False alarms and incidents merged into others explain nothing.
    """
    reported: dict[int, list[Incident]] = defaultdict(list)
    for incident in sorted(incidents, key=lambda i: i.onset_s):
        if incident.state != "false" and not incident.merged_into:
            reported[incident.attempt].append(incident)
    ordered = sorted(attempts, key=lambda a: (a.started_s, a.attempt))
    spans: list[TimelineSpan] = []
    for _, group in groupby(ordered, key=lambda a: a.run):
        run = list(group)
        stepping = any(a.first_step_s is not None for a in run)
        for at, attempt in enumerate(run):
            before = run[at - 1] if at else None
            following = run[at + 1].started_s if at + 1 < len(run) else None
            cause = LossCause(FIRST_START) if before is None else cause_of_end(before, reported[before.attempt])
            mine = [i for i in reported[attempt.attempt] if _within(i, attempt, now_s)]
            spans += [span._replace(stepping=stepping) for span in _of_attempt(attempt, mine, cause, stepping, now_s)]
            ended_s = attempt.ended_s
            if ended_s is not None and following is not None and following > ended_s:
                why = cause_of_end(attempt, reported[attempt.attempt])
                spans.append(TimelineSpan(ended_s, following, "down", attempt.id, attempt.gpus, why, stepping=stepping))
    return spans


def cause_of_end(attempt: Attempt, incidents: Iterable[Incident]) -> LossCause:
    """Return what ended the attempt: its number's last incident that stops jobs, else the scheduler's reason."""
    if attempt.end in ("preempted", "timeout"):
        return LossCause(attempt.end)
    ended_s = attempt.ended_s if attempt.ended_s is not None else float("inf")
    guilty = [
        i
        for i in incidents
        if attempt.started_s - CAUSE_LATE_S <= i.onset_s <= ended_s + CAUSE_LATE_S and _ends_attempts(i)
    ]
    if guilty:
        return _cause(max(guilty, key=lambda i: (stops_jobs(i), i.detected_s)))
    return LossCause(attempt.end if attempt.end == "failed" else UNEXPLAINED)


def _of_attempt(
    attempt: Attempt, incidents: Sequence[Incident], cause: LossCause, stepping: bool, now_s: float
) -> list[TimelineSpan]:
    """Return one attempt's spans: its phases, overlaid with the incidents and the gaps."""
    start_s = attempt.started_s
    end_s = max(start_s, now_s if attempt.ended_s is None else min(attempt.ended_s, now_s))
    phases = _phases(attempt, incidents, cause, stepping, end_s)
    unwatched = [(gap.start_s, gap.end_s) for gap in attempt.gaps]
    if end_s - attempt.seen_s > UNWATCHED_S:
        unwatched.append((attempt.seen_s, end_s))
    overlays = [(i, *_extent(i, end_s)) for i in incidents]
    moments = {start_s, end_s}
    edges = [edge for phase in phases for edge in phase[:2]]
    edges += [edge for _, since_s, until_s in overlays for edge in (since_s, until_s)]
    edges += [edge for gap in unwatched for edge in gap]
    moments.update(edge for edge in edges if start_s < edge < end_s)
    spans: list[TimelineSpan] = []
    for since_s, until_s in pairwise(sorted(moments)):
        phase = next(p for p in phases if p.start_s <= since_s < p.end_s)
        if any(a <= since_s < b for a, b in unwatched):
            span = TimelineSpan(since_s, until_s, "unknown", attempt.id, attempt.gpus, reason=NOT_WATCHED)
        else:
            there = [i for i, a, b in overlays if a <= since_s < b]
            span = _laid_over(phase._replace(start_s=since_s, end_s=until_s), there)
        if spans and spans[-1]._replace(end_s=until_s) == span._replace(start_s=spans[-1].start_s):
            spans[-1] = spans[-1]._replace(end_s=until_s)
        else:
            spans.append(span)
    return spans


def _phases(
    attempt: Attempt, incidents: Sequence[Incident], cause: LossCause, stepping: bool, end_s: float
) -> list[TimelineSpan]:
    """Return the phases according to the attempt's own steps, contiguous from its start to ``end_s``."""

    def phase(
        since_s: float, until_s: float, part: Part, why: LossCause | None = None, reason: str = ""
    ) -> TimelineSpan:
        return TimelineSpan(since_s, until_s, part, attempt.id, attempt.gpus, why, reason)

    start_s = attempt.started_s
    if attempt.first_step_s is None or attempt.last_step_s is None:
        if stepping:
            return [phase(start_s, end_s, "startup", cause)]
        return [phase(start_s, end_s, "unknown", None, NO_STEP)]
    first_s = min(max(attempt.first_step_s, start_s), end_s)
    last_s = min(max(attempt.last_step_s, first_s), end_s)
    fresh_s = first_s  # from here on steps were new
    if attempt.prior_step is not None:
        fresh_s = last_s if attempt.caught_up_s is None else min(max(attempt.caught_up_s, first_s), last_s)
    found = [
        phase(start_s, first_s, "startup", cause),
        phase(first_s, fresh_s, "redone", cause),
        phase(fresh_s, last_s, "training"),
    ]
    if attempt.ended_s is None:
        # The next step is in progress, and counts like the last one.
        due_s = min(end_s, last_s + max(LATE_FLOOR_S, LATE_STEPS * (attempt.step_s or 0.0)))
        under_way: Part = "training" if fresh_s < last_s or attempt.prior_step is None else "redone"
        if attempt.state != "running":
            found.append(phase(last_s, end_s, "ending"))
        elif end_s <= due_s:
            found.append(phase(last_s, end_s, under_way, cause if under_way == "redone" else None))
        else:
            found.append(phase(last_s, end_s, "unknown", None, STANDSTILL))
    elif attempt.end in MEANT_ENDS or (attempt.end == "gone" and not any(stops_jobs(i) for i in incidents)):
        found.append(phase(last_s, end_s, "ending", LossCause(attempt.end)))
    else:
        found.append(phase(last_s, end_s, "stopped", cause_of_end(attempt, incidents)))
    return [p for p in found if p.end_s > p.start_s] or [phase(start_s, end_s, "startup", cause)]


def _laid_over(phase: TimelineSpan, incidents: Sequence[Incident]) -> TimelineSpan:
    """Return the phase with the explanation by incidents of the same time."""
    stops = [i for i in incidents if stops_jobs(i)]
    if stops and phase.part in ("training", "startup", "unknown", "stopped"):
        return phase._replace(part="stopped", cause=_cause(stops[0]), reason="")
    slow = [i for i in incidents if i.slowdown_ratio > 0]
    if slow and phase.part == "training":
        # They slow the same steps: the worst one counts.
        worst = max(slow, key=lambda i: i.slowdown_ratio)
        ratio = worst.slowdown_ratio / (1 + worst.slowdown_ratio)
        return phase._replace(cause=_cause(worst), slow_ratio=ratio)
    return phase


def _extent(incident: Incident, end_s: float) -> tuple[float, float]:
    """Return when the incident began and ended: at its last verdict, not when it had been silent for long enough."""
    if incident.ended_s is None:
        return incident.onset_s, end_s
    return incident.onset_s, min(max(incident.seen_s, incident.detected_s), incident.ended_s)


def _within(incident: Incident, attempt: Attempt, now_s: float) -> bool:
    """Return whether the incident belongs to this attempt, not to one of the same number in another run."""
    ended_s = now_s if attempt.ended_s is None else attempt.ended_s
    return attempt.started_s - CAUSE_LATE_S <= incident.detected_s <= ended_s + CAUSE_LATE_S


def stops_jobs(incident: Incident) -> bool:
    """Return whether a job with this incident makes no steps."""
    fault = BY_NAME.get(incident.fault)
    trouble = incident.family or ("" if fault is None else fault.trouble)
    return is_of_a_stop(trouble)


def _ends_attempts(incident: Incident) -> bool:
    return stops_jobs(incident) or incident.action in ("exclude_node", "restart_job")


def _cause(incident: Incident) -> LossCause:
    return LossCause(incident.fault, incident.node or "", incident.id)
