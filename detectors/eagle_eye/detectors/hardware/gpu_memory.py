"""Detects failing GPU memory from the kernel log, the error counter or the program's exception."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from eagle_eye.detectors.signs.counters import grown, rises
from eagle_eye.detectors.signs.exits import Exit, unplanned_exits
from eagle_eye.detectors.signs.gpu_errors import (
    BEFORE_START_S,
    UNKNOWN_DEVICE,
    GpuError,
    at_once,
    counter_word_s,
    exit_near,
    gpu,
    gpu_errors,
    kernel_word_s,
    soon_known,
    uses,
    went_on,
)
from eagle_eye.detectors.types import Blind, Evidence, Verdict, Window
from eagle_eye.schema.attributes import text
from eagle_eye.schema.last_words import device_word

CONFIDENCE = 0.99
NEAR_S = 60.0  # log lines about one error are at most this far apart
DOUBLE_BIT_XID = 48  # reports an error; XID 94 or 95 with it tells whether it was contained
SETTLE_S = 1.0  # after it, in which that line follows
COUNTER = "gpu_ecc_uncorrected_total"
EVIDENCE_MAX = 6

# The action for a GPU's errors, most severe first; "wait": the next rows decide.
Asks = Literal["exclude_node", "restart_job", "drain_node", "wait"]
WORST_FIRST: tuple[Asks, ...] = ("exclude_node", "restart_job", "drain_node")
TAILS = {
    "exclude_node": "",
    "restart_job": ": contained, it hurt its process only",
    "drain_node": "; the job goes on, and the GPU needs a reset when it ends",
}


@dataclass(slots=True)
class _Case:
    """Everything known about one GPU's uncorrected errors."""

    node: str
    device: int
    since_s: float
    errors: list[GpuError] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)

    @property
    def reported(self) -> bool:
        """Whether the program reported it."""
        return any(item.metric == "training_error" for item in self.evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Finds ``gpu_memory_error``: XID 48, 64, 95, 140 and 94, the counter of uncorrected errors, or a CUDA exception.

    A fact. An uncontained error excludes the node. A contained one (XID 94, which also classifies an XID 48 or counter
    change next to it) affects only its process and asks for a restart, or for a drain once the job is seen to go on; so
    does an uncorrected error known only from the counter. XID 154 overrides the table. Sources: NVIDIA, XID Errors;
    NVIDIA, GPU Memory Error Management. Reads ``gpu_ecc_uncorrected_total`` (T, S) and events. Blind if the counters of
    many nodes change at one moment: then their source has changed. Cannot see: errors of a GPU with ECC off. Precursors
    (remaps, corrected errors) are left to EarlySigns.
    """

    name: str = "gpu_memory"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node with an uncorrected memory error."""
        counted, doubt = _counted(window)
        if not window.events and not counted and not doubt:
            return []
        cases = _cases(window, counted)
        exits = unplanned_exits(window) if cases else []
        worst: dict[str, tuple[int, _Case]] = {}
        for case in cases:
            asks = _asks(window, case, exits)
            if asks != "wait":
                place = WORST_FIRST.index(asks)
                if case.node not in worst or place < worst[case.node][0]:
                    worst[case.node] = (place, case)
        if doubt and not worst:
            raise Blind(doubt)
        return [self._verdict(window, case, WORST_FIRST[place]) for place, case in worst.values()]

    def _verdict(self, window: Window, case: _Case, asks: Asks) -> Verdict:
        first = case.evidence[0]
        what = f"{first.value:.0f} new errors" if isinstance(first.value, float) else f"{first.metric} {first.value}"
        if first.metric == "training_error":
            what = f"its program's last words: {first.value}"
        return Verdict(
            detector=self.name,
            fault="gpu_memory_error",
            job=window.job,
            nodes=(case.node,),
            node=case.node,
            device=case.device if case.device >= 0 else None,
            confidence=CONFIDENCE,
            onset_s=min(case.since_s, window.now_s),
            summary=f"{gpu(case.node, case.device)} had an uncorrected memory error ({what}){TAILS[asks]}",
            evidence=tuple(case.evidence[:EVIDENCE_MAX]),
            kinds=frozenset(item.metric for item in case.evidence),
            fact=True,
            asks="drain_node" if asks == "drain_node" else "restart_job" if asks == "restart_job" else None,
        )


def _cases(window: Window, counted: list[tuple[float, str, int, Evidence]]) -> list[_Case]:
    """Return what is known of each GPU, oldest first; reports that name no GPU join the first case that has one."""
    errors = [error for error in gpu_errors(window) if error.fact.kind in ("memory", "contained")]
    reported = [
        (
            event.time_s,
            event.node,
            event.device,
            Evidence(event.kind, event.node, event.device, "uncorrectable ECC error"),
        )
        for event in window.events
        if event.kind == "training_error"
        and event.node in window.nodes
        and event.time_s >= window.started_s - BEFORE_START_S
        and (word := device_word(text(event.attributes, "text"))) is not None
        and word.name == "memory"
    ]
    found: dict[tuple[str, int], _Case] = {}
    for error in errors:
        case = found.setdefault((error.node, error.device), _Case(error.node, error.device, error.first_s))
        case.errors.append(error)
        case.evidence.append(error.evidence)
    for time_s, node, device, evidence in (*reported, *counted):
        case = found.setdefault((node, device), _Case(node, device, time_s))
        case.since_s = min(case.since_s, time_s)
        case.evidence.append(evidence)
    for key in [key for key in found if key[1] == UNKNOWN_DEVICE]:
        other = next((case for case in found.values() if case.node == key[0] and case.device != UNKNOWN_DEVICE), None)
        if other is not None:
            other.errors += found[key].errors
            other.evidence += found[key].evidence
            other.since_s = min(other.since_s, found[key].since_s)
            del found[key]
    return sorted(found.values(), key=lambda case: (case.since_s, case.node, case.device))


def _counted(window: Window) -> tuple[list[tuple[float, str, int, Evidence]], str]:
    """Return the GPUs whose uncorrected-error counter has grown (onset, GPU, growth), or why this is undecided."""
    values = window.device.get(COUNTER)
    suspects = grown(values) if values is not None else ()
    if values is None or len(suspects) == 0:
        return [], ""
    found = []
    for index in suspects:
        up, series = rises(values[:, index]), window.series[index]
        if up:
            evidence = Evidence(
                COUNTER, series.node, series.device, sum(rise.amount for rise in up), 0.0, 0.0, "errors"
            )
            found.append((float(window.times_s[up[0].line]) - window.interval_s, series.node, series.device, evidence))
    times_s = {node: since_s for since_s, node, *_ in found}
    together = at_once(window, times_s, max(times_s.values())) if times_s else ()
    if together:
        return [], f"uncorrected errors of {len(together)} nodes were counted at one moment: their source has changed"
    return found, ""


def _asks(window: Window, case: _Case, exits: list[Exit]) -> Asks:
    if not uses(window, case.node, case.device):
        return "drain_node"
    ended = exit_near(exits, case.node, case.since_s) is not None
    recovery = next((e.recovery for e in reversed(case.errors) if e.recovery is not None), None)
    if recovery in ("reset", "reboot"):
        return "exclude_node"
    if recovery in ("drain_p2p", "drain_and_reset"):
        # If the job has to restart anyway, it restarts without the node.
        return "exclude_node" if ended and recovery == "drain_and_reset" else "drain_node"
    contained = [e for e in case.errors if e.fact.kind == "contained" or recovery == "none"]
    alone = [error for error in case.errors if not _qualified(error, contained)]
    if any(error.fact.code != DOUBLE_BIT_XID for error in alone):
        return "exclude_node"
    # Containment is logged a moment later; a counter's row may arrive before any log line, the program's report seconds
    # before.
    settle_s = SETTLE_S if case.errors else kernel_word_s(window) if case.reported else counter_word_s(window)
    if not contained and window.now_s < case.since_s + settle_s:
        return "wait"
    if alone:
        return "exclude_node"
    if not ended:
        if soon_known(window, case.since_s):
            return "wait"
        if went_on(window, case.since_s):
            return "wait" if recovery == "none" else "drain_node"
    return "restart_job" if contained else "exclude_node"


def _qualified(error: GpuError, contained: list[GpuError]) -> bool:
    """Whether an error was contained, or another log line about it says so."""
    if error in contained:
        return True
    return error.fact.code == DOUBLE_BIT_XID and any(
        other.first_s - NEAR_S <= error.last_s and error.first_s <= other.last_s + NEAR_S for other in contained
    )
