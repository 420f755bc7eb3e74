"""Detects a GPU whose memory is slow: hot and throttled, or clocked below its peers'."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.documented import memory_limits_c
from eagle_eye.detectors.signs.readings import READINGS_MIN, readings
from eagle_eye.detectors.signs.shared_cause import Struck, partition
from eagle_eye.detectors.signs.slow_clocks import CLEAR_DEFICIT, SlowClock, slow_clocks
from eagle_eye.detectors.signs.slow_share import Slowness, compute_excess, slowness_by_clock
from eagle_eye.detectors.signs.topology import named
from eagle_eye.detectors.signs.under_load import (
    ROWS_MIN,
    PeerComparison,
    compare,
    lines_within,
    loaded_rows,
    middle,
    peers_of,
    require_training,
)
from eagle_eye.detectors.types import Blind, Evidence, Verdict, Window

HOTTER_C = 8.0  # than the peers' memory
EXCESS_MIN = 0.05  # of a step, by which a rank with hot memory computes longer: then it is no coincidence
HOT_LASTS_S = 30.0
MEMORY_BOUND_SHARE = 0.5  # of the compute time, that scales with the memory clock in training transformers
SUSPECTS_MAX = 16
CONFIDENCE_CLEAR, CONFIDENCE_LIKELY, CONFIDENCE_HOT = 0.93, 0.8, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMemory:
    """Names the node with a GPU whose memory is slow.

    A memory clock below the peers' (``SlowClock``: under load, lasting) is one kind of evidence; memory at the limit of
    its type (95 C if undocumented) and well above its peers' temperature is another. Both together are
    ``thermal_throttle``, the clock alone is a ``straggler`` with this as evidence. Hot memory whose clock is not
    reported counts if its rank also computes longer than its peers; it then only supports what Straggler finds. Blind
    if neither memory clock nor memory temperature is reported. Cannot see: memory that is slow from retries at a normal
    clock and temperature.
    """

    name: str = "slow_memory"
    every_s: float = 2.0  # hardware effects last longer than this

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node with slow memory."""
        clocked = "gpu_memory_clock_hertz" in window.device
        if not clocked and "gpu_memory_temperature_celsius" not in window.device:
            raise Blind("neither memory clocks nor memory temperatures are reported")
        slow = [found for found in slow_clocks(window, "gpu_memory_clock_hertz") if found.lasting] if clocked else []
        slow = [found for found in slow if not found.chronic or _is_hot(window, found)]  # else another GPU model
        worst: dict[int, SlowClock] = {}
        for found in slow:
            worst.setdefault(int(window.node_of[found.index]), found)
        verdicts = []
        if worst:
            accused = {node: Struck(node, None if s.chronic else s.onset_s) for node, s in worst.items()}
            alone, cohorts = partition(window, accused, [])
            # Many nodes with another memory clock are another model or setting, not that many faulty GPUs.
            verdicts = (
                [self._low_clock(window, worst[node]) for node in alone] if not cohorts and len(alone) < 3 else []
            )
        return verdicts + self._hot(window, set(worst))

    def _low_clock(self, window: Window, slow: SlowClock) -> Verdict:
        series = window.series[slow.index]
        heat = compare(window, "gpu_memory_temperature_celsius", slow.index, slow.peers, slow.rows)
        hot = _is_hot(window, slow)
        cost = slowness_by_clock(window, [slow.index], slow.onset_s, 1 - slow.deficit, slow.chronic)
        if not cost.measured:
            cost = Slowness(cost.ratio * MEMORY_BOUND_SHARE, measured=False)
        evidence = [
            Evidence(
                "gpu_memory_clock_hertz",
                series.node,
                series.device,
                slow.clock_hz,
                slow.peers_hz,
                slow.peers_hz * (1 - CLEAR_DEFICIT),
                "hertz",
            )
        ]
        kinds = {"memory_clock"}
        if hot and heat is not None:
            kinds.add("memory_temperature")
            evidence.append(_heat_evidence(window, slow.index, heat.own, heat.peers))
        how = f" at {heat.own:.0f} C" if hot and heat is not None else ""
        return Verdict(
            detector=self.name,
            fault="thermal_throttle" if hot else "straggler",
            job=window.job,
            nodes=(series.node,),
            node=series.node,
            device=series.device,
            confidence=CONFIDENCE_CLEAR if hot else CONFIDENCE_LIKELY,
            onset_s=slow.onset_s,
            summary=(
                f"the memory of {series} is slow{how}: its clock is {slow.clock_hz / 1e6:.0f} MHz,"
                f" its peers' {slow.peers_hz / 1e6:.0f} MHz; {cost}"
            ),
            evidence=tuple(evidence),
            kinds=frozenset(kinds),
            slowdown_ratio=cost.ratio,
        )

    def _hot(self, window: Window, known: set[int]) -> list[Verdict]:
        """Return the verdicts on GPUs with hot memory whose ranks compute longer than their peers."""
        temperature = window.device.get("gpu_memory_temperature_celsius")
        if temperature is None or len(temperature) < ROWS_MIN:
            return []
        held = np.fmin.reduce(temperature[-ROWS_MIN:], axis=0)
        limits_c = memory_limits_c(window)
        suspects = np.flatnonzero(held >= limits_c)
        if len(suspects) == 0:
            return []
        require_training(window)
        rows = loaded_rows(window, lines_within(window.times_s, max(HOT_LASTS_S, READINGS_MIN * window.interval_s)))
        if len(rows) < ROWS_MIN:
            raise Blind("the job is not under load: temperatures say nothing about its pace")
        found: dict[int, Verdict] = {}
        for index in suspects[np.argsort(-held[suspects], kind="stable")][:SUSPECTS_MAX].tolist():
            node = int(window.node_of[index])
            read = readings(window, "gpu_memory_temperature_celsius", index)[rows]
            if np.count_nonzero(np.isfinite(read)) < READINGS_MIN:
                continue
            peers = peers_of(window, index, window.role_of)
            heat = compare(window, "gpu_memory_temperature_celsius", index, peers, rows)
            if node in known or node in found or heat is None:
                continue
            heat = heat._replace(own=middle(read))
            if not _too_hot(heat, float(limits_c[index])):
                continue
            since_s = float(window.times_s[rows[0]]) - window.interval_s
            excess = compute_excess(window, [index], since_s)
            if excess is not None and excess >= EXCESS_MIN:
                found[node] = self._hot_verdict(window, index, heat.own, heat.peers, excess, since_s)
        return list(found.values()) if len(found) < 3 else [self._room(window, list(found.values()))]

    def _hot_verdict(
        self, window: Window, index: int, own_c: float, peers_c: float, excess: float, since_s: float
    ) -> Verdict:
        series = window.series[index]
        return Verdict(
            detector=self.name,
            fault="thermal_throttle",
            job=window.job,
            nodes=(series.node,),
            node=series.node,
            device=series.device,
            confidence=CONFIDENCE_HOT,
            onset_s=since_s,
            summary=(
                f"the memory of {series} is at {own_c:.0f} C, its peers' at {peers_c:.0f} C,"
                f" and its rank computes longer; {Slowness(excess, measured=True)}"
            ),
            evidence=(_heat_evidence(window, index, own_c, peers_c),),
            kinds=frozenset({"memory_temperature"}),
            slowdown_ratio=excess,
        )

    def _room(self, window: Window, found: list[Verdict]) -> Verdict:
        nodes = tuple(verdict.nodes[0] for verdict in found)
        return Verdict(
            detector=self.name,
            fault="thermal_throttle",
            job=window.job,
            nodes=nodes,
            node=None,
            device=None,
            confidence=CONFIDENCE_HOT,
            onset_s=min(verdict.onset_s for verdict in found),
            summary=f"the memory of {named(nodes)} is too hot: the cooling of what they share, not the nodes",
            evidence=tuple(verdict.evidence[0] for verdict in found[:4]),
            kinds=frozenset({"memory_temperature"}),
            slowdown_ratio=max(verdict.slowdown_ratio for verdict in found),
            asks="notify",
        )


def _is_hot(window: Window, slow: SlowClock) -> bool:
    heat = compare(window, "gpu_memory_temperature_celsius", slow.index, slow.peers, slow.rows)
    return heat is not None and _too_hot(heat, float(memory_limits_c(window)[slow.index]))


def _too_hot(heat: PeerComparison, limit_c: float) -> bool:
    return heat.own >= limit_c and heat.own - heat.peers >= HOTTER_C


def _heat_evidence(window: Window, index: int, own_c: float, peers_c: float) -> Evidence:
    series, limit_c = window.series[index], float(memory_limits_c(window)[index])
    return Evidence("gpu_memory_temperature_celsius", series.node, series.device, own_c, peers_c, limit_c, "celsius")
