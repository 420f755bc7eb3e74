"""Totals a training process's steps and sends its state to the agent: one datagram, never blocking.

Touches: a Unix datagram socket, non-blocking. An agent that is absent, stopped or slow costs one failed system call,
and the totals in the next message make up for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from eagle_eye.agent.training_hook import launch_variables
from eagle_eye.agent.training_hook.message import (
    DEVICES_MAX,
    EVENTS_PER_MESSAGE_MAX,
    HEARTBEAT_S,
    MESSAGE_BYTES_MAX,
    NAME_CHARS_MAX,
    SOCKET_VARIABLE,
    HookEvent,
    HookMessage,
    Totals,
    default_socket,
    encode,
    encode_tail,
)
from eagle_eye.schema.restart_names import LAST_GROUP_VARIABLE

# Converts a program's values to numbers, without ever waiting for a device.
#
# Never imports torch: it is passed in.
VALUES_PENDING_MAX = 64  # a host leads by a few steps of two values each; more are not read


def scalar(value: Any) -> float | None:
    """Return a number, or None for a tensor on a device: reading it would block on the device."""
    if isinstance(value, (float, int)):
        return float(value)
    if getattr(value, "is_cpu", True) is False:
        return None
    item = getattr(value, "item", None)  # the fastest way, and silent about gradients
    return float(value if item is None else item())


class DeviceScalars:
    """Numbers on a GPU, copied asynchronously to pinned memory and read some steps later.

    The copy is enqueued on the current stream, where the program would read the value itself. Nothing is enqueued or
    polled while the stream is being captured into a graph. Any failure disables this permanently and is passed to
    ``failed`` once.
    """

    def __init__(self, torch: Any, failed: Callable[[BaseException], None]) -> None:
        """``torch`` is the module."""
        self._torch: Any = torch
        self._failed = failed
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self._free: list[tuple[Any, Any]] | None = None  # before the first value

    def keep(self, name: int, value: Any) -> bool:
        """Schedule the one-element tensor to be read later as ``name``; return whether it will be. Never raises."""
        if self._torch is None:
            return False
        cuda = self._torch.cuda
        try:
            if value.numel() != 1 or cuda.is_current_stream_capturing():
                return False
            if self._free is None:
                self._free = self._allocate()
            if not self._free:
                return False
            memory, event = self._free[-1]
            memory.copy_(value.detach().reshape(1), non_blocking=True)
            event.record(cuda.current_stream(value.device))
        except Exception as error:  # noqa: BLE001 - training must go on without us; it is counted
            self._switch_off(error)
            return False
        self._free.pop()
        self._pending.append((name, memory, event))
        return True

    def _allocate(self) -> list[tuple[Any, Any]]:
        torch = self._torch
        memory = torch.empty(VALUES_PENDING_MAX, dtype=torch.float32, pin_memory=True)
        return [(memory[place : place + 1], torch.cuda.Event()) for place in range(VALUES_PENDING_MAX)]

    def read(self) -> list[tuple[int, float]]:
        """Return the values that have arrived since the last call, oldest first, with their names."""
        values: list[tuple[int, float]] = []
        if not self._pending or self._free is None:
            return values
        try:
            if self._torch.cuda.is_current_stream_capturing():
                return values
            while self._pending and self._pending[0][2].query():
                name, memory, event = self._pending.popleft()
                values.append((name, float(memory.item())))
                self._free.append((memory, event))
        except Exception as error:  # noqa: BLE001 - training must go on without us; it is counted
            self._switch_off(error)
        return values

    def _switch_off(self, error: BaseException) -> None:
        self._torch = self._free = None
        self._pending.clear()
        self._failed(error)


_STEPS = Totals._fields.index("steps")
_TIMED = Totals._fields.index("timed_steps")
_COMPUTE = Totals._fields.index("compute_steps")
_DATA_WAIT = Totals._fields.index("data_wait_steps")
_COLLECTIVE = Totals._fields.index("collective_steps")
_TOKENS = Totals._fields.index("token_steps")
_WORK = Totals._fields.index("work_steps")
_LOSS = Totals._fields.index("losses")
_GRAD_NORM = Totals._fields.index("grad_norms")
_LOCAL_GRAD_NORM = Totals._fields.index("local_grad_norms")


class RunningTotals:
    """One process's totals since it attached, in ``sums`` in the order of ``Totals``.

    An invalid value is passed to ``failed``, one that cannot be read without blocking on its device is counted in
    ``unread``; the step still counts.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self.sums = [0.0] * len(Totals._fields)
        self.unread = 0
        self._failed = failed
        self._device_values: DeviceScalars | None = None

    def step(self, step_s: float | None, tokens: Any) -> None:
        """Add a finished step; it took ``step_s`` (None: not observed)."""
        sums = self.sums
        sums[_STEPS] += 1.0
        if step_s is None:
            return
        sums[_TIMED] += 1.0
        sums[_TIMED + 1] += step_s
        if tokens is not None and (number := self._amount(tokens)) is not None:
            sums[_TOKENS] += 1.0
            sums[_TOKENS + 1] += step_s
            sums[_TOKENS + 2] += number

    def parts(self, compute_s: Any, data_wait_s: Any, collective_s: Any) -> None:
        """Add a step's parts in seconds; None: not observed."""
        for index, value in ((_COMPUTE, compute_s), (_DATA_WAIT, data_wait_s), (_COLLECTIVE, collective_s)):
            if value is not None:
                self._add(index, value)

    def values(self, loss: Any, grad_norm: Any, local_grad_norm: Any, work_units: Any, *, looking: bool) -> bool:
        """Add a step's values; None: not observed. Return False where a loss or norm is not finite.

        ``looking``: this step is sampled, so values may be copied from a GPU; they count in a later step.
        """
        sound = loss is None or self._number(_LOSS, loss, looking=looking)
        if local_grad_norm is not None and sound:
            # A broken loss breaks the gradient on every rank, which then does not show where it came from.
            sound = self._number(_LOCAL_GRAD_NORM, local_grad_norm, looking=looking)
        if grad_norm is not None:
            sound = self._number(_GRAD_NORM, grad_norm, looking=looking) and sound
        if work_units is not None:
            self._add(_WORK, work_units)
        return self.arrived() and sound

    def arrived(self) -> bool:
        """Add the values that have arrived from a GPU; return False where one is not finite."""
        sound = True
        if self._device_values is not None:
            for index, number in self._device_values.read():
                sound = self._number(index, number, looking=False) and sound
        return sound

    def _add(self, index: int, value: Any) -> None:
        """Add to a (count, sum) pair; non-finite values count as not observed."""
        if (number := self._amount(value)) is not None:
            self.sums[index] += 1.0
            self.sums[index + 1] += number

    def _amount(self, value: Any) -> float | None:
        try:
            number = scalar(value)
        except Exception as error:  # noqa: BLE001 - a value of a kind that we don't know; the step counts all the same
            self._failed(error)
            return None
        if number is None:
            self.unread += 1
        elif not (isfinite(number) and number >= 0.0):
            self._failed(ValueError(f"{number!r} is no amount: expected a finite number from 0"))
            return None
        return number

    def _number(self, index: int, value: Any, *, looking: bool) -> bool:
        """Add to a (count, sum, odd) triple; return False for a non-finite value, which counts as odd."""
        try:
            number = scalar(value)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
            return True
        if number is None:
            if looking and not self._read_later(index, value):
                self.unread += 1
        elif isfinite(number):
            self.sums[index] += 1.0
            self.sums[index + 1] += number
        else:
            self.sums[index + 2] += 1.0
            return False
        return True

    def _read_later(self, index: int, value: Any) -> bool:
        """Schedule a GPU value to be read when it has arrived; return whether it will be."""
        if self._device_values is None:
            if not getattr(value, "is_cuda", False):
                return False
            self._device_values = DeviceScalars(sys.modules["torch"], self._failed)
        return self._device_values.keep(index, value)


