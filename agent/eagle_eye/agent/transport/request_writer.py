"""Frames as the body of a request: as rows of an outline that the server knows, whole where that saves nothing.

The spool keeps frames whole. Here they become rows, so that whichever server answers can be told the outline when it
asks for it. A server that does not read rows gets whole frames.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eagle_eye.schema.frame import CONTENT_TYPE as WHOLE_CONTENT_TYPE
from eagle_eye.schema.frame import BadFrame, Frame, encode_frame, encode_request, read_frame, unknown_keys
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_CONTENT_TYPE
from eagle_eye.schema.rows import (
    OUTLINES_PER_REQUEST_MAX,
    Outline,
    encode_outline,
    encode_row,
    encode_rows_request,
    outline_id,
    outline_of,
)

OLD_SERVER_S = 600.0  # how long whole frames are sent to a server that does not read rows
DEFLATE_BYTES_MIN = 16_384  # what is worth compressing: many frames at once, after an outage
DEFLATE_LEVEL = 1

_NO_ROWS_STATUS = 415
_NO_OUTLINE = (409, "outline")


class Written(NamedTuple):
    """A request's body; ``encoding`` is its Content-Encoding, "" for none."""

    body: bytes
    content_type: str
    encoding: str = ""


class RequestWriter:
    """Writes one lane's requests, and learns from the answers what the server knows.

    ``dated`` returns a frame as the clock by which the request is sent would have dated it.
    """

    def __init__(self, monotonic_s: Callable[[], float], dated: Callable[[Frame], Frame] = lambda frame: frame) -> None:
        self._monotonic_s = monotonic_s
        self._dated = dated
        self._whole_until_s = float("-inf")
        self._outline: Outline | None = None
        self._id = b""
        self._raw = b""
        self._known: set[bytes] = set()  # what the server has said it knows
        self._told: list[bytes] = []  # the outlines that the last request's rows need

    def write(self, frames: Sequence[bytes], now_s: float) -> Written:
        """Return a request with all of the frames, which are of one stream."""
        if self._monotonic_s() < self._whole_until_s:
            return Written(
                encode_request([self._dated_by_now(frame)[1] for frame in frames], now_s), WHOLE_CONTENT_TYPE
            )
        outlines: dict[bytes, bytes] = {}
        items = [self._item(frame, outlines) for frame in frames]
        self._told = list(outlines)
        unknown = [raw for id_, raw in outlines.items() if id_ not in self._known]
        body = encode_rows_request(unknown, items, now_s)
        if len(body) < DEFLATE_BYTES_MIN:
            return Written(body, ROWS_CONTENT_TYPE)
        return Written(zlib.compress(body, DEFLATE_LEVEL), ROWS_CONTENT_TYPE, "deflate")

    def answered(self, status: int, reason: str) -> bool:
        """Learn from the answer; return whether the same frames are to be sent again at once, written anew."""
        if status == 200:
            self._known = set(self._told)
        elif (status, reason) == _NO_OUTLINE and self._known:
            self._known.clear()
            return True
        elif status == _NO_ROWS_STATUS and self._monotonic_s() >= self._whole_until_s:
            self._whole_until_s = self._monotonic_s() + OLD_SERVER_S
            return True
        return False

    def _item(self, raw: bytes, outlines: dict[bytes, bytes]) -> bytes:
        """Return the frame as a row where its outline is worth it."""
        frame, raw = self._dated_by_now(raw)
        if frame is None or not frame.blocks:
            return raw  # it has come for an event alone; the next one will be another
        outline = outline_of(frame)
        if outline != self._outline:
            if len(outlines) >= OUTLINES_PER_REQUEST_MAX:
                return raw
            self._outline, self._raw = outline, encode_outline(outline)
            self._id = outline_id(self._raw)
        outlines[self._id] = self._raw
        return encode_row(frame, outline, self._id)

    def _dated_by_now(self, raw: bytes) -> tuple[Frame | None, bytes]:
        """Return a frame and its bytes, dated by the clock of now; None and the bytes for one that is sent as it is."""
        try:
            frame, unknown = read_frame(raw)
        except BadFrame:
            return None, raw  # of another version, left in the spool; the server will say so
        if unknown or unknown_keys(raw):
            return None, raw  # left by a newer agent: its server may know what this one would leave out
        dated = self._dated(frame)
        return dated, raw if dated is frame else encode_frame(dated)
