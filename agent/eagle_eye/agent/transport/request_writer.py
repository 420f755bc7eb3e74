"""Builds request bodies from spooled frames: rows, and the templates that the server does not know.

The loop encodes each sample once, as a row with its template; this only concatenates the parts. Frames are re-encoded
only to re-date them after the clock was set, and to send them whole to a server that does not read rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eagle_eye.agent.loop.clock_base import ClockBase
from eagle_eye.schema.frame import CONTENT_TYPE as WHOLE_CONTENT_TYPE
from eagle_eye.schema.frame import BadFrame, encode_frame, encode_request, read_frame, unknown_keys
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_CONTENT_TYPE
from eagle_eye.schema.rows import (
    TEMPLATES_PER_REQUEST_MAX,
    RowTemplate,
    decode_template,
    encode_row,
    encode_rows_request,
    encode_template,
    split_row,
    template_id,
    template_of,
    unknown_template_keys,
    whole_frame,
)

OLD_SERVER_S = 600.0  # how long whole frames are sent to a server that does not read rows
DEFLATE_BYTES_MIN = 16_384  # worth compressing: many frames at once, after an outage
DEFLATE_LEVEL = 1

_NO_ROWS_STATUS = 415
_NO_TEMPLATE = (409, "outline")


class Written(NamedTuple):
    """A request's body; ``encoding`` is its Content-Encoding, "" for none."""

    body: bytes
    content_type: str
    encoding: str = ""


class RequestWriter:
    """Writes one lane's requests, and tracks from the answers what the server knows.

    ``base`` re-dates frames by the clock at sending; None: they are sent unchanged.
    """

    def __init__(self, monotonic_s: Callable[[], float], base: ClockBase | None = None) -> None:
        self._monotonic_s = monotonic_s
        self._base = base
        self._whole_until_s = float("-inf")
        self._raw = b""  # the newest template...
        self._template: RowTemplate | None = None  # ...None: only an agent of another version can read it
        self._is_ours = False  # whether it has only fields known to this agent
        self._id = b""
        self._known: set[bytes] = set()  # those that the server has acknowledged
        self._sent: list[bytes] = []  # the templates that the last request's rows need

    def write(self, kept: Sequence[bytes], now_s: float) -> Written:
        """Return a request with all of ``kept``, which is from one stream."""
        base_s = None if self._base is None else self._base.read()
        if self._monotonic_s() < self._whole_until_s:
            return Written(encode_request([self._whole(raw, base_s) for raw in kept], now_s), WHOLE_CONTENT_TYPE)
        templates: dict[bytes, bytes] = {}
        items: list[bytes] = []
        for raw in kept:
            parts = split_row(raw)
            if parts is None:
                items.append(self._whole(raw, base_s))
                continue
            row = self._row(*parts, base_s)
            if self._id in templates or len(templates) < TEMPLATES_PER_REQUEST_MAX or self._template is None:
                templates[self._id] = self._raw
                items.append(row)
            else:
                items.append(encode_frame(whole_frame(self._template, row)))
        self._sent = list(templates)
        unknown = [raw for id_, raw in templates.items() if id_ not in self._known]
        body = encode_rows_request(unknown, items, now_s)
        if len(body) < DEFLATE_BYTES_MIN:
            return Written(body, ROWS_CONTENT_TYPE)
        return Written(zlib.compress(body, DEFLATE_LEVEL), ROWS_CONTENT_TYPE, "deflate")

    def answered(self, status: int, reason: str) -> bool:
        """Process the answer; return whether the same frames must be sent again at once, rewritten."""
        if status == 200:
            self._known = set(self._sent)
        elif (status, reason) == _NO_TEMPLATE and self._known:
            self._known.clear()
            return True
        elif status == _NO_ROWS_STATUS and self._monotonic_s() >= self._whole_until_s:
            self._whole_until_s = self._monotonic_s() + OLD_SERVER_S
            return True
        return False

    def _row(self, raw: bytes, row: bytes, base_s: float | None) -> bytes:
        """Return a row as it is sent; its template becomes the newest."""
        self._meet(raw)
        template = self._template
        if self._base is None or template is None or not self._is_ours or template.clock_base_s == base_s:
            return row
        frame = self._base.dated(whole_frame(template, row))
        template = template_of(frame)
        self._meet(encode_template(template))
        return encode_row(frame, template, self._id)

    def _meet(self, raw: bytes) -> None:
        if raw == self._raw:
            return
        self._raw, self._id = raw, template_id(raw)
        try:
            self._template, unknown = decode_template(raw)
        except BadFrame:
            self._template, unknown = None, ()
        self._is_ours = not unknown and not unknown_template_keys(raw)

    def _whole(self, raw: bytes, base_s: float | None) -> bytes:
        """Return a spooled frame as a whole frame."""
        parts = split_row(raw)
        if parts is not None:
            row = self._row(*parts, base_s)
            return row if self._template is None else encode_frame(whole_frame(self._template, row))
        if self._base is None:
            return raw
        try:
            frame, unknown = read_frame(raw)
        except BadFrame:
            return raw  # from another version, left in the spool; the server will reject it
        if frame.base_s == base_s or unknown or unknown_keys(raw):
            return raw  # left by a newer agent: its server may know fields that this one would drop
        return encode_frame(self._base.dated(frame))
