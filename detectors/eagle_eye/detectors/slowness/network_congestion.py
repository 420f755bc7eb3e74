"""Detects congestion between nodes: all ranks' collectives take longer and no node is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.job_slowdown import QuantityChange, overdue, slowed_by_network
from eagle_eye.detectors.signs.medians import quantile_over_rows
from eagle_eye.detectors.signs.port_signs import CONGESTION_PER_S, HOLD_S, LEAF_NODES_MIN, pause_signs
from eagle_eye.detectors.signs.progress import Patience
from eagle_eye.detectors.signs.recent_rows import lines_for, middle, past, rates
from eagle_eye.detectors.signs.topology import named, struck_switches
from eagle_eye.detectors.types import Blind, Evidence, Floats, Verdict, Window

# Metric, minimum in its unit (per second), unit. Pauses: 1% of the time at 400 Gb/s, 3% at 100 Gb/s.
GAUGES = (
    ("node_pfc_rx_pause_packets_per_second", 100.0, "packets_per_second"),
    ("node_tcp_retransmits_per_second", 20.0, "segments_per_second"),
)
NOTIFICATIONS = "node_congestion_notifications_total"
PAST_FACTOR = 3.0  # times the node's own past
HELD_QUANTILE = 0.3  # of the rows of HOLD_S, which must be high: pauses come in bursts
MOST_RATIO = 0.5  # of the nodes, from which on it affects the whole job
NEARLY_ALL_RATIO = 0.8  # of the nodes, above which listing them is pointless
HARDER_RATIO = 1.1  # times what any other node shows
PAST_ROWS_MIN = 3
SLOWER_RATIO = 0.03  # a smaller slowdown is not worth reporting
LOOKED_BACK_S = (60.0, 120.0, 240.0)
LASTS_S = 20.0  # bursts take less, and a report without action can wait
CONFIDENCE_ONE, CONFIDENCE_SEVERAL = 0.8, 0.92


class _Sign(NamedTuple):
    """A counter that is high on some nodes: which nodes, each node's rate (N,), and the evidence."""

    up: NDArray[np.bool_]
    rate: Floats
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCongestion:
    """Finds ``network_congestion``: notifications, received pauses or retransmissions high on many nodes together.

    Many means half of the job's nodes, or most of one switch's and few others. If it reaches all nodes and one switch's
    nodes show more than any other, that switch is named. High means ``PAST_FACTOR`` times the node's own past and above
    an absolute floor, in most of the newest rows. The job must also be slower: collectives longer than before while no
    rank's compute or data time is (42 of 43 multi-node fail-slows were congestion, and no node's fault: Greyhound, ATC
    2025). A burst that slows nothing is not reported. No node is accused or excluded. A single node that sends pauses
    explains those that the others receive: NicDegraded reports that. Blind without any of these counters. Cannot see:
    congestion present since the job's first step.
    """

    patience: Patience
    name: str = "network_congestion"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        if NOTIFICATIONS not in window.node and not any(metric in window.node for metric, _, _ in GAUGES):
            raise Blind("no congestion notifications, PFC pauses or retransmissions are observed")
        if overdue(window, self.patience) or len(window.node_times_s) <= PAST_ROWS_MIN:
            return []
        if not self._maybe(window):
            return []
        slow = self._slow(window)
        if slow is None or slow[1].ratio < SLOWER_RATIO or window.now_s - slow[0].since_s < LASTS_S:
            return []
        if slow[0].since_s <= window.node_times_s[PAST_ROWS_MIN - 1]:
            return []  # the period before is no longer in the window
        if pause_signs(window):
            return []
        signs = self._signs(window, slow[0].since_s)
        if not signs:
            return []
        struck = np.any([sign.up for sign in signs], axis=0)
        nodes, where = _concerned(window, struck)
        if len(nodes) >= NEARLY_ALL_RATIO * len(window.nodes):
            nodes, where = _worst_switch(window, signs) or (nodes, where)
        return [] if where is None else [self._verdict(window, nodes, where, slow, [sign.evidence for sign in signs])]

    def _slow(self, window: Window) -> tuple[QuantityChange, QuantityChange, str] | None:
        """Return how the job became slower recently or, where steps are too uneven to tell soon, over a longer time."""
        found = slowed_by_network(window)
        for back_s in LOOKED_BACK_S:
            if found is None and window.now_s - back_s > window.started_s:
                found = slowed_by_network(window, window.now_s - back_s)
        return found

    def _maybe(self, window: Window) -> bool:
        """Whether any counter is above its floor on two nodes: the cheap check that ends a pass over a healthy job."""
        notified = _notification_rate(window)
        if notified is not None and int((notified >= CONGESTION_PER_S).sum()) > 1:
            return True
        return any(
            int((np.fmax.reduce(window.node[metric][-PAST_ROWS_MIN:], axis=0) >= least).sum()) > 1
            for metric, least, _ in GAUGES
            if metric in window.node
        )

    def _signs(self, window: Window, since_s: float) -> list[_Sign]:
        """Return each counter that has been high on some nodes since ``since_s``."""
        before = int(np.searchsorted(window.node_times_s, since_s, side="right"))
        lines = lines_for(window.node_times_s, window.interval_s, HOLD_S)
        notified = _notification_rate(window)
        found = []
        for metric, least, unit in GAUGES:
            values = window.node.get(metric)
            if values is not None:
                now = quantile_over_rows(values[-lines:], HELD_QUANTILE)
                found.append((metric, now, past(values, before), least, unit))
        if notified is not None:
            usual = rates(window.node[NOTIFICATIONS][:before], window.node_times_s[:before], before - 1)
            found.append((NOTIFICATIONS, notified, usual, CONGESTION_PER_S, "packets_per_second"))
        signs = []
        for metric, now, usual, least, unit in found:
            up = now >= np.fmax(least, PAST_FACTOR * usual)
            if up.any():
                threshold = max(least, PAST_FACTOR * middle(usual))
                evidence = Evidence(metric, None, None, middle(now[up]), middle(usual), threshold, unit)
                signs.append(_Sign(up, now, evidence))
        return signs

    def _verdict(
        self,
        window: Window,
        nodes: tuple[str, ...],
        where: str,
        slow: tuple[QuantityChange, QuantityChange, str],
        found: list[Evidence],
    ) -> Verdict:
        waits, steps, kind = slow
        shown = ", ".join(f"{item.metric} at {item.value:.0f}/s" for item in found)
        return Verdict(
            detector=self.name,
            fault="network_congestion",
            job=window.job,
            nodes=nodes,
            node=None,
            device=None,
            confidence=CONFIDENCE_SEVERAL if len(found) > 1 else CONFIDENCE_ONE,
            onset_s=waits.since_s,
            summary=(
                f"the network is congested {where} ({shown}): {waits}, the job's steps are"
                f" {100 * steps.ratio:.0f}% longer, and no node's own work is"
            ),
            evidence=(*found, waits.evidence),
            kinds=frozenset({"congestion", kind}),
            slowdown_ratio=steps.ratio,
            asks="notify",
        )


