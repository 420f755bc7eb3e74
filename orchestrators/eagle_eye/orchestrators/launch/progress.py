"""Tracks the attempt's progress in a thread, since a checkpoint folder may hang and a server may be slow.

Touches the checkpoint folder, and the server through a callback.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch.checkpoints import Checkpoint, find_checkpoints
from eagle_eye.orchestrators.launch.job import ObservedProgress
from eagle_eye.schema.memory_steps import MemoryStep, whole_in_memory

LOOK_EVERY_S = 1.0
# How many more steps an attempt may have made than its observed pace implies.
PACE_MARGIN = 3.0
STEPS_MARGIN = 20


@dataclass
class _Attempt:
    number: int
    resumed_step: int
    began_s: float  # monotonic
    known: set[tuple[str, float]]
    first: tuple[float, int] | None = None  # when the first step was seen, and which it was
    reported: bool = False
    captures_before: int = 0  # the last attempt, as counted by stores, with steps in the nodes' memory from before


class ProgressReporter:
    """Reports an attempt's first known step and each checkpoint that it completes.

    ``look`` returns the server's view of the job, None where it has none; ``in_memory`` the copies of steps in the
    nodes' memory.
    """

    def __init__(
        self,
        folder: Path | None,
        look: Callable[[], ObservedProgress | None],
        post: Callable[[on.LaunchEvent], None],
        clock: Callable[[], float] = time.monotonic,
        in_memory: Callable[[], list[MemoryStep]] = list,
    ) -> None:
        self._folder = folder
        self._in_memory = in_memory
        self._look_at_server = look
        self._post = post
        self._clock = clock
        self._attempt: _Attempt | None = None
        self._changed = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def start(self) -> None:
        """Start watching attempts."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting. A thread that hangs in a folder is left behind."""
        self._stopping = True
        self._changed.set()

    def watch(
        self, attempt: int, resumed_step: int | None, known: Iterable[Checkpoint], copies: Iterable[MemoryStep] = ()
    ) -> None:
        """Watch this attempt from now on instead of the last one.

        ``known`` checkpoints existed before, and these ``copies`` in the nodes' memory.
        """
        before = {(one.path, one.written_s) for one in known}
        captures_before = max((copy.attempt for copy in copies), default=0)
        self._attempt = _Attempt(attempt, resumed_step or 0, self._clock(), before, captures_before=captures_before)
        self._changed.set()

    def look(self) -> None:
        """Report what is new."""
        attempt = self._attempt
        if attempt is None:
            return
        if not attempt.reported and (sight := self._look_at_server()) is not None and sight.attempt == attempt.number:
            self._step_seen(attempt, sight.step)
        if not attempt.reported:
            self._in_memory_seen(attempt)
        for path, written_s in sorted(self._checkpoints() - attempt.known, key=lambda one: one[1]):
            attempt.known.add((path, written_s))
            attempt.reported = True
            self._post(on.CheckpointWritten(attempt.number, int(path.rpartition("_")[2])))

    def _in_memory_seen(self, attempt: _Attempt) -> None:
        """Report a step that the attempt has captured on each rank."""
        captured = [copy for copy in self._in_memory() if copy.attempt > attempt.captures_before]
        whole = [step for step in whole_in_memory(captured) if step > attempt.resumed_step]
        if whole and attempt is self._attempt:
            attempt.reported = True
            self._post(on.StepSeen(attempt.number, min(whole), min(whole)))

    def _step_seen(self, attempt: _Attempt, step: int) -> None:
        """Report the first step once a later one shows the pace, and that it is not a dead attempt's last report."""
        now_s = self._clock()
        if attempt.first is None or step <= attempt.first[1]:
            attempt.first = attempt.first if attempt.first and step == attempt.first[1] else (now_s, step)
            return
        seen_s, first = attempt.first
        pace = (step - first) / max(now_s - seen_s, 1e-3)
        most = attempt.resumed_step + int(PACE_MARGIN * pace * (seen_s - attempt.began_s)) + STEPS_MARGIN
        attempt.reported = True
        self._post(on.StepSeen(attempt.number, first, most))

    def _checkpoints(self) -> set[tuple[str, float]]:
        with contextlib.suppress(OSError):
            return {(one.path, one.written_s) for one in find_checkpoints(self._folder)}
        return set()

    def _run(self) -> None:
        while not self._stopping:
            self._changed.wait(LOOK_EVERY_S if self._attempt is not None else None)
            self._changed.clear()
            if not self._stopping:
                self.look()
