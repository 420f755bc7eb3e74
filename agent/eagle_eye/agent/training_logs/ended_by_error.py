"""Finds logged errors that ended a program: afterwards it exits, or makes no further step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.redact import redact
from eagle_eye.agent.training_hook.message import TEXT_BYTES_MAX
from eagle_eye.agent.training_logs.rank_courses import Key, key
from eagle_eye.agent.training_logs.traceback_lines import HEADER
from eagle_eye.schema.events import Event

CHAINED_S = 1.0  # an exception raised while handling another follows directly in the log
SETTLED_S = 30.0  # a live rank without a step for this long after an uncaught error is not training


@dataclass
class _Error:
    text: str
    time_s: float
    seen_s: float
    uncaught: bool


class EndedByError:
    """Keeps each rank's newest error until its outcome is known. Errors are reported once per process.

    A traceback in a log may have been caught: only one after which its process ends, or which PyTorch's own hook
    for uncaught exceptions wrote and no step followed, has ended the program.
    """

    def __init__(self, running: Callable[[int], bool]) -> None:
        """``running`` says whether a pid belongs to a live process."""
        self._running = running
        self._waiting: dict[Key, _Error] = {}
        self._reported: set[Key] = set()

    def note(self, process: TrainingProcess, text: str, time_s: float, monotonic_s: float, *, uncaught: bool) -> None:
        """Record an error; it replaces an earlier one of the process, unless raised while handling that one."""
        if key(process) not in self._reported:
            before = self._waiting.get(key(process))
            if before is not None and monotonic_s - before.seen_s <= CHAINED_S:
                raised_for = _last(redact(before.text), TEXT_BYTES_MAX // 2)
                text = f"{raised_for}\n{HEADER}\n{_first(text, TEXT_BYTES_MAX // 2 - len(HEADER) - 2)}"
            self._waiting[key(process)] = _Error(text, time_s, monotonic_s, uncaught)

    def note_step(self, process: TrainingProcess) -> None:
        """Record that the process has finished a step: earlier errors were caught."""
        self._waiting.pop(key(process), None)

    def ended(self, processes: Iterable[TrainingProcess], monotonic_s: float) -> list[Event]:
        """Return the errors known by now to have ended their program; ``processes`` are all still tracked."""
        events = []
        known = {key(process): process for process in processes}
        self._waiting = {name: error for name, error in self._waiting.items() if name in known}
        self._reported &= known.keys()
        for name, error in list(self._waiting.items()):
            process = known[name]
            settled = error.uncaught and monotonic_s - error.seen_s >= SETTLED_S
            if settled or not self._running(process.pid):
                del self._waiting[name]
                self._reported.add(name)
                text = _first(redact(error.text), TEXT_BYTES_MAX)
                who = {"rank": process.rank, "job": process.job, "attempt": process.attempt}
                events.append(Event(error.time_s, "training_error", process.device, {"text": text, **who}))
        return events


def _first(text: str, size: int) -> str:
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore")


def _last(text: str, size: int) -> str:
    return text.encode("utf-8", "replace")[-size:].decode("utf-8", "ignore")
