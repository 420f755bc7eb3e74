"""Routes a node's rows to jobs' columns, and decides when a job has ended.

Routes are recomputed only when the node's frames change shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.types import WindowEvent
from eagle_eye.schema.frame import Block, Frame, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.job_track import JobTrack
from eagle_eye.server.engine.judgement import FAILED_S, since_s
from eagle_eye.server.model.batch import Batch, ColumnLayout, Matrix, ResolvedTemplate
from eagle_eye.server.model.records import Job

TRAINING_PREFIXES = ("train_", "nccl_")  # metrics that only a rank can have reported
PARTS_MAX = 16  # of a row placed together with others; agents' rows have three
_ROOM = 256
# Events not reported by a rank. They are reported once.
NODE_FAILURES = frozenset(
    {"xid", "sxid", "gpu_lost", "link_down", "link_up", "machine_check", "kernel_panic", "host_error"}
)

Shape = tuple[Scope, list[int | str], list[str]]


class Placement(NamedTuple):
    """Some metrics and rows of a block (as indexes), and the job's columns that they go to."""

    track: JobTrack
    scope: Scope
    metrics: tuple[str, ...]
    chosen: tuple[NDArray[np.intp], NDArray[np.intp]]
    columns: slice


@dataclass(slots=True)
class Route:
    """Where the frames of one node go while their ranks and the shape of their blocks do not change."""

    node: int  # its place in NodeTracks
    ranks: list[Rank]
    job: str | None
    epoch: int
    tracks: list[JobTrack]
    named: int = 0  # the number of leading tracks that the frames themselves name
    shapes: list[Shape] = field(default_factory=list)
    placements: list[list[Placement]] = field(default_factory=list)
    resolved: ResolvedTemplate | None = None  # of the rows that go here
    columns: tuple[int, ...] | None = None  # the first of each part's, if the parts go whole to one job

    def lay_out(self, resolved: ResolvedTemplate) -> None:
        """Compute where rows of the template go; ``columns`` is None if they cannot be placed together."""
        self.resolved = resolved
        self.columns = None
        found: list[int] = []
        for block in resolved.hollow.blocks:
            places = list(_placements(resolved.hollow, block, self.tracks))
            if len(places) != 1 or [len(part) for part in places[0].chosen] != [len(block.metrics), len(block.keys)]:
                return
            found.append(places[0].columns.start)
        if len(self.tracks) == 1:
            self.columns = tuple(found)

    def fits(self, frame: Frame, epoch: int) -> bool:
        """Whether the frame belongs to the same jobs as the last one did."""
        return self.epoch == epoch and self.job == frame.job and self.ranks == frame.ranks

    def place(self, frame: Frame) -> None:
        """Write the frame's rows to where they belong."""
        shapes = [(block.scope, block.keys, block.metrics) for block in frame.blocks if block.keys]
        if shapes != self.shapes:
            self.shapes = shapes
            self.placements = [list(_placements(frame, block, self.tracks)) for block in frame.blocks if block.keys]
        for block, placements in zip((b for b in frame.blocks if b.keys), self.placements, strict=True):
            values = np.frombuffer(block.values, dtype="<f8").reshape(len(block.metrics), len(block.keys))
            for placement in placements:
                whole = values.shape == (len(placement.chosen[0]), len(placement.chosen[1]))
                chosen = values if whole else values[np.ix_(*placement.chosen)]
                placement.track.write(frame.time_s, placement.scope, placement.metrics, placement.columns, chosen)


class Routed(NamedTuple):
    """Rows of one layout and where they go: row i to ``jobs[job[i]]``, or, if that is -1, by its route in ``odd``.

    ``columns`` (rows, PARTS_MAX) has the first column of each part.
    """

    batch: Batch
    jobs: Sequence[JobTrack]
    job: NDArray[np.intp]
    columns: NDArray[np.intp]
    odd: dict[int, Route]


