"""Generates a whole fleet's frames when due and sends each over its node's own connection."""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from eagle_eye.schema.events import Event
from eagle_eye.simulator.load.connection import allow_files
from eagle_eye.simulator.load.fleet import Load, SimulatedFleet
from eagle_eye.simulator.load.rows_wire import FleetRows
from eagle_eye.simulator.load.sender import StreamSender, Waiting, drained
from eagle_eye.simulator.load.tally import Tally
from eagle_eye.simulator.load.target import LoadTarget
from eagle_eye.simulator.load.values import METRICS, FleetValues

SLOT_S = 0.01  # frames that are due within it are made together
CONNECT_ATTEMPTS = 3
CONNECTING_MAX = 64  # at a time: a listening socket's queue has an end
CHECK_EVERY_S = 0.5
LATE_SEND_S = 0.05  # beyond it this program is what is slow


class Generator:
    """One run. ``reported(tally, seconds)`` is called about once a second."""

    def __init__(
        self,
        target: LoadTarget,
        load: Load,
        tokens: Sequence[str],
        drain_s: float,
        reported: Callable[[Tally, float], None],
    ) -> None:
        """``tokens``: one for each node, or a single one for all; [""]: none."""
        self._target = target
        self._load = load
        self._drain_s = drain_s
        self._reported = reported
        self._tokens = tokens
        self._stopping = asyncio.Event()
        self.tally = Tally()
        self.stream = f"load-{secrets.token_hex(8)}"

    def stop(self) -> None:
        """Generate no more frames; pending ones are awaited."""
        self._stopping.set()

    async def run(self) -> dict[str, Any]:
        """Send the load and return the figures. Raises OSError when the fleet cannot connect."""
        load, loop = self._load, asyncio.get_running_loop()
        allow_files(load.nodes)
        fleet = SimulatedFleet(load, self.stream)
        rows = FleetRows(fleet.frames)
        offset_s = time.time() - loop.time()
        senders = [
            StreamSender(self._target, self._tokens[at % len(self._tokens)], at, rows.wires[at], self.tally, offset_s)
            for at in range(load.nodes)
        ]
        try:
            await _open(senders)
            gc.collect()
            gc.freeze()  # the fleet lives as long as the process: looking through it again and again costs a tenth
            begin_s = (int(time.time() / load.interval_s) + 2) * load.interval_s
            self.tally.settled_s = begin_s + load.warm_up_s - offset_s
            self.tally.divide(begin_s - offset_s, load.intervals * load.interval_s)
            values = FleetValues(fleet.jobs, load.gpus, load.interval_s, load.step_s, begin_s, load.seed)
            checking = loop.create_task(self._check(senders, begin_s - offset_s))
            cpu_s = time.process_time()
            made = await self._make(senders, rows, values, begin_s, offset_s)
            seconds = made * load.interval_s
            cpu_s = time.process_time() - cpu_s
            wall_s = max(loop.time() - (begin_s - offset_s), 1e-9)
            figures = {"begin": begin_s, "seconds": seconds, "generator_cpu_ratio": cpu_s / wall_s}
            self.tally.goodbye_s = begin_s + made * load.interval_s - offset_s
            await self._goodbye(senders, fleet, rows, made + 1, begin_s + made * load.interval_s, offset_s)
            await drained(senders, self._drain_s)
            checking.cancel()
        finally:
            await asyncio.gather(*(sender.close() for sender in senders))
            gc.unfreeze()
        asked = {
            "nodes": load.nodes,
            "gpus": load.gpus,
            "metrics": len(METRICS),
            "interval_seconds": load.interval_s,
            "warm_up_seconds": load.warm_up_s,
        }
        return {**asked, **figures, "stream": self.stream, **self.tally.figures(seconds)}

    async def _make(
        self, senders: list[StreamSender], rows: FleetRows, values: FleetValues, begin_s: float, offset_s: float
    ) -> int:
        """Make and hand over all frames; return of how many intervals."""
        load = self._load
        samples = load.gpus * len(METRICS)
        slots = min(max(round(load.spread * load.interval_s / SLOT_S), 1), load.nodes)
        for interval in range(load.intervals):
            time_s = begin_s + interval * load.interval_s
            for slot in range(slots):
                due_s = time_s - offset_s + load.spread * load.interval_s * slot / slots
                await self._until(due_s)
                if self._stopping.is_set() and slot == 0:
                    return interval
                first, last = load.nodes * slot // slots, load.nodes * (slot + 1) // slots
                sequence = interval + 1
                raws = rows.encode(first, sequence, time_s, values.read(first, last, time_s))
                self._note_late(due_s, last - first)
                for at, raw in enumerate(raws, first):
                    senders[at].offer(Waiting(sequence, due_s, samples, raw))
        return load.intervals

    async def _goodbye(
        self,
        senders: list[StreamSender],
        fleet: SimulatedFleet,
        rows: FleetRows,
        sequence: int,
        time_s: float,
        offset_s: float,
    ) -> None:
        """Say goodbye for every node: a silence that was announced is no fault."""
        event = Event(time_s, "agent_stop", attributes={"reason": "the load test is over"})
        for at, (sender, frame) in enumerate(zip(senders, fleet.frames, strict=True)):
            due_s = time_s - offset_s + self._load.interval_s * at / len(senders)
            await self._until(due_s)
            sender.offer(Waiting(sequence, due_s, 0, rows.wires[at].telling(frame, sequence, time_s, [event])))

    async def _check(self, senders: list[StreamSender], begin_s: float) -> None:
        loop = asyncio.get_running_loop()
        reported_s = 0.0
        while True:
            now_s = loop.time()
            for sender in senders:
                sender.check(now_s)
            if now_s - reported_s >= 1.0:
                reported_s = now_s
                self._reported(self.tally, now_s - begin_s)
            await asyncio.sleep(CHECK_EVERY_S)

    async def _until(self, due_s: float) -> None:
        wait_s = due_s - asyncio.get_running_loop().time()
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)

    def _note_late(self, due_s: float, frames: int) -> None:
        if asyncio.get_running_loop().time() - due_s > LATE_SEND_S:
            self.tally.late_sends += frames


async def _open(senders: list[StreamSender]) -> None:
    """Connect all. Raises OSError, TimeoutError."""
    room = asyncio.Semaphore(CONNECTING_MAX)

    async def one(sender: StreamSender) -> None:
        async with room:
            for attempt in range(CONNECT_ATTEMPTS):
                try:
                    await sender.open()
                except (OSError, TimeoutError):
                    if attempt == CONNECT_ATTEMPTS - 1:
                        raise
                    await asyncio.sleep(0.1 * 2.0**attempt)
                else:
                    return

    tasks = [asyncio.create_task(one(sender)) for sender in senders]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
