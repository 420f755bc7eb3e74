"""Fast path to a row group's columns for nodes that kept a single layout throughout.

Ordered by node, key and time, each number's destination follows from the position of its frame: nothing is sorted, and
each number is copied once. Anything less regular takes the general path (``row_tables.Rows``) to the same table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import ROW_HEAD
from eagle_eye.server.history.segments.gathering import Gathered
from eagle_eye.server.history.segments.layout import LINKS_SCHEMA, SAMPLES_SCHEMA
from eagle_eye.server.history.segments.row_tables import Integers, Numbers, column, plain, rows_table, texts
from eagle_eye.server.model.batch import ColumnLayout, Part

_Place = slice | list[int]


class RowRun(NamedTuple):
    """Frames ``low`` to before ``high``, of ``nodes`` consecutive nodes, equally many of each, in one layout."""

    low: int
    high: int
    nodes: int
    layout: int


class _Piece(NamedTuple):
    """A run's rows of one table, from row ``begin`` (nodes, keys, frames per node), and where its metrics are."""

    run: RowRun
    begin: int
    keys: Sequence[int | str]
    metrics: list[tuple[str, _Place, Numbers]]  # name, index among the keys, (nodes, frames per node, its keys)

    def of(self, cells: Any) -> Any:
        """Return the piece's part of a column."""
        each = (self.run.high - self.run.low) // self.run.nodes
        end = self.begin + (self.run.high - self.run.low) * len(self.keys)
        return cells[self.begin : end].reshape(self.run.nodes, len(self.keys), each)


def runs_of(node: Integers, layout: Integers) -> list[RowRun] | None:
    """Return the runs of frames sorted by node and time; None if a node changed its layout."""
    changed = node[1:] != node[:-1]
    if (~changed & (layout[1:] != layout[:-1])).any():
        return None
    begins = np.flatnonzero(np.append(True, changed))
    counts, of = np.diff(begins, append=len(node)), layout[begins]
    firsts = np.flatnonzero(np.append(True, (counts[1:] != counts[:-1]) | (of[1:] != of[:-1])))
    lows = [*begins[firsts].tolist(), len(node)]
    nodes = np.diff(firsts, append=len(begins)).tolist()
    return [
        RowRun(low, high, number, place)
        for low, high, number, place in zip(lows, lows[1:], nodes, of[firsts].tolist(), strict=False)
    ]


def tables(
    frames: Gathered, runs: Sequence[RowRun], layouts: Sequence[ColumnLayout], first: int
) -> tuple[pa.Table | None, pa.Table | None]:
    """Return the rows of devices and nodes, and those of links; ``first`` is the first frame's number.

    No key may be in two tables of a layout.
    """
    samples, links = _Table(), _Table()
    for run in runs:
        layout = layouts[run.layout]
        numbers = frames.of(slice(run.low, run.high)).parts(ROW_HEAD.size, layout.size)
        by_table = {True: links, False: samples}
        for linked, table in by_table.items():
            table.add(run, [part for part in layout.parts if (part.scope is Scope.LINK) is linked], numbers)
    return samples.table(SAMPLES_SCHEMA, "device", frames, first), links.table(LINKS_SCHEMA, "link", frames, first)


class _Table:
    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._length = 0

    def add(self, run: RowRun, parts: Sequence[Part], numbers: Any) -> None:
        """Add the parts of a run's frames; ``numbers`` are their bytes: (frames, bytes)."""
        keys = sorted({key for part in parts for key in part.keys}, key=lambda key: (isinstance(key, str), key))
        if keys:
            metrics = [metric for part in parts for metric in _metrics(part, keys, numbers, run)]
            self._pieces.append(_Piece(run, self._length, keys, metrics))
            self._length += len(keys) * (run.high - run.low)

    def table(self, schema: pa.Schema, key: str, frames: Gathered, first: int) -> pa.Table | None:
        """Return the rows; None if there are none."""
        if self._length == 0:
            return None
        number = np.empty(self._length, dtype=np.int32)
        names = sorted({key for piece in self._pieces for key in piece.keys})
        place_of = {name: place for place, name in enumerate(names)}
        keyed = np.empty(self._length, dtype=np.int64)
        for piece in self._pieces:
            run = piece.run
            piece.of(number)[...] = np.arange(run.low, run.high).reshape(run.nodes, 1, -1)
            places = [place_of[name] if key == "link" else name for name in piece.keys]
            piece.of(keyed)[...] = np.array(places, dtype=np.int64)[:, None]
        columns = {
            "time": plain(frames.time_s[number], pa.float64()),
            "node": texts(frames.node[number], frames.names),
            key: texts(keyed, list(map(str, names))) if key == "link" else plain(keyed.astype(np.int16), pa.int16()),
            "frame": plain(number + np.int32(first), pa.int32()),
        }
        covered: dict[str, int] = {}
        for piece in self._pieces:
            for name, _, values in piece.metrics:
                covered[name] = covered.get(name, 0) + values.size
        cells = {
            name: np.empty(self._length, schema.field(name).type.to_pandas_dtype())
            if count == self._length
            else np.full(self._length, np.nan, schema.field(name).type.to_pandas_dtype())
            for name, count in covered.items()
        }
        with np.errstate(over="ignore"):  # beyond float32 is infinite
            for piece in self._pieces:
                for name, at, values in piece.metrics:
                    piece.of(cells[name])[:, at] = values.transpose(0, 2, 1)
        found = {name: column(values, schema.field(name)) for name, values in cells.items()}
        return rows_table(schema, {**columns, **found}, self._length)


def _metrics(part: Part, keys: Sequence[int | str], numbers: Any, run: RowRun) -> Iterator[tuple[str, _Place, Numbers]]:
    width = np.dtype(part.dtype).itemsize * len(part.metrics) * len(part.keys)
    values = numbers[:, part.begin : part.begin + width].view(part.dtype)
    values = values.reshape(run.nodes, -1, len(part.metrics), len(part.keys))
    at = [keys.index(key) for key in part.keys]
    place: _Place = slice(at[0], at[-1] + 1) if at == list(range(at[0], at[-1] + 1)) else at
    for number, name in enumerate(part.metrics):
        yield name, place, values[:, :, number, :]