def _notification_rate(window: Window) -> Floats | None:
    """Return each node's congestion notifications per second over HOLD_S: (N,); None if nothing counts them."""
    counter = window.node.get(NOTIFICATIONS)
    if counter is None or len(counter) <= PAST_ROWS_MIN:
        return None
    lines = lines_for(window.node_times_s, window.interval_s, HOLD_S)
    return rates(counter, window.node_times_s, lines)


def _worst_switch(window: Window, signs: Sequence[_Sign]) -> tuple[tuple[str, ...], str] | None:
    """Return the nodes of a switch that are all hit harder than any other node: its overflow affects all others.

    None if no counter shows one.
    """
    names = np.array(window.switches)
    for switch in sorted({name for name in window.switches if name}):
        there = names == switch
        for sign in signs:
            inside, outside = (sign.rate[some & np.isfinite(sign.rate)] for some in (there, ~there))
            if len(inside) < LEAF_NODES_MIN or len(outside) == 0:
                continue
            # With only one or two nodes elsewhere, chance may make them the least hit: require a larger distance than
            # the spread here.
            apart = HARDER_RATIO if len(outside) >= LEAF_NODES_MIN else max(HARDER_RATIO, _spread(inside))
            if float(inside.min()) >= apart * float(outside.max()):
                return tuple(window.nodes[i] for i in np.flatnonzero(there).tolist()), f"at {switch}"
    return None


def _spread(rates: Floats) -> float:
    """Return the highest rate divided by the lowest; inf if one is zero."""
    lowest = float(rates.min())
    return float(rates.max()) / lowest if lowest > 0 else float("inf")


def _concerned(window: Window, struck: NDArray[np.bool_]) -> tuple[tuple[str, ...], str | None]:
    """Return the affected nodes, and a description of where they are; None: too few to be the network."""
    count, total = int(struck.sum()), len(window.nodes)
    if count >= NEARLY_ALL_RATIO * total and count > 1:
        return tuple(window.nodes[i] for i in np.flatnonzero(struck)), "between all nodes"
    if any(window.switches):
        group = struck_switches(struck, np.arange(total), window.switches)
        if group is not None:
            there = np.array([switch in group.switches for switch in window.switches])
            if (there & struck).sum() < NEARLY_ALL_RATIO * there.sum():
                there &= struck
            return tuple(window.nodes[i] for i in np.flatnonzero(there).tolist()), f"at {', '.join(group.switches)}"
    if count > MOST_RATIO * total and count > 1:
        nodes = tuple(window.nodes[i] for i in np.flatnonzero(struck).tolist())
        return nodes, f"around {named(nodes)}"
    return (), None
