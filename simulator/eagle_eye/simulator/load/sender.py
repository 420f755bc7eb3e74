"""One synthetic agent's sender: in order, at least once, following the protocol: docs/reference/wire.md.

It differs from the real agent in its counters, and in that it spools only in memory.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from eagle_eye.schema.backoff import Backoff
from eagle_eye.simulator.load.answers import BadHttpAnswer, HttpAnswer, acknowledgement, problem
from eagle_eye.simulator.load.connection import LoadConnection, connect
from eagle_eye.simulator.load.tally import Tally
from eagle_eye.simulator.load.target import FRAMES_PATH, LoadTarget
from eagle_eye.simulator.load.wire import Wire

QUEUE_FRAMES_MAX = 600  # of one node: ten minutes of an outage at 1 Hz
REQUEST_FRAMES_MAX = 64  # what waits is sent together, as the agent does
CONNECT_S, ANSWER_S = 2.0, 5.0
DRAIN_LOOK_S = 0.05
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.1, 5.0
VERSION_RETRY_S = 60.0
NEVER = frozenset({400, 413, 422})  # of a frame that was sent alone: it will not be taken later either
ASKED_TO_WAIT = frozenset({429, 503})
UNKNOWN_TEMPLATE = (409, "outline")


class Waiting(NamedTuple):
    """A frame that is not acknowledged yet. ``due_s``: when it should have been sent, by the event loop's clock."""

    sequence: int
    due_s: float
    samples: int
    raw: bytes


