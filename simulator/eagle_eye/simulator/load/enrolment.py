"""Obtains tokens for synthetic nodes with the fleet's join token, as agents do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec

from eagle_eye.simulator.load.answers import HttpAnswer, problem
from eagle_eye.simulator.load.connection import LoadConnection, connect
from eagle_eye.simulator.load.target import ENROL_PATH, LoadTarget

AT_ONCE = 16
TIMEOUT_S = 10.0
ATTEMPTS_MAX = 100  # each waits as long as the server says


class NotEnrolled(Exception):
    """The server gave no token; the message is for people."""


class _Enrolled(msgspec.Struct, frozen=True):
    token: str


class _Asking:
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[HttpAnswer] | None = None

    async def ask(self, connection: LoadConnection, request: bytes) -> HttpAnswer:
        """Return the answer. Raises ConnectionError, TimeoutError."""
        self._answer = asyncio.get_running_loop().create_future()
        connection.send(request)
        return await asyncio.wait_for(self._answer, TIMEOUT_S)

    def answered(self, answer: HttpAnswer) -> None:
        """See connection.ConnectionOwner."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def lost(self, why: str) -> None:
        """See connection.ConnectionOwner."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(why))


async def enrol(target: LoadTarget, join: str, nodes: Sequence[str]) -> list[str]:
    """Return a token for each node. Raises NotEnrolled, OSError."""
    head = target.head(ENROL_PATH, "application/json", join)
    tokens = [""] * len(nodes)
    left = iter(range(len(nodes)))

    async def some(lane: int) -> None:
        asking = _Asking()
        connection = await connect(target, asking, lane, TIMEOUT_S)
        try:
            for at in left:
                body = msgspec.json.encode({"node": nodes[at]})
                for _ in range(ATTEMPTS_MAX):
                    if not connection.is_open:
                        connection = await connect(target, asking, lane, TIMEOUT_S)
                    answer = await asking.ask(connection, b"%b%d\r\n\r\n%b" % (head, len(body), body))
                    if answer.status not in (429, 503):
                        break
                    await asyncio.sleep((answer.retry_after_s or 1.0) * random.uniform(1.0, 1.5))  # noqa: S311 - no secret
                tokens[at] = _token(nodes[at], answer)
        finally:
            connection.close("end")

    lanes = [asyncio.create_task(some(lane)) for lane in range(min(AT_ONCE, len(nodes)))]
    try:
        await asyncio.gather(*lanes)
    finally:
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    return tokens


def _token(node: str, answer: HttpAnswer) -> str:
    if answer.status != 201:
        reason, detail = problem(answer.body)
        raise NotEnrolled(f"node {node!r} cannot be enrolled: HTTP {answer.status} {reason}: {detail}")
    try:
        return msgspec.json.decode(answer.body, type=_Enrolled).token
    except msgspec.MsgspecError as error:
        raise NotEnrolled(f"node {node!r} cannot be enrolled: the answer has no token ({error})") from None
