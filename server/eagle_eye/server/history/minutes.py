"""A segment's minutes: written with it, read by queries, and built again where they are missing.

They are made from the row groups of the segment while it is written. A minute that spans the end of a segment or row
group has a row in each; readers combine them.

``python -m eagle_eye.server.history.minutes FOLDER NAME...`` builds the minutes of raw segments below the history's
FOLDER that have none: those of earlier versions, or whose minutes broke. It reports what is on disk as JSON lines on
standard output. It changes no table: the server does.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_eye.schema.frame import Frame
from eagle_eye.schema.metrics import BY_NAME, MetricSpec, Scope
from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.server.history.history import BucketSeries, Floats, Integers, Summary, runs_of, summarize, taken
from eagle_eye.server.history.processes import settle
from eagle_eye.server.history.segment_files import BrokenSegment, Draft, Segment, overlaps, reading, whole, within
from eagle_eye.server.history.segment_tables import (
    FACTS_FILE,
    FRAMES_FILE,
    LINKS_FILE,
    MINUTE_S,
    MINUTES_FOLDER,
    RAW_FOLDER,
    SAMPLES_FILE,
    Facts,
    MinutesFacts,
    Remade,
    Step,
    Tables,
    any_between,
    column,
    no_step,
    texts,
)
from eagle_eye.server.model.errors import HistoryUnavailable, in_words

SERIES_FILE = "series.parquet"
SERIES_SCHEMA = pa.schema(
    [
        ("metric", pa.string()),
        ("node", pa.string()),
        ("device", pa.int16()),  # -1: the node; null: a link
        ("link", pa.string()),
        ("time", pa.float64()),  # where the bucket begins
        ("job", pa.string()),  # the job that the frames named; null if none; with several jobs, a row for each
        ("count", pa.int32()),
        ("min", pa.float64()),
        ("max", pa.float64()),
        ("mean", pa.float64()),
        ("first", pa.float64()),
        ("last", pa.float64()),
        ("increase", pa.float64()),
        ("second", pa.int8()),  # offset of the first value from ``time``; rows of earlier versions have none
    ]
)
NUMBERS = ("count", "min", "max", "mean", "first", "last", "increase")  # the columns of a Summary, in its order
GROUP_ROWS = 1 << 12  # minimum rows per row group; a new one begins only between metrics
ROWS_MAX = 1 << 20  # in memory, some 100 MB; beyond that rows are written, and the metrics start over

_ENCODINGS: dict[str, Any] = {
    "compression": "zstd",  # there are few of them, and they are kept for long
    "write_statistics": ["metric", "node", "time"],  # used by queries
    "store_schema": False,  # or readers would be told that texts are dictionaries
    "use_dictionary": [field.name for field in SERIES_SCHEMA if field.name not in NUMBERS[1:]],
    "column_encoding": dict.fromkeys(NUMBERS[1:], "BYTE_STREAM_SPLIT"),
    "write_page_checksum": True,
}


class _RankJob(msgspec.Struct):
    job: str


_ranks_decoder = msgspec.json.Decoder(list[_RankJob])


class _Rows(NamedTuple):
    """Rows of one scope sorted by node, key and time: where each bucket begins, and its columns."""

    starts: Integers
    cells: dict[str, pa.Array]  # per bucket: all columns except the metric's

    @classmethod
    def of(
        cls, node: pa.DictionaryArray, key: pa.Array, linked: bool, times_s: Floats, job: pa.DictionaryArray
    ) -> _Rows:
        """Return the buckets among rows with these nodes, devices or links, times and jobs."""
        begin_s = np.floor(times_s / MINUTE_S) * MINUTE_S
        same = begin_s[1:] == begin_s[:-1]
        for one in (node, key, job):
            codes = (one.indices if isinstance(one, pa.DictionaryArray) else one).fill_null(-1).to_numpy()
            same &= codes[1:] == codes[:-1]
        starts = np.flatnonzero(np.append(True, ~same))
        places = pa.array(starts)
        nothing = pa.DictionaryArray.from_arrays(pa.nulls(len(starts), pa.int32()), pa.array([], pa.string()))
        return cls(
            starts,
            {
                "node": node.take(places),
                "device": pa.nulls(len(starts), pa.int16()) if linked else key.take(places),
                "link": key.take(places) if linked else nothing,
                "time": pa.array(begin_s[starts]),
                "job": job.take(places),
                "second": pa.array((times_s - begin_s)[starts].astype(np.int8)),
            },
        )

    def table(self, metric: str, summary: Summary) -> pa.Table:
        """Return the metric's buckets that have values."""
        seen = np.flatnonzero(summary.counts > 0)
        places, summary = pa.array(seen), taken(summary, seen)
        cells = {name: cell.take(places) for name, cell in self.cells.items()}
        cells["metric"] = pa.DictionaryArray.from_arrays(np.zeros(len(seen), dtype=np.int32), [metric])
        cells["count"] = pa.array(summary.counts.astype(np.int32))
        for name, values in zip(NUMBERS[1:], summary[1:], strict=True):
            cells[name] = column(values, SERIES_SCHEMA.field(name))
        return pa.table([cells[name] for name in SERIES_SCHEMA.names], names=SERIES_SCHEMA.names)