class StreamSender:
    """Sends one stream of one node. All its methods are called on the event loop."""

    def __init__(self, target: LoadTarget, token: str, number: int, wire: Wire, tally: Tally, offset_s: float) -> None:
        """``number`` chooses the source address; ``offset_s`` plus the event loop's clock are Unix seconds."""
        self._target = target
        self._wire = wire
        self._number = number
        self._tally = tally
        self._offset_s = offset_s
        self._loop = asyncio.get_running_loop()
        self._head = target.head(FRAMES_PATH, wire.content_type, token)
        self._queue: deque[Waiting] = deque()
        self._sent: tuple[Waiting, ...] = ()  # what the request under way carries
        self._sent_s = 0.0
        self._connection: LoadConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX)
        self._frames_max = REQUEST_FRAMES_MAX
        self._closed = False
        self.watermark = 0  # every frame up to it is acknowledged as durable, but for those refused or dropped

    @property
    def waiting(self) -> int:
        """How many frames are not acknowledged, refused or dropped yet."""
        return len(self._queue)

    async def open(self) -> None:
        """Connect. Raises OSError, TimeoutError."""
        self._connection = await connect(self._target, self, self._number, CONNECT_S)
        self._wire.forget()

    def offer(self, frame: Waiting) -> None:
        """Take a frame, and send it unless others are pending."""
        tally = self._tally
        tally.made += 1
        tally.samples_made += frame.samples
        if len(self._queue) >= QUEUE_FRAMES_MAX:
            self._queue.popleft()
            tally.dropped += 1
        self._queue.append(frame)
        if self._retry is None:
            self._send()

    def check(self, now_s: float) -> None:
        """Give up on an overdue answer."""
        connection = self._connection
        if connection is not None and connection.busy and now_s - self._sent_s > ANSWER_S:
            connection.close("answer_timeout")

    async def close(self) -> None:
        """Close the connection; nothing more is sent."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._connection is not None:
            self._connection.close("end")
            await asyncio.sleep(0)  # the event loop lets go of it in its next turn

    def answered(self, answer: HttpAnswer) -> None:
        """See connection.ConnectionOwner."""
        if answer.status == 200:
            try:
                said = acknowledgement(answer.body)
            except BadHttpAnswer:
                self._fail("acknowledgement")
                return
            self._tally.duplicates += said.duplicates
            self.watermark = max(self.watermark, said.watermark)
            self._settle(said.watermark)
            if self._sent and self._sent[-1].sequence > said.watermark:
                self._fail("watermark")  # taken, and yet not durable: sent again
                return
            self._sent = ()
            self._backoff.reset()
            if self._queue:
                self._send()
            return
        self._refused(answer)

    def lost(self, why: str) -> None:
        """See connection.ConnectionOwner."""
        self._connection = None
        if self._closed:
            return
        if self._sent or why != "closed":
            self._tally.errors[why] += 1
        self._sent = ()
        if self._retry is None:
            self._later(self._backoff.next_s() if self._queue else 0.0)

    def _settle(self, watermark: int) -> None:
        """Drop and count durable frames."""
        now_s = self._loop.time()
        tally, queue = self._tally, self._queue
        while queue and queue[0].sequence <= watermark:
            frame = queue.popleft()
            tally.acknowledge(frame.samples, frame.due_s, now_s)

    def _refused(self, answer: HttpAnswer) -> None:
        reason, detail = problem(answer.body)
        self._wire.forget()
        kind = f"{answer.status} {reason}".strip()
        self._tally.said.setdefault(kind, detail)
        alone = len(self._sent) == 1
        if answer.status in NEVER and reason != "version":
            self._tally.errors[kind] += 1
            if alone and self._queue and self._queue[0].sequence == self._sent[0].sequence:
                self._queue.popleft()
                self._tally.refused += 1
            self._frames_max = 1  # find the one that the server does not want
            self._sent = ()
            self._send()
            return
        counted = self._tally.asked_to_wait if answer.status in ASKED_TO_WAIT else self._tally.errors
        counted[kind] += 1
        self._sent = ()
        wait_s = self._backoff.next_s()
        if (answer.status, reason) == UNKNOWN_TEMPLATE and self._backoff.failures == 1:
            wait_s = 0.0  # it comes with the same rows now
        elif reason == "version":
            wait_s = VERSION_RETRY_S * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        elif answer.retry_after_s is not None and answer.status in ASKED_TO_WAIT:
            wait_s = max(answer.retry_after_s * random.uniform(1.0, 1.5), wait_s)  # noqa: S311 - no secret
        self._later(wait_s)

    def _fail(self, kind: str) -> None:
        self._tally.errors[kind] += 1
        self._wire.forget()
        self._sent = ()
        self._later(self._backoff.next_s())

    def _later(self, wait_s: float) -> None:
        if not self._closed:
            self._retry = self._loop.call_later(wait_s, self._again)

    def _again(self) -> None:
        self._retry = None
        if self._connection is None:
            self._connecting = self._loop.create_task(self._reconnect())
        elif self._queue:
            self._send()

    async def _reconnect(self) -> None:
        try:
            await self.open()
        except (OSError, TimeoutError) as error:
            self._tally.errors[f"connect {type(error).__name__}"] += 1
            self._later(self._backoff.next_s())
            return
        finally:
            self._connecting = None
        if self._queue:
            self._send()

    def _send(self) -> None:
        """Send what waits, if the connection is free."""
        connection, queue = self._connection, self._queue
        if connection is None or not connection.is_open or connection.busy or not queue:
            return
        if len(queue) == 1:
            self._sent = (queue[0],)
            self._frames_max = REQUEST_FRAMES_MAX
        else:
            self._sent = tuple(queue[at] for at in range(min(len(queue), self._frames_max)))
        self._sent_s = self._loop.time()
        body = self._wire.body([frame.raw for frame in self._sent], self._sent_s + self._offset_s)
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        self._tally.requests += 1
        self._tally.bytes_sent += len(request)
        connection.send(request)


async def drained(senders: Collection[StreamSender], seconds: float) -> bool:
    """Wait until nothing waits any more; return False when something still does after ``seconds``."""
    end_s = asyncio.get_running_loop().time() + seconds
    while any(sender.waiting for sender in senders):
        if asyncio.get_running_loop().time() >= end_s:
            return False
        await asyncio.sleep(DRAIN_LOOK_S)
    return True