SENDS_PER_EVENT = 4  # how many accepted messages carry each event


@dataclass(frozen=True)
class Identity:
    """This process's rank and job, from its environment."""

    job: str
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    role: str
    device: int
    visible_devices: str = ""

    @staticmethod
    def of(environ: Mapping[str, str]) -> Identity:
        """Return the launcher's values from the environment; missing or invalid ones give a job with one rank."""
        place = launch_variables.place(environ)
        rank, local_rank = place.rank or 0, place.local_rank or 0
        visible = environ.get("CUDA_VISIBLE_DEVICES", "")
        return Identity(
            job=_printable(launch_variables.job(environ) or "default"),
            attempt=launch_variables.attempt(environ),
            rank=rank,
            world_size=max(place.size or 1, rank + 1),
            local_rank=local_rank,
            role=_printable(environ.get("EAGLE_EYE_ROLE", "")),
            device=_physical_device(visible, local_rank),
            visible_devices=visible,
        )

    @staticmethod
    def known(environ: Mapping[str, str], modules: Mapping[str, object]) -> Identity | None:
        """Return the process's identity, its rank by the default process group where no launcher's variable gives it.

        None while the environment says that there are several ranks and neither says which this is. ``modules`` is
        ``sys.modules``: torch is used if the program imported it.
        """
        found, place = Identity.of(environ), launch_variables.place(environ)
        if place.rank is not None:
            return found
        distributed: Any = modules.get("torch.distributed")
        if getattr(distributed, "is_initialized", bool)():
            return replace(found, rank=distributed.get_rank(), world_size=distributed.get_world_size())
        return None if found.world_size > 1 else found

    def on_device(self, index: int) -> Identity:
        """Return this identity on the process's ``index``-th visible GPU."""
        return replace(self, device=_physical_device(self.visible_devices, index))


