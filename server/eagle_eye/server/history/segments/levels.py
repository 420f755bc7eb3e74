"""What is kept of the past when raw frames are too many: levels of buckets, each with segments of its own.

A level's segment is a folder with one table and ``segment.json``. ``docs/explanation/history.md`` describes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from eagle_eye.schema.metrics import BY_NAME, Scope
from eagle_eye.server.history.segments.downsampling import Integers, Summary, joined, taken
from eagle_eye.server.history.segments.facts import DOWNSAMPLED_FORMAT
from eagle_eye.server.history.segments.row_tables import column, texts

SERIES_FILE = "series.parquet"
SERIES_SCHEMA = pa.schema(
    [
        ("metric", pa.string()),
        ("node", pa.string()),
        ("device", pa.int16()),  # -1: the node; null: a link
        ("link", pa.string()),
        ("time", pa.float64()),  # where the bucket begins
        ("job", pa.string()),  # whom the frames spoke of; null: nobody; of several, a line each
        ("count", pa.int32()),
        ("min", pa.float64()),
        ("max", pa.float64()),
        ("mean", pa.float64()),
        ("first", pa.float64()),
        ("last", pa.float64()),
        ("increase", pa.float64()),
    ]
)
_STATISTICS = [SERIES_SCHEMA.field(name) for name in ("min", "max", "mean", "first", "last", "increase")]
NUMBERS = ("count", "min", "max", "mean", "first", "last", "increase")  # the columns of a Summary, in its order

_LINKS = 1 << 20  # keys from here on are links


class Rows(NamedTuple):
    """Buckets of one metric: their series and job as a Book has them, where they begin, what was in them."""

    series: Integers
    begin_s: Integers
    job: Integers
    summary: Summary


class Book:
    """Series and jobs as numbers: a node, and a device (-1: itself) or link of it."""

    def __init__(self) -> None:
        self._nodes: dict[str, int] = {}
        self._links: dict[str, int] = {}
        self._jobs: dict[str | None, int] = {}

    def nodes(self, names: list[str]) -> Integers:
        """Return the nodes' numbers."""
        return np.array([self._nodes.setdefault(name, len(self._nodes)) for name in names], dtype=np.int64)

    def links(self, names: list[str]) -> Integers:
        """Return the links' keys."""
        known = self._links
        return np.array([_LINKS + known.setdefault(name, len(known)) for name in names], dtype=np.int64)

    def jobs(self, names: list[str | None]) -> Integers:
        """Return the jobs' numbers."""
        return np.array([self._jobs.setdefault(name, len(self._jobs)) for name in names], dtype=np.int64)

    def names(self, numbers: Integers) -> list[str]:
        """Return the names of nodes."""
        names = list(self._nodes)
        return [names[number] for number in numbers.tolist()]

    @staticmethod
    def series(nodes: Integers, keys: Integers) -> Integers:
        """Return the numbers of series; ``keys`` are devices, -1 or links' keys."""
        return (nodes << 32) | (keys + 1)

    def ranks(self, series: Integers) -> Integers:
        """Return numbers that sort as the series' nodes and then their keys do."""
        nodes, keys = series >> 32, (series & 0xFFFFFFFF) - 1
        links = np.flatnonzero(keys >= _LINKS)
        ranked = keys.copy()
        ranked[links] = _LINKS + _places(self._links)[keys[links] - _LINKS]
        found: Integers = (_places(self._nodes)[nodes] << 32) | (ranked + 1)
        return found

    def table(self, metric: str, rows: Rows) -> pa.Table:
        """Return the rows of SERIES_SCHEMA; its texts are dictionaries."""
        nodes, keys = rows.series >> 32, (rows.series & 0xFFFFFFFF) - 1
        linked = BY_NAME[metric].scope is Scope.LINK
        length = len(nodes)
        nothing = pa.DictionaryArray.from_arrays(pa.nulls(length, pa.int32()), pa.array([], pa.string()))
        cells = [
            pa.DictionaryArray.from_arrays(np.zeros(length, dtype=np.int32), [metric]),
            texts(nodes, list(self._nodes)),
            pa.nulls(length, pa.int16()) if linked else pa.array(keys.astype(np.int16)),
            texts(keys - _LINKS, list(self._links)) if linked else nothing,
            pa.array(rows.begin_s.astype(np.float64)),
            texts(rows.job, list(self._jobs)),
            pa.array(rows.summary.counts.astype(np.int32)),
            *(column(values, field) for values, field in zip(rows.summary[1:], _STATISTICS, strict=True)),
        ]
        return pa.table(cells, names=SERIES_SCHEMA.names)


class Level(NamedTuple):
    """Buckets of ``bucket_s``; one segment holds those of ``window_s`` and of one group of nodes."""

    name: str
    bucket_s: int
    window_s: int


MINUTES = Level("1m", 60, 3_600)
HOURS = Level("1h", 3_600, 86_400)
LEVELS = (MINUTES, HOURS)
LEVEL_OF_NAME = {level.name: level for level in LEVELS}


class LevelFacts(msgspec.Struct, frozen=True):
    """``segment.json`` of a downsampled segment. Times are corrected Unix seconds.

    ``journal`` names the journal whose frames it is made of, at least the last of them.
    ``frames`` counts the buckets of nodes, ``rows`` those of the table, ``bytes`` its size. Bit i of ``present`` says
    whether there is anything of the i-th bucket.
    """

    name: str
    journal: str
    level: str
    shard: int
    start_s: float
    end_s: float
    first_node: str
    last_node: str
    frames: int
    present: int
    rows: int
    bytes: int
    format: str = DOWNSAMPLED_FORMAT


def chosen(rows: Rows, places: np.ndarray[Any, Any]) -> Rows:
    """Return the rows that ``places`` (places or a mask) names."""
    return Rows(rows.series[places], rows.begin_s[places], rows.job[places], taken(rows.summary, places))


def together(parts: list[Rows]) -> Rows:
    """Return all rows, one part's after the other's."""
    series, begin_s, job, summaries = zip(*parts, strict=True)
    return Rows(np.concatenate(series), np.concatenate(begin_s), np.concatenate(job), joined(summaries))


def _places(names: dict[str, int]) -> Integers:
    """Return where each name stands among all in order, by its number."""
    places = np.empty(len(names), dtype=np.int64)
    places[[names[name] for name in sorted(names)]] = np.arange(len(names))
    return places