class RouteTable:
    """Routes of rows by template, those that go whole to one job as columns: for many thousands of rows at once."""

    def __init__(self) -> None:
        self._job: NDArray[np.intp] = np.full(_ROOM, -1, dtype=np.intp)
        self._columns: NDArray[np.intp] = np.zeros((_ROOM, PARTS_MAX), dtype=np.intp)
        self._cleared = 0
        self.clear()

    def clear(self) -> None:
        """Forget all routes."""
        self._place_of: dict[ResolvedTemplate, int] = {}  # in NodeTracks
        self._odd: dict[int, Route] = {}  # those that do not go whole to one job
        self._jobs: list[JobTrack] = []
        self._job_of: dict[JobTrack, int] = {}
        self._cleared += 1

    def put(self, route: Route) -> None:
        """Store the route of the rows of its template."""
        assert route.resolved is not None  # noqa: S101 - it was laid out
        while route.node >= len(self._job):
            self._job = np.concatenate([self._job, np.full_like(self._job, -1)])
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)])
        self._place_of[route.resolved] = route.node
        self._odd.pop(route.node, None)
        if route.columns is None or len(route.columns) > PARTS_MAX:
            self._odd[route.node] = route
            self._job[route.node] = -1
            return
        (track,) = route.tracks
        job = self._job_of.get(track)
        if job is None:
            job = self._job_of[track] = len(self._jobs)
            self._jobs.append(track)
        self._job[route.node] = job
        self._columns[route.node, : len(route.columns)] = route.columns

    def drop(self, route: Route | None) -> None:
        """Remove a route."""
        if route is not None and route.resolved is not None:
            self._place_of.pop(route.resolved, None)

    def routed(
        self, batch: Batch, route_of: Callable[[ResolvedTemplate, float, float], Route]
    ) -> tuple[NDArray[np.intp], Routed]:
        """Return the places of the rows' nodes in NodeTracks, and where the rows go.

        ``route_of(resolved, time_s, received_s)`` computes an unknown route; it may ``put`` it, and ``clear`` the
        table. ``time_s`` is by the server's clock.
        """
        place_of = self._place_of.get
        places = np.array([place_of(resolved, -1) for resolved in batch.resolved], dtype=np.intp)
        job = np.where(places >= 0, self._job[places], -1)
        routed = Routed(batch, self._jobs, job, self._columns[places], {})
        for at in np.flatnonzero((job < 0) & (places >= 0)).tolist():
            routed.odd[at] = self._odd[int(places[at])]
        unknown = np.flatnonzero(places < 0)
        if not len(unknown):
            return places, routed
        times_s, received_s = batch.server_time_s.tolist(), batch.received_s.tolist()
        for at in range(int(unknown[0]), len(places)):
            if places[at] < 0:
                cleared = self._cleared
                routed.odd[at] = route_of(batch.resolved[at], times_s[at], received_s[at])
                places[at] = routed.odd[at].node
                if cleared != self._cleared:  # routes of the rows after it are unknown again
                    places[at + 1 :] = job[at + 1 :] = -1
        return places, routed


def placing(all_routed: Iterable[Routed]) -> Iterator[None]:
    """Write rows along their routes; yields after those of each layout, time and job."""
    together: dict[tuple[ColumnLayout, float, JobTrack], list[tuple[Matrix, NDArray[np.intp]]]] = {}
    for routed in all_routed:
        batch = routed.batch
        layout, times_s, numbers = batch.layout, batch.server_time_s, batch.numbers
        for at, route in routed.odd.items():
            time_s = float(times_s[at])
            if route.columns is not None:
                columns = np.array([route.columns], dtype=np.intp)
                together.setdefault((layout, time_s, route.tracks[0]), []).append((numbers[at : at + 1], columns))
            elif route.tracks:
                route.place(batch.resolved[at].frame(1, time_s, numbers[at].tobytes()))
        for time_s, job, rows in _alike(times_s, routed.job):
            together.setdefault((layout, time_s, routed.jobs[job]), []).append((numbers[rows], routed.columns[rows]))
    for (layout, time_s, track), parts in together.items():
        matrices, places = zip(*parts, strict=True)
        used = min(columns.shape[1] for columns in places)
        firsts = np.concatenate([columns[:, :used] for columns in places])
        _place_rows(layout, time_s, firsts, np.concatenate(matrices), track)
        yield


def _alike(time_s: NDArray[np.float64], job: NDArray[np.intp]) -> Iterator[tuple[float, int, NDArray[np.intp]]]:
    """Yield the times and jobs shared by rows, with the rows; not those without a job."""
    order = np.lexsort((job, time_s))
    ordered_s, ordered = time_s[order], job[order]
    changed = (ordered_s[1:] != ordered_s[:-1]) | (ordered[1:] != ordered[:-1])
    begins = [0, *(np.flatnonzero(changed) + 1).tolist(), len(order)]
    for begin, end in pairwise(begins):
        if begin < end and ordered[begin] >= 0:
            yield float(ordered_s[begin]), int(ordered[begin]), order[begin:end]


def _place_rows(layout: ColumnLayout, time_s: float, firsts: NDArray[np.intp], matrix: Matrix, track: JobTrack) -> None:
    """Write rows of one layout and time to one job; ``firsts`` are each row's columns, as of its Route."""
    parts = [part for part in layout.parts if part.keys]
    for place, part in enumerate(parts):
        more = place > 0 and part.keys == parts[place - 1].keys and part.scope is parts[place - 1].scope
        chosen = (firsts[:, place, None] + np.arange(len(part.keys))).ravel()
        values = layout.values(part, matrix).transpose(1, 0, 2).reshape(len(part.metrics), -1)
        track.write(time_s, part.scope, part.metrics, chosen, values, more=more)


def _placements(frame: Frame, block: Block, tracks: Iterable[JobTrack]) -> Iterable[Placement]:
    names = tuple(block.metrics)
    everything = list(range(len(names)))
    for track in tracks:
        if block.scope is Scope.DEVICE:
            yield from _device_placements(frame, block, track)
        elif track.is_member(frame.node) and block.scope is Scope.NODE:
            yield from _runs(track, Scope.NODE, names, everything, [0], [track.node_column(frame.node)])
        elif track.is_member(frame.node):
            columns = [track.add_link(frame.node, str(key)) for key in block.keys]
            yield from _runs(track, Scope.LINK, names, everything, list(range(len(columns))), columns)


