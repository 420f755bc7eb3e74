"""Downsampled segments: written metric by metric, read a row group at a time, and only those that a metric is in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_eye.schema.metrics import BY_NAME, Kind, MetricSpec, Scope
from eagle_eye.server.history.segments.downsampling import BucketSeries, Integers, Summary, combine, taken
from eagle_eye.server.history.segments.facts import Step, any_between, no_step
from eagle_eye.server.history.segments.levels import (
    LEVEL_OF_NAME,
    NUMBERS,
    SERIES_FILE,
    SERIES_SCHEMA,
    Book,
    Level,
    LevelFacts,
    Rows,
    chosen,
    together,
)
from eagle_eye.server.history.segments.reader import overlaps, reading
from eagle_eye.server.history.segments.writer import Draft

GROUP_ROWS = 1 << 16  # rows of a row group at least; only between metrics does a new one begin
BATCH_ROWS = 1 << 16  # read at a time by queries

Part = tuple[str, Rows]


def write(
    folder: Path, facts: LevelFacts, parts: Iterable[Part], book: Book, step: Step = no_step
) -> LevelFacts | None:
    """Write the metrics' buckets, which come by name, as a segment; None: there were none, and there is no segment."""
    level = LEVEL_OF_NAME[facts.level]
    draft = Draft(folder, facts.name, step)
    waiting: list[pa.Table] = []
    seen = _Seen(level, facts.start_s)
    rows = 0
    try:
        for metric, part in parts:
            waiting.append(book.table(metric, part))
            seen.add(part)
            rows += len(part.series)
            if sum(len(table) for table in waiting) >= GROUP_ROWS:
                draft.append(SERIES_FILE, _one(waiting), _encodings)
                waiting = []
        if waiting:
            draft.append(SERIES_FILE, _one(waiting), _encodings)
        if not rows:
            draft.discard()
            return None
        first, last = seen.between(book)
        told = {"first_node": first, "last_node": last, "frames": seen.count(), "present": seen.present(), "rows": rows}
        return draft.finish(msgspec.structs.replace(facts, **told))
    except BaseException:
        draft.discard()
        raise


def parts_of(folder: Path, book: Book, without_s: Sequence[float] = ()) -> Iterator[Part]:
    """Yield the segment's metrics, by name, but for buckets that begin at these times. Raises BrokenSegment."""
    with reading(folder.name), _open(folder) as file:
        for number in range(file.metadata.num_row_groups):
            table = file.read_row_group(number, use_threads=False)
            metrics, names = _numbers(table["metric"])
            starts = np.flatnonzero(np.append(True, metrics[1:] != metrics[:-1])).tolist()
            rows = _rows(table, book)
            kept = ~np.isin(rows.begin_s, np.array(without_s, dtype=np.int64))
            for low, high in zip(starts, [*starts[1:], len(table)], strict=True):
                name = names[metrics[low]]
                places = low + np.flatnonzero(kept[low:high])
                if name in BY_NAME and len(places):  # a newer server knew more names
                    yield name, chosen(rows, places)


def rolled_up(sources: Sequence[Iterator[Part]], level: Level, book: Book, keep: bool = False) -> Iterator[Part]:
    """Yield the metrics of the sources, each by name, in the buckets of ``level``.

    With ``keep`` the first source was there before the others, whose values are of the same times: of a series and
    bucket that it has, first, last and increase stay as they were.
    """
    heads = [(source, next(source, None)) for source in sources]
    while True:
        metric = min((head[0] for _, head in heads if head is not None), default=None)
        if metric is None:
            return
        found: list[Rows] = []
        left = []
        for source, head in heads:
            while head is not None and head[0] == metric:
                found.append(head[1])
                head = next(source, None)  # noqa: PLW2901 - what comes next of it
            left.append((source, head))
        heads = left
        yield metric, _rolled_up(together(found), BY_NAME[metric].kind, level, book, keep)


def courses(
    folder: Path, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
) -> Iterator[BucketSeries]:
    """Yield the buckets that begin in ``start_s`` to before ``end_s``, by series and time. Raises BrokenSegment."""
    wanted = sorted(nodes)
    key = "link" if metric.scope is Scope.LINK else "device"
    with reading(folder.name), _open(folder) as file:
        for number in _groups_of(file, metric.name, wanted, start_s, end_s):
            # A row group is read in parts: rows of one metric may be a small part of it.
            columns = ["metric", "node", key, "time", "job", *NUMBERS]
            for batch in file.iter_batches(BATCH_ROWS, [number], columns, use_threads=False):
                table = pa.table(batch)
                times_s = table["time"].to_numpy()
                mask = (times_s >= start_s) & (times_s < end_s)
                mask &= pc.equal(table["metric"].cast(pa.string()), metric.name).to_numpy()
                if wanted:
                    mask &= pc.is_in(table["node"].cast(pa.string()), value_set=pa.array(wanted)).to_numpy()
                if job is not None and mask.any():
                    mask &= _speaking(table["job"], job)
                places = np.flatnonzero(mask)
                if len(places):
                    yield from _courses(table.take(pa.array(places)), key)


