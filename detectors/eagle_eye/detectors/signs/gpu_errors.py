"""Collects GPU errors from the kernel logs of a job's nodes, each once, however often it was logged.

Also shows how the job fared afterwards, which separates errors that matter from those that do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.exits import Exit
from eagle_eye.detectors.signs.progress import typical_step_s
from eagle_eye.detectors.signs.xids import BY_CODE, Recovery, Xid, code_of, is_fatal, recovery_of
from eagle_eye.detectors.types import Evidence, Window

UNKNOWN_DEVICE = -1
# Repeats closer than this are one occurrence: a failing driver logs thousands of lines (800,000 seen).
BURST_S = 60.0
RECOVERY_JOIN_S = 30.0  # XID 154 overrides the table for errors of the same GPU within this time (NVIDIA, XID Errors)
BEFORE_START_S = 60.0  # clock offset of first rows before an attempt's start; older errors belong elsewhere
EXIT_BEFORE_S, EXIT_AFTER_S = 5.0, 60.0  # a process killed by a GPU error ends within this time around it
KERNEL_WORD_S = 10.0  # after a program's GPU error, within which the kernel log arrives if it is read
AT_ONCE_S = 60.0  # errors of several nodes within this time are one event...
AT_ONCE_NODES = 3  # ...if this many nodes...
AT_ONCE_RATIO = 0.25  # ...and more than this share of the job have them: power or driver, not the nodes


@dataclass(frozen=True, slots=True)
class GpuError:
    """One XID of one GPU (``device`` -1: unknown), from its first line to its last.

    ``occurrences`` counts bursts, not lines. ``recovery`` is what the driver itself asked for next to it (XID 154),
    None if it did not. ``fatal_s`` is when a line first marked it as fatal, or left that to the table (inf: none did).
    """

    node: str
    device: int
    xid: Xid
    first_s: float
    last_s: float
    occurrences: int = 1
    recovery: Recovery | None = None
    fatal_s: float = math.inf

    @property
    def evidence(self) -> Evidence:
        """Return the error as evidence."""
        device = self.device if self.device >= 0 else None
        return Evidence("xid", self.node, device, f"{self.xid.code} ({self.xid.meaning})")

    @property
    def named(self) -> str:
        """Return the error as text for display."""
        return f"{gpu(self.node, self.device)}: XID {self.xid.code} ({self.xid.meaning})"


def gpu(node: str, device: int) -> str:
    """Return "n1/gpu3", or "n1" if the GPU is not known."""
    return node if device < 0 else f"{node}/gpu{device}"


def gpu_errors(window: Window) -> list[GpuError]:
    """Return the documented XIDs of this attempt's members, oldest first; each code of a GPU once."""
    spans: dict[tuple[str, int, int], tuple[float, float, int]] = {}  # first, last, occurrences
    said: dict[tuple[str, int], list[tuple[float, Recovery]]] = {}
    fatal: dict[tuple[str, int, int], float] = {}
    members: set[str] | None = None
    for event in window.events:
        if event.kind != "xid" or event.node is None or event.time_s < window.started_s - BEFORE_START_S:
            continue
        code = code_of(event.attributes)
        members = set(window.nodes) if members is None else members
        if code is None or code not in BY_CODE or event.node not in members:
            continue
        if BY_CODE[code].kind == "recovery":
            recovery = recovery_of(event.attributes)
            if recovery is not None:
                said.setdefault((event.node, event.device), []).append((event.time_s, recovery))
        if is_fatal(event.attributes):
            key = (event.node, event.device, code)
            fatal[key] = min(event.time_s, fatal.get(key, math.inf))
        first_s, last_s, occurrences = spans.get((event.node, event.device, code), (event.time_s, event.time_s, 1))
        spans[event.node, event.device, code] = (
            min(first_s, event.time_s),
            max(last_s, event.time_s),
            occurrences + (event.time_s - last_s > BURST_S),
        )
    return sorted(
        (
            GpuError(
                node,
                device,
                BY_CODE[code],
                *span,
                _recovery(span, said.get((node, device), [])),
                fatal.get((node, device, code), math.inf),
            )
            for (node, device, code), span in spans.items()
        ),
        key=lambda error: (error.first_s, error.node, error.device, error.xid.code),
    )


def unknown_errors(window: Window) -> list[tuple[float, str, int, int]]:
    """Return undocumented XIDs of this attempt's members: first time, node, device, code; oldest first."""
    found: dict[tuple[str, int, int], float] = {}
    for event in window.events:
        if event.kind != "xid" or event.node is None or event.time_s < window.started_s - BEFORE_START_S:
            continue
        code = code_of(event.attributes)
        if code is not None and code > 0 and code not in BY_CODE and event.node in window.nodes:
            key = (event.node, event.device, code)
            found[key] = min(event.time_s, found.get(key, event.time_s))
    return sorted((time_s, *key) for key, time_s in found.items())


def uses(window: Window, node: str, device: int) -> bool:
    """Whether a rank of the job runs on the GPU; True if ranks' placement, or the GPU of the error, is unknown."""
    if device == UNKNOWN_DEVICE or node not in window.nodes:
        return True
    mine = [window.series[i] for i in np.flatnonzero(window.node_of == window.nodes.index(node)).tolist()]
    ranked = {series.device for series in mine if series.rank >= 0}
    return not ranked or device in ranked


def went_on(window: Window, since_s: float) -> bool:
    """Whether the job has made a step that began after ``since_s``: a step in progress then may still have ended."""
    return window.advanced_s > since_s + window.interval_s + typical_step_s(window)


def soon_known(window: Window, since_s: float) -> bool:
    """Whether the next rows will show if the job goes on: its steps are short, and two intervals have not passed."""
    return typical_step_s(window) < window.interval_s and window.now_s < since_s + 2 * window.interval_s


def kernel_word_s(window: Window) -> float:
    """Return how long after a program's GPU error the kernel log may still report it."""
    return max(KERNEL_WORD_S, counter_word_s(window))


def counter_word_s(window: Window) -> float:
    """Return how long after an error counter has grown the kernel log may still report the error."""
    return max(2 * window.interval_s, 1.0)


def exit_near(exits: Iterable[Exit], node: str, time_s: float) -> Exit | None:
    """Return the first exit of a rank of the node around the time of an error, None if there was none."""
    near = (e for e in exits if e.node == node and -EXIT_BEFORE_S <= e.time_s - time_s <= EXIT_AFTER_S)
    return min(near, key=lambda e: e.time_s, default=None)


def at_once(window: Window, times_s: dict[str, float], time_s: float) -> tuple[str, ...]:
    """Return the nodes that had the same event at one time if they are too many for coincidence, else ().

    ``times_s`` holds the event's time on each node.
    """
    nodes = tuple(sorted(node for node, other_s in times_s.items() if abs(other_s - time_s) <= AT_ONCE_S))
    many = len(nodes) >= AT_ONCE_NODES and len(nodes) > AT_ONCE_RATIO * len(window.nodes)
    return nodes if many else ()


def _recovery(span: tuple[float, float, int], said: list[tuple[float, Recovery]]) -> Recovery | None:
    """Return the last recovery action requested near an error's lines."""
    near = [item for item in said if span[0] - RECOVERY_JOIN_S <= item[0] <= span[1] + RECOVERY_JOIN_S]
    return max(near)[1] if near else None
