"""Follows attempts of jobs from one poll of the detection loop to the next. Pure.

Polls are a few seconds apart; what happened in between is computed from the job's step time. A time without observation
is kept as a gap, never filled in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from eagle_eye.server.model.account_records import Attempt, AttemptEnd, Gap
from eagle_eye.server.monitor.watcher import JobProgress

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
