"""The simulated agents: places in which nodes come and go, each with a stream of its own to the server.

The numbers of many nodes are made at a time, as the load test makes them; what a fault changes is laid over them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import WIRE_VERSION, Block, Frame, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import Tail
from eagle_eye.simulator.load.connection import LoadTarget, allow_files
from eagle_eye.simulator.load.fleet import EXACT, METRICS, PLAIN, FleetRows, FleetValues, Readings
from eagle_eye.simulator.load.sender import StreamSender, Tally, Waiting, drained

INTERVAL_S = 1.0
STEP_S = 2.0
BATCHES = 20  # in which the nodes of an interval send, one after the other
CHECK_EVERY_S = 0.5
FILES_MORE = 256  # open files beside one for each node
AGENT_VERSION = "soak"

_STEP = EXACT.index("train_step")
_TRAINED = np.array([PLAIN.index(name) for name in METRICS if name.startswith("train_") and name in PLAIN])
_STEP_TIME, _COMPUTE = PLAIN.index("train_step_seconds"), PLAIN.index("train_compute_seconds")
_BUSY, _WATTS = PLAIN.index("gpu_utilization_ratio"), PLAIN.index("gpu_power_watts")
_AT_WORK = np.array(
    [
        PLAIN.index(name)
        for name in METRICS
        if name.endswith(("_active_ratio", "rx_bytes_per_second", "tx_bytes_per_second")) and name in PLAIN
    ]
)
_CELSIUS, _THROTTLE = PLAIN.index("gpu_temperature_celsius"), PLAIN.index("gpu_throttle_reasons")
_WITH_CLOCK = np.array([PLAIN.index("gpu_sm_clock_hertz"), _WATTS])
IDLE_W, WAITING_W = 95.0, 260.0
HOT_CELSIUS, HOT_CLOCK, THERMAL_BITS = 88.0, np.float32(0.62), 96.0  # NVML's software and hardware thermal slowdown


class Membership(NamedTuple):
    """What a node's agent says of the job on it; ``number`` chooses the job's steps."""

    job: str
    number: int
    attempt: int
    first_rank: int
    world: int


@dataclass
class Ledger:
    """What was acknowledged, by stream: the highest sequence of which the server said that it is durable."""

    watermarks: dict[str, int] = field(default_factory=dict)
    refused: int = 0


class Agents:
    """One agent in each of ``places``; a place's agent may end, begin again, or make way for another node's."""

    def __init__(self, target: LoadTarget, names: Sequence[str], gpus: int, seed: int) -> None:
        self._target = target
        self._gpus = gpus
        count = len(names)
        self.names = list(names)
        self.tally = Tally()
        self.ledger = Ledger()
        self.tokens = [""] * count
        self._clock_base_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        self._members: list[Membership | None] = [None] * count
        self._frames = [self._frame(name, None) for name in names]
        self._rows = FleetRows(self._frames)
        self._senders: list[StreamSender | None] = [None] * count
        self._sequence = np.zeros(count, dtype=np.int64)
        self._values = FleetValues(np.zeros(count, dtype=np.int64), gpus, INTERVAL_S, STEP_S, time.time(), seed)
        self._working = np.zeros(count, dtype=np.bool_)
        self._stalled = np.zeros(count, dtype=np.bool_)
        self._kept_steps = np.full((count, gpus), np.nan)
        self._kept = np.full((count, len(_TRAINED), gpus), np.nan, dtype=np.float32)
        self._slow = np.ones(count, dtype=np.float32)
        self._paced = np.ones(count, dtype=np.float32)
        self._hot = np.zeros(count, dtype=np.bool_)
        self._silent: dict[int, tuple[int, float]] = {}  # the rank on a device that says nothing, and since when
        self._loop = asyncio.get_running_loop()
        self._offset_s = time.time() - self._loop.time()

    def __len__(self) -> int:
        """How many places there are."""
        return len(self.names)

    @property
    def waiting(self) -> int:
        """How many frames are not acknowledged yet."""
        return sum(sender.waiting for sender in self._senders if sender is not None)

    def is_on(self, at: int) -> bool:
        """Whether the place's agent runs."""
        return self._senders[at] is not None

    async def start(self, at: int, name: str | None = None) -> None:
        """An agent begins in the place, with a stream of its own; ``name``: of another node than before."""
        if name is not None:
            self.names[at] = name
        self._frames[at] = self._frame(self.names[at], self._members[at], stream=secrets.token_hex(8))
        self._rows.renew(at, self._frames[at])
        self._sequence[at] = 0
        wire = self._rows.wires[at]
        sender = StreamSender(self._target, self.tokens[at], at, wire, self.tally, self._offset_s)
        self._senders[at] = sender
        try:
            await sender.open()
        except (OSError, TimeoutError) as error:
            sender.lost(type(error).__name__)  # it tries again by itself

    async def kill(self, at: int) -> None:
        """The place's agent is gone without a word, with what it had not handed over."""
        sender = self._senders[at]
        if sender is None:
            return
        self._senders[at] = None
        self._note(self._frames[at].stream, sender)
        self.tally.made -= sender.waiting  # nobody promised anything of these
        await sender.close()
        self._note(self._frames[at].stream, sender)

    async def farewell(self, at: int, reason: str, patience_s: float) -> None:
        """The place's agent says goodbye, and is over once all is acknowledged or ``patience_s`` has passed."""
        self.tell(at, [Event(time.time(), "agent_stop", attributes={"reason": reason})])
        sender = self._senders[at]
        if sender is not None:
            await drained([sender], patience_s)
        await self.kill(at)

    def take_part(self, at: int, member: Membership | None) -> None:
        """The node's ranks are those of an attempt of a job; None: nothing runs on it."""
        stream, self._members[at] = self._frames[at].stream, member
        self._frames[at] = self._frame(self.names[at], member, stream)
        self._rows.change(at, self._frames[at])
        self._working[at] = member is not None
        self._stalled[at] = self._hot[at] = False
        self._slow[at] = self._paced[at] = 1.0
        self._silent.pop(at, None)
        if member is not None:
            self._values.assign(at, member.number)

    def stall(self, at: int) -> None:
        """No step of the node's ranks finishes any more; its GPUs wait in a collective."""
        self._stalled[at] = True

    def silence(self, at: int, device: int) -> None:
        """The rank on a device says nothing from now on although its process exists, and its GPU has nothing to do."""
        self._silent[at] = (device, time.time())

    def slow_down(self, at: int, step: float, compute: float) -> None:
        """The node's steps take ``step`` times their time, what it computes ``compute`` times."""
        self._slow[at], self._paced[at] = compute, step

    def heat(self, at: int) -> None:
        """The node's GPUs are at their limit and slow their clocks down."""
        self._hot[at] = True

    def tell(self, at: int, events: Sequence[Event]) -> None:
        """Send a frame for events alone."""
        sender = self._senders[at]
        if sender is None:
            return
        self._sequence[at] += 1
        now_s = time.time()
        sequence = int(self._sequence[at])
        raw = self._rows.wires[at].telling(self._frames[at], sequence, now_s, events)
        sender.offer(Waiting(sequence, self._loop.time(), 0, raw))

    async def run(self) -> None:
        """Send a frame a second from every node, until cancelled."""
        allow_files(len(self) + FILES_MORE)
        checking = self._loop.create_task(self._check())
        next_s = float(int(time.time()) + 1)
        try:
            while True:
                for batch in range(BATCHES):
                    due_s = next_s - self._offset_s + INTERVAL_S * batch / BATCHES
                    await asyncio.sleep(max(due_s - self._loop.time(), 0.0))
                    first, last = (len(self) * (batch + more) // BATCHES for more in (0, 1))
                    self._send(first, last, next_s, due_s)
                # A process that was stopped for a while leaves out what nobody has read.
                next_s = max(next_s + INTERVAL_S, float(int(time.time() - 2.0)))
        finally:
            checking.cancel()

    def reported(self) -> Ledger:
        """Return what is acknowledged so far."""
        for at, sender in enumerate(self._senders):
            if sender is not None:
                self._note(self._frames[at].stream, sender)
        self.ledger.refused = self.tally.refused + self.tally.dropped
        return self.ledger

    async def close(self) -> None:
        """All agents are gone."""
        for at in range(len(self)):
            await self.kill(at)

    def _note(self, stream: str, sender: StreamSender) -> None:
        if sender.watermark:
            self.ledger.watermarks[stream] = max(self.ledger.watermarks.get(stream, 0), sender.watermark)

    def _send(self, first: int, last: int, time_s: float, due_s: float) -> None:
        """Make the frames of the places and hand those of running agents over."""
        if first == last:
            return
        readings = self._values.read(first, last, time_s)
        self._lay_over(first, last, readings)
        on = [self._senders[at] is not None for at in range(first, last)]
        self._sequence[first:last] += on
        raws = self._rows.encode(first, self._sequence[first:last], time_s, readings)
        samples = self._gpus * len(METRICS)
        for at, raw in enumerate(raws, first):
            sender = self._senders[at]
            if sender is not None:
                row = self._with_silence(at, raw) if at in self._silent else raw
                sender.offer(Waiting(int(self._sequence[at]), due_s, samples, row))

    def _lay_over(self, first: int, last: int, readings: Readings) -> None:
        here = slice(first, last)
        exact, plain = readings
        plain[:, _COMPUTE] *= self._slow[here, None]
        plain[:, _STEP_TIME] *= self._paced[here, None]
        hot = self._hot[here]
        plain[np.ix_(hot, _WITH_CLOCK)] *= HOT_CLOCK
        plain[hot, _CELSIUS], plain[hot, _THROTTLE] = HOT_CELSIUS, THERMAL_BITS
        stalled, idle = self._stalled[here], ~self._working[here]
        if stalled.any():
            exact[stalled, _STEP] = self._kept_steps[here][stalled]
            plain[np.ix_(stalled, _TRAINED)] = self._kept[here][stalled]
            plain[np.ix_(stalled, _AT_WORK)] *= np.float32(0.02)
            plain[stalled, _WATTS], plain[stalled, _BUSY] = WAITING_W, 1.0
        going = ~stalled
        self._kept_steps[here][going] = exact[going, _STEP]
        self._kept[here][going] = plain[:, _TRAINED][going]
        if idle.any():
            exact[idle, _STEP] = np.nan
            plain[np.ix_(idle, _TRAINED)] = np.nan
            plain[np.ix_(idle, _AT_WORK)] = 0.0
            plain[idle, _WATTS], plain[idle, _BUSY] = IDLE_W, 0.0
        for at, (device, _) in self._silent.items():
            if first <= at < last:
                plain[at - first, _BUSY, device], plain[at - first, _WATTS, device] = 0.0, IDLE_W

    def _with_silence(self, at: int, raw: bytes) -> bytes:
        """Return the row with how long each rank has said nothing."""
        device, since_s = self._silent[at]
        silent_s = [time.time() - since_s if one == device else 0.0 for one in range(self._gpus)]
        tail = msgspec.msgpack.encode(Tail(silent_s=silent_s))
        return b"%b%b%b%b" % (raw[:4], len(tail).to_bytes(4, "little"), raw[8:], tail)

    def _frame(self, node: str, member: Membership | None, stream: str = "none") -> Frame:
        ranks = [
            Rank(member.job, member.first_rank + device, member.world, device, attempt=member.attempt)
            for device in range(self._gpus if member else 0)
            if member
        ]
        return Frame(
            version=WIRE_VERSION,
            node=node,
            boot_id=f"boot-{node}",
            stream=stream,
            sequence=1,
            time_s=1.0,
            interval_s=INTERVAL_S,
            agent_version=AGENT_VERSION,
            clock_base_s=self._clock_base_s,
            job=member.job if member else None,
            ranks=ranks,
            blocks=[Block(Scope.DEVICE, list(range(self._gpus)), list(METRICS), b"")],
            collectors={"soak": "ok"},
        )

    async def _check(self) -> None:
        while True:
            now_s = self._loop.time()
            for sender in self._senders:
                if sender is not None:
                    sender.check(now_s)
            await asyncio.sleep(CHECK_EVERY_S)


def exits(member: Membership, device: int, exit_code: int, goodbye: bool) -> Event:
    """Return the end of the process of a rank, as its agent tells of it."""
    attributes: Mapping[str, str | int | float | bool | None] = {
        "exit_code": exit_code,
        "rank": member.first_rank + device,
        "pid": 1_000 + device,
        "goodbye": goodbye,
        "job": member.job,
        "attempt": member.attempt,
    }
    return Event(time.time(), "process_exit", device, dict(attributes))
