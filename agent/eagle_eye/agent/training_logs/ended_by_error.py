"""Finds logged errors that ended a program: afterwards it exits, or makes no further step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.redact import redact
from eagle_eye.agent.training_hook.message import TEXT_BYTES_MAX
from eagle_eye.agent.training_logs.last_words import LastWords
from eagle_eye.agent.training_logs.rank_courses import Key, key
from eagle_eye.schema.events import Event
from eagle_eye.schema.last_words import HEADER, device_word

CHAINED_S = 1.0  # an exception raised while handling another follows directly in the log
SETTLED_S = 30.0  # a live rank without a step for this long after an uncaught error is not training
WORDS_MAX = 8  # of one process since its last step: threads and handlers fail one after the other
_CUT = "\n...\n"


@dataclass
class _Error:
    words: tuple[LastWords, ...]
    time_s: float
    seen_s: float
    uncaught: bool


class EndedByError:
    """Keeps each rank's newest words until their outcome is known. Errors are reported once per process.

    A traceback in a log may have been caught: only one after which its process ends, or which PyTorch's own hook
    for uncaught exceptions wrote and no step followed, has ended the program.
    """

    def __init__(self, running: Callable[[int], bool]) -> None:
        """``running`` says whether a pid belongs to a live process."""
        self._running = running
        self._waiting: dict[Key, _Error] = {}
        self._reported: set[Key] = set()

    def note(
        self, process: TrainingProcess, words: LastWords, time_s: float, monotonic_s: float, *, uncaught: bool
    ) -> None:
        """Record an error, which may go on; it replaces an earlier one, unless it follows from that one.

        An error of a device is never replaced: such a device does not recover.
        """
        if key(process) not in self._reported:
            before = self._waiting.get(key(process))
            kept: tuple[LastWords, ...] = ()
            if before is not None:
                followed = monotonic_s - before.seen_s <= CHAINED_S
                kept = before.words if followed else tuple(w for w in before.words if device_word(w.text))
            self._waiting[key(process)] = _Error((*kept, words)[-WORDS_MAX:], time_s, monotonic_s, uncaught)

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
                who = {"rank": process.rank, "job": process.job, "attempt": process.attempt}
                text = text_of(error.words)
                events.append(Event(error.time_s, "training_error", process.device, {"text": text, **who}))
        return events


def text_of(words: Sequence[LastWords]) -> str:
    """Return the words as one text: what was raised first, and what was raised for it or names a device.

    An abort or a watchdog that follows a traceback is only the end of the process. Each keeps its beginning and its
    end: the place, and the cause, which a message of several lines has in its last one.
    """
    chosen = [one for one in words if one.kind == "traceback" or device_word(one.text)] or words[:1]
    texts = list(dict.fromkeys(redact(one.text) for one in chosen))
    joint = f"\n{HEADER}\n"
    size = (TEXT_BYTES_MAX - (len(texts) - 1) * len(joint)) // len(texts)
    return joint.join(_within(text, size) for text in texts)


def _within(text: str, size: int) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= size:
        return encoded.decode("utf-8")
    end = encoded[-(size // 2) :].decode("utf-8", "ignore")
    return encoded[: size - size // 2 - len(_CUT)].decode("utf-8", "ignore") + _CUT + end
