"""Receives what this node's training processes report through their hooks. Touches: /proc, of those that are silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from eagle_eye.agent.loop.collector import CollectFailed, Drops, Observed
from eagle_eye.agent.processes.hook_reader import HookReader, RankProcess
from eagle_eye.agent.processes.process_files import ProcessFiles
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import RANKS_MAX

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
