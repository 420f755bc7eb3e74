"""Sends the training process's state to the agent: one datagram, never blocking.

Touches: a Unix datagram socket, non-blocking. An agent that is absent, stopped or slow costs one failed system call,
and the totals in the next message make up for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
