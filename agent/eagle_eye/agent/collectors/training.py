"""Receives what this node's training processes report through their hooks, and watches for their exits.

Touches: the hook's socket and its folder, pidfds, /proc, one thread. Any process that can write to the socket may claim
to be a rank, so everything is bounded; the kernel vouches for the sender's pid.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from eagle_eye.agent.collector import CollectFailed, Drops, Observed
from eagle_eye.agent.processes.exit_watcher import exit_code, is_running, open_pidfd
from eagle_eye.agent.processes.process_files import ProcessFiles
from eagle_eye.agent.training_hook.message import MESSAGE_BYTES_MAX, BadMessage, HookMessage, Totals, decode
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import RANKS_MAX, Rank

SILENT_BEATS = 3.0  # a rank is silent after missing this many heartbeats
SILENT_S_MIN = 2.0  # and its last values are repeated no longer than this
MESSAGES_PER_SECOND_MAX = 200  # a hook sends 24 a second and a few events


class _Mean(NamedTuple):
    metric: str
    weight: str
    total: str
    odd: str = ""


_MEANS = (
    _Mean("train_step_seconds", "timed_steps", "step_s"),
    _Mean("train_compute_seconds", "compute_steps", "compute_s"),
    _Mean("train_data_wait_seconds", "data_wait_steps", "data_wait_s"),
    _Mean("nccl_collective_seconds", "collective_steps", "collective_s"),
    _Mean("train_work_units", "work_steps", "work_units"),
    _Mean("train_loss", "losses", "loss", "loss_odd"),
    _Mean("train_grad_norm", "grad_norms", "grad_norm", "grad_norm_odd"),
    _Mean("train_local_grad_norm", "local_grad_norms", "local_grad_norm", "local_grad_norm_odd"),
    _Mean("train_tokens_per_second", "token_step_s", "timed_tokens"),
)


def means(before: Totals, after: Totals) -> dict[str, float]:
    """Return the means between two totals, by metric; absent: nothing to average.

    A quantity that was NaN or infinite even once is +inf: a mean of the rest would hide it.
    """
    row: dict[str, float] = {}
    for mean in _MEANS:
        weight = getattr(after, mean.weight) - getattr(before, mean.weight)
        if mean.odd and getattr(after, mean.odd) > getattr(before, mean.odd):
            row[mean.metric] = math.inf
        elif weight > 0:
            row[mean.metric] = (getattr(after, mean.total) - getattr(before, mean.total)) / weight
    return row


class RankProcess:
    """One process that reports as a rank. Times are of the agent's monotonic clock."""

    def __init__(self, message: HookMessage, pid: int, device: int, now_s: float) -> None:
        self.message = message
        self.pid = pid
        self.device = device
        self.pidfd: int | None = None
        self.heard_s = now_s
        self.goodbye = message.goodbye
        self._baseline = message.totals  # a process older than the agent is averaged from here on
        self._row: dict[str, float] = {}
        self._events_seen = 0
        self._phase = ""
        self._window_s = now_s
        self._window_messages = 0

    def flooding(self, now_s: float) -> bool:
        """Whether the process has exceeded its messages per second; counts one message."""
        if now_s - self._window_s >= 1.0:
            self._window_s = now_s
            self._window_messages = 0
        self._window_messages += 1
        return self._window_messages > MESSAGES_PER_SECOND_MAX

    def accept(self, message: HookMessage, now_s: float, time_s: float) -> list[Event]:
        """Accept the message; return its events that are new.

        ``time_s`` is the wall clock. If the messages that announced a phase were lost, the phase is taken from this
        one, and counts from now.
        """
        self.heard_s = now_s
        self.message = message
        self.goodbye = self.goodbye or message.goodbye
        new = [event for event in message.events if event.number > self._events_seen]
        events = []
        for event in sorted(new, key=lambda item: item.number):
            self._events_seen = event.number
            if event.kind == "phase":
                self._phase = str(event.value)
                attributes: dict[str, object] = {"name": event.value, **self.who()}
            elif event.kind == "training_error":
                attributes = {"text": event.value, **self.who()}
            else:
                attributes = {"step": event.value}
            events.append(Event(event.time_s, event.kind, self.device, attributes))
        if message.phase and message.phase != self._phase:
            self._phase = message.phase
            events.append(Event(time_s, "phase", self.device, {"name": message.phase, **self.who()}))
        return events

    def who(self) -> dict[str, object]:
        """Return the attributes that identify the process in an event."""
        message = self.message
        return {"rank": message.rank, "job": message.job, "attempt": message.attempt}

    def silent_s(self, now_s: float) -> float:
        """Return how long the hook has been silent; 0 while its heartbeats arrive and after its goodbye."""
        age_s = now_s - self.heard_s
        return 0.0 if self.goodbye or age_s <= SILENT_BEATS * self.message.heartbeat_s else age_s

    def row(self, now_s: float) -> dict[str, float]:
        """Return the row for the interval ending now and start the next; empty: not observed."""
        message = self.message
        totals = message.totals
        # After its goodbye only what is new since the last row is reported, once.
        if self.silent_s(now_s) > SILENT_S_MIN or (self.goodbye and totals.steps <= self._baseline.steps):
            return {}
        if totals.steps < self._baseline.steps:
            self._baseline = totals
        if totals.steps > self._baseline.steps:
            self._row.update(means(self._baseline, totals))
            self._baseline = totals
        row = dict(self._row)
        if message.step >= 0 and totals.steps > 0:
            row["train_step"] = float(message.step)
        if message.sequence >= 0:
            row["nccl_sequence"] = float(message.sequence)
            row["nccl_completed_sequence"] = float(max(0, message.completed_sequence))
        if message.quorum >= 0:
            row["train_quorum"] = float(message.quorum)
        return row

    def rank(self, now_s: float) -> Rank:
        """Return the rank."""
        message = self.message
        return Rank(
            job=message.job,
            rank=message.rank,
            world_size=message.world_size,
            device=self.device,
            attempt=message.attempt,
            pid=self.pid,
            role=message.role,
            silent_s=self.silent_s(now_s),
        )


