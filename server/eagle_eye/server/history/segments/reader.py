"""Reads one segment: only the row groups and columns needed, one row group in memory at a time."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_eye.schema.frame import Rank
from eagle_eye.schema.metrics import MetricSpec, Scope
from eagle_eye.server.history.history import RankReport, Recorded, Run, runs_of, speaks_of
from eagle_eye.server.history.segments.facts import FACTS_FILE, Facts, any_between
from eagle_eye.server.history.segments.frames import frames_of, whole
from eagle_eye.server.history.segments.layout import FRAMES_FILE, LINKS_FILE, SAMPLES_FILE
from eagle_eye.server.model.errors import HistoryUnavailable
from eagle_eye.server.telemetry.endings import in_words

# Errors of this process, not of the segment, which remains intact.
OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})
_ranks_decoder = msgspec.json.Decoder(list[Rank])


class BrokenSegment(ValueError):
    """A segment that cannot be read, or has unexpected contents; ``segment`` is its name, if known."""

    segment = ""


class _Group(NamedTuple):
    """Frames of one row group: the wanted rows, and the number of the first row in the whole table."""

    table: pa.Table
    wanted: np.ndarray[Any, np.dtype[np.int64]]
    first: int


class Segment:
    """One segment's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check_tables(self) -> None:
        """Raise BrokenSegment if a table is missing or truncated; cheap, as no table is read."""
        with reading():
            there = sum(path.stat().st_size for path in self._folder.iterdir() if path.name != FACTS_FILE)
        try:
            written = msgspec.json.decode((self._folder / FACTS_FILE).read_bytes(), type=Facts).bytes
        except (OSError, msgspec.MsgspecError):
            return  # the tables are read without it
        if there < written:
            raise BrokenSegment(f"its tables have {there} bytes, and had {written}")

    def frames(self, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[Recorded]:
        """Yield the nodes' frames (all if empty) in the range, by node and then by time. Raises BrokenSegment."""
        with reading(), self._open(FRAMES_FILE) as file:
            for group in _groups(file, None, nodes, start_s, end_s):
                end = group.first + group.table.num_rows
                samples, links = (self.rows(name, None, group.first, end) for name in (SAMPLES_FILE, LINKS_FILE))
                yield from frames_of(group.table, group.wanted, group.first, samples, links)

    def ranks(self, nodes: Sequence[str], start_s: float, end_s: float) -> Iterator[RankReport]:
        """Yield the ranks that the nodes' frames in the range report, as History.ranks does. Raises BrokenSegment."""
        with reading(), self._open(FRAMES_FILE) as file:
            for group in _groups(file, ["time", "node", "ranks", "raw"], nodes, start_s, end_s):
                yield from _told(group.table.take(pa.array(group.wanted)).to_pylist())

    def count(self, nodes: Sequence[str], start_s: float, end_s: float) -> int:
        """Return how many frames ``frames`` would yield. Raises BrokenSegment."""
        with reading(), self._open(FRAMES_FILE) as file:
            groups = _groups(file, ["time", "node"], nodes, start_s, end_s)
            return sum(len(group.wanted) for group in groups)

    def runs(
        self, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
    ) -> Iterator[Run]:
        """Yield the metric's values in the range, as History.runs does. Raises BrokenSegment."""
        name, key = (LINKS_FILE, "link") if metric.scope is Scope.LINK else (SAMPLES_FILE, "device")
        speaking = [] if job is None else ["job", "ranks"]
        with reading(), self._open(FRAMES_FILE) as file:
            for group in _groups(file, ["time", "node", "raw", *speaking], nodes, start_s, end_s):
                wanted = group.wanted if job is None else _speaking(group, job)
                # Columns do not tell its job.
                yield from _runs_of_whole(group.table, group.wanted, metric, job)
                rows = self.rows(name, ["time", "node", key, metric.name], group.first, group.first + len(group.table))
                if rows is None or metric.name not in rows.schema.names:
                    continue
                mask = np.zeros(group.table.num_rows, dtype=bool)
                mask[wanted] = True
                values = rows[metric.name].to_numpy().astype(np.float64)
                chosen = np.flatnonzero(mask[rows["frame"].to_numpy() - group.first] & ~np.isnan(values))
                yield from _runs(rows, chosen, key, values)

    def _open(self, name: str) -> pq.ParquetFile:
        return pq.ParquetFile(self._folder / name, page_checksum_verification=True)

    def rows(self, name: str, columns: list[str] | None, first: int, end: int) -> pa.Table | None:
        """Return the rows of frames ``first`` to before ``end``; None if there are none."""
        if not (self._folder / name).exists():
            return None
        with self._open(name) as file:
            at = file.schema_arrow.names.index("frame")
            groups = [
                number
                for number in range(file.metadata.num_row_groups)
                if overlaps(file.metadata.row_group(number).column(at).statistics, first, end - 1)
            ]
            if not groups:
                return None
            if columns is not None:
                columns = ["frame", *(column for column in columns if column in file.schema_arrow.names)]
            return file.read_row_groups(groups, columns=columns, use_threads=False)


def within(table: pa.Table | None, first: int, length: int) -> pa.Table | None:
    """Return the rows of ``length`` frames starting at ``first``; a row group may hold rows of other frames."""
    if table is None:
        return None
    frames = table["frame"].to_numpy()
    inside = (frames >= first) & (frames < first + length)
    return table if inside.all() else table.take(pa.array(np.flatnonzero(inside)))


@contextmanager
def reading(segment: str = "") -> Iterator[None]:
    """Convert errors of reading a segment to BrokenSegment, or to HistoryUnavailable if the segment is not at fault."""
    try:
        try:
            yield
        except BrokenSegment:
            raise
        except OSError as error:
            if error.errno in OURS:
                raise HistoryUnavailable(f"a segment of the history cannot be read at the moment: {error}") from error
            raise BrokenSegment(f"{error}") from error
        except (pa.ArrowException, msgspec.MsgspecError, KeyError, IndexError, ValueError, UnicodeError) as error:
            raise BrokenSegment(in_words(error)) from error
    except BrokenSegment as error:
        error.segment = error.segment or segment
        raise


def _groups(
    file: pq.ParquetFile, columns: list[str] | None, nodes: Sequence[str], start_s: float, end_s: float
) -> Iterator[_Group]:
    names = file.schema_arrow.names
    time_at, node_at = names.index("time"), names.index("node")
    wanted = sorted(nodes)
    values = pa.array(wanted, pa.string())
    first = 0
    for number in range(file.metadata.num_row_groups):
        meta = file.metadata.row_group(number)
        begin, first = first, first + meta.num_rows
        if not overlaps(meta.column(time_at).statistics, start_s, end_s):
            continue
        statistics = meta.column(node_at).statistics
        if nodes and statistics is not None and not any_between(wanted, statistics.min, statistics.max):
            continue
        table = file.read_row_group(number, columns=columns, use_threads=False)
        times_s = table["time"].to_numpy()
        mask = (times_s >= start_s) & (times_s <= end_s)
        if nodes:
            mask &= pc.is_in(table["node"], value_set=values).to_numpy()
        if mask.any():
            yield _Group(table, np.flatnonzero(mask), begin)


def overlaps(statistics: Any, low: float | str, high: float | str) -> bool:
    """Return whether a column chunk with these statistics may hold values between ``low`` and ``high``."""
    return statistics is None or not statistics.has_min_max or (statistics.min <= high and statistics.max >= low)


def _speaking(group: _Group, job: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the wanted rows that name the job."""
    ranks = group.table["ranks"].combine_chunks().dictionary_encode()
    texts = ranks.dictionary.to_pylist()
    of_ranks = np.array([any(rank.job == job for rank in _ranks_decoder.decode(text)) for text in texts] + [False])
    places = ranks.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
    named = pc.equal(group.table["job"], job).fill_null(False).to_numpy()
    speaking: np.ndarray[Any, np.dtype[np.bool_]] = of_ranks[places] | named
    found: np.ndarray[Any, np.dtype[np.int64]] = group.wanted[speaking[group.wanted]]
    return found


def _told(rows: list[dict[str, Any]]) -> Iterator[RankReport]:
    known: dict[str, list[Rank]] = {}  # consecutive frames have the same ranks
    for row in rows:
        if row["raw"] is not None:
            frame = whole(row["raw"])
            if frame is not None:
                yield RankReport(row["node"], row["time"], frame.ranks)
            continue
        text = row["ranks"]
        if text not in known:
            known[text] = _ranks_decoder.decode(text)
        yield RankReport(row["node"], row["time"], known[text])


def _runs(rows: pa.Table, chosen: np.ndarray[Any, Any], key: str, values: np.ndarray[Any, Any]) -> Iterator[Run]:
    """Yield the chosen rows, sorted by node, key and time, as one run for each node and key."""
    if len(chosen) == 0:
        return
    taken = rows.select(["time", "node", key]).take(pa.array(chosen))
    times_s, values = taken["time"].to_numpy(), values[chosen]
    codes = [taken[name].combine_chunks().dictionary_encode() for name in ("node", key)]
    places = [code.indices.to_numpy() for code in codes]
    new = (places[0][1:] != places[0][:-1]) | (places[1][1:] != places[1][:-1])
    bounds = np.r_[0, np.flatnonzero(new) + 1, len(chosen)].tolist()
    nodes, keys = (code.dictionary.to_pylist() for code in codes)
    for low, high in pairwise(bounds):
        yield Run(nodes[places[0][low]], keys[places[1][low]], times_s[low:high], values[low:high])


def _runs_of_whole(table: pa.Table, wanted: np.ndarray[Any, Any], metric: MetricSpec, job: str | None) -> Iterator[Run]:
    """Yield the values of frames that were stored whole because no columns could hold them."""
    if table["raw"].null_count == table.num_rows:
        return
    rows = table.select(["raw", "time"]).take(pa.array(wanted)).to_pylist()
    frames = ((whole(row["raw"]), row["time"]) for row in rows if row["raw"] is not None)
    yield from runs_of(((one, at_s) for one, at_s in frames if one and (job is None or speaks_of(one, job))), metric)
