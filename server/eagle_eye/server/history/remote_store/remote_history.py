"""Reads from the store what the embedded history no longer has: points of a query, and frames of a job."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import numpy as np

from eagle_eye.schema.frame import WIRE_VERSION, Frame, block
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX, MetricSpec, Scope
from eagle_eye.server.history.history import Recorded
from eagle_eye.server.history.remote_store import promql
from eagle_eye.server.history.remote_store.promql import PromQl, RemoteSeries
from eagle_eye.server.history.remote_store.remote_store_metrics import Figures
from eagle_eye.server.history.remote_store.series_names import JOB, NAME, NODE, SeriesSubject, place_of
from eagle_eye.server.history.remote_store.settings import RemoteStoreSettings
from eagle_eye.server.history.remote_store.slices import slices
from eagle_eye.server.model.errors import RemoteStoreSilent

SENDER = "remote store"  # the agent version in reconstructed frames
BOOT_UNKNOWN = "unknown"
QUESTIONS_MAX = 8  # concurrent queries: a store that hangs must not block every API thread

_log = logging.getLogger(__name__)

Series = dict[tuple[str, int | str], dict[int, float]]  # by node and key: the value in each step that has one


class SeriesQuery(NamedTuple):
    """A query of one metric's last value in each step; None: any node, any job."""

    spec: MetricSpec
    node: str | None
    job: str | None
    start_s: float
    step_s: float


class Reach(NamedTuple):
    """The steps of a query that the store answers (the first ``steps``, before ``seam_s``), and the result."""

    steps: int
    seam_s: float
    series: Series
    problem: str | None


class RemoteHistory:
    """Reads the store; for any thread."""

    def __init__(self, client: httpx.Client, settings: RemoteStoreSettings, figures: Figures) -> None:
        self._promql = PromQl(client, settings.read_url, settings.answer_bytes_max)
        self._external = settings.external_labels
        self._interval_s = settings.interval_s
        self._figures = figures
        self._turns = threading.BoundedSemaphore(QUESTIONS_MAX)

    def points(self, asked: SeriesQuery, steps: int) -> Series:
        """Return the last value in each of the first ``steps`` steps that has one. Raises RemoteStoreSilent."""
        if steps == 0:
            return {}
        labels = dict(self._external)
        labels |= {label: value for label, value in ((NODE, asked.node), (JOB, asked.job)) if value is not None}
        of = promql.selector(PROMETHEUS_PREFIX + asked.spec.name, labels, {})
        end_s = asked.start_s + steps * asked.step_s
        found: Series = {}
        for course in self._counted(lambda: self._promql.thinned(of, asked.start_s, end_s, asked.step_s)):
            place = place_of({**course.labels, NAME: PROMETHEUS_PREFIX + asked.spec.name})
            if place is None:
                continue
            of_series = found.setdefault((place.node, place.key), {})
            numbers = (np.rint((course.times_s - asked.start_s) / asked.step_s).astype(int) - 1).tolist()
            of_series.update(
                (number, value)
                for number, value in zip(numbers, course.values.tolist(), strict=True)
                if not math.isnan(value)
            )
        return {key: points for key, points in found.items() if points}

    def before(self, seam_s: float | None, asked: SeriesQuery, steps: int) -> Reach:
        """Return the points of all steps that begin before ``seam_s`` (None: of all steps).

        If the store does not answer, they are empty and the problem is given, so that embedded data can still be shown.
        """
        end_s = asked.start_s + steps * asked.step_s
        reached = steps
        if seam_s is not None:
            reached = min(max(math.ceil((seam_s - asked.start_s) / asked.step_s), 0), steps)
        seam_s = min(asked.start_s + reached * asked.step_s, end_s)
        try:
            return Reach(reached, seam_s, self.points(asked, reached), None)
        except RemoteStoreSilent as error:
            return Reach(reached, seam_s, {}, str(error))

    def frames(self, job: str, start_s: float, end_s: float) -> Iterator[Recorded]:
        """Yield the job's rows from ``start_s`` to before ``end_s`` as frames, in pieces as they are read.

        They contain no ranks and no events: the store holds only numbers. Raises RemoteStoreSilent.
        """
        of = promql.selector("", {**self._external, JOB: job}, {NAME: f"{PROMETHEUS_PREFIX}.+"})

        def ask(begin_s: float, until_s: float) -> list[RemoteSeries]:
            return self._counted(lambda: self._promql.raw(of, begin_s, until_s))

        sequence = 0
        for piece in slices(start_s, end_s, ask):
            for frame in frames_of(piece.courses, self._interval_s or 1.0, sequence):
                sequence = frame.sequence
                yield Recorded(frame, frame.time_s, 0.0)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._turns.acquire(blocking=False):
            raise RemoteStoreSilent(f"{QUESTIONS_MAX} other questions wait for the remote store; ask again later")
        try:
            yield
        finally:
            self._turns.release()

    def _counted(self, ask: Callable[[], list[RemoteSeries]]) -> list[RemoteSeries]:
        try:
            with self._turn():
                return ask()
        except RemoteStoreSilent as error:
            self._figures.read_failures.inc()
            _log.warning("the remote store was asked in vain: %s", error)
            raise


def frames_of(courses: list[RemoteSeries], interval_s: float, sequence: int) -> Iterator[Frame]:
    """Yield the series' samples as frames of nodes in order of time, numbered from ``sequence`` + 1."""
    rows: dict[tuple[float, str, str | None], dict[Scope, dict[int | str, dict[str, float]]]] = {}
    for course in courses:
        place = place_of(course.labels)
        if place is not None:
            _gather(rows, place, course)
    for (time_s, node, job), scopes in sorted(rows.items(), key=lambda item: item[0][:2]):
        sequence += 1
        yield Frame(
            version=WIRE_VERSION,
            node=node,
            boot_id=BOOT_UNKNOWN,
            stream=SENDER,
            sequence=sequence,
            time_s=time_s,
            interval_s=interval_s,
            agent_version=SENDER,
            job=job,
            blocks=[block(scope, keys) for scope, keys in scopes.items()],  # type: ignore[arg-type]
        )


def _gather(
    rows: dict[tuple[float, str, str | None], dict[Scope, dict[int | str, dict[str, float]]]],
    place: SeriesSubject,
    course: RemoteSeries,
) -> None:
    name, scope = place.spec.name, place.spec.scope
    for time_s, value in zip(course.times_s.tolist(), course.values.tolist(), strict=True):
        if not math.isnan(value):
            of_node = rows.setdefault((time_s, place.node, place.job), {})
            of_node.setdefault(scope, {}).setdefault(place.key, {})[name] = value
