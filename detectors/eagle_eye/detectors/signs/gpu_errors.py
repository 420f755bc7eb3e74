"""Collects what drivers say of the GPUs of a job's nodes, each fact once, however often it was logged.

Also shows how the job fared afterwards, which separates errors that matter from those that do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from eagle_eye.detectors.signs.exits import Exit
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.progress import typical_step_s
from eagle_eye.detectors.types import Evidence, Window, WindowEvent
from eagle_eye.schema.attributes import text
from eagle_eye.schema.driver_facts import BY_CODE, GPU_REPAIRED, Fact, FactJudgement, Recovery, Xid, code_of, judged

# When the driver asked for which recovery of a node's GPU.
_Said: TypeAlias = dict[tuple[str, int], list[tuple[float, Recovery]]]

UNKNOWN_DEVICE = -1
# Repeats closer than this are one occurrence: a failing driver logs thousands of lines (800,000 seen).
BURST_S = 60.0
CHANNELS = ("xid", "host_error", "gpu_lost")  # the kinds of events that carry facts of GPUs
OF_THE_PROGRAM = ("application", "cleanup", "restart")  # kinds of facts that programs cause
NO_GPUS = ("part", "symptom")  # kinds of facts of the host: signs/kernel_facts.py
RECOVERY_JOIN_S = 30.0  # XID 154 overrides the table for errors of the same GPU within this time (NVIDIA, XID Errors)
BEFORE_START_S = 60.0  # clock offset of first rows before an attempt's start; older errors belong elsewhere
EXIT_BEFORE_S, EXIT_AFTER_S = 5.0, 60.0  # a process killed by a GPU error ends within this time around it
KERNEL_WORD_S = 10.0  # after a program's GPU error, within which the kernel log arrives if it is read
AT_ONCE_S = 60.0  # errors of several nodes within this time are one event...
AT_ONCE_NODES = 3  # ...if this many nodes...
AT_ONCE_RATIO = 0.25  # ...and more than this share of the job have them: power or driver, not the nodes


@dataclass(frozen=True, slots=True)
class GpuError:
    """One fact of one GPU (``device`` -1: unknown), from its first line to its last, by the channel that carried it.

    ``occurrences`` counts bursts, not lines. ``recovery`` is what the driver itself asked for next to it (XID 154),
    None if it did not. ``fatal_s`` is when a line first marked it as fatal, or left that to the table (inf: none did).
    ``part`` is the address by which a line names a GPU without a row, ``repaired`` whether its driver later reset it.
    """

    node: str
    device: int
    fact: Xid | Fact
    channel: str
    first_s: float
    last_s: float
    occurrences: int = 1
    recovery: Recovery | None = None
    fatal_s: float = math.inf
    part: str = ""
    repaired: bool = False

    @property
    def evidence(self) -> Evidence:
        """Return the error as evidence."""
        device = self.device if self.device >= 0 else None
        return Evidence(self.channel, self.node, device, self.fact.said.removeprefix("XID "))

    @property
    def named(self) -> str:
        """Return the error as text for display."""
        part = f" {self.part}" if self.part and self.device < 0 else ""
        return f"{gpu(self.node, self.device)}{part}: {self.fact.said}"

    def beside(self, other: GpuError) -> bool:
        """Whether it and another of the same node were logged within RECOVERY_JOIN_S of each other."""
        near = self.first_s - RECOVERY_JOIN_S <= other.last_s and other.first_s <= self.last_s + RECOVERY_JOIN_S
        return self.node == other.node and near


def gpu(node: str, device: int) -> str:
    """Return "n1/gpu3", or "n1" if the GPU is not known."""
    return node if device < 0 else f"{node}/gpu{device}"


@once
def gpu_errors(window: Window) -> list[GpuError]:
    """Return what is known of the GPUs of this attempt's members, oldest first; each fact of a GPU once.

    A line that names no GPU is about the one that XIDs beside it name, if they name one alone.
    """
    found: dict[tuple[str, int, str, str, str], GpuError] = {}
    repaired_s: dict[tuple[str, int, str], float] = {}
    said: _Said = {}
    members: set[str] | None = None
    for event in window.events:
        if event.kind not in CHANNELS or event.node is None or event.time_s < window.started_s - BEFORE_START_S:
            continue
        judgement = judged(event.kind, event.attributes, event.device)
        members = set(window.nodes) if members is None else members
        if judgement is None or judgement.fact.kind in NO_GPUS or event.node not in members:
            continue
        if judgement.recovery is not None:
            said.setdefault((event.node, event.device), []).append((event.time_s, judgement.recovery))
        part = text(event.attributes, "device")
        if judgement.fact.name == GPU_REPAIRED:
            repaired_s[event.node, event.device, part] = event.time_s
            continue
        key = (event.node, event.device, part, event.kind, judgement.fact.name)
        known = found.get(key)
        found[key] = _seen(event, event.node, part, judgement) if known is None else _again(known, event, judgement)
    for key, error in found.items():
        if repaired_s and repaired_s.get(key[:3], -math.inf) >= error.last_s:
            found[key] = replace(error, repaired=True)
    return sorted(
        (_placed(_with_recovery(error, said), found.values(), said) for error in found.values()),
        key=lambda error: (error.first_s, error.node, error.device, error.fact.code, error.fact.name),
    )


def _seen(event: WindowEvent, node: str, part: str, judgement: FactJudgement) -> GpuError:
    time_s, fatal_s = event.time_s, event.time_s if judgement.fatal else math.inf
    return GpuError(node, event.device, judgement.fact, event.kind, time_s, time_s, fatal_s=fatal_s, part=part)


def _again(known: GpuError, event: WindowEvent, judgement: FactJudgement) -> GpuError:
    return replace(
        known,
        first_s=min(known.first_s, event.time_s),
        last_s=max(known.last_s, event.time_s),
        occurrences=known.occurrences + (event.time_s - known.last_s > BURST_S),
        fatal_s=min(known.fatal_s, event.time_s) if judgement.fatal else known.fatal_s,
    )


def _placed(error: GpuError, all_of_them: Iterable[GpuError], said: _Said) -> GpuError:
    if error.device != UNKNOWN_DEVICE or error.part or isinstance(error.fact, Xid):
        return error
    named = {
        other.device
        for other in all_of_them
        if other.device != UNKNOWN_DEVICE and other.fact.kind not in OF_THE_PROGRAM and error.beside(other)
    }
    return _with_recovery(replace(error, device=named.pop()), said) if len(named) == 1 else error


def _with_recovery(error: GpuError, said: _Said) -> GpuError:
    """Return the error with the last recovery action requested near its lines."""
    first_s, last_s = error.first_s - RECOVERY_JOIN_S, error.last_s + RECOVERY_JOIN_S
    near = [item for item in said.get((error.node, error.device), []) if first_s <= item[0] <= last_s]
    return replace(error, recovery=max(near)[1]) if near else error


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
