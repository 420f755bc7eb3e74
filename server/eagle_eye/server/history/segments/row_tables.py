"""Builds a segment's table of device, node or link rows, with frames grouped by layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Numbers = np.ndarray[Any, np.dtype[np.floating[Any]]]


class Tables(NamedTuple):
    """One row group of each table; None: no rows."""

    frames: pa.Table
    samples: pa.Table | None
    links: pa.Table | None


class Odd(Exception):
    """A frame that the columns cannot hold."""


class _Group(NamedTuple):
    """Frames of one layout; their numbers, by frame, then metric, as little-endian float64."""

    keys: Sequence[int | str]
    metrics: int
    columns: Sequence[str]
    places: Sequence[int]  # indexes of the columns among the metrics
    frames: list[int]
    values: list[bytes]


class Rows:
    """Rows of one table; each layout's values become columns at once. ``key`` distinguishes the rows of a frame."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._groups: dict[object, _Group] = {}
        self._matrices: list[tuple[Integers, Sequence[int | str], Mapping[str, Numbers]]] = []

    def add(
        self,
        frame: int,
        layout: object,
        keys: Sequence[int | str],
        metrics: int,
        columns: Sequence[str],
        places: Sequence[int],
        values: bytes,
    ) -> None:
        """Add a block of one frame: ``columns`` are its metrics with a column, ``places`` their indexes in it."""
        group = self._groups.get(layout)
        if group is None:
            group = self._groups[layout] = _Group(keys, metrics, columns, places, [], [])
        group.frames.append(frame)
        group.values.append(values)

    def add_all(self, frames: Integers, keys: Sequence[int | str], columns: Mapping[str, Numbers]) -> None:
        """Add a block of each of the frames; a column's numbers are (frames, keys)."""
        self._matrices.append((frames, keys, columns))

    def table(
        self, schema: pa.Schema, first: int, times_s: Floats, node: Integers, names: Sequence[str]
    ) -> pa.Table | None:
        """Return the rows by node, key and time; None if there are none.

        ``times_s`` and ``node`` (indexes into ``names``) are those of the frames, which are sorted by node and time;
        ``first`` is the first one's number.
        """
        blocks = [*self._matrices, *map(_matrix, self._groups.values())]
        count = sum(len(frames) * len(keys) for frames, keys, _ in blocks)
        if count == 0:
            return None
        cells: dict[str, Numbers] = defaultdict(lambda: np.full(count, np.nan))
        frame = np.empty(count, dtype=np.int64)
        named: list[Any] = []
        low = 0
        for frames, keys, columns in blocks:
            high = low + len(frames) * len(keys)
            for name, values in columns.items():
                if len(blocks) == 1:
                    cells[name] = values.reshape(-1)
                else:
                    cells[name][low:high] = values.reshape(-1)
            frame[low:high] = np.repeat(frames, len(keys))
            named.append(np.tile(np.array(keys, dtype=object if self._key == "link" else np.int64), len(frames)))
            low = high
        every_key = np.concatenate(named)
        if self._key == "link":
            links, rank = np.unique(every_key.astype(str).astype(object), return_inverse=True)
        else:
            rank = every_key
        order = np.lexsort((frame, rank, node[frame]))
        frame, rank = frame[order], rank[order]
        known = {
            "time": plain(times_s[frame], pa.float64()),
            "node": texts(node[frame], names),
            self._key: texts(rank, links.tolist()) if self._key == "link" else plain(rank.astype(np.int16), pa.int16()),
            "frame": plain((frame + first).astype(np.int32), pa.int32()),
        }
        found = {name: column(values[order], schema.field(name)) for name, values in cells.items()}
        return rows_table(schema, {**known, **found}, count)


def rows_table(schema: pa.Schema, columns: Mapping[str, pa.Array], length: int) -> pa.Table:
    """Return the columns as a table in the order of the schema, with nulls for missing columns."""
    arrays = [columns[field.name] if field.name in columns else _nothing(field.type, length) for field in schema]
    return pa.table(arrays, names=schema.names)


def column(values: Numbers, field: pa.Field) -> pa.Array:
    """Return the values as a column; NaN is null."""
    with np.errstate(over="ignore"):  # beyond float32 is infinite
        cells = np.ascontiguousarray(values, field.type.to_pandas_dtype())
    if len(cells) == 0 or not np.isnan(cells.min()):  # the minimum is NaN if any is NaN
        return plain(cells, field.type)
    seen = ~np.isnan(cells)
    return plain(cells, field.type, seen)


def plain(cells: np.ndarray[Any, Any], kind: pa.DataType, seen: Any = None) -> pa.Array:
    """Return numbers of this type as a column; ``seen`` marks those that are not null (None: all)."""
    # Not pa.array: that imports pandas if it is installed, which takes half a second.
    bits = None if seen is None else pa.py_buffer(np.packbits(seen, bitorder="little"))
    return pa.Array.from_buffers(kind, len(cells), [bits, pa.py_buffer(cells)])


def texts(places: Integers, names: Sequence[str | None]) -> pa.DictionaryArray:
    """Return the names at these indexes as a dictionary-encoded column; None is null."""
    here = np.flatnonzero(np.bincount(places, minlength=len(names))).tolist()
    own: dict[str, int] = {}
    index = np.full(len(names), -1, dtype=np.int32)
    for place in here:
        name = names[place]
        if name is not None:
            index[place] = own.setdefault(name, len(own))
    indices = index[places]
    seen = None if None not in names else indices >= 0
    return pa.DictionaryArray.from_arrays(plain(indices, pa.int32(), seen), pa.array(own, pa.string()))


@lru_cache(maxsize=64)
def _nothings(kind: pa.DataType, length: int) -> pa.Array:
    return pa.nulls(length, kind)


def _nothing(kind: pa.DataType, length: int) -> pa.Array:
    """Return a column of nulls; all of a type share their memory."""
    return _nothings(kind, 1 << max(length - 1, 1).bit_length()).slice(0, length)


def as_json(plain: Any) -> str:
    """Return the value as JSON. Raises Odd for values that JSON would change: NaN, infinity, bytes."""
    text = msgspec.json.encode(plain)
    if msgspec.json.decode(text) != plain:
        raise Odd
    return text.decode()


def _matrix(group: _Group) -> tuple[Integers, Sequence[int | str], Mapping[str, Numbers]]:
    shape = len(group.frames), group.metrics, len(group.keys)
    block = np.frombuffer(b"".join(group.values), "<f8").reshape(shape)
    columns = {name: block[:, place, :] for name, place in zip(group.columns, group.places, strict=True)}
    return np.array(group.frames), group.keys, columns
