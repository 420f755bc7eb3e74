"""Downsamples a segment's frames to minutes while the segment is written, from the same row groups.

A minute that spans the end of a segment or row group has a row in each; readers combine them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eagle_eye.schema.frame import Frame
from eagle_eye.schema.metrics import BY_NAME, Scope
from eagle_eye.server.history.history import runs_of
from eagle_eye.server.history.segments.downsampling import Floats, Integers, Summary, summarize, taken
from eagle_eye.server.history.segments.facts import MINUTE_S, Facts, MinutesFacts, Step, no_step
from eagle_eye.server.history.segments.frames import whole
from eagle_eye.server.history.segments.row_tables import Tables, column, texts
from eagle_eye.server.history.segments.writer import Draft

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
