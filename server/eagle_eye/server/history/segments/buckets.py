"""Where the buckets of a level are among the rows of several tables.

Buckets whose rows lie in several places, or out of order, since frames came late or a stretch of the journal ended
there, are put together before they are summarized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.schema.metrics import Kind
from eagle_eye.server.history.segments.downsampling import Floats, Integers, Summary, constant, joined, summarize, taken
from eagle_eye.server.history.segments.levels import Book, Level, Rows, chosen

# A metric's values and how many of them are NaN; a number: that is what all are; None: there are none.
Column = Callable[[str], "tuple[np.ndarray[Any, Any], int] | float | None"]


class BucketRows(NamedTuple):
    """Some rows of a scope, by series and time as far as possible, and the columns of its metrics and of ``time``."""

    series: Integers
    time_s: Floats
    job: Integers
    column: Column


class _Part(NamedTuple):
    """The buckets of one source: where each begins and ends among its rows, what it is of, and the columns."""

    starts: Integers
    ends: Integers
    series: Integers
    bucket: Integers
    job: Integers
    first_s: Floats
    unsorted: np.ndarray[Any, np.dtype[np.bool_]]
    column: Column

    def values(self, name: str) -> np.ndarray[Any, Any]:
        """Return a column's values; NaN where there are none."""
        column = self.column(name)
        if isinstance(column, tuple):
            return column[0]
        return np.full(int(self.ends[-1]), np.nan if column is None else column)


class Buckets:
    """The rows of all sources of one scope, in buckets. Sources are added, then it is closed, then it is read."""

    def __init__(self, level: Level, book: Book) -> None:
        self._level = level
        self._book = book
        self._parts: list[_Part] = []

    def add(self, source: BucketRows) -> None:
        """Add a source's rows, of which there are some; only where the buckets are among them is kept."""
        # A time's digits are fine enough that no quotient is rounded up to the next bucket.
        bucket = np.floor(source.time_s / self._level.bucket_s).astype(np.int64)
        new = np.ones(len(bucket), dtype=bool)
        new[1:] = (source.series[1:] != source.series[:-1]) | (bucket[1:] != bucket[:-1])
        new[1:] |= source.job[1:] != source.job[:-1]
        starts = np.flatnonzero(new)
        back = np.zeros(len(bucket), dtype=bool)
        back[1:] = (source.time_s[1:] < source.time_s[:-1]) & ~new[1:]
        self._parts.append(
            _Part(
                starts,
                np.append(starts[1:], len(bucket)),
                source.series[starts],
                bucket[starts],
                source.job[starts],
                source.time_s[starts],
                np.logical_or.reduceat(back, starts),
                source.column,
            )
        )

    def close(self) -> None:
        """Find which buckets are in one place, and in which order all of them are read."""
        if not self._parts:
            return
        sizes = [len(part.starts) for part in self._parts]
        number = np.repeat(np.arange(len(sizes)), sizes)
        group = np.concatenate([np.arange(size) for size in sizes])
        series, bucket, job, first_s, unsorted = (
            np.concatenate(columns) for columns in zip(*(part[2:7] for part in self._parts), strict=True)
        )
        ranks = self._book.ranks(series)
        order = np.lexsort((first_s, job, bucket, ranks))
        columns = [column[order] for column in (ranks, bucket, job)]
        same = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
        begins = np.flatnonzero(np.append(True, ~same))
        members = np.diff(begins, append=len(order))
        scattered = (members > 1) | np.logical_or.reduceat(unsorted[order], begins)
        owner = np.repeat(np.where(scattered, np.cumsum(scattered) - 1, -1), members)
        self._gather(order[owner >= 0], owner[owner >= 0], number, group)
        place = np.empty(len(begins), dtype=np.int64)
        place[~scattered] = order[begins[~scattered]]
        place[scattered] = len(order) + np.arange(int(np.count_nonzero(scattered)))
        # By series and time: a bucket in which the job changed has a row for each, in order of time.
        firsts = order[begins]
        in_order = np.lexsort((first_s[firsts], bucket[firsts], ranks[firsts]))
        self._place = place[in_order]
        firsts = firsts[in_order]
        self._series, self._begin_s, self._job = series[firsts], bucket[firsts] * self._level.bucket_s, job[firsts]

    def rows(self, metric: str, kind: Kind) -> Rows | None:
        """Return the metric's buckets that have values, by node, device or link and time; None: there are none."""
        found: list[Summary] = []
        gathered: list[np.ndarray[Any, Any]] = []
        some = False
        for part, rows in zip(self._parts, self._rows if self._parts else [], strict=True):
            column = part.column(metric)
            some |= column is not None
            if isinstance(column, float):
                found.append(constant(column, part.ends - part.starts, kind))
                gathered.append(np.full(len(rows), column))
                continue
            length = int(part.ends[-1])
            values, missing = (np.full(length, np.nan, dtype=np.float32), length) if column is None else column
            found.append(summarize(values, part.starts, kind, missing))
            gathered.append(values[rows])
        if not some:
            return None
        if len(self._order):
            found.append(summarize(np.concatenate(gathered)[self._order], self._starts, kind))
        everything = joined(found)
        summary = taken(everything, self._place)
        seen = summary.counts > 0
        return chosen(Rows(self._series, self._begin_s, self._job, summary), seen) if seen.any() else None

    def _gather(self, members: Integers, owner: Integers, number: Integers, group: Integers) -> None:
        """Note which rows of each source belong to scattered buckets, and in which order they stand together.

        ``members`` are buckets of parts, and ``owner`` of each the scattered bucket that it is some of.
        """
        self._rows: list[Integers] = []
        owners: list[Integers] = []
        times_s: list[Floats] = []
        for at, part in enumerate(self._parts):
            own = number[members] == at
            groups = group[members[own]]
            starts, ends = part.starts[groups], part.ends[groups]
            rows = _ranges(starts, ends)
            self._rows.append(rows)
            owners.append(np.repeat(owner[own], ends - starts))
            times_s.append(part.values("time")[rows] if len(rows) else np.empty(0))
        of = np.concatenate(owners)
        self._order = np.lexsort((np.concatenate(times_s), of))
        of = of[self._order]
        self._starts = np.flatnonzero(np.append(True, of[1:] != of[:-1])) if len(of) else of


def _ranges(starts: Integers, ends: Integers) -> Integers:
    """Return all places from each start to before its end."""
    sizes = ends - starts
    if not len(sizes):
        return sizes
    before = np.cumsum(sizes) - sizes
    places: Integers = np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)
    return places
