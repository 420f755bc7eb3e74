"""Rows of devices, nodes or links as one table of a segment, gathered by layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
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


class Odd(Exception):  # noqa: N818 - it names the frame
    """A frame that the columns cannot hold."""


class _Group(NamedTuple):
    """Frames of one layout; their numbers, all metrics of a frame after each other, as little-endian float64."""

    keys: Sequence[int | str]
    metrics: int
    columns: Sequence[str]
    places: Sequence[int]  # of the columns, among the metrics
    frames: list[int]
    values: list[bytes]


class Rows:
    """Rows of one table; each layout's values become columns in one go. ``key`` is what tells rows of a frame apart."""

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
        """Add a block of one frame: ``columns`` are its metrics that have one, ``places`` where they are in it."""
        group = self._groups.get(layout)
        if group is None:
            group = self._groups[layout] = _Group(keys, metrics, columns, places, [], [])
        group.frames.append(frame)
        group.values.append(values)

    def add_all(self, frames: Integers, keys: Sequence[int | str], columns: Mapping[str, Numbers]) -> None:
        """Add a block of each of the frames; a column's numbers are (frames, keys)."""
        self._matrices.append((frames, keys, columns))

    def table(self, schema: pa.Schema, first: int, times_s: Floats, nodes: Any, turns: Integers) -> pa.Table | None:
        """Return the rows by node, key and time; None: there are none.

        ``times_s``, ``nodes`` and ``turns`` (which node it is) are the frames'; ``first`` is the first one's number.
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
            names, rank = np.unique(every_key.astype(str).astype(object), return_inverse=True)
        else:
            rank = every_key
        order = np.lexsort((frame, rank, turns[frame]))
        frame, rank = frame[order], rank[order]
        known = {
            "time": pa.array(times_s[frame]),
            "node": pa.array(nodes[frame], pa.string()),
            self._key: pa.array(names[rank] if self._key == "link" else rank, schema.field(self._key).type),
            "frame": pa.array((frame + first).astype(np.int32)),
        }
        return pa.table([_column(f, known, cells, order) for f in schema], schema=schema)


def turns_of(nodes: Any) -> Integers:
    """Return for frames sorted by node which node each is of, counted from 0."""
    turns: Integers = np.cumsum(np.r_[0, (nodes[1:] != nodes[:-1]).astype(np.int64)])
    return turns


def as_json(plain: Any) -> str:
    """Return the value as JSON. Raises Odd for what JSON would change: NaN, infinity, bytes."""
    text = msgspec.json.encode(plain)
    if msgspec.json.decode(text) != plain:
        raise Odd
    return text.decode()


def _matrix(group: _Group) -> tuple[Integers, Sequence[int | str], Mapping[str, Numbers]]:
    shape = len(group.frames), group.metrics, len(group.keys)
    block = np.frombuffer(b"".join(group.values), "<f8").reshape(shape)
    columns = {name: block[:, place, :] for name, place in zip(group.columns, group.places, strict=True)}
    return np.array(group.frames), group.keys, columns


def _column(field: pa.Field, known: Mapping[str, pa.Array], cells: Mapping[str, Numbers], order: Integers) -> pa.Array:
    if field.name in known:
        return known[field.name]
    if field.name not in cells:
        return pa.nulls(len(order), field.type)
    values = cells[field.name][order]
    with np.errstate(over="ignore"):  # beyond float32 is infinite
        return pa.array(values.astype(field.type.to_pandas_dtype(), copy=False), mask=np.isnan(values))
