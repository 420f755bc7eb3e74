"""Decodes and validates the body of a request of frames.

Whole frames and rows become the same ``Request``: later stages do not distinguish them.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from eagle_eye.schema.frame import BadFrame, DecodedFrame, Frame, decode_request, read_frame, unknown_keys
from eagle_eye.schema.rows import (
    RowTemplate,
    check_size,
    decode_rows_request,
    is_row,
    names_none,
    read_row,
    row_head,
    template_id,
    unknown_template_keys,
)
from eagle_eye.server.ingest.frame_rules import KEYS_EVERY, RETRY_UNAVAILABLE_S, refusal_of
from eagle_eye.server.ingest.templates import KnownTemplate, Templates
from eagle_eye.server.ingest.unknown_fields import UnknownThings
from eagle_eye.server.model.batch import StreamRef
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryUnavailable, Refusal
from eagle_eye.server.security.limits import Rates

LEARNED_PER_S, LEARNED_AT_ONCE = 1_500, 1_500  # templates: each costs about a hundred times as much as one of its rows
RETRY_LEARN_S = 2


T = TypeVar("T")


class Entry(NamedTuple):
    """One frame as received: its sequence in its stream, its own time (by its node's clock), and its bytes."""

    sequence: int
    time_s: float
    raw: bytes


class Request(msgspec.Struct, frozen=True, gc=False):
    """A decoded body. ``known`` has each entry's template, None for an entry whose frame is in ``frames``.

    ``boot_id`` and ``clock_base_s`` are those that the last entry reports. ``fresh`` are the templates among them that
    may not be durable yet; ``unknown`` counts ignored fields by name.
    """

    node: str
    ref: StreamRef
    interval_s: float
    agent_version: str
    boot_id: str
    sent_s: float
    clock_base_s: float | None
    entries: tuple[Entry, ...]
    known: tuple[KnownTemplate | None, ...]
    frames: Mapping[int, Frame]
    fresh: tuple[KnownTemplate, ...]
    unknown: Counter[str]


class _One(NamedTuple):
    """One row; ``reading`` is its decoded frame if it has more than numbers."""

    says: RowTemplate | Frame
    known: KnownTemplate | None
    entry: Entry
    reading: DecodedFrame | None

    @property
    def base_s(self) -> float | None:
        """The base of the clock that dated the row."""
        if self.known is not None:
            return self.known.clock_base_s
        return self.reading.frame.base_s if self.reading is not None else None


class RowsReader:
    """Decodes bodies; on the event loop."""

    def __init__(self, templates: Templates, unknown: UnknownThings, inflated_bytes_max: int, clock: Clock) -> None:
        self._clock = clock
        self._learns = Rates(keys_max=1)
        self._templates = templates
        self._unknown = unknown
        self._inflated_bytes_max = inflated_bytes_max

    def inflated(self, body: bytes) -> bytes:
        """Return a zlib-compressed body decompressed. Raises Refusal."""
        limit = self._inflated_bytes_max
        inflater = zlib.decompressobj()
        try:
            whole = inflater.decompress(body, limit + 1)
        except zlib.error as error:
            raise Refusal(400, "truncated", f"the body cannot be decompressed (zlib): {error}") from None
        if len(whole) > limit:
            raise Refusal(413, "oversized", f"the body has more than {limit} bytes once decompressed: send less")
        if not inflater.eof:
            raise Refusal(400, "truncated", "the compressed body ends before its data does")
        return whole

    def read(self, body: bytes) -> Request:
        """Decode a body of rows. Raises Refusal: 400, 409 for a template that must be sent, 413, 503."""
        sent_s, templates, rows = _checked(decode_rows_request, body, "the request")
        if not rows:
            raise Refusal(400, "empty", "the request has no rows; send at least one")
        self._learn(templates)
        return _request(sent_s, [_checked(self._one, row, f"row {at}") for at, row in enumerate(rows)], "row")

    def alone(self, id_: bytes, size: int) -> KnownTemplate | None:
        """Return the template if a body of ``size`` bytes is a single row of it; None: decode it with ``read``."""
        known = self._templates.get(id_)
        if known is None or size != known.alone_bytes or not (known.durable and known.admitted):
            return None
        known.used = True
        return known

    def _learn(self, templates: Sequence[bytes]) -> None:
        for at, raw in enumerate(templates):
            if self._templates.get(template_id(raw)) is None:
                self._make_room()
            try:
                known = self._templates.learn(raw)
            except BadFrame as error:
                raise refusal_of(error, f"template {at}") from None
            resolved = known.resolved
            left_out = (*unknown_template_keys(raw), *filter(names_none, resolved.unknown))
            if left_out:
                self._unknown.note(resolved.node, resolved.template.agent_version, Counter(left_out))

    def _one(self, row: bytes) -> _One:
        """Decode a row, or a whole frame among rows. Raises BadFrame, Refusal."""
        if row and not is_row(row):
            return _whole(row)
        head = row_head(row)
        known = self._find(head.template_id)
        known.used = True
        template, entry = known.resolved.template, Entry(head.sequence, head.time_s, row)
        if head.tail_bytes or known.resolved.layout is None:
            return _One(template, known, entry, read_row(template, row))
        check_size(known.resolved.size, row, 0)
        return _One(template, known, entry, None)

    def _find(self, id_: bytes) -> KnownTemplate:
        known = self._templates.get(id_)
        if known is None:
            self._make_room()
            try:
                known = self._templates.recall(id_)
            except HistoryUnavailable as error:
                raise Refusal(503, "storage", str(error), {"Retry-After": str(RETRY_UNAVAILABLE_S)}) from None
        if known is None:
            raise Refusal(409, "outline", f"the template {id_.hex()} is not known here; send it with its rows")
        return known

    def _make_room(self) -> None:
        """Raise Refusal unless one more template may be learned now, so that a returning fleet delays no known node."""
        wait_s = self._learns.take("", LEARNED_PER_S, LEARNED_AT_ONCE, self._clock.monotonic_s())
        if wait_s > 0.0:
            detail = f"more than {LEARNED_PER_S} agents a second begin to send; send this again in a moment"
            raise Refusal(503, "busy", detail, {"Retry-After": str(RETRY_LEARN_S)})


def read_whole(body: bytes) -> Request:
    """Decode a body of whole frames. Raises Refusal: 400, 413. Pure."""
    sent_s, raws = _checked(decode_request, body, "the request")
    if not raws:
        raise Refusal(400, "empty", "the request has no frames; send at least one")
    return _request(sent_s, [_checked(_whole, raw, f"frame {at}") for at, raw in enumerate(raws)], "frame")


def _checked(read: Callable[[bytes], T], raw: bytes, where: str) -> T:
    try:
        return read(raw)
    except BadFrame as error:
        raise refusal_of(error, where) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Refusal(400, "malformed", f"{where} cannot be decoded: {type(error).__name__}") from None


def _whole(raw: bytes) -> _One:
    frame, unknown = reading = read_frame(raw)
    if frame.sequence % KEYS_EVERY == 1:
        reading = DecodedFrame(frame, (*unknown, *unknown_keys(raw)))
    return _One(frame, None, Entry(frame.sequence, frame.time_s, raw), reading)


def _request(sent_s: float, read: Sequence[_One], what: str) -> Request:
    first = read[0].says
    for at, one in enumerate(read[1:], 1):
        if (one.says.node, one.says.stream) != (first.node, first.stream):
            raise Refusal(400, "mixed", f"{what} {at} is of another node or stream than {what} 0; send one a request")
    fresh = {one.known.id: one.known for one in read if one.known is not None and not one.known.durable}
    return Request(
        first.node,
        StreamRef(first.node, first.stream) if read[0].known is None else read[0].known.resolved.ref,
        first.interval_s,
        read[-1].says.agent_version,
        read[-1].says.boot_id,
        sent_s,
        read[-1].base_s,
        tuple([one.entry for one in read]),
        tuple([one.known if one.reading is None else None for one in read]),
        {at: one.reading.frame for at, one in enumerate(read) if one.reading is not None},
        tuple(fresh.values()),
        Counter([name for one in read if one.reading is not None for name in one.reading.unknown]),
    )
