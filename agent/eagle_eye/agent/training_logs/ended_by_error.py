"""Which errors in logs have ended a program: those after which it is gone, or makes no step any more. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.redact import redact
from eagle_eye.agent.training_hook.message import TEXT_BYTES_MAX
from eagle_eye.agent.training_logs.rank_courses import Key, key
from eagle_eye.agent.training_logs.traceback_lines import HEADER
from eagle_eye.schema.events import Event

CHAINED_S = 1.0  # an exception raised while another is handled stands right behind it in the log
SETTLED_S = 30.0  # a living rank that made no step for so long after an error that nothing caught is not training


@dataclass
class _Error:
    text: str
    time_s: float
    seen_s: float
    uncaught: bool


class EndedByError:
    """Keeps each rank's newest error until it is clear what became of it. An error is told once for a process.

    A traceback in a log may have been caught: only one after which its process ends, or which PyTorch's own hook
    for uncaught exceptions wrote and no step followed, has ended the program.
    """

    def __init__(self, running: Callable[[int], bool]) -> None:
        """``running`` says whether a process id is that of a living process."""
        self._running = running
        self._waiting: dict[Key, _Error] = {}
        self._reported: set[Key] = set()

    def note(self, process: TrainingProcess, text: str, time_s: float, monotonic_s: float, *, uncaught: bool) -> None:
        """Take in an error; a later one of the same process takes its place, behind what it was raised for."""
        if key(process) not in self._reported:
            before = self._waiting.get(key(process))
            if before is not None and monotonic_s - before.seen_s <= CHAINED_S:
                raised_for = _last(redact(before.text), TEXT_BYTES_MAX // 2)
                text = f"{raised_for}\n{HEADER}\n{_first(text, TEXT_BYTES_MAX // 2 - len(HEADER) - 2)}"
            self._waiting[key(process)] = _Error(text, time_s, monotonic_s, uncaught)

    def note_step(self, process: TrainingProcess) -> None:
        """Note that the process has finished a step: what came before was caught."""
        self._waiting.pop(key(process), None)

    def ended(self, processes: Iterable[TrainingProcess], monotonic_s: float) -> list[Event]:
        """Return the errors that have ended their program by now; ``processes`` are all that are still known."""
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
