"""Reading the ends of training processes: which exits are causes and which are echoes of a peer's death."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from eagle_eye.detectors.types import Happening, Window

# What the survivors of a collective print when a peer is gone. Seen from Gloo, NCCL and TCPStore.
ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|socket (closed|timeout)"
    r"|(nccl|gloo|store|peer).{0,80}(time[d ]?out|abort|unhandled|remote|closed)|unhandled (system|cuda) error"
    r"|watchdog caught collective|DistNetworkError|DistStoreError|peer.{0,40}(gone|lost|unreachable)",
    re.IGNORECASE | re.DOTALL,
)
# Sent by whoever stops a job or cleans up after another rank's death.
CLEANUP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
            return not ECHO.search(self.error)
        return self.exit_code is not None and self.exit_code < 0 and -self.exit_code != signal.SIGABRT

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


def unplanned_exits(window: Window) -> list[Exit]:
    """Return the ends of this attempt's ranks that nobody planned, oldest first."""
    errors: dict[tuple[str | None, int], str] = {}
    for event in window.events:
        if event.kind == "training_error":
            errors[event.node, event.device] = str(event.attributes.get("text", ""))
    found = [
        Exit(
            time_s=event.time_s,
            node=event.node,
            device=event.device,
            rank=_integer(event, "rank", -1),
            exit_code=code,
            error=errors.get((event.node, event.device), ""),
        )
        for event in window.events
        if event.kind == "process_exit" and event.node is not None
        for code in (_exit_code(event),)
        if code != 0 and not _planned(event, code, (event.node, event.device) in errors)
    ]
    return sorted(found, key=lambda item: (item.time_s, item.node, item.device))


def left_early(window: Window) -> list[str]:
    """Return the ranks whose process ended well (exit code 0) although others of the attempt are still there."""
    ended = {
        (event.node, event.device): f"rank {_integer(event, 'rank', -1)} on {event.node}"
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
    code = event.attributes.get("exit_code")
    return int(code) if isinstance(code, int | float) else None


def _integer(event: Happening, name: str, otherwise: int) -> int:
    value = event.attributes.get(name)
    return int(value) if isinstance(value, int | float) else otherwise
