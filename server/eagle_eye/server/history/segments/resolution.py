"""Which level answers for which part of a query: the coarsest that the step allows, else what is there. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from eagle_eye.server.history.history import QueryPart
from eagle_eye.server.history.segments.level_table import Window
from eagle_eye.server.history.segments.levels import HOURS, LEVEL_OF_NAME, MINUTES

_HOUR_S = MINUTES.window_s  # a window of minutes is a bucket of hours


class Piece(NamedTuple):
    """A downsampled segment to be read, of it the buckets that begin at ``start_s`` to before ``end_s``."""

    window: Window
    start_s: float
    end_s: float

    def frames(self, nodes: Sequence[str]) -> int:
        """Return about how many buckets of the nodes (all if empty) are in it."""
        length_s = self.end_s - self.start_s
        share = math.ceil(self.window.frames * length_s / (self.window.end_s - self.window.start_s))
        bucket_s = LEVEL_OF_NAME[self.window.level].bucket_s
        return min(share, len(nodes) * math.ceil(length_s / bucket_s)) if nodes else share


class Choice(NamedTuple):
    """What is read, and in which resolution.

    ``skipped`` are by group the windows whose raw segments, up to an id, the pieces stand for: as begin and id.
    """

    pieces: list[Piece]
    skipped: dict[int, list[tuple[float, int]]]
    spans: list[QueryPart]


def choose(windows: Iterable[Window], step_s: float, start_s: float, end_s: float) -> Choice:
    """Return what answers a query with this step: for each hour of each group one of its levels, or raw segments.

    Only whole buckets within the range are read of a level, so hours are not where the range ends within one.
    """
    rows = list(windows)
    minutes = {(one.shard, one.start_s): one for one in rows if one.level == MINUTES.name}
    hours = {(one.shard, one.start_s): one for one in rows if one.level == HOURS.name}
    places = set(minutes)
    for shard, day_s in hours:
        places |= {(shard, day_s + _HOUR_S * at) for at in range(HOURS.window_s // _HOUR_S)}
    pieces: list[Piece] = []
    skipped: dict[int, list[tuple[float, int]]] = {}
    coarsest: dict[float, int] = {}
    for shard, begin_s in sorted(places):
        if begin_s > end_s or begin_s + _HOUR_S <= start_s:
            continue
        fine = minutes.get((shard, begin_s))
        coarse = hours.get((shard, begin_s // HOURS.window_s * HOURS.window_s))
        whole = start_s <= begin_s and begin_s + _HOUR_S <= end_s
        source = _source(fine, coarse if coarse is not None and coarse.has(begin_s) else None, step_s, whole)
        if source is None:
            continue
        bucket_s = MINUTES.bucket_s if source is fine else HOURS.bucket_s
        low_s = max(begin_s, -(-start_s // bucket_s) * bucket_s)
        high_s = min(begin_s + _HOUR_S, end_s // bucket_s * bucket_s)
        if low_s < high_s:
            pieces.append(Piece(source, low_s, high_s))
        if fine is not None:
            skipped.setdefault(shard, []).append((begin_s, fine.through_id))
        coarsest[begin_s] = max(coarsest.get(begin_s, 0), bucket_s)
    return Choice(_joined(pieces), skipped, _spans(coarsest, start_s, end_s))


def left_of(first_s: float, last_s: float, id_: int, skipped: Iterable[tuple[float, int]]) -> list[tuple[float, float]]:
    """Return the parts of a raw segment's time, ends included, that no piece has."""
    left = []
    for begin_s, through_id in sorted(skipped):
        if id_ <= through_id and begin_s <= last_s and begin_s + _HOUR_S > first_s:
            if first_s < begin_s:
                left.append((first_s, float(np.nextafter(begin_s, 0.0))))
            first_s = begin_s + _HOUR_S
    if first_s <= last_s:
        left.append((first_s, last_s))
    return left


def _source(fine: Window | None, coarse: Window | None, step_s: float, whole: bool) -> Window | None:
    """Return the row whose segment answers for an hour; None: raw segments do."""
    has_fine = fine is not None and fine.name is not None
    has_coarse = coarse is not None and coarse.name is not None and (fine is None or fine.id <= coarse.through_id)
    if has_coarse and whole and step_s >= HOURS.bucket_s:
        return coarse
    if has_fine and step_s >= MINUTES.bucket_s:
        return fine
    if fine is not None and not fine.partial:
        return None
    if has_fine:
        return fine
    return coarse if has_coarse else None


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces, those of one segment that follow each other as one."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].window is piece.window and joined[-1].end_s == piece.start_s:
            joined[-1] = joined[-1]._replace(end_s=piece.end_s)
        else:
            joined.append(piece)
    return joined


def _spans(coarsest: dict[float, int], start_s: float, end_s: float) -> list[QueryPart]:
    spans: list[QueryPart] = []

    def add(low_s: float, high_s: float, bucket_s: int) -> None:
        if spans and spans[-1].bucket_s == bucket_s:
            spans[-1] = spans[-1]._replace(end_s=high_s)
        elif low_s < high_s or not spans:
            spans.append(QueryPart(low_s, high_s, bucket_s))

    at_s = start_s
    for begin_s, bucket_s in sorted(coarsest.items()):
        if begin_s > at_s:
            add(at_s, begin_s, 0)
        at_s = min(begin_s + _HOUR_S, end_s)
        add(max(begin_s, start_s), at_s, bucket_s)
    if at_s < end_s or not spans:
        add(at_s, end_s, 0)
    return spans
