"""Reads minutes, and hours of earlier versions: one row group at a time, and only those that contain the metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_eye.schema.metrics import MetricSpec, Scope
from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.server.history.segments.downsampling import BucketSeries, Summary, taken
from eagle_eye.server.history.segments.facts import any_between
from eagle_eye.server.history.segments.minutes import NUMBERS, SERIES_FILE
from eagle_eye.server.history.segments.reader import overlaps, reading

BATCH_ROWS = 1 << 16  # read at a time
TEXTS = ["metric", "node", "link", "job"]


def courses(
    folder: Path, metric: MetricSpec, nodes: Sequence[str], start_s: float, end_s: float, job: str | None
) -> Iterator[BucketSeries]:
    """Yield the buckets that begin in ``start_s`` to before ``end_s``, by series and time. Raises BrokenSegment."""
    wanted = sorted(nodes)
    key = "link" if metric.scope is Scope.LINK else "device"
    with reading(folder.name), _open(folder) as file:
        columns = ["metric", "node", key, "time", "job", *NUMBERS]
        columns += [name for name in ("second",) if name in file.schema_arrow.names]
        for number in _groups_of(file, metric.name, wanted, start_s, end_s):
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


def _open(folder: Path) -> pq.ParquetFile:
    return pq.ParquetFile(folder / SERIES_FILE, page_checksum_verification=True, read_dictionary=TEXTS)


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


prepare_record_types()  # for those who import this module late