@dataclass
class HookState:
    """The next message's contents. The training thread writes it; ``progress`` is replaced as a whole."""

    progress: tuple[int, tuple[float, ...]] = (-1, Totals())  # last finished step, the fields of Totals
    phase: str = "start"
    gpu: str = ""
    quorum: int = -1
    failures: int = 0
    unread: int = 0
    events: list[HookEvent] = field(default_factory=list)
    events_counted: int = 0
    changed: bool = True  # the tail must be re-encoded

    def take_quorum(self, quorum: int) -> None:
        """Set the quorum of replica groups that the process is in; -1: not observed."""
        if quorum != self.quorum:
            self.quorum = quorum
            self.changed = True


class HookSender:
    """Sends ``state`` as messages of one process; every method returns at once and raises no network error.

    While ``identity`` is None nothing is sent.
    """

    def __init__(
        self,
        identity: Identity | None,
        state: HookState,
        path: Path | None,
        heartbeat_s: float = HEARTBEAT_S,
        sequences: Callable[[], tuple[int, int]] = lambda: (-1, -1),
    ) -> None:
        """``path`` None: the agent's default socket, looked up again after every failure."""
        self.identity = identity
        self.state = state
        self.heartbeat_s = heartbeat_s
        self.unsent = 0
        self._path = path
        self._address = str(path or default_socket())
        self._sequences = sequences
        self._process = uuid.uuid4().bytes
        self._number = 0
        self._tail = b""
        self._sends_left: dict[int, int] = {}
        # Held while sending and never waited for: a thread that finds it taken leaves sending to the other one.
        self._sending = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def event(self, kind: str, value: str | int) -> None:
        """Queue an event; it is sent with the next messages."""
        state = self.state
        state.events_counted += 1
        state.events.append(HookEvent(state.events_counted, time.time(), kind, value))
        if len(state.events) > EVENTS_PER_MESSAGE_MAX:
            del state.events[0]
            state.failures += 1
        state.changed = True

    def send(self, *, goodbye: bool = False) -> bool:
        """Send the state; return whether the agent's socket accepted it."""
        identity = self.identity
        if identity is None or not self._sending.acquire(blocking=False):
            return False
        try:
            message = self._message(identity, goodbye=goodbye)
            try:
                self._socket.sendto(message, self._address)
            except OSError:  # no listener, or its queue is full: the next message carries it all
                self.unsent += 1
                if self._path is None:
                    self._address = str(default_socket())
                return False
            self._count_event_sends()
            return True
        finally:
            self._sending.release()

    def close(self) -> None:
        """Close the socket; nothing is sent afterwards."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _message(self, identity: Identity, *, goodbye: bool) -> bytes:
        state = self.state
        sequence, completed = self._sequences()
        if state.changed:
            state.changed = False
            self._tail = self._encode_tail(identity)
        self._number += 1
        step, totals = state.progress
        message = HookMessage(
            process=self._process,
            number=self._number,
            time_s=time.time(),
            heartbeat_s=self.heartbeat_s,
            job=identity.job,
            rank=identity.rank,
            world_size=identity.world_size,
            device=identity.device,
            attempt=identity.attempt,
            step=step,
            sequence=sequence,
            completed_sequence=completed,
            goodbye=goodbye,
            failures=min(state.failures, 0xFFFFFFFF),
            unread=min(state.unread, 0xFFFFFFFF),
            unsent=min(self.unsent, 0xFFFFFFFF),
            totals=Totals._make(totals),
        )
        return encode(message, self._tail)

    def _encode_tail(self, identity: Identity) -> bytes:
        state = self.state
        while True:
            tail = encode_tail(identity.job, identity.role, state.phase, state.gpu, state.events, state.quorum)
            if len(tail) <= MESSAGE_BYTES_MAX - 512 or not state.events:
                return tail
            del state.events[0]
            state.failures += 1

    def _count_event_sends(self) -> None:
        state = self.state
        if not state.events:
            return
        sends_left: dict[int, int] = {}
        for event in list(state.events):
            left = self._sends_left.get(event.number, SENDS_PER_EVENT) - 1
            if left > 0:
                sends_left[event.number] = left
            else:
                state.events.remove(event)
                state.changed = True
        self._sends_left = sends_left


def hook_socket(environ: Mapping[str, str]) -> Path | None:
    """Return the agent's socket path from the environment; None: the default place."""
    text = environ.get(SOCKET_VARIABLE, "")
    return Path(text) if text else None


