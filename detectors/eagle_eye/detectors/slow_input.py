"""A node whose ranks wait for their data while all others have theirs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.peers import peers_median, step_levels
from eagle_eye.detectors.signs.progress import typical_step_s
from eagle_eye.detectors.types import Blind, Evidence, Floats, Verdict, Window

STEPS_LOOKED_AT = 6
STEADY_STEPS_MIN = 5  # of these, in which the wait must be long: one late batch is daily life
NODES_RATIO_MAX = 0.2  # more nodes than this (and more than one) waiting: it is the storage, not a host
ARRIVAL_EXCESS_RATIO = 0.5  # of the excess wait for data, that is missing in the wait for peers
CONFIDENCE_LONE, CONFIDENCE_EARLY, CONFIDENCE_RIPE = 0.6, 0.85, 0.93


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowInput:
    """Names the node whose data wait makes every step longer: its host, its disk or its mount is suspect.

    A rank's wait for data in a step is compared with the median of the other ranks of its role. It counts where
    it exceeds that by ``ratio`` of the step in most of the newest steps and has lasted ``floor_s``; it is sure once
    it has lasted ``ripe_s`` and the rank waits correspondingly less for its peers: the second kind of evidence.
    Where several nodes wait it is the storage's matter, and where all do nobody's. Blind where nobody reports data
    waits. Cannot see: data that is slow for everyone; a loader that prefetches deep enough to hide it.
    """

    ratio: float
    floor_s: float
    ripe_s: float
    name: str = "slow_input"
    by_step: bool = True

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        if "train_data_wait_seconds" not in window.device:
            raise Blind("no rank reports how long it waits for data")
        waits = window.steps.values.get("train_data_wait_seconds")
        if waits is None or len(waits) < STEPS_LOOKED_AT:
            return []
        step_s = typical_step_s(window)
        limit_s = self.ratio * step_s
        if not (waits[-1] > limit_s).any():
            return []
        recent = waits[-STEPS_LOOKED_AT:]
        excess = np.array([row - peers_median(row, window.role_of) for row in recent])
        slow = (excess > limit_s).sum(axis=0) >= STEADY_STEPS_MIN
        nodes = np.unique(window.node_of[slow])
        if len(nodes) == 0 or (len(nodes) > 1 and len(nodes) > NODES_RATIO_MAX * len(window.nodes)):
            return []
        typical = median_over_rows(excess)
        worst = int(np.flatnonzero(slow)[np.argmax(typical[slow])])
        since_s = self._since_s(window, waits, worst, limit_s) - step_s
        if window.now_s - since_s < self.floor_s:
            return []
        return [self._verdict(window, worst, since_s, float(typical[worst]), step_s)]

    def _since_s(self, window: Window, waits: Floats, index: int, limit_s: float) -> float:
        """Return when the first of the unbroken row of long waits was reported; a single short one breaks nothing."""
        first = len(waits) - 1
        missed = 0
        for line in range(len(waits) - 1, -1, -1):
            missed = 0 if waits[line, index] > limit_s else missed + 1
            if missed > STEPS_LOOKED_AT - STEADY_STEPS_MIN:
                break
            first = line if missed == 0 else first
        return float(window.steps.times_s[first])

    def _verdict(self, window: Window, index: int, since_s: float, excess_s: float, step_s: float) -> Verdict:
        series = window.series[index]
        others = np.flatnonzero((window.role_of == window.role_of[index]) & (np.arange(len(window.series)) != index))
        own_s, _ = step_levels(window, "train_data_wait_seconds", -STEPS_LOOKED_AT, index, others)
        evidence = [
            Evidence(
                "train_data_wait_seconds",
                series.node,
                series.device,
                own_s,
                own_s - excess_s,
                own_s - excess_s + self.ratio * step_s,
                "seconds",
            )
        ]
        kinds = {"data_wait"}
        late, peers = step_levels(window, "nccl_collective_seconds", -STEPS_LOOKED_AT, index, others)
        if late <= peers - ARRIVAL_EXCESS_RATIO * excess_s:
            kinds.add("collective_arrival")
            evidence.append(
                Evidence("nccl_collective_seconds", series.node, series.device, late, peers, None, "seconds")
            )
        confidence = CONFIDENCE_LONE
        if len(kinds) > 1:
            confidence = CONFIDENCE_RIPE if window.now_s - since_s >= self.ripe_s else CONFIDENCE_EARLY
        slowdown = excess_s / (step_s - excess_s) if step_s > excess_s else 1.0
        return Verdict(
            detector=self.name,
            fault="straggler",
            job=window.job,
            nodes=(series.node,),
            node=series.node,
            device=series.device,
            confidence=confidence,
            onset_s=since_s,
            summary=(
                f"{series.node} waits {own_s:.2f} s a step for its data, its peers {own_s - excess_s:.2f} s:"
                f" its host, disk or mount; the job's steps are {100 * slowdown:.0f}% longer for it"
            ),
            evidence=tuple(evidence),
            kinds=frozenset(kinds),
            slowdown_ratio=slowdown,
        )
