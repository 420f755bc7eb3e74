"""Reads a trace's tables as blocks of frames, in order of time and node, whatever the order in the files.

A table is read once, its keys sorted once (or found sorted), and its cells gathered in chunks of contiguous rows: no
Python code runs per row. Memory is the file's columns plus one chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.events import WHOLE_NODE
from eagle_eye.schema.frame import Block
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.times import TIME_S_MAX, in_seconds
from eagle_eye.server.backtest.trace_clocks import RowSpan
from eagle_eye.server.backtest.trace_format import SILENCE_COLUMN, BadTrace, opened

CHUNK_CELLS = 1 << 21  # gathered at a time: 16 MiB
DEVICE_MAX = (1 << 15) - 1
NO_KEY = -2  # the row has no device, node or link

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class TraceRows(NamedTuple):
    """Rows of one scope of one node that ended at one time.

    ``silent`` has the silence in seconds of each device whose rank's process reported nothing.
    """

    time_s: float
    node: str
    block: Block
    silent: dict[int, float]


class _Keys(NamedTuple):
    """The rows' keys: Unix seconds, and indexes into ``nodes`` and ``names`` (devices: the device itself)."""

    times_s: Floats
    node_of: Integers
    key_of: Integers
    nodes: list[str]
    names: list[str] | None


class RowColumns(NamedTuple):
    """A table's usable rows in order of time, node and key, as columns; ``node_of`` and ``key_of`` as in ``_Keys``."""

    times_s: Floats
    node_of: Integers
    key_of: Integers
    nodes: list[str]
    names: list[str] | None
    values: dict[str, Any]


class TableRows:
    """The rows of a table, in order: ``moments`` yields them, ``columns`` has them whole.

    Raises BadTrace where they cannot be read.
    """

    def __init__(self, path: Path, key: str, scopes: Sequence[Scope]) -> None:
        self._path, self._key, self._scopes = path, key, scopes
        self._table = _read(path, key, scopes)
        times_s = _numbers(path, self._table, "time", pa.float64())
        node_of, nodes = _texts(path, self._table, "node")
        names: list[str] | None = None
        if key == "device":
            devices = _numbers(path, self._table, "device", pa.float64())
            known = np.isfinite(devices) & (devices >= WHOLE_NODE) & (devices <= DEVICE_MAX)
            key_of = np.where(known, devices, NO_KEY).astype(np.int64)
        else:
            key_of, names = _texts(path, self._table, key)
        self._keys = _Keys(times_s, node_of, key_of, nodes, names)
        self._check_times()

    def _check_times(self) -> None:
        times_s = self._keys.times_s[np.isfinite(self._keys.times_s)]
        if len(times_s) == 0:
            return
        wrong = (times_s < 0.0) | (times_s >= TIME_S_MAX)
        if wrong.any():
            some = float(times_s[wrong][0])
            limit = f"expected Unix seconds, from 1970 to 2100{in_seconds(some)}"
            raise BadTrace(f"{self._path}: column 'time' has {some:.0f} ({wrong.sum()} of {len(wrong)} rows); {limit}")

    def spans(self) -> dict[str, RowSpan]:
        """Return when each node's first and last rows ended."""
        keys = self._keys
        usable = np.isfinite(keys.times_s) & (keys.node_of != NO_KEY)
        firsts, lasts = np.full(len(keys.nodes), np.inf), np.full(len(keys.nodes), -np.inf)
        np.minimum.at(firsts, keys.node_of[usable], keys.times_s[usable])
        np.maximum.at(lasts, keys.node_of[usable], keys.times_s[usable])
        spans = zip(keys.nodes, firsts.tolist(), lasts.tolist(), strict=True)
        return {node: RowSpan(first_s, last_s) for node, first_s, last_s in spans if first_s <= last_s}

    def spacing_s(self) -> float:
        """Return the typical time between two moments of the first node, NaN where there is none."""
        times_s = np.unique(self._keys.times_s[self._keys.node_of == 0])
        gaps_s = np.diff(times_s[np.isfinite(times_s)])
        return float(np.median(gaps_s)) if len(gaps_s) else float("nan")

    def shift(self, offsets_s: Mapping[str, float]) -> None:
        """Subtract each node's clock offset from the times of its rows."""
        if offsets_s:
            by_node = np.array([*(offsets_s.get(node, 0.0) for node in self._keys.nodes), 0.0])  # NO_KEY: the last
            self._keys = self._keys._replace(times_s=self._keys.times_s - by_node[np.maximum(self._keys.node_of, -1)])

    def outside(self, start_s: float, end_s: float) -> tuple[int, int]:
        """Return how many rows end before ``start_s``, and how many after ``end_s``."""
        times_s = self._keys.times_s
        return int((times_s < start_s).sum()), int((times_s > end_s).sum())

    def columns(self, ignored: Counter[str]) -> RowColumns:
        """Return the usable rows with every metric that the file has, NaN where one was not observed.

        ``ignored`` counts what was left out, as ``moments`` does.
        """
        order = _order(self._keys, ignored, self._key)
        keys = self._keys
        names = [name for name in self._table.schema.names if name in catalogue.BY_NAME]
        values = {name: _metric(self._path, self._table, name)[order] for name in names}
        return RowColumns(keys.times_s[order], keys.node_of[order], keys.key_of[order], keys.nodes, keys.names, values)

    def moments(self, ignored: Counter[str]) -> list[Iterator[TraceRows]]:
        """Return the moments of each scope.

        ``ignored`` counts what was left out: "duplicate row", "row without time, node or device".
        """
        keys = self._keys
        order = _order(keys, ignored, self._key)
        if self._key != "device":
            return [_moments(self._path, self._table, keys, order, self._scopes[0])]
        of_node = keys.key_of[order] == WHOLE_NODE
        return [
            _moments(self._path, self._table, keys, order[~of_node], Scope.DEVICE),
            _moments(self._path, self._table, keys, order[of_node], Scope.NODE),
        ]