def collective_sequences(modules: Mapping[str, object]) -> tuple[int, int]:
    """Return the newest collective enqueued and completed on the default process group; -1: not observed.

    Reads the flight recorder's status, a few hundred bytes, without the entries. ``modules`` is ``sys.modules``: torch
    is used if the program imported it, and never imported here.
    """
    distributed = modules.get("torch.distributed")
    binding = modules.get("torch._C._distributed_c10d")
    if distributed is None or binding is None:
        return -1, -1
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return -1, -1
    # Private names: builds without them observe no sequences.
    newest = (-1, -1)
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(binding, name, None)
        if dump is not None:
            newest = max(newest, _sequences_in(dump(False, False), os.environ.get(LAST_GROUP_VARIABLE, "")))
    return newest


def _sequences_in(dumped: bytes | str, over: str) -> tuple[int, int]:
    """Return those of the default group, the widest; with ``over``, the first group created after that one."""
    groups = json.loads(dumped).get("pg_status", {})
    default = "0"
    if over:
        later = [int(number) for number in groups if over != "unknown" and int(number) > int(over)]
        default = str(min(later, default=-1))
    status = groups.get(default)
    if not status:
        return -1, -1
    return int(status.get("last_enqueued_collective", -1)), int(status.get("last_completed_collective", -1))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:NAME_CHARS_MAX])


def _physical_device(visible: str, index: int) -> int:
    """Return the node-wide index of the process's ``index``-th GPU, as far as CUDA_VISIBLE_DEVICES shows."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if len(names) == 1:
        index = 0  # a launcher that shows each rank only its own GPU
    if index < len(names) and names[index].isdecimal() and len(names[index]) < 5:
        index = int(names[index])
    return min(max(index, 0), DEVICES_MAX - 1)