class MinutesWriter:
    """Writes the minutes of a segment below ``folder``; row groups are added in order."""

    def __init__(self, folder: Path, name: str, step: Step = no_step) -> None:
        self._draft = Draft(folder, name, step)
        self._waiting: dict[str, list[pa.Table]] = defaultdict(list)
        self._rows = self._waiting_rows = self._buckets = 0

    def add(self, tables: Tables, first: int) -> None:
        """Add a row group; ``first`` is the number of its first frame."""
        frames = tables.frames
        job, names = _jobs(frames)
        begin_s = np.floor(frames["time"].to_numpy() / MINUTE_S)
        nodes = _encoded(frames["node"]).indices.to_numpy()
        self._buckets += 1 + int(np.count_nonzero((begin_s[1:] != begin_s[:-1]) | (nodes[1:] != nodes[:-1])))
        for table, key in ((tables.samples, "device"), (tables.links, "link")):
            if table is not None and len(table):
                self._add(table, key, job[table["frame"].to_numpy() - first], names)
        if frames["raw"].null_count < len(frames):
            self._add_whole(frames.filter(pc.is_valid(frames["raw"])).select(["raw", "time"]).to_pylist())
        if self._waiting_rows >= ROWS_MAX:
            self._flush()

    def finish(self, facts: Facts) -> MinutesFacts:
        """Move the minutes of the segment with these facts into place, durably."""
        self._flush()
        if not self._rows:
            self._draft.append(SERIES_FILE, SERIES_SCHEMA.empty_table(), lambda: _ENCODINGS)
        return self._draft.finish(
            MinutesFacts(
                name=facts.name,
                journal=facts.journal,
                shard=facts.shard,
                last_chunk=facts.last_chunk,
                first_node=facts.first_node,
                last_node=facts.last_node,
                start_s=facts.first_s // MINUTE_S * MINUTE_S,
                end_s=facts.last_s // MINUTE_S * MINUTE_S + MINUTE_S,
                frames=self._buckets,
                rows=self._rows,
                bytes=0,
            )
        )

    def discard(self) -> None:
        """Remove what was written."""
        self._draft.discard()

    def _add(self, table: pa.Table, key: str, job: Integers, names: Sequence[str | None]) -> None:
        linked = key == "link"
        node, keys = _encoded(table["node"]), _encoded(table[key]) if linked else table[key].combine_chunks()
        of_node = np.zeros(len(table), dtype=bool) if linked else keys.to_numpy() == -1
        for scope, own in ((Scope.LINK, ~of_node),) if linked else ((Scope.NODE, of_node), (Scope.DEVICE, ~of_node)):
            places = np.flatnonzero(own)
            if not len(places):
                continue
            chosen = pa.array(places)
            times_s = table["time"].to_numpy()[places]
            rows = _Rows.of(node.take(chosen), keys.take(chosen), linked, times_s, texts(job[places], names))
            for name in table.schema.names:
                spec = BY_NAME.get(name)
                if spec is not None and spec.scope is scope and table[name].null_count < len(table):
                    self._put(name, rows, summarize(table[name].to_numpy()[places], rows.starts, spec.kind))

    def _add_whole(self, found: list[dict[str, Any]]) -> None:
        """Add the frames that were stored whole because no columns could hold them: a row for each value."""
        points: dict[str, list[tuple[str, Any, float, str | None, float]]] = defaultdict(list)
        for row in found:
            frame: Frame | None = whole(row["raw"])
            for name in {name for block in (frame.blocks if frame else ()) for name in block.metrics} & BY_NAME.keys():
                assert frame is not None  # noqa: S101 - or it had no blocks
                job = _line_each({frame.job, *(rank.job for rank in frame.ranks)})
                for run in runs_of([(frame, row["time"])], BY_NAME[name]):
                    points[name].append((run.node, run.key, row["time"], job, float(run.values[0])))
        for name, own in points.items():
            own.sort(key=lambda point: point[:3])
            node, key, times_s, jobs, values = zip(*own, strict=True)
            linked = BY_NAME[name].scope is Scope.LINK
            keys = pa.array(key, pa.string()).dictionary_encode() if linked else pa.array(key, pa.int16())
            node, job = (pa.array(one, pa.string()).dictionary_encode() for one in (node, jobs))
            rows = _Rows.of(node, keys, linked, np.array(times_s), job)
            self._put(name, rows, summarize(np.array(values), rows.starts, BY_NAME[name].kind))

    def _put(self, metric: str, rows: _Rows, summary: Summary) -> None:
        table = rows.table(metric, summary)
        self._waiting[metric].append(table)
        self._waiting_rows += len(table)

    def _flush(self) -> None:
        parts: list[pa.Table] = []
        for metric in sorted(self._waiting):
            parts += self._waiting.pop(metric)
            if sum(map(len, parts)) >= GROUP_ROWS:
                self._append(parts)
                parts = []
        self._append(parts)
        self._waiting_rows = 0

    def _append(self, parts: list[pa.Table]) -> None:
        if any(map(len, parts)):
            # As one table whose columns have one dictionary each, so that it is written as such.
            table = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
            self._draft.append(SERIES_FILE, table, lambda: _ENCODINGS)
            self._rows += len(table)


