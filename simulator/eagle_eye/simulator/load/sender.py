"""One synthetic agent's sender: in order, at least once, following the protocol: docs/reference/wire.md.

It differs from the real agent in its counters, and in that it spools only in memory.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from eagle_eye.schema.backoff import Backoff
from eagle_eye.schema.frame import CONTENT_TYPE, encode_request
from eagle_eye.simulator.load.connection import (
    FRAMES_PATH,
    BadHttpAnswer,
    HttpAnswer,
    LoadConnection,
    LoadTarget,
    acknowledgement,
    connect,
    problem,
)


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


BUCKETS_PER_DOUBLING = 16  # a quantile is known to 4.4%
SHORTEST_S = 1e-4
BUCKETS = 26 * BUCKETS_PER_DOUBLING  # up to 6,700 s
PARTS_MAX, PART_S_MIN = 60, 10.0  # into which a run is divided, to tell a bad minute from a bad server


class LatencyHistogram:
    """A histogram of durations in exponential buckets; quantiles are upper bounds of their buckets."""

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self.count = 0
        self.max_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        bucket = int(math.log2(seconds / SHORTEST_S) * BUCKETS_PER_DOUBLING) + 1 if seconds > SHORTEST_S else 0
        self._counts[min(bucket, BUCKETS - 1)] += 1
        self.count += 1
        self.max_s = max(self.max_s, seconds)

    def quantile_s(self, share: float) -> float | None:
        """Return the duration that ``share`` of all did not exceed; None: there were none."""
        if self.count == 0:
            return None
        wanted = share * self.count
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return min(SHORTEST_S * math.exp2(bucket / BUCKETS_PER_DOUBLING), self.max_s)
        return self.max_s

    def figures(self) -> dict[str, float | None]:
        """Return quantiles and maximum in seconds; None: there were none."""
        quantiles = {name: self.quantile_s(share) for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))}
        return {**quantiles, "max": self.max_s if self.count else None}


class Tally:
    """Counts of frames and samples, each frame in one of: acknowledged, refused, given up, dropped, waiting.

    ``made`` and ``acknowledged`` count frames, ``samples_*`` their numbers. ``refused``: the server will never take it
    (400, 413, 422). ``dropped``: it was pushed out of a full queue. ``latencies`` run from the moment at which a frame
    was due, not from that at which it could be sent.
    """

    def __init__(self) -> None:
        self.made = 0
        self.samples_made = 0
        self.acknowledged = 0
        self.samples_acknowledged = 0
        self.refused = 0
        self.dropped = 0
        self.duplicates = 0  # frames that the server had already when they were sent again
        self.requests = 0
        self.bytes_sent = 0
        self.late_sends = 0  # frames that this program itself sent later than LATE_SEND_S after they were due
        self.asked_to_wait: Counter[str] = Counter()  # by status and reason: what was sent again later
        self.errors: Counter[str] = Counter()
        self.said: dict[str, str] = {}  # the first detail of each kind of refusal
        self.latencies = LatencyHistogram()
        self.settled_s = -math.inf  # frames due from then on, by the event loop's clock, count in ``settled`` too
        self.settled = LatencyHistogram()
        self.goodbye_s = math.inf  # those due from then on are goodbyes: all nodes at once, counted apart
        self.goodbyes = LatencyHistogram()
        self._parts: list[LatencyHistogram] = []
        self._begin_s, self._part_s = 0.0, PART_S_MIN

    def divide(self, begin_s: float, duration_s: float) -> None:
        """Tell the parts of a run from each other that begins at ``begin_s`` by the event loop's clock."""
        self._begin_s, self._part_s = begin_s, max(PART_S_MIN, duration_s / PARTS_MAX)
        self._parts = [LatencyHistogram() for _ in range(math.ceil(duration_s / self._part_s - 1e-9))]

    def acknowledge(self, samples: int, due_s: float, now_s: float) -> None:
        """Count a frame that is durable; times by the event loop's clock."""
        self.acknowledged += 1
        self.samples_acknowledged += samples
        if due_s >= self.goodbye_s:
            self.goodbyes.add(now_s - due_s)
            return
        self.latencies.add(now_s - due_s)
        if due_s >= self.settled_s:
            self.settled.add(now_s - due_s)
        if self._parts:
            part = int((due_s - self._begin_s) / self._part_s)
            self._parts[min(max(part, 0), len(self._parts) - 1)].add(now_s - due_s)

    @property
    def lost(self) -> int:
        """How many frames were made and not acknowledged, whatever became of them."""
        return self.made - self.acknowledged

    def figures(self, seconds: float) -> dict[str, Any]:
        """Return all of it as plain JSON; ``seconds`` is how long frames were made."""
        return {
            "frames_sent": self.made,
            "frames_acknowledged": self.acknowledged,
            "frames_lost": self.lost,
            "samples_sent": self.samples_made,
            "samples_acknowledged": self.samples_acknowledged,
            "samples_per_second": self.samples_acknowledged / seconds if seconds > 0.0 else 0.0,
            "frames_refused": self.refused,
            "frames_dropped": self.dropped,
            "duplicates": self.duplicates,
            "requests": self.requests,
            "bytes_sent": self.bytes_sent,
            "sends_late": self.late_sends,
            "acknowledged_seconds": self.latencies.figures(),
            "acknowledged_seconds_settled": self.settled.figures(),
            "acknowledged_seconds_by_part": [
                {"from": at * self._part_s, **part.figures()} for at, part in enumerate(self._parts)
            ],
            "acknowledged_seconds_goodbye": self.goodbyes.figures(),
            "asked_to_wait": dict(self.asked_to_wait),
            "errors": dict(self.errors),
            "details": self.said,
        }


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