class _Seen:
    """Which buckets of which nodes there are."""

    def __init__(self, level: Level, start_s: float) -> None:
        self._level = level
        self._start_s = start_s
        self._seen = np.zeros((64, level.window_s // level.bucket_s), dtype=bool)

    def add(self, rows: Rows) -> None:
        """Note the rows."""
        nodes = rows.series >> 32
        more = int(nodes.max()) + 1 - len(self._seen)
        if more > 0:
            self._seen = np.vstack([self._seen, np.zeros((more, self._seen.shape[1]), dtype=bool)])
        self._seen[nodes, (rows.begin_s - int(self._start_s)) // self._level.bucket_s] = True

    def count(self) -> int:
        """Return how many buckets of nodes there are."""
        return int(np.count_nonzero(self._seen))

    def present(self) -> int:
        """Return the buckets that there are of any node, as bits."""
        return sum(1 << at for at in np.flatnonzero(self._seen.any(axis=0)).tolist())

    def between(self, book: Book) -> tuple[str, str]:
        """Return the first and the last node, by name."""
        names = book.names(np.flatnonzero(self._seen.any(axis=1)))
        return min(names), max(names)


def _rolled_up(rows: Rows, kind: Kind, level: Level, book: Book, keep: bool) -> Rows:
    begin_s = rows.begin_s // level.bucket_s * level.bucket_s
    ranks = book.ranks(rows.series)
    order = np.lexsort((rows.begin_s, rows.job, begin_s, ranks))  # stable: what was there before comes first
    ordered = chosen(rows, order)
    begin_s, ranks = begin_s[order], ranks[order]
    same = (ranks[1:] == ranks[:-1]) & (begin_s[1:] == begin_s[:-1]) & (ordered.job[1:] == ordered.job[:-1])
    starts = np.flatnonzero(np.append(True, ~same))
    summary = combine(ordered.summary, starts, kind)
    if keep:
        kept = {name: getattr(ordered.summary, name)[starts] for name in ("first", "last", "increase")}
        summary = summary._replace(**kept)
    # Jobs that shared a bucket in the order in which they began.
    in_order = np.lexsort((ordered.begin_s[starts], begin_s[starts], ranks[starts]))
    return chosen(Rows(ordered.series[starts], begin_s[starts], ordered.job[starts], summary), in_order)


def _one(parts: list[pa.Table]) -> pa.Table:
    """Return the parts as one table, each column of which has one dictionary: so it is written as such."""
    return parts[0] if len(parts) == 1 else pa.concat_tables(parts).unify_dictionaries().combine_chunks()


def _encodings() -> dict[str, Any]:
    return {
        "compression": "zstd",  # of minutes there are few, and they are kept for long
        "write_statistics": ["metric", "node", "time"],  # what queries look for
        "store_schema": False,  # or readers would be told that texts are dictionaries
        "use_dictionary": [field.name for field in SERIES_SCHEMA if field.name not in NUMBERS[1:]],
        "column_encoding": dict.fromkeys(NUMBERS[1:], "BYTE_STREAM_SPLIT"),
        "write_page_checksum": True,
    }


def _open(folder: Path) -> pq.ParquetFile:
    texts = ["metric", "node", "link", "job"]
    return pq.ParquetFile(folder / SERIES_FILE, page_checksum_verification=True, read_dictionary=texts)


def _groups_of(file: pq.ParquetFile, metric: str, wanted: list[str], start_s: float, end_s: float) -> Iterator[int]:
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


def _rows(table: pa.Table, book: Book) -> Rows:
    nodes, names = _numbers(table["node"])
    links, link_names = _numbers(table["link"])
    jobs, job_names = _numbers(table["job"])
    keys = table["device"].combine_chunks().fill_null(-1).to_numpy().astype(np.int64)
    linked = links < len(link_names)
    if linked.any():
        keys[linked] = book.links(link_names)[links[linked]]
    return Rows(
        book.series(book.nodes(names)[nodes], keys),
        table["time"].to_numpy().astype(np.int64),
        book.jobs([*job_names, None])[jobs],
        _summary(table),
    )


def _summary(table: pa.Table) -> Summary:
    count = table["count"].to_numpy().astype(np.int64)
    return Summary(count, *(table[name].to_numpy().astype(np.float64) for name in NUMBERS[1:]))


def _numbers(column: pa.ChunkedArray) -> tuple[Integers, list[str]]:
    """Return the places of a dictionary column's texts, and the texts; null is the place after the last."""
    whole = column.unify_dictionaries().combine_chunks()
    texts = whole.dictionary.to_pylist()
    return whole.indices.fill_null(len(texts)).to_numpy().astype(np.int64), texts


def _speaking(column: pa.ChunkedArray, job: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    places, texts = _numbers(column)
    speaking: np.ndarray[Any, np.dtype[np.bool_]] = np.array([job in text.split("\n") for text in texts] + [False])
    return speaking[places]


def _courses(table: pa.Table, key: str) -> Iterator[BucketSeries]:
    nodes, names = _numbers(table["node"])
    if key == "link":
        keys, texts = _numbers(table["link"])
        keys_of: list[Any] = texts
    else:
        keys, keys_of = table["device"].to_numpy().astype(np.int64), []
    new = np.append(True, (nodes[1:] != nodes[:-1]) | (keys[1:] != keys[:-1]))
    starts = np.flatnonzero(new).tolist()
    times_s, summary = table["time"].to_numpy(), _summary(table)
    for low, high in zip(starts, [*starts[1:], len(table)], strict=True):
        key_of = keys_of[keys[low]] if keys_of else int(keys[low])
        yield BucketSeries(names[nodes[low]], key_of, times_s[low:high], taken(summary, slice(low, high)))