def _encoded(texts_: pa.ChunkedArray) -> pa.DictionaryArray:
    """Return a text column dictionary-encoded."""
    whole_ = texts_.unify_dictionaries().combine_chunks() if pa.types.is_dictionary(texts_.type) else texts_
    if isinstance(whole_, pa.ChunkedArray):
        whole_ = whole_.combine_chunks().dictionary_encode()
    return whole_


def _jobs(frames: pa.Table) -> tuple[Integers, list[str | None]]:
    """Return the jobs of each frame as an index into a list of names."""
    columns = [_encoded(frames[name]) for name in ("job", "ranks")]
    known = [[*one.dictionary.to_pylist(), None] for one in columns]
    codes = [one.indices.fill_null(len(one.dictionary)).to_numpy().astype(np.int64) for one in columns]
    pairs, places = np.unique(codes[0] << 32 | codes[1], return_inverse=True)
    said = [_job(known[0][pair >> 32], known[1][pair & 0xFFFFFFFF]) for pair in pairs.tolist()]
    names = list(dict.fromkeys(said))
    return np.array([names.index(one) for one in said], dtype=np.int64)[places], names


def _job(named: str | None, ranks: str | None) -> str | None:
    return _line_each({named, *(rank.job for rank in (_ranks_decoder.decode(ranks) if ranks else []))})


def _line_each(jobs: set[str | None]) -> str | None:
    return "\n".join(sorted(job for job in jobs if job is not None)) or None  # no name contains a newline


# Reading minutes, and hours of earlier versions: one row group at a time, and only those that contain the metric

BATCH_ROWS = 1 << 16  # read at a time
TEXTS = ["metric", "node", "link", "job"]


def courses(
    folder: Path, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
) -> Iterator[BucketSeries]:
    """Yield the buckets that begin in ``start_s`` to before ``end_s``, by series and time. Raises BrokenSegment."""
    wanted = sorted(nodes)
    key = "link" if metric.scope is Scope.LINK else "device"
    with reading(folder.name), _open_series(folder) as file:
        columns = ["metric", "node", key, "time", "job", *NUMBERS]
        columns += [name for name in ("second",) if name in file.schema_arrow.names]
        for number in _series_groups(file, metric.name, wanted, start_s, end_s):
            # A row group is read in parts: rows of one metric may be a small part of it.
            for batch in file.iter_batches(BATCH_ROWS, [number], columns, use_threads=False):
                table = pa.table(batch)
                times_s = table["time"].to_numpy()
                mask = (times_s >= start_s) & (times_s < end_s)
                mask &= pc.equal(table["metric"].cast(pa.string()), metric.name).to_numpy()
                if wanted:
                    mask &= pc.is_in(table["node"].cast(pa.string()), value_set=pa.array(wanted)).to_numpy()
                if job is not None and mask.any():
                    jobs = table["job"].combine_chunks()
                    speaking = [job in text.split("\n") for text in jobs.dictionary.to_pylist()]
                    mask &= np.array([*speaking, False])[jobs.indices.fill_null(len(speaking)).to_numpy()]
                places = np.flatnonzero(mask)
                if len(places):
                    yield from _courses(table.take(pa.array(places)), key)


