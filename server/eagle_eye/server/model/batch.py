"""Frames of many nodes as columns: one type for every way in, from its decoder to the journal and the windows. Pure.

Rows of numbers with one layout are read together, as a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from eagle_eye.schema.frame import Block, Frame, check_frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import ROW_HEAD, RowTemplate, frame_of, names_none

Numbers = NDArray[np.floating[Any]]
Matrix = NDArray[np.uint8]
Times = NDArray[np.float64]


class Part(NamedTuple):
    """Some of a row's numbers: metrics of one scope and precision; ``begin`` is their offset in bytes."""

    scope: Scope
    keys: tuple[int | str, ...]
    metrics: tuple[str, ...]
    begin: int
    dtype: str


class ColumnLayout:
    """The positions of a row's numbers. Templates with equal tables share one layout; see ``layout_of``."""

    __slots__ = ("__weakref__", "parts", "size")

    def __init__(self, parts: tuple[Part, ...], size: int) -> None:
        self.parts = parts
        self.size = size

    @staticmethod
    def values(part: Part, matrix: Matrix) -> Numbers:
        """Return a part's numbers: (rows, metrics, keys)."""
        width = np.dtype(part.dtype).itemsize * len(part.metrics) * len(part.keys)
        cut = np.ascontiguousarray(matrix[:, part.begin : part.begin + width])
        numbers: Numbers = cut.view(part.dtype).reshape(len(matrix), len(part.metrics), len(part.keys))
        return numbers


class StreamRef:
    """A stream that sends frames repeatedly; the history caches its own state of the stream in ``held``."""

    __slots__ = ("held", "name")

    def __init__(self, node: str, stream: str) -> None:
        self.name = (node, stream)
        self.held: Any = None


class ResolvedTemplate:
    """A validated template, as used by the engine, the fleet and the journal; ``frame`` makes whole frames.

    ``ref`` is its stream. ``hollow`` is a frame with names but no numbers, one table per part of the layout.
    ``unknown`` lists rows and columns known only to a newer server, or with invalid names. A template with such rows or
    columns has no layout, and each of its rows is read alone.
    """

    __slots__ = ("hollow", "layout", "node", "ref", "size", "template", "unknown")

    def __init__(self, template: RowTemplate, unknown: tuple[str, ...]) -> None:
        self.template = template
        self.unknown = unknown
        self.node = template.node
        self.ref = StreamRef(template.node, template.stream)
        self.size = template.size
        self.layout = layout_of(template) if all(map(names_none, unknown)) else None
        parts = self.layout.parts if self.layout else ()
        blocks = [Block(part.scope, list(part.keys), list(part.metrics), b"") for part in parts if part.keys]
        self.hollow = msgspec.structs.replace(frame_of(template, 1, 1.0, bytes(template.size)), blocks=blocks)

    def frame(self, sequence: int, time_s: float, numbers: bytes) -> Frame:
        """Return a row without a tail as its frame, without what is unknown. Raises BadFrame."""
        return check_frame(frame_of(self.template, sequence, time_s, numbers)).frame


class Batch(NamedTuple):
    """Frames received at about the same time, as columns.

    Row i belongs to the stream ``refs[i]``. ``time_s`` is by its node's clock; ``offset_s`` is added to it on reading.
    ``raw`` has each frame's bytes, as a matrix if all have the same size. ``templates`` (by id) are those that rows in
    the batch reference and that may not be durable yet. ``resolved`` has each row's template if all are rows of one
    layout without tails, and nothing otherwise; only then there are a ``layout`` and ``numbers``.
    """

    refs: Sequence[StreamRef]
    sequence: np.ndarray[Any, np.dtype[np.int64]]
    time_s: Times
    received_s: Times
    offset_s: Times
    raw: Matrix | Sequence[bytes]
    templates: Mapping[bytes, bytes] = MappingProxyType({})
    resolved: Sequence[ResolvedTemplate] = ()

    @classmethod
    def of(
        cls,
        lines: Iterable[tuple[StreamRef, int, float, float, float, bytes]],
        templates: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> Batch:
        """Return a batch of at least one row, each given in the order of the columns."""
        refs, sequences, times_s, received_s, offsets_s, raw = zip(*lines, strict=True)
        times = np.array((times_s, received_s, offsets_s), np.float64)
        return cls(refs, np.array(sequences, np.int64), times[0], times[1], times[2], raw, templates)

    @property
    def raw_bytes(self) -> int:
        """Total size of the frames in bytes."""
        return self.raw.nbytes if isinstance(self.raw, np.ndarray) else sum(map(len, self.raw))

    @property
    def server_time_s(self) -> Times:
        """The frames' times by the server's clock."""
        return self.time_s + self.offset_s

    @property
    def layout(self) -> ColumnLayout:
        """The layout of the rows."""
        layout = self.resolved[0].layout
        assert layout is not None  # noqa: S101 - see above
        return layout

    @property
    def numbers(self) -> Matrix:
        """The rows' numbers as bytes: (rows, size)."""
        assert isinstance(self.raw, np.ndarray)  # noqa: S101 - rows of one layout have one size
        return self.raw[:, ROW_HEAD.size :]

    def only(self, chosen: Sequence[bool]) -> Batch:
        """Return the chosen rows of one layout."""
        if False not in chosen:
            return self
        assert isinstance(self.raw, np.ndarray)  # noqa: S101 - as in numbers
        at = np.flatnonzero(chosen)
        rows: list[int] = at.tolist()
        columns = (self.sequence[at], self.time_s[at], self.received_s[at], self.offset_s[at], self.raw[at])
        return Batch([self.refs[row] for row in rows], *columns, self.templates, [self.resolved[row] for row in rows])


class Row(NamedTuple):
    """One row of a template that has a layout, without a tail; otherwise as in a ``Batch``."""

    resolved: ResolvedTemplate
    sequence: int
    time_s: float
    received_s: float
    offset_s: float
    raw: bytes


def batches_of(rows: Iterable[Row]) -> list[Batch]:
    """Return consecutive rows of one layout as a batch each."""
    batches: list[Batch] = []
    for _, together in groupby(rows, lambda row: row.resolved.layout):
        lines = list(together)
        batch = Batch.of((row.resolved.ref, *row[1:]) for row in lines)
        raw = np.frombuffer(b"".join(batch.raw), np.uint8).reshape(len(lines), -1)
        batches.append(batch._replace(raw=raw, resolved=[row.resolved for row in lines]))
    return batches


_layouts: WeakValueDictionary[tuple[Part, ...], ColumnLayout] = WeakValueDictionary()


def layout_of(template: RowTemplate) -> ColumnLayout:
    """Return the layout of a template whose metrics are all known; the same object for equal tables."""
    parts: list[Part] = []
    at = 0
    for block in template.blocks:
        keys = tuple(block.keys)
        for dtype, metrics in (("<f8", block.metrics[: block.exact]), ("<f4", block.metrics[block.exact :])):
            if metrics:
                parts.append(Part(block.scope, keys, tuple(metrics), at, dtype))
            at += np.dtype(dtype).itemsize * len(metrics) * len(keys)
    named = tuple(parts)
    known = _layouts.get(named)
    if known is None:
        known = _layouts[named] = ColumnLayout(named, at)
    return known