def sample_rows(path: Path) -> TableRows:
    """Return the rows of ``samples.parquet``. Raises BadTrace."""
    return TableRows(path, "device", (Scope.DEVICE, Scope.NODE))


def link_rows(path: Path) -> TableRows:
    """Return the rows of ``links.parquet``; the keys of their blocks are the links' names. Raises BadTrace."""
    return TableRows(path, "link", (Scope.LINK,))


def _read(path: Path, key: str, scopes: Sequence[Scope]) -> pa.Table:
    """Return the key columns and those in the catalogue; other columns are not read."""
    try:
        opened(path).close()  # Arrow would wait for ever for a FIFO's other end
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            missing = [name for name in ("time", "node", key) if name not in present]
            if missing:
                raise BadTrace(f"{path}: no column {', '.join(missing)}")
            metrics = [name for scope in scopes for name in catalogue.names(scope) if name in present]
            ours = [SILENCE_COLUMN] if Scope.DEVICE in scopes and SILENCE_COLUMN in present else []
            return file.read(columns=["time", "node", key, *metrics, *ours])
    except (OSError, pa.ArrowException) as error:
        raise BadTrace(f"{path}: {error}") from None


def _numbers(path: Path, table: pa.Table, name: str, kind: Any) -> Any:
    """Return a column as an array of floats, NaN where it is null."""
    column = table[name]
    try:
        return pc.cast(column, kind, safe=False).to_numpy() if column.type != kind else column.to_numpy()
    except pa.ArrowException as error:
        raise BadTrace(f"{path}: column {name!r} of type {column.type} holds no numbers: {error}") from None


def _metric(path: Path, table: pa.Table, name: str) -> Any:
    return _numbers(path, table, name, pa.float64() if catalogue.BY_NAME[name].exact else pa.float32())


def _texts(path: Path, table: pa.Table, name: str) -> tuple[Integers, list[str]]:
    """Return a column of text as indexes into its sorted values; NO_KEY where it is null."""
    column = table[name]
    try:
        text = pc.cast(column, pa.string()).combine_chunks()
        coded = pc.dictionary_encode(text)
    except pa.ArrowException as error:
        raise BadTrace(f"{path}: column {name!r} of type {column.type} holds no names: {error}") from None
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    values: list[str] = coded.dictionary.to_pylist()
    rank = np.empty(len(values) + 1, dtype=np.int64)
    rank[sorted(range(len(values)), key=values.__getitem__)] = np.arange(len(values))
    rank[-1] = NO_KEY
    indexes = coded.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)
    return rank[indexes], sorted(values)


