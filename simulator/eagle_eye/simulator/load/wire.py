"""The encoding of one stream's requests (docs/reference/wire.md); a synthetic fleet's is in ``rows_wire.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from eagle_eye.schema.frame import CONTENT_TYPE, encode_request


class Wire(Protocol):
    """How the frames of one stream become the bodies of requests."""

    content_type: str

    def body(self, frames: Sequence[bytes], sent_s: float) -> bytes:
        """Return the body of a request that carries the frames."""
        ...

    def forget(self) -> None:
        """Repeat what was sent before: the connection is new, or the server may not have kept it."""
        ...


class FrameWire:
    """The first version of the wire: each frame is self-contained."""

    content_type = CONTENT_TYPE

    def body(self, frames: Sequence[bytes], sent_s: float) -> bytes:
        """See Wire."""
        return encode_request(frames, sent_s)

    def forget(self) -> None:
        """See Wire."""
