"""Reads what a chart shows, within limits: a metric of some nodes, a job's members. Touches: store, history."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.metrics import MetricSpec
from eagle_eye.schema.names import natural_order
from eagle_eye.server.charts.plots import Stretch, picked, stretch
from eagle_eye.server.history.history import (
    BucketSeries,
    Floats,
    History,
    QueryPart,
    Run,
    SeriesKey,
    SeriesSteps,
    Statistic,
    TooManySeries,
    in_steps,
)
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.errors import HistoryMoved, Refusal
from eagle_eye.server.store.store import ATTEMPTS, JOBS, MEMBERSHIPS, PAGE_LIMIT_MAX, Store

# The members of a job's attempt and their roles, as far as still known.

ROLES_NODES_MAX = 256  # nodes whose frames are read for the roles of ranks of an ended attempt
ROLES_S = 4.0


class Members(NamedTuple):
    """``nodes`` are the attempt's; ``ranks`` those of their ranks that are known, with their roles."""

    nodes: tuple[str, ...]
    ranks: tuple[MemberRank, ...]


def members_of(store: Store, fleet: Fleet, job: str, attempt: int, time_s: float) -> Members:
    """Return the members of the attempt that ran at ``time_s``: from the schedulers, the agents or the accounts.

    Both are empty if unknown.
    """
    record = store.get(JOBS, job)
    ranks: list[MemberRank] = []
    nodes: set[str] = set()
    if record is not None and record.attempt == attempt:
        ranks = record.ranks
        nodes.update(record.nodes)
    heard = fleet.jobs().get(job)
    if heard is not None and heard[0] == attempt and (not ranks or not any(rank.role for rank in ranks)):
        ranks = heard[1] or ranks
    nodes.update(rank.node for rank in ranks)
    if not nodes:
        nodes.update(_on_record(store, job, attempt, time_s))
    return Members(tuple(sorted(nodes, key=natural_order)), tuple(ranks))


def ranks_seen(
    history: History, job: str, attempt: int, always: Sequence[str], nodes: Sequence[str], time_s: float
) -> tuple[MemberRank, ...]:
    """Return the ranks that agents reported just before ``time_s`` (from a sample of many nodes); needs raw history.

    Raises HistoryUnavailable.
    """
    asked = tuple(dict.fromkeys((*always, *picked(nodes, ROLES_NODES_MAX))))
    if not asked:
        return ()
    found: dict[tuple[str, int], MemberRank] = {}
    for reported in history.ranks(asked, time_s - ROLES_S, time_s):
        for rank in reported.ranks:
            if rank.job == job and rank.attempt == attempt:
                found[reported.node, rank.device] = MemberRank(rank.rank, reported.node, rank.device, rank.role)
    return tuple(found.values())


def _on_record(store: Store, job: str, attempt: int, time_s: float) -> list[str]:
    known = [a for a in store.page(ATTEMPTS, {"job": job}, limit=PAGE_LIMIT_MAX).items if a.attempt == attempt]
    begun = [a for a in known if a.started_s <= time_s] or known
    latest = max(begun, key=lambda a: a.started_s, default=None)
    membership = None if latest is None else store.get(MEMBERSHIPS, latest.id)
    return [] if membership is None else membership.nodes


# A metric of some nodes.

FRAMES_MAX = 20_000  # for one chart: about a second of work
SERIES_MAX = 4_096
SPARSE = 1.5  # steps between values beyond which the steps are too short for the source
TURN_S = 10.0  # how long a chart waits for its turn


class ReadValues(NamedTuple):
    """The values read. ``nodes`` are those of the second group that fitted the limit.

    ``stretch`` has longer steps than requested if the values are further apart; ``spans`` are the bucket lengths used.
    """

    stretch: Stretch
    series: dict[SeriesKey, SeriesSteps]
    nodes: tuple[str, ...]
    spans: list[QueryPart]