def _device_placements(frame: Frame, block: Block, track: JobTrack) -> Iterable[Placement]:
    """Yield the rows of the job's own ranks whole, and only hardware metrics of devices that no rank uses."""
    owners = {rank.device: (rank.job, rank.attempt) for rank in sorted(frame.ranks, key=lambda rank: rank.attempt)}
    devices = [int(key) for key in block.keys]
    claimed = [i for i, device in enumerate(devices) if owners.get(device) == (track.job, track.attempt)]
    free = [i for i, device in enumerate(devices) if device not in owners]
    everything = list(range(len(block.metrics)))
    hardware = [m for m, name in enumerate(block.metrics) if not name.startswith(TRAINING_PREFIXES)]
    # If it is not known who uses what, all rows are the job's.
    for rows, metrics in ((claimed, everything), (free, hardware if track.ranked else everything)):
        if rows and metrics:
            names = tuple(block.metrics[m] for m in metrics)
            columns = [track.add_series(frame.node, devices[i]) for i in rows]
            yield from _runs(track, Scope.DEVICE, names, metrics, rows, columns)


def _runs(
    track: JobTrack, scope: Scope, names: tuple[str, ...], metrics: list[int], rows: list[int], columns: list[int]
) -> Iterable[Placement]:
    """Yield one placement for each run of adjacent columns: usually one for all of a node's rows."""
    start = 0
    for end in range(1, len(columns) + 1):
        if end == len(columns) or columns[end] != columns[end - 1] + 1:
            chosen = np.array(metrics, dtype=np.intp), np.array(rows[start:end], dtype=np.intp)
            yield Placement(track, scope, names, chosen, slice(columns[start], columns[end - 1] + 1))
            start = end


def names_other_attempt(ranks: Iterable[Rank], track: JobTrack) -> bool:
    """Return whether a node names a rank of another attempt of the job."""
    return any(rank.job == track.job and rank.attempt != track.attempt for rank in ranks)


def concerned(
    event: WindowEvent, jobs_of_node: Iterable[JobTrack | None], route: Route, ranks: Sequence[Rank]
) -> Iterator[JobTrack]:
    """Yield the jobs that an event of a node is about; ``ranks`` are those that the node named with it."""
    failure = event.kind in NODE_FAILURES
    for track in route.tracks:
        # Re-read by a restarted server: of an earlier attempt, after which the node may have been repaired.
        earlier = failure and track.declared and event.time_s < track.started_s
        if not earlier or any((rank.job, rank.attempt) == (track.job, track.attempt) for rank in ranks):
            yield track
    # For a moment after the end of an attempt an agent still names its ranks, while the next one is starting.
    for other in jobs_of_node if failure else ():
        if other is None or event.node is None or any(other is one for one in route.tracks):
            continue
        if other.is_member(event.node) and event.time_s >= other.started_s:
            yield other


# Decides when a job has ended, on whose report, and how long its data is kept.
#
# A node's rows go to all jobs that it is a member of, even while none of its ranks reports. A job that is over must not
# receive any more: they would belong to the jobs that run there now.

# States in which a job has the nodes that its scheduler names.
HELD_STATES = frozenset({"running", "suspended", "completing", "maintenance"})
FINAL_STATES = frozenset({"finished", "cancelled"})  # after which a job does not continue in another attempt by itself
FORGET_JOB_S = 86_400.0  # a job without any report for this long is dropped from memory


def is_over(job: Job | None, track: JobTrack, now_s: float) -> bool:
    """Whether the attempt ended, according to its launcher or scheduler, so long ago that it is no longer judged."""
    if job is None or job.attempt < track.attempt or job.state in HELD_STATES:
        return False
    return now_s - since_s(job) > FAILED_S


def is_left(track: JobTrack, routes: Mapping[str, Route]) -> bool:
    """Whether all nodes of the attempt now report other jobs, and none this one."""
    known = [routes.get(node) for node in track.nodes]
    return bool(known) and all(
        route is not None and route.named and track not in route.tracks[: route.named] for route in known
    )


def may_go(job: Job | None, track: JobTrack, now_s: float, kept_s: float) -> bool:
    """Whether the job's data can be dropped; ``kept_s`` is how long it is kept after a final end."""
    untouched_s = now_s - track.touched_s
    if job is None or job.state not in FINAL_STATES or not is_over(job, track, now_s):
        return untouched_s > FORGET_JOB_S
    return min(untouched_s, now_s - since_s(job)) > min(kept_s, FORGET_JOB_S)


def is_past(job: Job, now_s: float) -> bool:
    """Whether the job is old and no longer reported by anything."""
    return job.state not in HELD_STATES and now_s - job.updated_s > FORGET_JOB_S