def _open_series(folder: Path) -> pq.ParquetFile:
    return pq.ParquetFile(folder / SERIES_FILE, page_checksum_verification=True, read_dictionary=TEXTS)


def _series_groups(file: pq.ParquetFile, metric: str, wanted: list[str], start_s: float, end_s: float) -> Iterator[int]:
    names = file.schema_arrow.names
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        of = {name: group.column(names.index(name)).statistics for name in ("metric", "node", "time")}
        nodes = of["node"]
        if (
            overlaps(of["metric"], metric, metric)
            and overlaps(of["time"], start_s, end_s)
            and not (wanted and nodes is not None and not any_between(wanted, nodes.min, nodes.max))
        ):
            yield number


def _courses(table: pa.Table, key: str) -> Iterator[BucketSeries]:
    columns: list[Any] = [table[name].combine_chunks() for name in ("node", key)]
    codes = [one.indices if isinstance(one, pa.DictionaryArray) else one for one in columns]
    new = np.logical_or.reduce([one.to_numpy()[1:] != one.to_numpy()[:-1] for one in codes])
    starts = np.flatnonzero(np.append(True, new))
    names = [one.take(pa.array(starts)).to_pylist() for one in columns]
    times_s = table["time"].to_numpy()
    began_s = times_s + (table["second"].to_numpy() if "second" in table.schema.names else 0)
    count, *others = (table[name].to_numpy() for name in NUMBERS)
    summary = Summary(count.astype(np.int64), *(one.astype(np.float64) for one in others))
    for node, own, low, high in zip(*names, starts.tolist(), [*starts[1:].tolist(), len(table)], strict=True):
        part = slice(low, high)
        yield BucketSeries(node, own, times_s[part], taken(summary, part), began_s[part])


# Building missing minutes

NICENESS = 15  # yields also to the compactor, which bounds the journal's size


def remake(folder: Path, name: str, step: Step = no_step) -> Remade:
    """Write the minutes of the raw segment of this name. Raises OSError, ArrowException, HistoryUnavailable."""
    raw = folder / RAW_FOLDER / name
    writer = MinutesWriter(folder / MINUTES_FOLDER, name, step)
    try:
        with reading(name):
            Segment(raw).check_tables()
            facts = msgspec.json.decode((raw / FACTS_FILE).read_bytes(), type=Facts)
            with pq.ParquetFile(raw / FRAMES_FILE, page_checksum_verification=True) as file:
                first = 0
                for number in range(file.metadata.num_row_groups):
                    frames = file.read_row_group(number, columns=["time", "node", "job", "ranks", "raw"])
                    samples, links = (
                        within(Segment(raw).rows(table, None, first, first + len(frames)), first, len(frames))
                        for table in (SAMPLES_FILE, LINKS_FILE)
                    )
                    writer.add(Tables(frames, samples, links), first)
                    first += len(frames)
        return Remade(name, writer.finish(facts))
    except BrokenSegment as error:
        writer.discard()
        return Remade(name, None, f"{error}"[:500])
    except BaseException:
        writer.discard()
        raise


def main(arguments: Sequence[str]) -> int:
    """Build the minutes that are missing; return 1 on failure, with the reason on standard error."""
    folder, *names = arguments
    settle(NICENESS)
    try:
        for name in names:
            sys.stdout.buffer.write(msgspec.json.encode(remake(Path(folder), name)) + b"\n")
            sys.stdout.buffer.flush()
    except (OSError, pa.ArrowException, HistoryUnavailable, MemoryError) as error:
        sys.stderr.write(f"{in_words(error)}\n")
        return 1
    return 0


prepare_record_types()  # for those who import this module late


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
