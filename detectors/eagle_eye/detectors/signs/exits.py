"""Classifies the exits of training processes: causes, and echoes of a peer's death."""

from __future__ import annotations

import math
import re
import signal
from dataclasses import dataclass

from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.types import Window, WindowEvent
from eagle_eye.schema.attributes import text, whole
from eagle_eye.schema.last_words import DeviceWord, cause, device_word, last_words

GPU_MEMORY_ERROR = re.compile(r"CUDA out of memory|\bOutOfMemoryError\b")  # the batch or the model does not fit
HOST_MEMORY_ERROR = re.compile(r"^MemoryError\b|Cannot allocate memory|std::bad_alloc", re.MULTILINE)
QUORUM = "train_quorum"  # torchft's replica groups report it
SHELL_SIGNALS = 128  # shells and containers report a process killed by signal n as 128 + n (POSIX sh)
# Sent to stop a job or to clean up after another rank's death.
CLEANUP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DEADLY_SIGNALS = frozenset(
    {*CLEANUP_SIGNALS, signal.SIGQUIT, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}
    | {signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE, signal.SIGXCPU, signal.SIGSYS}
)


@dataclass(frozen=True, slots=True)
class Exit:
    """The unplanned end of one rank's process; ``exit_code`` None: not readable, ``error`` "": no text."""

    time_s: float
    node: str
    device: int
    rank: int
    exit_code: int | None
    error: str

    @property
    def cause(self) -> bool:
        """Whether this exit can have been the first: a signal not used for cleanup, or an error of its own."""
        if self.error:
            return cause(self.error) in ("device", "own")
        return self.exit_code is not None and self.exit_code < 0 and -self.exit_code != signal.SIGABRT

    @property
    def out_of_memory(self) -> bool:
        """Whether it ended for lack of memory, by its own report."""
        return self.cause and (GPU_MEMORY_ERROR.search(self.error) or HOST_MEMORY_ERROR.search(self.error)) is not None

    @property
    def of_device(self) -> DeviceWord | None:
        """The error of its GPU that ended it, by its own report; None for none."""
        return device_word(self.error) if cause(self.error) == "device" else None

    @property
    def of_failing_memory(self) -> bool:
        """Whether its GPU's memory failed, by its own report."""
        word = self.of_device
        return word is not None and word.name == "memory"

    @property
    def error_kind(self) -> str:
        """Return the exception's name, or its words' first word; "" without a text."""
        return re.split(r"[:\s]", last_words(self.error), maxsplit=1)[0]

    @property
    def who(self) -> str:
        """Return which process it was, for display."""
        return f"rank {self.rank} on {self.node}" if self.rank >= 0 else f"a rank on {self.node}"

    @property
    def how(self) -> str:
        """Return how the process ended, for display."""
        if self.exit_code is None:
            return "ended (exit code unknown)"
        if self.exit_code < 0:
            try:
                return f"was killed by {signal.Signals(-self.exit_code).name}"
            except ValueError:
                return f"was killed by signal {-self.exit_code}"
        return f"ended with exit code {self.exit_code}"


@once
def unplanned_exits(window: Window) -> list[Exit]:
    """Return the unplanned exits of this attempt's ranks, oldest first.

    Replica groups go on without one that has ended: there, an exit counts until the job has made another step.
    """
    since_s = window.advanced_s if QUORUM in window.device else -math.inf
    errors: dict[tuple[str | None, int], str] = {}
    ends: list[WindowEvent] = []
    for event in window.events:
        if event.kind == "training_error":
            errors[event.node, event.device] = text(event.attributes, "text")
        elif event.kind == "process_exit" and event.node is not None:
            ends.append(event)
    found: list[Exit] = []
    ranks: dict[tuple[str, int], int] | None = None
    for event in ends:
        code, place = _exit_code(event), (event.node or "", event.device)
        if code == 0 or event.time_s <= since_s or _planned(event, code, place in errors):
            continue
        rank = whole(event.attributes, "rank")
        if rank is None:
            ranks = {(s.node, s.device): s.rank for s in window.series} if ranks is None else ranks
            rank = ranks.get(place, -1)
        found.append(Exit(event.time_s, *place, rank, code, errors.get(place, "")))
    return sorted(found, key=lambda item: (item.time_s, item.node, item.device))


def left_early(window: Window) -> list[str]:
    """Return the ranks whose process ended with exit code 0 although others of the attempt are still running."""
    ended = {
        (event.node, event.device): f"rank {_rank(event)} on {event.node}"
        for event in window.events
        if event.kind == "process_exit" and _exit_code(event) == 0
    }
    ranks = sum(series.rank >= 0 for series in window.series) if ended else 0
    return list(ended.values()) if len(ended) < ranks else []


def _planned(event: WindowEvent, code: int | None, failed: bool) -> bool:
    if code is None:
        return bool(event.attributes.get("goodbye")) and not failed
    return -code in CLEANUP_SIGNALS


def _exit_code(event: WindowEvent) -> int | None:
    """Return the exit code, negative for a signal however it was reported; None if not readable."""
    code = whole(event.attributes, "exit_code")
    if code is not None and code > SHELL_SIGNALS and code - SHELL_SIGNALS in _DEADLY_SIGNALS:
        return SHELL_SIGNALS - code
    return code


def _rank(event: WindowEvent) -> int:
    rank = whole(event.attributes, "rank")
    return -1 if rank is None else rank
