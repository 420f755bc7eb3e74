"""Tracks this node's ranks while they run, what their processes do, and how they ended; thread-safe."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from eagle_eye.agent.loop.collector import Drops, Observed
from eagle_eye.agent.processes.census import MemberProcess
from eagle_eye.agent.processes.exit_watcher import Ended, ExitReporter
from eagle_eye.agent.processes.process_files import ProcessFiles, Stat
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import RANKS_MAX, Rank

FAMILY_MAX = 128  # processes per rank: data loaders, compile workers; larger families are not reported
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
HELD = "D"  # uninterruptible sleep: in a driver, or waiting for storage


def rows(
    files: ProcessFiles, ranks: Iterable[TrainingProcess], members: Iterable[MemberProcess]
) -> dict[int, dict[str, float]]:
    """Return each rank's row by device: CPU time and bytes of its process and all descendants.

    Reaped children count in their parent's accounts. A counter is left out if any part of it cannot be read.
    """
    children: dict[int, list[int]] = {}
    for member in members:
        children.setdefault(member.parent, []).append(member.pid)
    found = {}
    for rank in ranks:
        if rank.starting:  # the GPU that it is expected on may be another's
            continue
        family = _family(rank.pid, children)
        stats = [_stat(files, pid) for pid in family[:FAMILY_MAX]]
        own = stats[0]
        if own is None or len(family) > FAMILY_MAX:
            continue
        row = {"rank_blocked_ratio": float(own.state == HELD)}
        row["rank_cpu_seconds_total"] = sum(stat.cpu_ticks for stat in stats if stat is not None) / TICKS_PER_S
        moved = [_moved(files, pid) for pid in family]
        known = [number for number in moved if number is not None]
        if len(known) == len(moved):
            row["rank_io_bytes_total"] = float(sum(known))
        found[rank.device] = row
    return found


def _family(pid: int, children: dict[int, list[int]]) -> Sequence[int]:
    """Return a process and its descendants, a little over FAMILY_MAX at most."""
    family = [pid]
    for member in family:
        if len(family) > FAMILY_MAX:
            break
        family += [child for child in children.get(member, ()) if child not in family]
    return family


def _stat(files: ProcessFiles, pid: int) -> Stat | None:
    try:
        return files.stat(pid)
    except OSError:
        return None


def _moved(files: ProcessFiles, pid: int) -> int | None:
    """Return the bytes a process has read and written; 0 for one that has exited, None if not readable."""
    try:
        return files.io_bytes(pid)
    except OSError:
        return None


EVENTS_QUEUED_MAX = 4_096


@dataclass
class _Running:
    """A process that is a rank, and whether its hook has ever reported."""

    process: TrainingProcess
    started: int
    hooked: bool = False


class Ranks:
    """Publishes the ranks to ``processes`` and watches them; those with a hook are published but not reported.

    Those that are starting are reported only if they fail: the server would keep the GPU that they are expected on.
    """

    def __init__(
        self,
        processes: TrainingProcesses,
        drops: Drops,
        files: ProcessFiles,
        hooked_pids: Callable[[], set[int]],
        wake: Callable[[], None],
        now_s: Callable[[], float],
        watch: Callable[[Ended], ExitReporter],
    ) -> None:
        self._processes = processes
        self._drops = drops
        self._files = files
        self._hooked_pids = hooked_pids
        self._wake = wake
        self._now_s = now_s
        self._watcher = watch(self._end)
        self._lock = threading.Lock()  # guards the following attributes
        self._running: dict[int, _Running] = {}
        self._ended: set[int] = set()  # pids, since the last scan
        self._departed: list[Rank] = []  # not yet included in a frame for the last time
        self._events: list[Event] = []

    def take(self, chosen: Sequence[tuple[TrainingProcess, int]], listed: Collection[int]) -> None:
        """Set the ranks: pids with their start times in clock ticks; ``listed`` are all existing pids."""
        started = {process.pid: started for process, started in chosen}
        with self._lock:
            left = [
                pid
                for pid, item in self._running.items()
                if started.get(pid) != item.started and pid in listed  # exits are reported by the watcher
            ]
            for pid in left:
                del self._running[pid]
            known = set(self._running)
        for pid in left:
            self._watcher.forget(pid)
            self._drops.count("ranks_reconsidered")
        for process, ticks in chosen:
            if process.pid not in known:
                self._follow(process, ticks)
        with self._lock:
            for process, _ in chosen:
                if process.pid in self._running:
                    self._running[process.pid].process = process
            self._publish()

    def notice(self) -> None:
        """Note which ranks' hooks report, and exits that no descriptor announced."""
        self._watcher.poll()
        hooked = self._hooked_pids()
        with self._lock:
            for pid in hooked & self._running.keys():
                self._running[pid].hooked = True

    def ended(self) -> set[int]:
        """Return the processes that exited since the last call."""
        with self._lock:
            ended, self._ended = self._ended, set()
        return ended

    def happened(self) -> Observed:
        """Return the ranks without a hook, those that exited since the last call once more, and their exits."""
        with self._lock:
            events, self._events = self._events, []
            ranks, self._departed = self._departed, []
            ranks += [
                _rank(item.process) for item in self._running.values() if not (item.hooked or item.process.starting)
            ]
        ranks.sort(key=lambda rank: (rank.job, rank.attempt, rank.rank, rank.pid))
        self._drops.count("ranks_over_limit", len(ranks) - RANKS_MAX)
        return Observed(ranks=ranks[:RANKS_MAX], events=events)

    def close(self) -> None:
        """Stop watching all processes."""
        self._watcher.close()

    def _follow(self, process: TrainingProcess, started: int) -> None:
        pid = process.pid
        stat = self._files.stat(pid)
        if stat is None or stat.started != started or stat.ended:
            return
        with self._lock:
            self._running[pid] = _Running(process, started)
        try:
            self._watcher.watch(pid)
        except ProcessLookupError:
            self._end(pid, None)
            return
        stat = self._files.stat(pid)
        if stat is not None and stat.started != started:  # another process has the pid, and is the one watched
            self._watcher.forget(pid)
            self._end(pid, None)

    def _end(self, pid: int, code: int | None) -> None:
        """Record a process's exit; also called from the watcher's thread."""
        hooked = pid in self._hooked_pids()
        with self._lock:
            item = self._running.pop(pid, None)
            if item is None:
                return
            self._ended.add(pid)
            self._publish()
            if item.hooked or hooked:
                return  # the hook's reader reports it
            if code is None:
                self._drops.count("exit_code_unread")
                return
            process = item.process
            if process.starting and code == 0:
                return
            attributes = {"exit_code": code, "pid": pid, "goodbye": False, **process.who()}
            self._events.append(Event(self._now_s(), "process_exit", process.device, attributes))
            if len(self._events) > EVENTS_QUEUED_MAX:
                del self._events[0]
                self._drops.count("events_over_limit")
            self._departed.append(_rank(process))
            self._drops.count("ranks_over_limit", len(self._departed) - RANKS_MAX)
            del self._departed[:-RANKS_MAX]
        self._wake()

    def _publish(self) -> None:
        running = [item.process for item in self._running.values()]
        self._processes.publish(sorted(running, key=lambda item: (item.job, item.attempt, item.rank)))


def _rank(process: TrainingProcess) -> Rank:
    return Rank(
        job=process.job,
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
        attempt=process.attempt,
        pid=process.pid,
        role=process.role,
    )
