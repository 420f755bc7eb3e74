"""A server that answers frames as it is told to, and remembers what it read. For tests of what sends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from eagle_eye.schema.frame import CONTENT_TYPE, Frame, decode_frame, decode_request
from eagle_eye.schema.rows import RowTemplate, decode_rows_request, decode_template, read_row, row_head, template_id

Said = tuple[int, dict[str, object], str]  # status, body, headers


@dataclass
class FrameServer:
    """``answers(requests so far)`` returns what is said instead of an acknowledgement, or None for that.

    Each request is remembered as its frames; ``heads`` are the requests' own. Templates are known by connection alone.
    """

    answers: Callable[[int], Said | None] = lambda _number: None
    url: str = ""
    requests: list[list[Frame]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    templates: int = 0
    connections: int = 0

    @property
    def frames(self) -> list[Frame]:
        """All frames that were read."""
        return [frame for request in self.requests for frame in request]


class _Speaker(asyncio.Protocol):
    def __init__(self, server: FrameServer) -> None:
        self._server = server
        self._data = b""
        self._known: dict[bytes, RowTemplate] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections += 1

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        size = next(int(line[16:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: "))
        if len(rest) < size:
            return
        self._data = rest[size:]
        self._take(head.decode(), rest[:size])

    def _take(self, head: str, body: bytes) -> None:
        server = self._server
        server.heads.append(head)
        server.bodies.append(body)
        server.paths.append(head.split(" ")[1])
        frames = self._read(head, body)
        server.requests.append(frames)
        said = server.answers(len(server.requests))
        if said is None:
            watermark = frames[-1].sequence if frames else 0
            said = (200, {"accepted": len(frames), "duplicates": 0, "watermark": watermark}, "")
        status, document, headers = said
        content = msgspec.json.encode(document)
        lines = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
        self._transport.write(lines.encode() + content)

    def _read(self, head: str, body: bytes) -> list[Frame]:
        if head.startswith("POST /api/v1/frames") and CONTENT_TYPE in head:
            return [decode_frame(raw) for raw in decode_request(body)[1]]
        if not head.startswith("POST /api/v1/frames"):
            return []
        _, templates, rows = decode_rows_request(body)
        for raw in templates:
            self._server.templates += 1
            self._known[template_id(raw)] = decode_template(raw)[0]
        return [read_row(self._known[row_head(row).template_id], row).frame for row in rows]


@contextmanager
def frame_server(answers: Callable[[int], Said | None] = lambda _number: None) -> Iterator[FrameServer]:
    """Run one on a free port of loopback."""
    server = FrameServer(answers)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    stopping = asyncio.Event()
    speakers: list[_Speaker] = []

    def speaker() -> _Speaker:
        speakers.append(_Speaker(server))
        return speakers[-1]

    async def serve() -> None:
        async with await loop.create_server(speaker, "127.0.0.1", 0) as listening:
            server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            started.set()
            await stopping.wait()
        for one in speakers:
            one.close()
        await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait(5.0)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(5.0)
        loop.close()
