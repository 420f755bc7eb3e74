"""Writes one segment's folder, and reads it.

It is written atomically: it appears complete, durable and under its name, or not at all. Only the row groups and
columns needed are read, one row group in memory at a time. Frames are rebuilt from the tables.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_eye.schema.events import BY_KIND, Event
from eagle_eye.schema.frame import WIRE_VERSION, BadFrame, Block, Frame, Rank, decode_frame
from eagle_eye.schema.metrics import BY_NAME, MetricSpec, Scope
from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.server.history.history import RankReport, Recorded, Run, runs_of, speaks_of
from eagle_eye.server.history.segment_tables import (
    FACTS_FILE,
    FRAMES_FILE,
    LINKS_FILE,
    PARTIAL,
    SAMPLES_FILE,
    Facts,
    Step,
    Tables,
    any_between,
    no_step,
)
from eagle_eye.server.model.errors import HistoryUnavailable, in_words

# Frames, rebuilt from a segment's tables

Integers = np.ndarray[Any, np.dtype[np.int64]]
_Layout = list[tuple[Scope, list[int | str], list[str]]]

_layout_decoder = msgspec.json.Decoder(_Layout)
_ranks_decoder = msgspec.json.Decoder(list[Rank])
_events_decoder = msgspec.json.Decoder(list[Event])
_texts_decoder = msgspec.json.Decoder(dict[str, str])
_counts_decoder = msgspec.json.Decoder(dict[str, int])


def frames_of(
    table: pa.Table, wanted: Integers, first: int, samples: pa.Table | None, links: pa.Table | None
) -> Iterator[Recorded]:
    """Yield the wanted rows of ``table`` as frames. Raises ValueError where the tables do not belong together.

    ``first`` is the number of the table's first row; the rows of ``samples`` and ``links`` refer to frames by such
    numbers. Fields that only a newer server knows are left out, as by ``decode_frame``.
    """
    rows = table.take(pa.array(wanted)).to_pylist()
    places_of: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        if row["layout"] is not None:
            places_of.setdefault(row["layout"], []).append(place)
    of_devices, of_links = _Rows(samples, "device"), _Rows(links, "link")
    blocks: list[list[Block]] = [[] for _ in rows]
    for text, places in places_of.items():
        layout = _layout_decoder.decode(text)
        skipped = 0  # bytes of ``unknown`` that belong to earlier metrics
        for scope, keys, metrics in layout:
            linked = scope is Scope.LINK
            source = of_links if linked else of_devices
            beside = [key for other, others, _ in layout if (other is Scope.LINK) is linked for key in others]
            beside.sort(key=str if linked else int)
            columns = [name for name in metrics if name in source.names]
            cells = source.values(wanted[places] + first, [beside.index(key) for key in keys], len(beside), columns)
            elsewhere = [name for name in metrics if name not in source.names]
            for place, own in zip(places, cells, strict=True):
                values = dict(zip(columns, own, strict=True))
                for number, name in enumerate(elsewhere):
                    at = skipped + 8 * len(keys) * number
                    values[name] = np.frombuffer(rows[place]["unknown"], "<f8", len(keys), at)
                known = [name for name in metrics if name in BY_NAME]
                blocks[place].append(Block(scope, keys, known, b"".join(values[name].tobytes() for name in known)))
            skipped += 8 * len(keys) * len(elsewhere)
    for row, own_blocks in zip(rows, blocks, strict=True):
        frame = _frame(row, own_blocks) if row["raw"] is None else whole(row["raw"])
        if frame is not None:
            yield Recorded(frame, row["received"], row["clock_offset"])


def whole(raw: bytes) -> Frame | None:
    """Return the frame that was stored whole; None where this server cannot decode it."""
    try:
        return decode_frame(raw)
    except BadFrame:
        return None


def _frame(row: dict[str, Any], blocks: list[Block]) -> Frame:
    events = _events_decoder.decode(row["events"]) if row["events"] is not None else []
    return Frame(
        version=WIRE_VERSION,
        node=row["node"],
        boot_id=row["boot_id"],
        stream=row["stream"],
        sequence=row["sequence"],
        time_s=row["node_time"],
        interval_s=row["interval"],
        agent_version=row["agent_version"],
        job=row["job"],
        ranks=_ranks_decoder.decode(row["ranks"]),
        blocks=blocks,
        events=[event for event in events if event.kind in BY_KIND],
        collectors=_texts_decoder.decode(row["collectors"]),
        dropped=_counts_decoder.decode(row["dropped"]),
    )


class _Rows:
    """The rows of some frames, looked up by frame and key."""

    def __init__(self, table: pa.Table | None, key: str) -> None:
        self._table: Any = table
        self._columns: dict[str, Any] = {}
        self.names = frozenset(table.schema.names if table is not None else ()) - {"time", "node", key, "frame"}
        if table is not None:
            frames = table["frame"].to_numpy()
            self._order = np.argsort(frames, kind="stable")  # stable: the keys of one frame's rows stay in order
            self._frames = frames[self._order]

    def values(self, frames: Integers, keys: list[int], rows: int, metrics: list[str]) -> Any:
        """Return the cells (frames, metrics, keys) as float64; ``keys`` are indexes among each frame's ``rows``."""
        if self._table is None or not keys:
            return np.empty((len(frames), len(metrics), len(keys)))
        begins = np.searchsorted(self._frames, frames)
        if len(self._frames) < begins.max() + rows or (self._frames[begins + rows - 1] != frames).any():
            raise ValueError("rows of frames are missing")
        places = self._order[begins[:, None] + np.array(keys)]
        cells = np.empty((len(frames), len(metrics), len(keys)))
        for number, name in enumerate(metrics):
            cells[:, number, :] = self._column(name)[places]
        return cells

    def _column(self, name: str) -> Any:
        if name not in self._columns:
            self._columns[name] = self._table[name].to_numpy()
        return self._columns[name]


