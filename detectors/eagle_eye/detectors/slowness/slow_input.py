"""Detects a node whose ranks wait for data while all others have theirs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.own_pace import require_cpu, require_pace
from eagle_eye.detectors.signs.peers import peers_median, step_levels
from eagle_eye.detectors.signs.progress import typical_step_s
from eagle_eye.detectors.signs.rank_cost import cost_by_pace
from eagle_eye.detectors.signs.slow_share import Slowness
from eagle_eye.detectors.types import Blind, Evidence, Floats, Verdict, Window

STEPS_LOOKED_AT = 6
STEADY_STEPS_MIN = 5  # of these, in which the wait must be long: one late batch is normal
NODES_RATIO_MAX = 0.2  # more nodes than this (and more than one) waiting: the storage, not a host
ARRIVAL_EXCESS_RATIO = 0.5  # of the excess wait for data, that is missing from the wait for peers
COST_SHARE = 0.5  # of what the steps would be longer if all of them waited for it, that they must be longer
# Signs of a host that cannot deliver data in time, and by how much they must exceed the other nodes' and its own past.
HOST_SIGNS = {
    "node_mounts_unresponsive": (1.0, "mounts"),
    "node_io_pressure_ratio": (0.1, "ratio"),
    "node_iowait_ratio": (0.05, "ratio"),
    "node_blocked_tasks": (2.0, "tasks"),
    "node_cpu_steal_ratio": (0.05, "ratio"),
    "node_cpu_pressure_ratio": (0.2, "ratio"),
}
CONFIDENCE_LONE, CONFIDENCE_EARLY, CONFIDENCE_RIPE = 0.6, 0.85, 0.93


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowInput:
    """Names the node whose data wait makes every step longer: its host, its disk or mount, or its share of the data.

    A rank's data wait in a step is compared with the median of the other ranks of its role. It counts where it exceeds
    that by ``ratio`` of the step in most of the newest steps, has lasted ``floor_s``, and steps are longer since: all
    that a program does between two steps is such a wait, and ranks that are early may wait as long for nothing. It is
    certain once it has lasted ``ripe_s`` and the host shows why: it waits for I/O, has blocked tasks, a mount that does
    not answer, or no CPU, unlike any other node and unlike before. A shorter wait for peers shows the cost but not the
    reason: a slow shard of the data looks the same, and would wait on any other node. Where the steps before are not
    known, host and shorter wait together stand for them. If several nodes wait, the storage is at fault; if all do, no
    node is. Blind if data waits are not reported, while the job has no pace yet, where most hosts are short of CPU
    (``signs/own_pace``), and where it is not known whether steps are longer. Cannot see: data that is slow for every
    node; a loader that prefetches far enough to hide it.
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
        require_pace(window)
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
        require_cpu(window)
        onset = self._onset(waits[:, worst], limit_s)
        since_s = float(window.steps.times_s[onset]) - step_s
        if window.now_s - since_s < self.floor_s:
            return []
        excess_s = float(typical[worst])
        expected = excess_s / (step_s - excess_s) if step_s > excess_s else 1.0
        cost = cost_by_pace(window, onset, expected)
        if cost is not None and cost.measured and cost.ratio < COST_SHARE * expected:
            return []  # the steps do not wait for it
        return [self._verdict(window, worst, since_s, excess_s, step_s, cost)]

    def _onset(self, waits: Floats, limit_s: float) -> int:
        """Return the line of the first of the current run of long waits; single short waits are ignored."""
        first = len(waits) - 1
        missed = 0
        for line in range(len(waits) - 1, -1, -1):
            missed = 0 if waits[line] > limit_s else missed + 1
            if missed > STEPS_LOOKED_AT - STEADY_STEPS_MIN:
                break
            first = line if missed == 0 else first
        return first

    def _verdict(
        self, window: Window, index: int, since_s: float, excess_s: float, step_s: float, cost: Slowness | None
    ) -> Verdict:
        """Return the verdict. Raises Blind if nothing shows that steps are longer: by ``cost``, None if not known."""
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
        late, peers = step_levels(window, "nccl_collective_seconds", -STEPS_LOOKED_AT, index, others)
        arrives_late = late <= peers - ARRIVAL_EXCESS_RATIO * excess_s
        if arrives_late:
            evidence.append(
                Evidence("nccl_collective_seconds", series.node, series.device, late, peers, None, "seconds")
            )
        kinds = {"data_wait"}
        host = _host_sign(window, int(window.node_of[index]), since_s)
        if host is not None:
            kinds.add("host_wait")
            evidence.append(host)
        if cost is None and arrives_late and host is not None:
            cost = Slowness(excess_s / max(step_s - excess_s, excess_s), measured=False)
        if cost is None or cost.ratio <= 0:
            reason = "there is no time before" if cost is None else "their length varies too much"
            raise Blind(f"{series.node} waits longer for its data; whether steps are longer for it: {reason}")
        why = (
            "its host, disk or mount"
            if host
            else "its host, or its part of the data, which on another node would wait, too"
        )
        confidence = CONFIDENCE_LONE
        if host is not None:
            confidence = CONFIDENCE_RIPE if window.now_s - since_s >= self.ripe_s else CONFIDENCE_EARLY
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
                f"{series.node} waits {own_s:.3g} s a step for its data, its peers {own_s - excess_s:.3g} s:"
                f" {why}; {cost}"
            ),
            evidence=tuple(evidence),
            kinds=frozenset(kinds),
            slowdown_ratio=cost.ratio,
        )


def _host_sign(window: Window, node: int, since_s: float) -> Evidence | None:
    """Return a host sign since ``since_s`` that no other node shows and that is new; None: no sign or no rows.

    Without rows from before, the other nodes' are the only reference.
    """
    after = window.node_times_s >= since_s
    for metric, (excess, unit) in HOST_SIGNS.items():
        values = window.node.get(metric)
        if values is None or not np.isfinite(values[after, node]).any():
            continue
        own = float(np.nanmedian(values[after, node]))
        others = np.delete(values[after], node, axis=1)
        before = values[~after, node]
        known = others[np.isfinite(others)]
        if len(known) == 0:
            continue
        usual = float(np.median(known))
        was = float(np.nanmedian(before)) if np.isfinite(before).any() else usual
        limit = max(usual, was) + excess
        if own >= limit:
            return Evidence(metric, window.nodes[node], None, own, usual, limit, unit)
    return None
