"""Reads rows of numbers from many nodes with one layout together, as matrices. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from eagle_eye.schema.frame import Block, Frame, check_frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import Outline, frame_of, names_none

Numbers = NDArray[np.floating[Any]]
Matrix = NDArray[np.uint8]


class Part(NamedTuple):
    """Some of a row's numbers: metrics of one scope and precision; ``begin`` is their offset in bytes."""

    scope: Scope
    keys: tuple[int | str, ...]
    metrics: tuple[str, ...]
    begin: int
    dtype: str


class Layout:
    """The positions of a row's numbers. Outlines with equal tables share one layout; see ``layout_of``."""

    __slots__ = ("__weakref__", "parts", "size")

    def __init__(self, parts: tuple[Part, ...], size: int) -> None:
        self.parts = parts
        self.size = size

    def matrix(self, rows: Sequence[bytes]) -> Matrix:
        """Return the numbers of rows of this layout as one matrix of bytes: (rows, size)."""
        return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), self.size)

    @staticmethod
    def values(part: Part, matrix: Matrix) -> Numbers:
        """Return a part's numbers: (rows, metrics, keys)."""
        width = np.dtype(part.dtype).itemsize * len(part.metrics) * len(part.keys)
        cut = np.ascontiguousarray(matrix[:, part.begin : part.begin + width])
        numbers: Numbers = cut.view(part.dtype).reshape(len(matrix), len(part.metrics), len(part.keys))
        return numbers


class Outlined:
    """A validated outline, as used by the engine, the fleet and the journal; ``frame`` makes whole frames.

    ``hollow`` is a frame with names but no numbers, one table per part of the layout. ``unknown`` lists rows and
    columns known only to a newer server, or with invalid names. An outline with such rows or columns has no layout, and
    each of its rows is read alone.
    """

    __slots__ = ("hollow", "layout", "node", "outline", "size", "unknown")

    def __init__(self, outline: Outline, unknown: tuple[str, ...]) -> None:
        self.outline = outline
        self.unknown = unknown
        self.node = outline.node
        self.size = outline.size
        self.layout = layout_of(outline) if all(map(names_none, unknown)) else None
        parts = self.layout.parts if self.layout else ()
        blocks = [Block(part.scope, list(part.keys), list(part.metrics), b"") for part in parts if part.keys]
        self.hollow = msgspec.structs.replace(frame_of(outline, 1, 1.0, bytes(outline.size)), blocks=blocks)

    def frame(self, sequence: int, time_s: float, numbers: bytes) -> Frame:
        """Return a row without a tail as its frame, without what is unknown. Raises BadFrame."""
        return check_frame(frame_of(self.outline, sequence, time_s, numbers)).frame


class Row(NamedTuple):
    """One row of an outline that has a layout, without a tail; ``time_s`` is on the server's clock."""

    outlined: Outlined
    time_s: float
    received_s: float
    numbers: bytes


class RowGroup(NamedTuple):
    """Rows of one layout, without tails, in order of arrival; times are on the server's clock.

    ``numbers`` holds one row's bytes per line.
    """

    layout: Layout
    outlined: Sequence[Outlined]
    time_s: Sequence[float]
    received_s: Sequence[float]
    numbers: Matrix


def groups_of(rows: Iterable[Row]) -> list[RowGroup]:
    """Group consecutive rows of one layout."""
    groups: list[RowGroup] = []
    for layout, together in groupby(rows, lambda row: row.outlined.layout):
        assert layout is not None  # noqa: S101 - a Row's outline has one
        outlined, times_s, received_s, numbers = zip(*together, strict=True)
        groups.append(RowGroup(layout, outlined, times_s, received_s, layout.matrix(numbers)))
    return groups


_layouts: WeakValueDictionary[tuple[Part, ...], Layout] = WeakValueDictionary()


def layout_of(outline: Outline) -> Layout:
    """Return the layout of an outline whose metrics are all known; the same object for equal tables."""
    parts: list[Part] = []
    at = 0
    for block in outline.blocks:
        keys = tuple(block.keys)
        for dtype, metrics in (("<f8", block.metrics[: block.exact]), ("<f4", block.metrics[block.exact :])):
            if metrics:
                parts.append(Part(block.scope, keys, tuple(metrics), at, dtype))
            at += np.dtype(dtype).itemsize * len(metrics) * len(keys)
    named = tuple(parts)
    known = _layouts.get(named)
    if known is None:
        known = _layouts[named] = Layout(named, at)
    return known