class Turns:
    """Limits the number of concurrent charts, which share the interpreter with ingestion."""

    def __init__(self, count: int = 2) -> None:
        self._free = threading.BoundedSemaphore(count)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a turn. Raises Refusal 503 when none is free in time."""
        if not self._free.acquire(timeout=TURN_S):
            raise Refusal(503, "busy", f"no chart could be drawn within {TURN_S:g} s", {"Retry-After": "5"})
        try:
            yield
        finally:
            self._free.release()


def read(
    history: History,
    metric: MetricSpec,
    statistic: Statistic,
    nodes: tuple[Sequence[str], Sequence[str]],
    wanted: Stretch,
    job: str | None,
    frames_max: int = FRAMES_MAX,
) -> ReadValues:
    """Return the metric of two groups of nodes: all of the first, and of the second as many as the limit allows.

    Without a first group one node is read even if it has more than ``frames_max``. Raises Refusal 400 if that exceeds
    FRAMES_MAX, or the first group ``frames_max``; HistoryUnavailable.
    """
    always, others = nodes
    for last in (False, False, True):
        try:
            return _read(history, metric, statistic, (tuple(always), tuple(others)), wanted, job, frames_max)
        except TooManySeries:
            raise Refusal(400, "too_much", f"more than {SERIES_MAX} series lie in the range") from None
        except HistoryMoved:  # something was found broken; the rest answers
            if last:
                raise
    raise AssertionError  # for the type checker


def _read(
    history: History,
    metric: MetricSpec,
    statistic: Statistic,
    nodes: tuple[tuple[str, ...], tuple[str, ...]],
    wanted: Stretch,
    job: str | None,
    frames_max: int,
) -> ReadValues:
    always, others = nodes
    while True:
        if not always and not others:
            return ReadValues(wanted, {}, (), [])
        names = (*always, *others)
        end_s = np.nextafter(wanted.end_s, 0.0)
        with history.courses(metric, names, wanted.start_s, end_s, job, wanted.step_s, frames_max) as reading:
            if reading.frames > frames_max and len(others) > (0 if always else 1):
                # Counting stops soon after the limit, so this removes rather too many than too few.
                fitting = max(1, len(others) * frames_max // reading.frames)
                others = picked(others, min(fitting, len(others) // 2))
                continue
            most = frames_max if always else max(frames_max, FRAMES_MAX)
            if reading.frames > most:
                raise Refusal(400, "too_much", f"more than {most} frames lie in the range; shorten it")
            courses = _gathered(reading.courses)
            coarse = max([_spacing_s(courses), *(float(span.bucket_s) for span in reading.spans)])
            shown = wanted
            if coarse > SPARSE * wanted.step_s:
                shown = stretch(wanted.start_s, wanted.end_s, wanted.steps, coarse)
            series = in_steps(courses, metric, statistic, shown.start_s, shown.step_s, SERIES_MAX)
            return ReadValues(shown, series, others, reading.spans)


def _gathered(courses: Iterable[Run | BucketSeries]) -> list[Run | BucketSeries]:
    """Merge all runs of a series into one: for frames in no segment each value is a run."""
    found: list[Run | BucketSeries] = []
    times_s: dict[SeriesKey, list[Floats]] = defaultdict(list)
    values: dict[SeriesKey, list[Floats]] = defaultdict(list)
    for course in courses:
        if isinstance(course, BucketSeries):
            found.append(course)
        else:
            times_s[course.node, course.key].append(course.times_s)
            values[course.node, course.key].append(course.values)
    for (node, key), parts in times_s.items():
        whole = np.concatenate(parts)
        order = np.argsort(whole, kind="stable")
        found.append(Run(node, key, whole[order], np.concatenate(values[node, key])[order]))
    return found


def _spacing_s(courses: Sequence[Run | BucketSeries]) -> float:
    """Return the typical distance of a series' values, 0 if unknown."""
    gaps: list[float] = []
    last: dict[SeriesKey, float] = {}
    for course in courses[:SERIES_MAX]:
        key = (course.node, course.key)
        before = last.get(key)
        times_s = course.times_s if before is None else np.concatenate([[before], course.times_s])
        if len(times_s) > 1:
            gaps.append(float(np.median(np.diff(times_s))))
        last[key] = float(course.times_s[-1])
    return float(np.median(gaps)) if gaps else 0.0