# Reading

# Errors of this process, not of the segment, which remains intact.
OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})


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


# Writing

SomeFacts = TypeVar("SomeFacts", bound=msgspec.Struct)

# Numeric columns are written byte-stream-split and compressed. With few distinct values in random order (hundredths,
# clocks in steps) dictionary indexes are smaller, but take twice the time.
DISTINCT_MAX = 1_024
DICTIONARY_SAVES_BYTES = 0.5  # per value at least, or it is not worth it


class Draft:
    """A folder of tables below ``folder`` that appears under its name when it is finished."""

    def __init__(self, folder: Path, name: str, step: Step = no_step) -> None:
        self._folder = folder
        self._name = name
        self._step = step
        self._draft = folder / f"{PARTIAL}{name}"
        self._tables: dict[str, pq.ParquetWriter] = {}
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True, mode=0o700)
        step("draft")

    def append(self, name: str, table: pa.Table, options: Callable[[], dict[str, Any]]) -> None:
        """Add one row group to the table of this name; ``options`` returns its write options and is called once."""
        writer = self._tables.get(name)
        if writer is None:
            path = self._draft / name
            path.touch(mode=0o600)
            writer = self._tables[name] = pq.ParquetWriter(path, table.schema, **options())
        writer.write_table(table, row_group_size=max(len(table), 1))

    def finish(self, facts: SomeFacts) -> SomeFacts:
        """Move the folder into place, durably, and return the facts with its size."""
        for table in self._tables.values():
            table.close()
        self._step("tables")
        size = sum((self._draft / name).stat().st_size for name in self._tables)
        facts = msgspec.structs.replace(facts, bytes=size)
        (self._draft / FACTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")
        for path in (*self._draft.iterdir(), self._draft):
            _sync(path)
        self._step("synced")
        self._draft.rename(self._folder / self._name)
        self._step("renamed")
        _sync(self._folder)
        self._step("durable")
        return facts

    def discard(self) -> None:
        """Remove what was written of an unfinished folder."""
        for table in self._tables.values():
            table.close()
        shutil.rmtree(self._draft, ignore_errors=True)


class SegmentWriter:
    """Writes a segment's tables below ``folder``, a row group at a time: memory does not grow with the segment.

    The column encodings are chosen from ``sample``, some of the rows, or else from the first row group.
    """

    def __init__(self, folder: Path, name: str, step: Step = no_step, sample: Tables | None = None) -> None:
        self._draft = Draft(folder, name, step)
        self._samples = _named(sample) if sample is not None else {}

    def write(self, tables: Tables) -> None:
        """Add one row group to each table."""
        for name, table in _named(tables).items():
            options = partial(_encodings, self._samples.get(name, table))
            self._draft.append(name, table.cast(_written(table.schema)), options)

    def finish(self, facts: Facts) -> Facts:
        """Move the segment into place, durably, and return the facts with its size."""
        return self._draft.finish(facts)

    def discard(self) -> None:
        """Remove what was written of an unfinished segment."""
        self._draft.discard()


def _named(tables: Tables) -> dict[str, pa.Table]:
    named = {FRAMES_FILE: tables.frames, SAMPLES_FILE: tables.samples, LINKS_FILE: tables.links}
    return {name: table for name, table in named.items() if table is not None}


def _written(schema: pa.Schema) -> pa.Schema:
    """Return the schema with texts as dictionaries, so that equal texts are encoded once."""
    text = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([field.with_type(text) if field.type == pa.string() else field for field in schema])


def _encodings(sample: pa.Table) -> dict[str, Any]:
    """Return how each column is written, chosen from some of its rows."""
    dictionary, split, summarized = [], {}, []
    for name, column in zip(sample.schema.names, sample.columns, strict=True):
        if name in ("frame", "sequence"):
            split[name] = "DELTA_BINARY_PACKED"
        elif not pa.types.is_floating(column.type) or _suits_dictionary(column):
            dictionary.append(name)
        else:
            split[name] = "BYTE_STREAM_SPLIT"
        if pa.types.is_primitive(column.type) or name in ("node", "link", "raw"):
            summarized.append(name)
    return {
        "compression": "lz4",
        "write_statistics": summarized,
        "use_dictionary": dictionary,
        "column_encoding": split,
        "write_page_checksum": True,
        "store_schema": False,  # or readers would be told that texts are dictionaries
    }


def _suits_dictionary(column: pa.ChunkedArray) -> bool:
    """Return whether a dictionary is worth its cost: about twice the time of compressed byte streams."""
    if not 1 < len(column.unique()) <= DISTINCT_MAX:
        return False
    sizes = []
    for options in ({"use_dictionary": True}, {"use_dictionary": False, "use_byte_stream_split": True}):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"": column}), sink, compression="lz4", **options)
        sizes.append(sink.tell())
    return bool(sizes[1] - sizes[0] > DICTIONARY_SAVES_BYTES * len(column))


def _sync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


prepare_record_types()  # for those who import this module late
