"""Bodies that are refused: read on for a moment, so that the client sees why, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from eagle_eye.server import raw_http
from eagle_eye.server.errors import Refusal
from eagle_eye.server.raw_http import LINGER_BYTES, ASGIMessage, read_body

CHUNK_BYTES = 1 << 16


class Sender:
    """A client that sends so many chunks, then nothing more, or never says that it has ended."""

    def __init__(self, chunks: int, *, ends: bool = True) -> None:
        self.sent = 0
        self._chunks = chunks
        self._ends = ends

    async def receive(self) -> ASGIMessage:
        """Return the next chunk."""
        if self.sent == self._chunks:
            await asyncio.Event().wait()
        self.sent += 1
        more = not self._ends or self.sent < self._chunks
        return {"type": "http.request", "body": bytes(CHUNK_BYTES), "more_body": more}


def refused(sender: Sender, headers: Mapping[str, str]) -> str:
    async def ask() -> None:
        await read_body(sender.receive, headers, 1_000, 5.0, "ingest.body_bytes_max")

    with pytest.raises(Refusal) as refusal:
        asyncio.run(ask())
    return refusal.value.reason


@pytest.mark.parametrize("headers", [{}, {"content-length": str(10 * CHUNK_BYTES)}])
def test_a_refused_body_is_read_to_its_end(headers: dict[str, str]) -> None:
    sender = Sender(10)
    assert refused(sender, headers) == "oversized"
    assert sender.sent == 10


def test_an_endless_body_is_read_no_further_than_the_limit() -> None:
    sender = Sender(1_000, ends=False)
    assert refused(sender, {}) == "oversized"
    assert sender.sent * CHUNK_BYTES <= LINGER_BYTES + 2 * CHUNK_BYTES


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_http, "LINGER_S", 0.01)
    assert refused(Sender(2, ends=False), {}) == "oversized"


def test_who_asks_before_sending_is_answered_at_once() -> None:
    sender = Sender(10)
    assert refused(sender, {"content-length": "70000", "expect": "100-continue"}) == "oversized"
    assert sender.sent == 0
