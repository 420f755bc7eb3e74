"""A job's past: its attempts, how each moment of them was spent, and how much of that was training that counted. Pure.

``ettr_ratio`` (effective training time ratio: time of steps that counted over wall-clock time since the first attempt
started) is the quantity that operators of large clusters publish (MegaScale, NSDI 2024; ByteRobust, SOSP 2025; Kokolis
et al., HPCA 2025). ``goodput_ratio`` also deducts what slow nodes cost. Time of unknown use is in neither's
denominator; it is summed separately. Nor is what was lost in a run of which no step was ever seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.server.model.records import Attempt, AttemptEnd, Gap, Incident, is_of_a_stop

if TYPE_CHECKING:
    from eagle_eye.server.monitor.watcher import JobProgress

# Attempts are followed from one poll of the detection loop to the next, a few seconds apart; what happened in between
# is computed from the job's step time. A time without observation is kept as a gap, never filled in.

LOOK_S = 10.0  # between polls
UNWATCHED_S = 60.0  # a longer time without a poll, or without a report from any of the job's nodes, is a gap
GONE_S = 300.0  # a job that no scheduler declared is over once no agent has reported it for this long
GAPS_KEPT = 64  # per attempt
WRITE_S = 30.0  # how stale the newest step on record may get; this much is lost when the server is killed

_STATED_ENDS = frozenset(get_args(AttemptEnd)) - {"", "superseded", "gone"}
_MEANT_ENDS = frozenset({"finished", "cancelled"})  # after these the next attempt belongs to another run
_FLUID = {"seen_s": 0.0, "last_step": None, "last_step_s": None, "step_s": None}


class Witness(NamedTuple):
    """When any node of the job was last heard, and when an agent last reported the job; None: not yet."""

    heard_s: float | None
    spoken_s: float | None


def follow(
    known: Attempt | None, course: JobProgress, witness: Witness, now_s: float, new_id: Callable[[], str]
) -> list[Attempt]:
    """Return the attempts that are new or changed, the current one last; ``known`` is the newest on record."""
    alive = _is_alive(course, witness, now_s)
    if known is not None and course.attempt == known.attempt:
        if known.ended_s is None:
            return _changed(known, _updated(known, course, witness, now_s))
        if known.end == "gone" and alive:
            # It is reported again: its agents were away, not the job.
            return _changed(known, _updated(replace(known, ended_s=None, end=""), course, witness, now_s))
        if known.end == "gone" or course.state in _STATED_ENDS or not alive:
            return []
    if course.state in _STATED_ENDS or not alive:
        return []  # over before it was ever seen, or the memory of such a job
    ended = [] if known is None or known.ended_s is not None else [_superseded(known, course)]
    before = ended[0] if ended else known
    return [*ended, _updated(_begun(before, course, new_id()), course, witness, now_s)]


def forsaken(known: Attempt, now_s: float) -> Attempt | None:
    """Return an open attempt that the detection loop has forgotten as ended; None while it may still return."""
    if known.ended_s is not None or now_s - known.seen_s < GONE_S:
        return None
    return replace(known, ended_s=max(known.seen_s, known.last_step_s or 0.0), end="gone")


def worth_writing(old: Attempt | None, new: Attempt, written_s: float, now_s: float) -> bool:
    """Return whether more than the newest step has changed, or the record has become stale."""
    if old is None or replace(old, **_FLUID) != replace(new, **_FLUID):
        return True
    return old != new and now_s - written_s >= WRITE_S


def _is_alive(course: JobProgress, witness: Witness, now_s: float) -> bool:
    if course.declared:
        return True
    return witness.spoken_s is not None and now_s - witness.spoken_s < GONE_S


def _changed(known: Attempt, new: Attempt) -> list[Attempt]:
    return [] if new == known else [new]


def _superseded(known: Attempt, course: JobProgress) -> Attempt:
    """Return the attempt as ended by the next one, which began before this one was reported over."""
    end: AttemptEnd = "superseded" if course.attempt > known.attempt else "gone"
    return replace(known, ended_s=max(known.started_s, course.started_s, known.last_step_s or 0.0), end=end)


def _begun(before: Attempt | None, course: JobProgress, attempt_id: str) -> Attempt:
    same_run = before is not None and course.attempt > before.attempt and before.end not in _MEANT_ENDS
    steps = [s for s in (before.prior_step, before.last_step) if s is not None] if before and same_run else []
    started_s = course.started_s
    if before is not None and before.ended_s is not None:
        started_s = max(started_s, before.ended_s)
    return Attempt(
        id=attempt_id,
        run=before.run if before is not None and same_run else attempt_id,
        job=course.job,
        attempt=course.attempt,
        started_s=started_s,
        seen_s=started_s,
        prior_step=max(steps, default=None),
    )


def _updated(known: Attempt, course: JobProgress, witness: Witness, now_s: float) -> Attempt:
    new = replace(
        known,
        state=course.state,
        declared=known.declared or course.declared,
        nodes=len(course.nodes),
        node=course.nodes[0] if len(course.nodes) == 1 else "",
        gpus=course.gpus,
        step_s=course.step_s if course.step_s is not None else known.step_s,
    )
    new = _stepped(new, course)
    if witness.heard_s is not None and now_s - witness.heard_s <= UNWATCHED_S:
        if now_s - new.seen_s > UNWATCHED_S:
            new = replace(new, gaps=_bounded([*new.gaps, Gap(new.seen_s, now_s)]))
        new = replace(new, seen_s=max(now_s, new.seen_s))
    if course.state in _STATED_ENDS:
        return replace(new, ended_s=max(now_s, new.started_s), end=msgspec.convert(course.state, AttemptEnd))
    spoken_s = max(witness.spoken_s or known.seen_s, new.started_s, new.last_step_s or 0.0)
    if not course.declared and now_s - spoken_s >= GONE_S:
        return replace(new, ended_s=spoken_s, end="gone")
    return new


def _stepped(known: Attempt, course: JobProgress) -> Attempt:
    """Return the attempt with its newest step, the time of its first, and when it passed the earlier progress."""
    if course.step is None or course.progressed_s is None:
        return known
    if known.last_step is not None and course.step <= known.last_step:
        return known
    pace_s = course.step_s or 0.0
    done_s = max(course.progressed_s, known.last_step_s or known.started_s)
    first, first_s = known.first_step, known.first_step_s
    if first is None or first_s is None:
        first = course.step if course.first_step is None else min(course.first_step, course.step)
        first_s = max(known.started_s, done_s - (course.step - first) * pace_s)
    caught_up_s = known.caught_up_s
    if known.prior_step is not None and caught_up_s is None and course.step > known.prior_step:
        caught_up_s = max(first_s, known.last_step_s or first_s, done_s - (course.step - known.prior_step) * pace_s)
    return replace(
        known,
        first_step=first,
        first_step_s=first_s,
        last_step=course.step,
        last_step_s=done_s,
        caught_up_s=caught_up_s,
    )


def _bounded(gaps: list[Gap]) -> list[Gap]:
    """Return the gaps, with the two nearest merged while there are too many; no time is added as observed."""
    if len(gaps) <= GAPS_KEPT:
        return gaps
    at = min(range(len(gaps) - 1), key=lambda i: gaps[i + 1].start_s - gaps[i].end_s)
    return [*gaps[:at], Gap(gaps[at].start_s, gaps[at + 1].end_s), *gaps[at + 2 :]]


# The timeline: contiguous spans with how each moment was spent, and for what cause. Every second between the start of a
# run's first attempt and the end of its last one is in exactly one span, so that sums over spans add up to the total.

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


# Goodput: sums over spans.

By = Literal["job", "node", "fault"]
# Where time went other than training; slow is the part of training lost to slowness.
LOST_PARTS = ("down", "startup", "redone", "stopped", "slow", "ending")


@dataclass(slots=True)
class Amount:
    """Wall-clock seconds, and GPU-seconds where the number of GPUs is known; the rest is ``uncounted_s``."""

    seconds: float = 0.0
    gpu_seconds: float = 0.0
    uncounted_s: float = 0.0

    def add(self, seconds: float, gpus: int | None) -> None:
        """Add ``seconds`` of ``gpus`` GPUs (None: unknown number)."""
        self.seconds += seconds
        if gpus is None:
            self.uncounted_s += seconds
        else:
            self.gpu_seconds += seconds * gpus

    def merge(self, other: Amount) -> None:
        """Add another amount."""
        self.seconds += other.seconds
        self.gpu_seconds += other.gpu_seconds
        self.uncounted_s += other.uncounted_s


class GoodputLoss(NamedTuple):
    """A loss of one kind due to one cause."""

    part: str
    cause: LossCause
    amount: Amount


@dataclass(slots=True)
class Account:
    """The sums of some spans: ``training`` at full speed, ``lost`` by part, and ``unknown``.

    Together they make ``wall``.
    """

    wall: Amount = field(default_factory=Amount)
    training: Amount = field(default_factory=Amount)
    lost: dict[str, Amount] = field(default_factory=dict)
    unknown: dict[str, Amount] = field(default_factory=dict)  # by reason
    known_s: float = 0.0  # of runs of which steps were seen, time of known use

    @property
    def ettr_ratio(self) -> float | None:
        """Time of steps that counted, slow ones included, over the known time; None when nothing is known."""
        return self._share(self.training.seconds + self._slow_s)

    @property
    def goodput_ratio(self) -> float | None:
        """The time that the counted steps would have taken without slowness, over the known time; None likewise."""
        return self._share(self.training.seconds)

    @property
    def _slow_s(self) -> float:
        slow = self.lost.get("slow")
        return 0.0 if slow is None else slow.seconds

    def _share(self, seconds: float) -> float | None:
        return min(seconds / self.known_s, 1.0) if self.known_s > 0 else None


def clipped(spans: Iterable[TimelineSpan], since_s: float, until_s: float) -> list[TimelineSpan]:
    """Return the parts of the spans between two times."""
    found = []
    for span in spans:
        start_s, end_s = max(span.start_s, since_s), min(span.end_s, until_s)
        if end_s > start_s:
            found.append(span._replace(start_s=start_s, end_s=end_s))
    return found


def account(spans: Iterable[TimelineSpan]) -> Account:
    """Return the sums of the spans."""
    sums = Account()
    for span in spans:
        sums.wall.add(span.seconds, span.gpus)
        if span.part == "unknown":
            sums.unknown.setdefault(span.reason, Amount()).add(span.seconds, span.gpus)
            continue
        sums.known_s += span.seconds if span.stepping else 0.0
        if span.part == "training":
            sums.training.add(span.seconds * (1 - span.slow_ratio), span.gpus)
        for part, _, seconds in _losses(span):
            sums.lost.setdefault(part, Amount()).add(seconds, span.gpus)
    return sums


def losses(spans: Iterable[TimelineSpan]) -> list[GoodputLoss]:
    """Return the losses by part and cause, the costliest first."""
    found: dict[tuple[str, LossCause], Amount] = defaultdict(Amount)
    for span in spans:
        for part, cause, seconds in _losses(span):
            found[part, cause].add(seconds, span.gpus)
    by_cost = [GoodputLoss(part, cause, amount) for (part, cause), amount in found.items()]
    return sorted(by_cost, key=lambda loss: (-loss.amount.gpu_seconds, -loss.amount.seconds, loss.part, loss.cause))


def grouped(found: Sequence[GoodputLoss], by: By) -> dict[str, dict[str, Amount]]:
    """Return losses summed by node or by fault, and by part in each; node "": no single node is to blame."""
    name: Callable[[LossCause], str] = (lambda cause: cause.node) if by == "node" else (lambda cause: cause.fault)
    sums: dict[str, dict[str, Amount]] = defaultdict(lambda: defaultdict(Amount))
    for loss in found:
        sums[name(loss.cause)][loss.part].merge(loss.amount)
    return {key: dict(parts) for key, parts in sums.items()}


def _losses(span: TimelineSpan) -> list[tuple[str, LossCause, float]]:
    """Return the span's losses: part, cause and seconds."""
    if span.part == "unknown":
        return []
    if span.part == "training":
        if span.cause is None or span.slow_ratio <= 0:
            return []
        return [("slow", span.cause, span.seconds * span.slow_ratio)]
    return [(span.part, span.cause or LossCause("ending"), span.seconds)]
