"""Detects a GPU or NVLink error that stopped the job, among XIDs that a job often survives."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_eye.detectors.signs.gpu_errors import GpuError, at_once, gpu_errors, soon_known, uses, went_on
from eagle_eye.detectors.signs.progress import Patience
from eagle_eye.detectors.signs.stop import Standstill, stop_of
from eagle_eye.detectors.types import Verdict, Window

ENDS_S = 30.0  # both ends of a link log its failure within this time
FIRST_S = 2.0  # of many at once, one this much earlier was the first; nodes' clocks agree better than that
CONFIDENCE = 0.97
EVIDENCE_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceErrors:
    """Finds ``gpu_hang``: a fatal error of an NVLink or GPU just before the job stopped. A fact if the job stopped.

    XID 74, 136 and 155 and the fatal ones of 144 to 150 (links), 151, 156, 158, 167 and 173 (a GPU that needs a reset),
    and what drivers say without an XID: the state of the NVLinks broken, an uncorrectable hardware error.
    The earliest node is the cause; others whose links failed within ``ENDS_S`` are named as the other end, which may be
    to blame instead: the one that reported first is excluded. Errors that a program causes, or cleanup after a death
    (13, 31, 43, 45), are ignored. While the job goes on, an error that needs a reset asks for a drain (after the
    driver's own reset it is reported), and link errors are left to NvlinkDegraded. If many nodes fail at one moment and
    none was first, no node is accused: their switch or power failed. Source: NVIDIA, XID Errors. Reads events, exits
    and the job's progress. Cannot see: which end of a link failed; how severe an XID of 144 to 150 is if the source
    passes on only the code.
    """

    patience: Patience
    name: str = "device_errors"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict on the stop, or one for each node of a running job that needs a reset."""
        fatal = [error for error in gpu_errors(window) if _matters(window, error)] if window.events else []
        if not fatal:
            return []
        stop = stop_of(window, self.patience)
        if stop is not None:
            beside = [error for error in fatal if stop.beside(error.node, error.fatal_s)]
            return self._stopped(window, stop, sorted(beside, key=_moment)) if beside else []
        due = [
            error
            for error in fatal
            if error.fact.kind == "reset" and not soon_known(window, error.fatal_s) and went_on(window, error.fatal_s)
        ]
        by_node = {error.node: error for error in reversed(due)}
        return [self._goes_on(window, error) for error in by_node.values()]

    def _stopped(self, window: Window, stop: Standstill, errors: list[GpuError]) -> list[Verdict]:
        first = errors[0]
        times_s = {error.node: error.fatal_s for error in reversed(errors)}
        second_s = min((time_s for node, time_s in times_s.items() if node != first.node), default=None)
        if at_once(window, times_s, first.fatal_s) and second_s is not None and second_s - first.fatal_s < FIRST_S:
            return []
        own = [error for error in errors if error.node == first.node]
        ends = [
            node
            for node, time_s in times_s.items()
            if node != first.node and first.fact.kind == "nvlink" and time_s - first.fatal_s <= ENDS_S
        ]
        other = f"; it was first, its link's other end may be to blame ({', '.join(ends[:4])})" if ends else ""
        how = "the job's ranks ended after it" if stop.exits else "no step has finished since"
        devices = {error.device for error in own}
        return [
            Verdict(
                detector=self.name,
                fault="gpu_hang",
                job=window.job,
                nodes=(first.node,),
                node=first.node,
                device=first.device if len(devices) == 1 and first.device >= 0 else None,
                confidence=CONFIDENCE,
                onset_s=min(first.fatal_s, window.now_s),
                summary=f"{first.named}: {how}{other}",
                evidence=(*(error.evidence for error in [*own, *errors][:EVIDENCE_MAX]), stop.evidence),
                kinds=frozenset({*(error.channel for error in own), stop.kind}),
                fact=True,
            )
        ]

    def _goes_on(self, window: Window, error: GpuError) -> Verdict:
        return Verdict(
            detector=self.name,
            fault="gpu_hang",
            job=window.job,
            nodes=(error.node,),
            node=error.node,
            device=error.device if error.device >= 0 else None,
            confidence=CONFIDENCE,
            onset_s=min(error.fatal_s, window.now_s),
            summary=f"{error.named}{', its driver has reset it' if error.repaired else ''}, and the job goes on",
            evidence=(error.evidence,),
            kinds=frozenset({error.channel}),
            fact=True,
            asks="notify" if error.repaired else "drain_node",
        )


def _matters(window: Window, error: GpuError) -> bool:
    """Whether the error is of a link or GPU that the job uses, is fatal, and its driver asks for an action."""
    known = error.fact.kind in ("nvlink", "reset") and error.fatal_s <= window.now_s and error.recovery != "none"
    return known and uses(window, error.node, error.device)


def _moment(error: GpuError) -> tuple[float, str, int]:
    return error.fatal_s, error.node, error.device