RECEIVE_BUFFER_BYTES = 4 << 20
DATAGRAMS_PER_ROUND_MAX = 2_048
DATAGRAMS_PER_SECOND_MAX = 20_000
EVENTS_QUEUED_MAX = 4_096
EXITED_REMEMBERED = 4_096
ROUND_S = 0.25  # the reader wakes up at least this often, which is how it detects its own pauses
PAUSE_S = 1.0  # a gap between rounds beyond which we were stopped, so that silence means nothing
UNSEEN_S_MAX = 600.0  # a process outside our pid namespace is forgotten after this silence

_CREDENTIALS = struct.Struct("=iII")


class SocketTaken(OSError):
    """Another process listens on the hook's socket."""


class HookReader:
    """This node's training processes as reported by their hooks."""

    def __init__(
        self,
        path: Path,
        drops: Drops,
        wake: Callable[[], None],
        devices_by_uuid: Mapping[str, int],
        monotonic_s: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Bind the socket and start listening.

        ``wake`` is called for events that must not wait for the end of the interval. Raises OSError when the socket
        cannot be opened, SocketTaken when another process has it.
        """
        self.lock = threading.Lock()  # guards the following attributes
        self.processes: dict[int | bytes, RankProcess] = {}
        self.departed: list[RankProcess] = []  # not yet included in a frame for the last time
        self.unreported: list[RankProcess] = []  # exited, with steps not yet in any row
        self.events: list[Event] = []
        self._path = path
        self._drops = drops
        self._wake = wake
        self._devices_by_uuid = devices_by_uuid
        self._monotonic_s = monotonic_s
        self._now_s = now_s
        self._exited: dict[bytes, None] = {}  # in order of exit
        self._looked_s = 0.0
        self._drained_s = monotonic_s()
        self._second_s = self._drained_s
        self._second_datagrams = 0
        self._socket = _bind(path)
        self._stop, self._stopped = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hook-reader", daemon=True)
        self._thread.start()

    @property
    def drained_s(self) -> float:
        """When the socket was last seen empty: silence is only meaningful up to then."""
        return self._drained_s

    def close(self) -> None:
        """Stop listening and remove the socket."""
        os.write(self._stopped, b"x")
        self._thread.join()
        self._selector.close()
        self._socket.close()
        for descriptor in (self._stop, self._stopped):
            os.close(descriptor)
        for process in self.processes.values():
            if process.pidfd is not None:
                os.close(process.pidfd)
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _run(self) -> None:
        while True:
            ready = [key for key, _ in self._selector.select(timeout=ROUND_S)]
            if any(key.fd == self._stop for key in ready):
                return
            with self.lock:
                self._drain()
                # After the socket: messages sent before the exit are already in it.
                for key in ready:
                    if isinstance(key.data, RankProcess):
                        self._end(key.data)
                self._look_after_all()
            if self._second_datagrams >= DATAGRAMS_PER_SECOND_MAX:
                self._drops.count("hook_flood_pauses")
                time.sleep(0.05)

    def _drain(self) -> None:
        for _ in range(DATAGRAMS_PER_ROUND_MAX):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    MESSAGE_BYTES_MAX + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                self._note_empty()
                return
            self._receive(data, _sender_pid(ancillary))

    def _note_empty(self) -> None:
        now_s = self._monotonic_s()
        away_s = now_s - self._drained_s
        if away_s > PAUSE_S:
            # We were not listening, and a full queue rejects messages: nobody was silent.
            for process in self.processes.values():
                process.heard_s = min(now_s, process.heard_s + away_s)
        self._drained_s = now_s

    def _receive(self, data: bytes, pid: int) -> None:
        now_s = self._monotonic_s()
        if now_s - self._second_s >= 1.0:
            self._second_s = now_s
            self._second_datagrams = 0
        self._second_datagrams += 1
        known = self.processes.get(pid) if pid else None
        if known is not None and known.flooding(now_s):
            self._drops.count("hook_flood")
            return
        try:
            message = decode(data)
        except BadMessage as error:
            self._drops.count(f"hook_{error.reason}")
            return
        self._drops.count("hook_unknown_event", message.unknown_events)
        self._take(message, pid, now_s)

    def _take(self, message: HookMessage, pid: int, now_s: float) -> None:
        if message.process in self._exited:
            self._drops.count("hook_after_exit")
            return
        key: int | bytes = pid or message.process
        process = self.processes.get(key)
        if process is None or process.message.process != message.process:
            if process is None and len(self.processes) >= RANKS_MAX:
                self._drops.count("ranks_over_limit")
                return
            process = self._meet(message, pid, now_s, process)
            self.processes[key] = process
        elif message.number <= process.message.number:
            return  # overtaken by a newer one, which includes everything in this one
        else:
            self._count_hook_trouble(process.message, message)
        events = process.accept(message, now_s, self._now_s())
        for event in events:
            self._queue(event)
        if any(event.kind == "training_error" for event in events):
            self._wake()
        if message.goodbye and not pid:
            self._end(process)

    def _meet(self, message: HookMessage, pid: int, now_s: float, before: RankProcess | None) -> RankProcess:
        device = self._devices_by_uuid.get(message.gpu, message.device)
        process = RankProcess(message, pid, device, now_s)
        if before is not None:  # the same process attached again
            process.pidfd = before.pidfd
            if process.pidfd is not None:
                self._selector.modify(process.pidfd, selectors.EVENT_READ, process)
            return process
        if not pid:
            self._drops.count("exit_unwatched")  # another pid namespace: its exit will not be visible
            return process
        with contextlib.suppress(ProcessLookupError):  # already gone: the next round sees it
            process.pidfd = open_pidfd(pid)
            if process.pidfd is not None:
                self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        return process  # without a descriptor it is polled

    def _look_after_all(self) -> None:
        now_s = self._monotonic_s()
        if now_s - self._looked_s >= ROUND_S:
            self._looked_s = now_s
            for process in [item for item in self.processes.values() if item.pidfd is None]:
                self._look_after(process)

    def _look_after(self, process: RankProcess) -> None:
        """Detect the exit of a process that no descriptor covers."""
        if process.pid:
            if not is_running(process.pid):
                self._end(process)
        elif self._monotonic_s() - process.heard_s > UNSEEN_S_MAX:
            self._drops.count("ranks_forgotten")
            self.processes.pop(process.message.process, None)

    def _end(self, process: RankProcess) -> None:
        key: int | bytes = process.pid or process.message.process
        if self.processes.get(key) is not process:
            return
        del self.processes[key]
        message = process.message
        self._exited[message.process] = None
        if len(self._exited) > EXITED_REMEMBERED:
            del self._exited[next(iter(self._exited))]
        code = exit_code(process.pid, process.pidfd) if process.pid else None
        if process.pidfd is not None:
            self._selector.unregister(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = None
        for ended in (self.departed, self.unreported):
            ended.append(process)
            self._drops.count("ranks_over_limit", len(ended) - RANKS_MAX)
            del ended[:-RANKS_MAX]
        attributes = {"exit_code": code, "pid": process.pid, "goodbye": process.goodbye, **process.who()}
        self._queue(Event(self._now_s(), "process_exit", process.device, attributes))
        self._wake()

    def _queue(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) > EVENTS_QUEUED_MAX:
            del self.events[0]
            self._drops.count("events_over_limit")

    def _count_hook_trouble(self, before: HookMessage, after: HookMessage) -> None:
        self._drops.count("hook_failures", after.failures - before.failures)
        self._drops.count("hook_unread_values", after.unread - before.unread)
        self._drops.count("hook_unsent", after.unsent - before.unsent)


def _bind(path: Path) -> socket.socket:
    """Return the listening socket at ``path``, which any user's training may write to."""
    folder = path.parent
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    owner = folder.stat().st_uid
    if owner not in (0, os.geteuid()):
        raise PermissionError(f"{folder} belongs to user {owner}; the hook's socket needs a folder of our own")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        _remove_stale(path)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:  # its owner is gone
            path.unlink()
        else:
            raise SocketTaken(f"another process listens on {path}")


def _sender_pid(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Return the sender's pid from the kernel; 0: a process not visible to us."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            return max(0, int(_CREDENTIALS.unpack_from(data)[0]))
    return 0


EVENTS_PER_FRAME_MAX = 256  # at most 2 KB of text each; the rest waits for the next frame


class TrainingCollector:
    """Ranks, their steps and collectives, their events and their exits."""

    name = "training"

    def __init__(
        self,
        path: Path,
        drops: Drops,
        wake: Callable[[], None] = lambda: None,
        devices_by_uuid: Mapping[str, int] | None = None,
        proc: Path = Path("/proc"),
    ) -> None:
        """``wake`` is called when a process exited or failed: this must not wait for the end of the interval."""
        self._path = path
        self._drops = drops
        self._wake = wake
        self._devices_by_uuid = {} if devices_by_uuid is None else devices_by_uuid
        self._files = ProcessFiles(proc)
        self._reader: HookReader | None = None

    def open(self) -> None:
        """Start listening. Raises CollectFailed when the socket cannot be opened; collecting tries again."""
        if self._reader is None:
            try:
                self._reader = HookReader(self._path, self._drops, self._wake, self._devices_by_uuid)
            except OSError as error:
                raise CollectFailed(f"hook socket {self._path}: {error.strerror or error}") from None

    def collect(self, now_s: float) -> Observed:  # noqa: ARG002 - the reader has its own clocks
        """Return the ranks, their rows for the interval ending now, and its events."""
        self.open()
        observed = self.happened()
        reader = self._reader
        if reader is None:
            return observed
        with reader.lock:
            known_s = reader.drained_s
            named = {rank.pid for rank in observed.ranks}
            alive = {process.device for process in reader.processes.values()}
            for process in reader.unreported:
                process.goodbye = True
                if process.device in alive:
                    # A row is identified by its device alone, and the device now belongs to the next attempt's rank.
                    self._drops.count("rank_device_conflicts")
                    continue
                self._put(observed, process, known_s)
                if process.pid not in named:
                    observed.ranks.append(process.rank(known_s))
            reader.unreported.clear()
            # The newest attempt last: where two ranks claim one device, its row is kept.
            for process in sorted(reader.processes.values(), key=lambda item: item.message.attempt):
                self._put(observed, process, known_s)
        return observed

    def _put(self, observed: Observed, process: RankProcess, known_s: float) -> None:
        row = process.row(known_s) | self._stopped(process, known_s)
        if row:
            if process.device in observed.devices:
                self._drops.count("rank_device_conflicts")
            observed.devices[process.device] = row

    def _stopped(self, process: RankProcess, known_s: float) -> dict[str, float]:
        """Return whether a silent process is stopped; empty: it reports, or this cannot be read."""
        reader = self._reader
        if reader is None or not process.pid or process.silent_s(known_s) == 0.0:
            return {}
        if any(other.device == process.device for other in reader.processes.values() if other is not process):
            return {}  # its row may be another attempt's
        stopped = self._files.is_stopped(process.pid)
        return {} if stopped is None else {"rank_stopped_ratio": float(stopped)}

    def happened(self) -> Observed:
        """Return ranks and events without rows; ranks that ended since the last frame are included once more."""
        reader = self._reader
        if reader is None:
            return Observed()
        with reader.lock:
            known_s = reader.drained_s
            events: list[Event] = reader.events[:EVENTS_PER_FRAME_MAX]
            del reader.events[:EVENTS_PER_FRAME_MAX]
            processes: list[RankProcess] = [*reader.processes.values(), *reader.departed]
            reader.departed.clear()
        ranks = [process.rank(known_s) for process in processes[:RANKS_MAX]]
        return Observed(events=events, ranks=ranks)

    def pids(self) -> set[int]:
        """Return the processes whose hooks report; empty while not listening."""
        return {process.pid for process in self._reporting() if process.pid}

    def attempts(self) -> dict[int, int]:
        """Return the attempts reported by these processes' hooks, by pid."""
        return {process.pid: process.message.attempt for process in self._reporting() if process.pid}

    def devices(self) -> set[int]:
        """Return the rows of the ranks whose hooks report; empty while not listening."""
        return {process.device for process in self._reporting()}

    def step(self, pid: int) -> float | None:
        """Return the last step that a process's hook reported as finished; None: it reported none."""
        steps = (process.message.step for process in self._reporting() if process.pid == pid)
        step = next(steps, -1)
        return float(step) if step >= 0 else None

    def _reporting(self) -> list[RankProcess]:
        reader = self._reader
        if reader is None:
            return []
        with reader.lock:
            return list(reader.processes.values())

    def close(self) -> None:
        """Stop listening."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
