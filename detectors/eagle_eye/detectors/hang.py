"""A job that makes no step although it should, and the node that holds it up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.exits import unplanned_exits
from eagle_eye.detectors.progress import Patience, Progress, progress
from eagle_eye.detectors.types import Blind, Evidence, Floats, Verdict, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Finds a standstill and its culprit.

    The culprit is the rank whose process says nothing although it exists (stopped, or stuck in the kernel), or the
    rank that has enqueued fewer collectives than its peers, who wait in one that it has not reached (C4D, Aegis:
    "collective launch lower than the group"). One node must stand out; where none or several do, the verdict is a
    hang without a known culprit. A job that
    lost a process is not hanging: ProcessExit speaks. Blind as ``progress`` is. Cannot see: which of two ends of
    a broken link is to blame when all ranks wait in the same collective.
    """

    patience: Patience
    rank_silent_s: float
    silent_node_s: float
    name: str = "hang"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        if unplanned_exits(window):
            return []
        state = progress(window, self.patience)
        if not state.stopped:
            return []
        if self._unheard(window):
            raise Blind("a node of the job has not been heard of since before the standstill became due")
        silent = self._silent_nodes(window)
        lagging, lag = self._lagging_nodes(window)
        suspects = silent & lagging if silent and lagging and silent & lagging else silent or lagging
        culprit = next(iter(suspects)) if len(suspects) == 1 else None
        return [self._verdict(window, state, culprit, silent, lag)]

    def _unheard(self, window: Window) -> bool:
        """Whether some node's silence may yet explain the standstill; NodeSilent decides that."""
        heard_s = np.maximum(window.heard_s, window.watching_since_s)
        missed_s = np.where(window.farewell, 0.0, window.now_s - heard_s)
        return bool((missed_s > max(0.5 * self.silent_node_s, 2 * window.interval_s)).any())

    def _silent_nodes(self, window: Window) -> set[str]:
        quiet = window.silent_s > self.rank_silent_s
        if quiet.all():
            return set()
        return {window.series[i].node for i in np.flatnonzero(quiet)}

    def _lagging_nodes(self, window: Window) -> tuple[set[str], Floats]:
        """Return the nodes with a rank behind in collectives, and each rank's lag (S,), NaN where unknown."""
        sequence = _last(window, "nccl_sequence")
        if not np.isfinite(sequence).any():
            return set(), sequence
        lag = np.nanmax(sequence) - sequence
        return {window.series[i].node for i in np.flatnonzero(lag > 0)}, lag

    def _verdict(self, window: Window, state: Progress, culprit: str | None, silent: set[str], lag: Floats) -> Verdict:
        evidence = [
            Evidence(
                "train_step_standstill_seconds",
                None,
                None,
                state.standstill_s,
                state.typical_step_s,
                state.due_s,
                "seconds",
            )
        ]
        kinds = {"standstill"}
        reasons: list[str] = []
        device = None
        onset_s = state.advanced_s
        for i, series in enumerate(window.series):
            if series.node != culprit:
                continue
            if culprit in silent and window.silent_s[i] > self.rank_silent_s:
                quiet_s = float(window.silent_s[i])
                evidence.append(
                    Evidence(
                        "rank_silence_seconds",
                        culprit,
                        series.device,
                        quiet_s,
                        0.0,
                        self.rank_silent_s,
                        "seconds",
                    )
                )
                kinds.add("rank_silence")
                reasons.append(f"rank {series.rank} exists but has said nothing for {quiet_s:.1f} s")
                device = series.device
            if lag[i] > 0:
                evidence.append(
                    Evidence("nccl_sequence_lag", culprit, series.device, float(lag[i]), 0.0, 0.0, "collectives")
                )
                kinds.add("collective_sequence")
                reasons.append(f"rank {series.rank} is {lag[i]:.0f} collectives behind its peers, who wait for it")
                device = series.device
        where = f"{culprit} holds the job up: {'; '.join(reasons[:2])}" if culprit else "culprit unknown"
        return Verdict(
            detector=self.name,
            fault="hang",
            job=window.job,
            nodes=(culprit,) if culprit else (),
            node=culprit,
            device=device,
            confidence=0.97 if culprit else 0.8,
            onset_s=onset_s,
            summary=(f"no step for {state.standstill_s:.1f} s where {state.typical_step_s:.2f} s are typical; {where}"),
            evidence=tuple(evidence),
            kinds=frozenset(kinds),
        )


def _last(window: Window, metric: str) -> Floats:
    values = window.device.get(metric)
    result = np.full(len(window.series), np.nan)
    if values is not None:
        for row in values:
            np.copyto(result, row, where=np.isfinite(row))
    return result