def _order(keys: _Keys, ignored: Counter[str], key: str) -> Integers:
    """Return the usable rows in order of time, node and key; of duplicates the last one in the file."""
    usable = np.isfinite(keys.times_s) & (keys.node_of != NO_KEY) & (keys.key_of != NO_KEY)
    order = np.flatnonzero(usable)
    if len(order) < len(usable):
        ignored[f"row without time, node or {key}"] += len(usable) - len(order)
    columns = [keys.times_s[order], keys.node_of[order], keys.key_of[order]]
    if not _ascending(columns):
        turned = np.lexsort(columns[::-1])  # stable: the last of equal ones stays the last
        order, columns = order[turned], [column[turned] for column in columns]
    last = np.ones(len(order), dtype=bool)
    last[:-1] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    if not last.all():
        ignored["duplicate row"] += int((~last).sum())
        order = order[last]
    return order


def _ascending(columns: Sequence[Any]) -> bool:
    settled = np.zeros(max(len(columns[0]) - 1, 0), dtype=bool)
    for column in columns:
        before, after = column[:-1], column[1:]
        if (~settled & (after < before)).any():
            return False
        settled |= after > before
    return True


def _moments(path: Path, table: pa.Table, keys: _Keys, order: Integers, scope: Scope) -> Iterator[TraceRows]:
    """Yield the moments of the rows in ``order``; metrics without any value in a moment are left out of its block."""
    names = [name for name in catalogue.names(scope) if name in table.schema.names]
    columns = [_metric(path, table, name) for name in names]
    silence = None
    if scope is Scope.DEVICE and SILENCE_COLUMN in table.schema.names:
        silence = _numbers(path, table, SILENCE_COLUMN, pa.float64())
    return _gathered(columns, names, keys, order, scope, silence)


def _gathered(
    columns: list[Any], names: list[str], keys: _Keys, order: Integers, scope: Scope, silence: Any
) -> Iterator[TraceRows]:
    if len(order) == 0:
        return
    times_s, node_of = keys.times_s[order], keys.node_of[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (times_s[1:] != times_s[:-1]) | (node_of[1:] != node_of[:-1])
    bounds = np.append(np.flatnonzero(new), len(order))
    chunk_rows = max(CHUNK_CELLS // max(len(names), 1), 1)
    patterns = _Patterns(names)
    first = 0
    while first < len(bounds) - 1:
        last = max(int(np.searchsorted(bounds, bounds[first] + chunk_rows, side="right")) - 1, first + 1)
        start, end = int(bounds[first]), int(bounds[last])
        rows = order[start:end]
        cells = np.empty((len(names), end - start), dtype="<f8")
        for line, column in zip(cells, columns, strict=True):
            line[:] = column[rows]
        offsets = bounds[first:last] - start
        seen: Any = np.logical_or.reduceat(~np.isnan(cells), offsets, axis=1).T
        complete = seen.all(axis=1).tolist()
        labels = _labels(keys, rows)
        quiet = _silences(silence, rows, labels)
        at = [*offsets.tolist(), end - start]
        when = times_s[start:end][offsets].tolist()
        who = node_of[start:end][offsets].tolist()
        for i, (time_s, node) in enumerate(zip(when, who, strict=True)):
            low, high = at[i], at[i + 1]
            chosen, wanted = (names, None) if complete[i] else patterns.get(seen[i])
            held = cells[:, low:high] if wanted is None else cells[wanted, low:high]
            silent = dict(quiet[k] for k in range(low, high) if k in quiet) if quiet else {}
            yield TraceRows(time_s, keys.nodes[node], Block(scope, labels[low:high], chosen, held.tobytes()), silent)
        first = last


class _Patterns:
    """The metrics of a block: there are few distinct combinations, and each is looked up once."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._known: dict[bytes, tuple[list[str], Integers]] = {}

    def get(self, seen: Any) -> tuple[list[str], Integers]:
        """Return the names and indexes of the metrics where ``seen`` (metrics,) is true."""
        key = seen.tobytes()
        if key not in self._known:
            wanted = np.flatnonzero(seen)
            self._known[key] = ([self._names[metric] for metric in wanted], wanted)
        return self._known[key]


def _silences(silence: Any, rows: Integers, labels: list[Any]) -> dict[int, tuple[int, float]]:
    """Return the device and silence in seconds of the silent ranks, by position in the chunk."""
    if silence is None:
        return {}
    values = silence[rows]
    return {int(k): (labels[k], float(values[k])) for k in np.flatnonzero(values > 0)}


def _labels(keys: _Keys, rows: Integers) -> list[Any]:
    found: list[int] = keys.key_of[rows].tolist()
    return found if keys.names is None else [keys.names[key] for key in found]
