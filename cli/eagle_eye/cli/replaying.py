"""Sends a trace's rows, events and job updates to a server when they are due. Touches: the network.

Rows are sent and dated at their due time, so that the server's clock and the rows' agree as with real agents: at ten
times the speed a second of the trace, and the interval of its rows, lasts a tenth of one. The rows' values are
unchanged, including durations and rates.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import numpy as np

from eagle_eye.client import Client
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Frame, encode_frame
from eagle_eye.server.backtest.trace import Step, Trace
from eagle_eye.server.model.records import Job
from eagle_eye.simulator.load.connection import LoadTarget, allow_files
from eagle_eye.simulator.load.sender import FrameWire, StreamSender, Tally, Waiting, drained

AGENT_VERSION = "replay"
HEARD_INTERVALS = 3.0  # a node whose last row is newer than this at the trace's end is taken as still alive
SETTLE_S = 3.0  # after the last row, for the server to reach its last verdict
DRAIN_S = 10.0
CHECK_EVERY_S = 0.5
LATE_SEND_S = 0.2  # beyond this the program itself is too slow


class Pacing(NamedTuple):
    """Maps the trace's time to the current time; all times are Unix seconds."""

    start_s: float
    end_s: float
    speed: float
    begin_s: float

    @property
    def seconds(self) -> float:
        """The duration of the trace."""
        return (self.end_s - self.start_s) / self.speed

    def now_s(self, time_s: float) -> float:
        """Return when data of ``time_s`` is sent, which is also its new timestamp."""
        return self.begin_s + (time_s - self.start_s) / self.speed


class Replay:
    """A trace being replayed. ``suffix`` is appended to the names of job and nodes.

    ``reported(share, tally)`` is called twice a second. ``skipped`` counts rows of nodes that the header does not name.
    """

    def __init__(
        self,
        trace: Trace,
        target: LoadTarget,
        token: str,
        client: Client,
        suffix: str,
        reported: Callable[[float, Tally], None],
    ) -> None:
        self.trace = trace
        self.suffix = suffix
        self._target = target
        self._token = token
        self._client = client
        self._reported = reported
        self._stream = f"replay-{secrets.token_hex(8)}"
        self._sequences: Counter[str] = Counter()
        self._last: dict[str, Frame] = {}
        self.job = trace.header.job + suffix
        self.nodes = [node.node + suffix for node in trace.header.nodes]
        self.tally = Tally()
        self.skipped: Counter[str] = Counter()

    async def run(self, speed: float) -> Pacing:
        """Send all of it, and a goodbye for the nodes that were alive at the end. Raises OSError, ClientError."""
        allow_files(len(self.nodes))
        loop = asyncio.get_running_loop()
        offset_s = time.time() - loop.time()
        steps = iter(self.trace.steps())
        step = next(steps, None)  # reads the files: the clock starts here
        senders = {
            node: StreamSender(self._target, self._token, at, FrameWire(), self.tally, offset_s)
            for at, node in enumerate(self.nodes)
        }
        try:
            for sender in senders.values():
                await sender.open()
            header = self.trace.header
            pace = Pacing(header.start, header.end, speed, time.time())
            checking = loop.create_task(self._check(senders, pace))
            while step is not None:
                await self._take(step, pace, senders, offset_s)
                step = next(steps, None)
            await asyncio.sleep(max(pace.now_s(pace.end_s) + SETTLE_S - time.time(), 0.0))
            self._goodbye(pace, senders, offset_s)
            await drained(senders.values(), DRAIN_S)
            checking.cancel()
        finally:
            await asyncio.gather(*(sender.close() for sender in senders.values()))
        return pace

    async def _take(self, step: Step, pace: Pacing, senders: Mapping[str, StreamSender], offset_s: float) -> None:
        due_s = pace.now_s(step.time_s)
        wait_s = due_s - time.time()
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)
        if step.job is not None:
            await asyncio.to_thread(self._declare, step.job)
        elif step.frame is not None:
            frame = self._frame(step.frame, pace)
            sender = senders.get(frame.node)
            if sender is None:
                self.skipped[frame.node] += 1
                return
            self.tally.late_sends += -wait_s > LATE_SEND_S
            self._last[frame.node] = step.frame
            sender.offer(Waiting(frame.sequence, due_s - offset_s, _samples(frame), encode_frame(frame)))
            if frame.sequence % 16 == 0:
                await asyncio.sleep(0)  # gives the connections their turn even in a fast replay

    def _frame(self, frame: Frame, pace: Pacing) -> Frame:
        node = frame.node + self.suffix
        self._sequences[node] += 1
        replace = msgspec.structs.replace
        return replace(
            frame,
            node=node,
            boot_id=self._stream,
            stream=self._stream,
            sequence=self._sequences[node],
            time_s=pace.now_s(frame.time_s),
            interval_s=frame.interval_s / pace.speed,
            agent_version=AGENT_VERSION,
            job=self.job,
            ranks=[replace(rank, job=self.job) for rank in frame.ranks],
            events=[self._event(event, pace) for event in frame.events],
        )

    def _event(self, event: Event, pace: Pacing) -> Event:
        attributes = event.attributes
        if attributes.get("job") == self.trace.header.job:
            attributes = {**attributes, "job": self.job}
        return msgspec.structs.replace(event, time_s=pace.now_s(event.time_s), attributes=attributes)

    def _declare(self, job: Job) -> None:
        """Report the scheduler's job updates."""
        ranks = [msgspec.structs.replace(rank, node=rank.node + self.suffix) for rank in job.ranks]
        body = {"attempt": job.attempt, "state": job.state, "ranks": [msgspec.to_builtins(rank) for rank in ranks]}
        self._client.call("PUT", f"/api/v1/jobs/{quote(self.job, safe='')}", None, body)

    def _goodbye(self, pace: Pacing, senders: Mapping[str, StreamSender], offset_s: float) -> None:
        """Announce the end of the nodes that were alive: the trace ends, they did not fail."""
        patience_s = HEARD_INTERVALS * self.trace.header.interval_s
        now_s = time.time()
        for node, last in self._last.items():
            if pace.end_s - last.time_s <= patience_s:
                event = Event(pace.end_s, "agent_stop", attributes={"reason": "the trace ends"})
                frame = msgspec.structs.replace(last, time_s=pace.end_s, blocks=[], events=[event])
                said = self._frame(frame, pace)
                senders[node].offer(Waiting(said.sequence, now_s - offset_s, 0, encode_frame(said)))

    async def _check(self, senders: Mapping[str, StreamSender], pace: Pacing) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for sender in senders.values():
                sender.check(loop.time())
            self._reported(min((time.time() - pace.begin_s) / max(pace.seconds, 1e-9), 1.0), self.tally)
            await asyncio.sleep(CHECK_EVERY_S)


def _samples(frame: Frame) -> int:
    return sum(int(np.count_nonzero(~np.isnan(np.frombuffer(block.values, "<f8")))) for block in frame.blocks)


def figures(replay: Replay, pace: Pacing, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what was sent and what the server detected, with the trace's labels at their shifted times."""
    labels = [
        {
            "fault": label.fault,
            "nodes": [node + replay.suffix for node in label.nodes],
            "start": pace.now_s(label.start),
            "end": pace.now_s(label.end),
            "expect": label.expect,
        }
        for label in replay.trace.labels() or ()
    ]
    return {
        "job": replay.job,
        "start": pace.now_s(pace.start_s),
        "end": pace.now_s(pace.end_s),
        **replay.tally.figures(pace.seconds),
        "skipped": dict(replay.skipped),
        "labels": labels,
        "incidents": found,
    }
