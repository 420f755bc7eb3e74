"""A server that ends, or ceases to lead: what is under way has a moment, and is then broken off in one line."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest
import uvicorn

from eagle_eye.server.security.auth import Limits
from eagle_eye.server.security.settings import LimitSettings
from eagle_eye.server.transport.connections import AcceptingServer, Connections, GuardedProtocol
from tests.server.builders import FakeClock

WITHIN_S = 20.0
GRACE_S = 1


class Protocol(GuardedProtocol):
    @staticmethod
    def closed(_: str) -> None:
        pass

    @staticmethod
    def head_timeout_s() -> float:
        return WITHIN_S


def test_a_request_that_does_not_end_is_broken_off_after_a_while_and_said_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario() -> bytes:
        asked = asyncio.Event()

        async def endless(scope: Any, receive: Any, send: Any) -> None:
            asked.set()
            await asyncio.Event().wait()

        bound = socket.create_server(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        limits = Limits(LimitSettings(), FakeClock(), lambda _: None)
        config = uvicorn.Config(
            endless, http=Protocol, lifespan="off", log_config=None, timeout_graceful_shutdown=GRACE_S
        )
        server = AcceptingServer(config, bound, Connections(limits, FakeClock(), lambda _: None))
        serving = asyncio.create_task(server._serve())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(asked.wait(), WITHIN_S)
        server.should_exit = True
        await asyncio.wait_for(serving, WITHIN_S)
        answer = await reader.read(1)
        writer.close()
        return answer

    try:
        answered = asyncio.run(scenario())
    except ConnectionResetError:
        answered = b""
    assert answered == b""
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "broken off: their clients ask again" in said.getMessage()
    assert said.__dict__["requests"] == 1
    assert said.exc_info is None
