"""Detects a GPU, driver or firmware that has stopped working."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.exits import Exit, unplanned_exits
from eagle_eye.detectors.signs.gpu_errors import (
    UNKNOWN_DEVICE,
    GpuError,
    at_once,
    exit_near,
    gpu,
    gpu_errors,
    soon_known,
    uses,
    went_on,
)
from eagle_eye.detectors.signs.progress import Patience, Progress, progress, typical_step_s
from eagle_eye.detectors.signs.vanished import Vanished, vanished
from eagle_eye.detectors.types import Blind, Evidence, Verdict, Window
from eagle_eye.schema.driver_facts import Fact

CONFIDENCE_FACT = 0.99
CONFIDENCE_GONE = 0.95  # values gone and the job stopped for long enough to act
CONFIDENCE_EARLY = 0.85
TOGETHER_S = 10.0  # values and job count as stopped together within this, two intervals and two reported steps
EXPLAINED_KINDS = ("memory", "contained", "remap", "lost")  # errors whose own detectors handle XID 154 as well
STANDS_STEPS = 2.0  # typical steps, or intervals, without a step: the job may have stopped
WHOLE_NODE_FLOORS = 5.0  # of silence in a pause: restarts of exporters, images pulled, take a minute or two


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHang:
    """Finds ``gpu_hang``: XID 46, 62, 109, 110, 119, 120, 143 (facts), or a device whose NVML values are gone.

    Sources: NVIDIA, XID Errors; ByteRobust (SOSP 2025): a hung driver blocks NVML before it blocks the job. An XID
    excludes the node, or drains it if the job is seen to go on (a timeout that only a tool hit). Missing values are no
    proof: when a device's ``gpu_*`` values (T, S) have vanished, the result is Blind while the job stands still, and a
    fault once the job has stopped or a rank has ended at the same moment, or once a pause during which they vanished is
    ripe and has lasted for the floor since. Values that vanish after a process has ended are due to a reset or a
    diagnosis. Cannot see: a hang of a GPU whose NVML answers (Hang finds its rank); what happened if a node with one
    GPU falls silent as a whole, or all GPUs of the job's only node do.
    """

    patience: Patience
    name: str = "gpu_hang"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node with a hung GPU; raise Blind if a device does not answer."""
        errors = _hangs(gpu_errors(window)) if window.events else []
        gone = vanished(window)
        if not errors and not gone:
            return []
        exits = unplanned_exits(window)
        found = self._logged(window, errors, exits) if errors else []
        if not found and gone:
            found = self._gone(window, gone, exits)
        return found

    def _logged(self, window: Window, errors: list[GpuError], exits: list[Exit]) -> list[Verdict]:
        by_node: dict[str, list[GpuError]] = {}
        for error in errors:
            by_node.setdefault(error.node, []).append(error)
        times_s = {node: own[0].first_s for node, own in by_node.items()}
        together = at_once(window, times_s, max(times_s.values()))
        found = []
        for node, own in by_node.items():
            if node in together:
                continue
            first = own[0]
            drain = self._drain(window, own, exits)
            if drain is not None:
                tail = ", and the job goes on" if drain else ""
                more = f" ({len(own) - 1} more)" if len(own) > 1 else ""
                found.append(self._fact(window, (node,), own, f"{first.named}{more}{tail}", drain=drain))
        if together:
            own = [error for node in together for error in by_node[node]]
            text = f"GPUs of {len(together)} nodes hang at once, first {own[0].named}"
            found.append(self._fact(window, together, own, text, drain=False))
        return found

    def _drain(self, window: Window, own: list[GpuError], exits: list[Exit]) -> bool | None:
        """Return whether draining the node suffices; None while the next rows may decide."""
        first = own[0]
        ended = exit_near(exits, first.node, first.first_s) is not None
        if not any(uses(window, error.node, error.device) for error in own):
            return True
        recovery = own[-1].recovery
        if recovery in ("reset", "reboot"):
            # A line that names no GPU may be about one that the job does not use.
            unnamed = all(error.device == UNKNOWN_DEVICE and isinstance(error.fact, Fact) for error in own)
            return unnamed and not ended and went_on(window, first.first_s)
        if recovery in ("drain_p2p", "drain_and_reset"):
            return not (ended and recovery == "drain_and_reset")
        if ended:
            return False
        return None if soon_known(window, first.first_s) else went_on(window, first.first_s)

    def _fact(self, window: Window, nodes: tuple[str, ...], own: list[GpuError], summary: str, drain: bool) -> Verdict:
        alone, device = len(nodes) == 1, next((e.device for e in own if e.device >= 0), UNKNOWN_DEVICE)
        return Verdict(
            detector=self.name,
            fault="gpu_hang",
            job=window.job,
            nodes=nodes,
            node=nodes[0] if alone else None,
            device=device if alone and device >= 0 else None,
            confidence=CONFIDENCE_FACT,
            onset_s=min(*(error.first_s for error in own), window.now_s),
            summary=summary,
            evidence=tuple(error.evidence for error in own[:4]),
            kinds=frozenset(error.channel for error in own),
            fact=True,
            asks="drain_node" if drain else None,
        )

    def _gone(self, window: Window, gone: list[Vanished], exits: list[Exit]) -> list[Verdict]:
        state = None if exits else progress(window, self.patience)
        found = []
        for node in sorted({window.series[item.column].node for item in gone}):
            own = [item for item in gone if window.series[item.column].node == node]
            first = min(own, key=lambda item: item.since_s)
            if state is None:
                verdict = self._ended(window, node, first, exits)
            else:
                verdict = self._stopped(window, node, first, state)
            if verdict is not None:
                found.append(verdict)
        return found

    def _in_a_pause(self, window: Window, first: Vanished, state: Progress) -> bool:
        """Whether a device fell silent during a pause that has since outlasted everything the job does.

        A device that is gone when a checkpoint or evaluation ends explains why the job does not continue. If its whole
        node is, so may be what reads it: exporters restart, and the pause began without them.
        """
        floors = WHOLE_NODE_FLOORS if first.whole_node else 1.0
        lasted_s = window.now_s - first.since_s
        return first.since_s > state.advanced_s and state.ripe and lasted_s >= floors * self.patience.floor_s

    def _ended(self, window: Window, node: str, first: Vanished, exits: list[Exit]) -> Verdict | None:
        near_s = TOGETHER_S + 2 * window.interval_s
        ends = [e for e in exits if abs(e.time_s - first.since_s) <= near_s]
        early = [e for e in exits if e.node == node and e.time_s < first.since_s - window.interval_s]
        if early:
            return None  # a reset or diagnosis after the end
        if not ends and exits[0].time_s > first.since_s and _together(window, first.since_s, window.advanced_s):
            evidence = Evidence("process_exit", exits[0].node, exits[0].device, exits[0].how)
            reason = "its peers gave up waiting"
            return self._silent(window, node, first, CONFIDENCE_GONE, evidence, "standstill", reason)
        if not ends or (first.whole_node and any(e.node == node for e in ends)):
            return None  # rows that end with the processes say nothing about the GPUs
        end = next((e for e in ends if e.node == node), ends[0])
        evidence = Evidence("process_exit", end.node, end.device, end.how)
        return self._silent(window, node, first, CONFIDENCE_GONE, evidence, "exit", f"a rank on {end.node} {end.how}")

    def _stopped(self, window: Window, node: str, first: Vanished, state: Progress) -> Verdict | None:
        place = gpu(node, window.series[first.column].device)
        if not (self._in_a_pause(window, first, state) or _together(window, first.since_s, state.advanced_s)):
            if first.since_s > state.advanced_s:
                raise Blind(f"{place} does not answer, and fell silent in a pause of the job")
            return None
        if not (state.stopped or state.outlasts_pauses):
            if not state.reported or state.standstill_s > STANDS_STEPS * max(state.typical_step_s, window.interval_s):
                raise Blind(f"{place} does not answer, and the job has stood still for {state.standstill_s:.1f} s")
            return None
        evidence = state.evidence
        confidence = CONFIDENCE_GONE if state.prompt or state.past_own_pauses else CONFIDENCE_EARLY
        reason = str(state)
        return self._silent(window, node, first, confidence, evidence, "standstill", reason)

    def _silent(
        self, window: Window, node: str, first: Vanished, confidence: float, other: Evidence, kind: str, reason: str
    ) -> Verdict:
        device = window.series[first.column].device
        silence_s = window.now_s - first.since_s
        which = "no GPU of it answers" if first.whole_node else "its node's other GPUs do"
        return Verdict(
            detector=self.name,
            fault="gpu_hang",
            job=window.job,
            nodes=(node,),
            node=node,
            device=None if first.whole_node else device,
            confidence=confidence,
            onset_s=first.since_s,
            summary=f"{gpu(node, device)} has not answered for {silence_s:.1f} s ({which}), and {reason}",
            evidence=(Evidence("gpu_silence_seconds", node, device, silence_s, 0.0, None, "seconds"), other),
            kinds=frozenset({"device_silence", kind}),
        )


def _hangs(errors: list[GpuError]) -> list[GpuError]:
    """Return the errors that mean a GPU no longer works: by the table, or because the driver requests a reset."""
    explained = [e for e in errors if e.fact.kind in EXPLAINED_KINDS]
    return [
        error
        for error in errors
        if (error.fact.kind == "hang" and error.recovery != "none")
        or (
            error.fact.kind == "recovery"
            and error.recovery not in (None, "none")
            and not any(other.device == error.device and error.beside(other) for other in explained)
        )
    ]


def _together(window: Window, gone_s: float, advanced_s: float) -> bool:
    """Whether a device's values and the job's work stopped at the same moment; steps under way may still be made."""
    underway_s = 2 * typical_step_s(window) if np.isfinite(window.last_step) else 0.0
    return abs(gone_s - advanced_s) <= TOGETHER_S + 2 * window.interval_s + underway_s
