"""Reading the ends of training processes: which exits are causes and which are echoes of a peer's death."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from eagle_eye.detectors.signs.attributes import text, whole
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.types import Happening, Window

# What the survivors of a collective print when a peer is gone. Seen from Gloo, NCCL and TCPStore.
ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|socket (closed|timeout)"
    r"|(nccl|gloo|store|peer).{0,80}(time[d ]?out|abort|unhandled|remote|closed)|unhandled (system|cuda) error"
    r"|watchdog caught collective|DistNetworkError|DistStoreError|peer.{0,40}(gone|lost|unreachable)",
    re.IGNORECASE | re.DOTALL,
)
# How torch's store, Gloo, NCCL and ibverbs say that a connection could not be made; one that was lost is another thing.
CANNOT_CONNECT = re.compile(
    r"connectFullMesh|no route to host|network is (?:unreachable|down)|host is (?:unreachable|down)"
    r"|\bconnect(?:ion|ing|ed)?\b[^\n]{0,200}(?:timed? ?out|refused|unreachable|invalid argument|cannot assign)"
    r"|socket\w*connect[^\n]{0,200}(?:timed? ?out|refused|failed)|tim(?:ed?|ing) ?out[^\n]{0,60}\bconnect"
    r"|failed to connect|ibv_modify_qp[^\n]{0,80}(?:timed? ?out|failed)",
    re.IGNORECASE,
)
UNCORRECTABLE = re.compile(r"uncorrectable ECC|cudaErrorECCUncorrectable|double[- ]bit ECC", re.IGNORECASE)
GPU_MEMORY_ERROR = re.compile(r"CUDA out of memory|\bOutOfMemoryError\b")  # the batch or the model does not fit
HOST_MEMORY_ERROR = re.compile(r"^MemoryError\b|Cannot allocate memory|std::bad_alloc", re.MULTILINE)
SHELL_SIGNALS = 128  # shells and containers report a process that signal n killed as 128 + n (POSIX sh)
# Sent by whoever stops a job or cleans up after another rank's death.
CLEANUP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DEADLY_SIGNALS = frozenset(
    {*CLEANUP_SIGNALS, signal.SIGQUIT, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}
    | {signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE, signal.SIGXCPU, signal.SIGSYS}
)


@dataclass(frozen=True, slots=True)
class Exit:
    """The unplanned end of one rank's process; ``exit_code`` None: nobody could read it, ``error`` "": no text."""

    time_s: float
    node: str
    device: int
    rank: int
    exit_code: int | None
    error: str

    @property
    def cause(self) -> bool:
        """Whether this end can have been the first: a signal nobody sends to clean up, or an error of its own."""
        if self.error:
            words = "\n".join(line for line in self.error.splitlines() if not line[:1].isspace())  # no source lines
            return not (ECHO.search(self.error) or CANNOT_CONNECT.search(words))
        return self.exit_code is not None and self.exit_code < 0 and -self.exit_code != signal.SIGABRT

    @property
    def out_of_memory(self) -> bool:
        """Whether it ended for want of memory, by its own word."""
        return self.cause and (GPU_MEMORY_ERROR.search(self.error) or HOST_MEMORY_ERROR.search(self.error)) is not None

    @property
    def of_failing_memory(self) -> bool:
        """Whether its GPU's memory failed, by its own word."""
        return UNCORRECTABLE.search(self.error) is not None

    @property
    def error_kind(self) -> str:
        """Return the exception's name, or the last line's first word; "" without a text."""
        lines = self.error.strip().splitlines()
        return re.split(r"[:\s]", lines[-1].strip(), maxsplit=1)[0] if lines else ""

    @property
    def who(self) -> str:
        """Say whose process it was, for people."""
        return f"rank {self.rank} on {self.node}" if self.rank >= 0 else f"a rank on {self.node}"

    @property
    def how(self) -> str:
        """Say how the process ended, for people."""
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
    """Return the ends of this attempt's ranks that nobody planned, oldest first."""
    errors: dict[tuple[str | None, int], str] = {}
    ends: list[Happening] = []
    for event in window.events:
        if event.kind == "training_error":
            errors[event.node, event.device] = text(event.attributes, "text")
        elif event.kind == "process_exit" and event.node is not None:
            ends.append(event)
    found: list[Exit] = []
    ranks: dict[tuple[str, int], int] | None = None
    for event in ends:
        code, place = _exit_code(event), (event.node or "", event.device)
        if code == 0 or _planned(event, code, place in errors):
            continue
        rank = whole(event.attributes, "rank")
        if rank is None:
            ranks = {(s.node, s.device): s.rank for s in window.series} if ranks is None else ranks
            rank = ranks.get(place, -1)
        found.append(Exit(event.time_s, *place, rank, code, errors.get(place, "")))
    return sorted(found, key=lambda item: (item.time_s, item.node, item.device))


def left_early(window: Window) -> list[str]:
    """Return the ranks whose process ended well (exit code 0) although others of the attempt are still there."""
    ended = {
        (event.node, event.device): f"rank {_rank(event)} on {event.node}"
        for event in window.events
        if event.kind == "process_exit" and _exit_code(event) == 0
    }
    ranks = sum(series.rank >= 0 for series in window.series) if ended else 0
    return list(ended.values()) if len(ended) < ranks else []


def _planned(event: Happening, code: int | None, failed: bool) -> bool:
    if code is None:
        return bool(event.attributes.get("goodbye")) and not failed
    return -code in CLEANUP_SIGNALS


def _exit_code(event: Happening) -> int | None:
    """Return the exit code, negative for a signal however the signal was reported; None where nobody could read it."""
    code = whole(event.attributes, "exit_code")
    if code is not None and code > SHELL_SIGNALS and code - SHELL_SIGNALS in _DEADLY_SIGNALS:
        return SHELL_SIGNALS - code
    return code


def _rank(event: Happening) -> int:
    rank = whole(event.attributes, "rank")
    return -1 if rank is None else rank
