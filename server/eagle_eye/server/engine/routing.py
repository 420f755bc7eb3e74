"""Where a node's rows go: which jobs' columns, worked out once and again only when the node's frames change shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.schema.frame import Block, Frame, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.job_track import JobTrack
from eagle_eye.server.engine.outlined import Layout, Matrix, Outlined, RowGroup

TRAINING_PREFIXES = ("train_", "nccl_")  # metrics that only a rank can have said

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
    """Where the frames of one node go while their ranks and the shape of their blocks stay as they are."""

    node: int  # its place in NodeTracks
    ranks: list[Rank]
    job: str | None
    epoch: int
    tracks: list[JobTrack]
    ranked: tuple[bool, ...]
    shapes: list[Shape]
    placements: list[list[Placement]]
    outlined: Outlined | None = None  # whose rows go here
    columns: tuple[int, ...] | None = None  # the first of each part's, where the parts go whole to one job

    def lay_out(self, outlined: Outlined) -> None:
        """Work out where rows of the outline go; ``columns`` is None where they cannot be placed together."""
        self.outlined = outlined
        self.columns = None
        found: list[int] = []
        for block in outlined.hollow.blocks:
            places = list(_placements(outlined.hollow, block, self.tracks))
            if len(places) != 1 or [len(part) for part in places[0].chosen] != [len(block.metrics), len(block.keys)]:
                return
            found.append(places[0].columns.start)
        if len(self.tracks) == 1:
            self.columns = tuple(found)

    def fits(self, frame: Frame, epoch: int) -> bool:
        """Whether the frame belongs to the same jobs as the last one did."""
        return (
            self.epoch == epoch
            and self.job == frame.job
            and self.ranks == frame.ranks
            and self.ranked == tuple(track.ranked for track in self.tracks)
        )

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


def placing(routed: Iterable[tuple[RowGroup, Sequence[Route]]]) -> Iterator[None]:
    """Write rows to where their routes lead, those of one layout, moment and job before each time this yields."""
    together: dict[tuple[Layout, float, JobTrack], list[tuple[Matrix, list[tuple[int, ...]]]]] = {}
    for group, routes in routed:
        here: dict[tuple[float, JobTrack], tuple[list[int], list[tuple[int, ...]]]] = {}
        for at, route in enumerate(routes):
            if route.columns is not None:
                places, columns = here.setdefault((group.time_s[at], route.tracks[0]), ([], []))
                places.append(at)
                columns.append(route.columns)
            elif route.tracks:
                route.place(group.outlined[at].frame(1, group.time_s[at], group.numbers[at].tobytes()))
        for (time_s, job), (places, columns) in here.items():
            matrix = group.numbers if len(places) == len(routes) else group.numbers[places]
            together.setdefault((group.layout, time_s, job), []).append((matrix, columns))
    for (layout, time_s, job), parts in together.items():
        matrix = parts[0][0] if len(parts) == 1 else np.concatenate([matrix for matrix, _ in parts])
        _place_rows(layout, time_s, list(chain.from_iterable(columns for _, columns in parts)), matrix, job)
        yield


def _place_rows(
    layout: Layout, time_s: float, columns: Sequence[tuple[int, ...]], matrix: Matrix, track: JobTrack
) -> None:
    """Write rows of one layout and moment to one job; ``columns`` are each row's, as of its Route."""
    firsts = np.array(columns, dtype=np.intp)
    parts = [part for part in layout.parts if part.keys]
    for place, part in enumerate(parts):
        chosen = (firsts[:, place, None] + np.arange(len(part.keys))).ravel()
        values = layout.values(part, matrix).transpose(1, 0, 2).reshape(len(part.metrics), -1)
        track.write(time_s, part.scope, part.metrics, chosen, values)


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
    """Yield the rows of the job's own ranks whole, and of devices that no rank uses what is no rank's word."""
    owners = {rank.device: (rank.job, rank.attempt) for rank in sorted(frame.ranks, key=lambda rank: rank.attempt)}
    devices = [int(key) for key in block.keys]
    claimed = [i for i, device in enumerate(devices) if owners.get(device) == (track.job, track.attempt)]
    free = [i for i, device in enumerate(devices) if device not in owners]
    everything = list(range(len(block.metrics)))
    hardware = [m for m, name in enumerate(block.metrics) if not name.startswith(TRAINING_PREFIXES)]
    # Where nobody says who uses what, all rows are the job's.
    for rows, metrics in ((claimed, everything), (free, hardware if track.ranked else everything)):
        if rows and metrics:
            names = tuple(block.metrics[m] for m in metrics)
            columns = [track.add_series(frame.node, devices[i]) for i in rows]
            yield from _runs(track, Scope.DEVICE, names, metrics, rows, columns)


def _runs(
    track: JobTrack, scope: Scope, names: tuple[str, ...], metrics: list[int], rows: list[int], columns: list[int]
) -> Iterable[Placement]:
    """Yield one placement for each run of neighbouring columns: usually one for all of a node's rows."""
    start = 0
    for end in range(1, len(columns) + 1):
        if end == len(columns) or columns[end] != columns[end - 1] + 1:
            chosen = np.array(metrics, dtype=np.intp), np.array(rows[start:end], dtype=np.intp)
            yield Placement(track, scope, names, chosen, slice(columns[start], columns[end - 1] + 1))
            start = end
