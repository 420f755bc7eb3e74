"""Detects a GPU whose PCIe link has lost width or speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.activity_pace import PaceChange
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD, growth
from eagle_eye.detectors.signs.readings import READINGS_MIN, lasting, readings
from eagle_eye.detectors.signs.recent_rows import grown
from eagle_eye.detectors.signs.slow_share import Slowness, compute_excess, pace_change, slowness_by_pace
from eagle_eye.detectors.signs.under_load import (
    PEERS_SAMPLED,
    PeerComparison,
    Rows,
    compare,
    compare_values,
    lines_within,
    loaded_rows,
    middle,
    peers_of,
    require_training,
    works,
)
from eagle_eye.detectors.types import Blind, Evidence, Floats, Integers, Verdict, Window

LASTS_S = 10.0  # a link must be seen degraded this long...
ROWS_MIN = 3  # ...in this many rows: a sample may hit a link while it retrains
READ_S = 180.0  # in which that many readings must be found, if a source is read less often than it is polled
LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}  # PCI-SIG, by generation
LANES_USUAL, GENERATION_USUAL = 16, 4  # if not reported
TRAFFIC_RATIO = 0.85  # of the peers' traffic over the link, below which it carries less...
TRAFFIC_SIGMAS = 5.0  # ...in robust standard deviations as well
REPLAYS_S = 180.0
REPLAYS_MIN = 12.0  # within REPLAYS_S: healthy links replay a few packets a day
REPLAYS_BEGUN = 0.03  # of all replays in the window, that may precede the onset
REPLAYS_RATIO, REPLAYS_SIGMAS = 2.0, 10.0  # times a typical peer's, and in robust deviations between peers
PAUSES_PER_SECOND = 200.0  # PFC pauses that a node sends: its adapter's buffers fill since PCIe does not drain them
PAUSES_RATIO = 5.0  # times the peers' (Minder, Deng et al. 2025: the first sign of a degraded PCIe link)
LINK_SIGNS = (("gpu_pcie_link_width", "lanes"), ("gpu_pcie_link_generation", "generation"))
# Existing values (PCI-SIG): any other is a failed reading, such as the 0 of a link that does not answer.
LINKS = {"gpu_pcie_link_width": (1, 2, 4, 8, 12, 16, 32), "gpu_pcie_link_generation": (1, 2, 3, 4, 5, 6, 7)}
TRAFFIC = ("gpu_pcie_rx_bytes_per_second", "gpu_pcie_tx_bytes_per_second")
SUSPECTS_MAX = 32
ALWAYS_RATIO = 0.05  # of all links: if more were always narrow, they are built that way
MANY_NODES = 3  # with a narrower link all along: built that way
CONFIDENCE_SURE, CONFIDENCE_LINK, CONFIDENCE_REPLAYS = 0.95, 0.85, 0.9


@dataclass(frozen=True, slots=True, eq=False)
class _Suspect:
    index: int
    peers: Integers
    rows: Rows
    onset_s: float
    chronic: bool
    lost: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieDegraded:
    """Names the node with a GPU whose PCIe link runs narrower or slower than its peers' under load.

    The link's width or generation is compared with the same GPU slot of other nodes and with its own past, only in rows
    under load: idle GPUs lower the generation to save power. A degraded link is one kind of evidence; others are less
    traffic over it than the peers' under the same load, replays, pauses (PFC) that the node's adapter sends because
    PCIe does not drain it (Minder, NSDI 2025), and steps that became longer at the same time. If links are not
    reported, replays need two of those. Blind if neither links nor replays are reported. Cannot see: a link between NIC
    and switch; a slot built narrower on all nodes.
    """

    name: str = "pcie_degraded"
    every_s: float = 2.0  # hardware effects last longer than this

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node with a degraded link."""
        device = window.device
        if not any(metric in device for metric, _ in LINK_SIGNS) and "gpu_pcie_replays_total" not in device:
            raise Blind("neither PCIe links nor replays are reported")
        narrow, replaying = _narrow(window), _replaying(window)
        if not narrow and not replaying:
            return []
        require_training(window)
        rows = loaded_rows(window, lines_within(window.times_s, LASTS_S))
        if len(rows) < ROWS_MIN:
            raise Blind("the job is not under load: PCIe links cannot be compared")
        slots = np.array([series.device for series in window.series])
        worst: dict[int, list[_Suspect]] = {}
        for index in (narrow + [i for i in replaying if i not in narrow])[:SUSPECTS_MAX]:
            suspect = _close_look(window, index, rows, slots)
            if suspect.lost or index in replaying:
                worst.setdefault(int(window.node_of[index]), []).append(suspect)
        if sum(all(s.chronic and s.lost for s in own) for own in worst.values()) >= MANY_NODES:
            worst = {node: own for node, own in worst.items() if not all(s.chronic and s.lost for s in own)}
        verdicts = (self._judge(window, own, set(replaying)) for own in worst.values())
        return [verdict for verdict in verdicts if verdict is not None]

    def _judge(self, window: Window, found: list[_Suspect], replaying: set[int]) -> Verdict | None:
        first = max(found, key=lambda suspect: (bool(suspect.lost), suspect.index in replaying))
        series = window.series[first.index]
        onset_s = min(suspect.onset_s for suspect in found)
        kinds: set[str] = set()
        evidence = list(first.lost)
        if first.lost:
            kinds.add("pcie_link")
        less = _less_traffic(window, first)
        if less is not None:
            kinds.add("pcie_bandwidth")
            evidence.append(less)
        replays = _replays(window, first) if first.index in replaying else None
        if replays is not None:
            kinds.add("pcie_replays")
            evidence.append(replays)
        pauses = _pauses(window, int(window.node_of[first.index]))
        if pauses is not None:
            kinds.add("pfc_pauses")
            evidence.append(pauses)
        paced = pace_change(window, onset_s, chronic=first.chronic)
        if paced is not None and paced.clear:
            kinds.add("step_time")
        if first.lost:
            lasted = window.now_s - onset_s >= LASTS_S
            confidence = CONFIDENCE_SURE if len(kinds) > 1 and lasted else CONFIDENCE_LINK
        elif len(kinds) >= 3:
            confidence = CONFIDENCE_REPLAYS
        else:
            return None
        cost = _cost(window, found, onset_s, paced)
        what = ", ".join(_reported(item) for item in evidence[:2])
        return Verdict(
            detector=self.name,
            fault="pcie_degraded",
            job=window.job,
            nodes=(series.node,),
            node=series.node,
            device=series.device if len(found) == 1 else None,
            confidence=confidence,
            onset_s=onset_s,
            summary=f"the PCIe link of {series} is degraded: {what}; {cost}",
            evidence=tuple(evidence),
            kinds=frozenset(kinds),
            slowdown_ratio=cost.ratio,
        )


def _narrow(window: Window) -> list[int]:
    """Return the series whose link was below their role's best in the newest rows, those that dropped first."""
    fell: list[int] = []
    always: list[int] = []
    for metric, _ in LINK_SIGNS:
        values = window.device.get(metric)
        if values is None or len(values) < ROWS_MIN:
            continue
        held = np.fmax.reduce(values[-ROWS_MIN:], axis=0)
        if not (held < np.fmax.reduce(held)).any():
            continue
        best = np.full(int(window.role_of.max()) + 1, -np.inf)
        np.fmax.at(best, window.role_of, held)
        low = held < best[window.role_of]
        before = np.fmax.reduce(values[:: max(len(values) // 8, 1)], axis=0)
        fell += np.flatnonzero(low & (held < before))[:SUSPECTS_MAX].tolist()
        rest = np.flatnonzero(low & ~(held < before))
        if len(rest) <= max(SUSPECTS_MAX, ALWAYS_RATIO * len(held)):
            always += rest[:SUSPECTS_MAX].tolist()
    return list(dict.fromkeys(fell + always))


def _replaying(window: Window) -> list[int]:
    values = window.device.get("gpu_pcie_replays_total")
    if values is None or len(values) < 2:
        return []
    lines = lines_within(window.times_s, REPLAYS_S)
    if not (grown(values, lines) >= REPLAYS_MIN).any():
        return []
    total = growth(values, lines + 1)
    known = total[np.isfinite(total)]
    if len(known) == 0:
        return []
    usual = float(np.median(known))
    sigma = max(SIGMA_PER_MAD * float(np.median(np.abs(known - usual))), math.sqrt(usual))
    over = np.flatnonzero(total >= max(REPLAYS_MIN, REPLAYS_RATIO * usual + REPLAYS_SIGMAS * sigma))
    return [int(index) for index in over[:SUSPECTS_MAX]]


def _close_look(window: Window, index: int, rows: Rows, slots: Integers) -> _Suspect:
    """Return what the link has lost against its slot on other nodes (or all peers) and its own past, under load."""
    alike = (slots == slots[index]) & (window.role_of == window.role_of[index])
    peers: Integers = np.flatnonzero(alike & (window.node_of != window.node_of[index]))[:PEERS_SAMPLED]
    if len(peers) < 2:
        peers = peers_of(window, index, window.role_of)
    series = window.series[index]
    lost = []
    onset_s, chronic = float(window.times_s[rows[0]]) - window.interval_s, True
    busy = works(window, index, peers, rows)
    worked = loaded_rows(window, lines_within(window.times_s, READ_S)) if busy else rows
    for metric, unit in LINK_SIGNS:
        found = _compare_links(window, metric, index, peers, rows) if busy else None
        if found is None or not found.own < found.peers:
            continue
        own = _link(window, metric, index)
        reported = worked[np.isfinite(own[worked])]
        newest = own[reported[-max(READINGS_MIN, int((reported >= rows[0]).sum())) :]]
        if len(newest) < READINGS_MIN or not (newest < found.peers).all():
            continue
        lost.append(Evidence(metric, series.node, series.device, middle(newest), found.peers, found.peers, unit))
        higher = np.flatnonzero(lasting(own) >= found.peers)
        if len(higher):
            chronic = False
            onset_s = float(window.times_s[higher[-1]])
        else:
            onset_s = float(window.times_s[0]) - window.interval_s
    if not lost:
        onset_s, chronic = _replays_began(window, index)
    return _Suspect(index, peers, rows, onset_s, chronic, tuple(lost))


def _link(window: Window, metric: str, index: int) -> Floats:
    """Return a link's readings, (T,); NaN if there was none: an answering device always has one."""
    return _possible(metric, readings(window, metric, index))


def _possible(metric: str, values: Floats) -> Floats:
    return np.where(np.isin(values, LINKS[metric]), values, np.nan)


def _compare_links(window: Window, metric: str, index: int, peers: Integers, rows: Rows) -> PeerComparison | None:
    """Return how a link compares with its peers' over some rows; None if not observed."""
    values = window.device.get(metric)
    if values is None or len(rows) == 0 or len(peers) == 0:
        return None
    own, others = values[rows, index], values[np.ix_(rows, peers)]
    return compare_values(_possible(metric, own), _possible(metric, others))


def _replays_began(window: Window, index: int) -> tuple[float, bool]:
    """Return when the link's replays began to grow, and whether the window shows no time before."""
    counts = window.device.get("gpu_pcie_replays_total")
    own = counts[:, index] if counts is not None else np.zeros(0)
    known = np.flatnonzero(np.isfinite(own))
    if len(known) < 2:
        return float(window.times_s[-1]) - window.interval_s, True
    total = own[known[-1]] - own[known].min()
    before = known[own[known] <= own[known].min() + REPLAYS_BEGUN * total]
    return float(window.times_s[before[-1]]), len(before) < ROWS_MIN


def _less_traffic(window: Window, suspect: _Suspect) -> Evidence | None:
    series = window.series[suspect.index]
    for metric in TRAFFIC:
        found = compare(window, metric, suspect.index, suspect.peers, suspect.rows)
        if found is None:
            continue
        if found.ratio <= TRAFFIC_RATIO and found.peers - found.own >= TRAFFIC_SIGMAS * found.sigma:
            line = found.peers * TRAFFIC_RATIO
            return Evidence(metric, series.node, series.device, found.own, found.peers, line, "bytes_per_second")
    return None


def _replays(window: Window, suspect: _Suspect) -> Evidence:
    values = window.device["gpu_pcie_replays_total"]
    lines = lines_within(window.times_s, REPLAYS_S) + 1
    own = float(growth(values[:, suspect.index : suspect.index + 1], lines)[0])
    peers = middle(growth(values[:, suspect.peers], lines)) if len(suspect.peers) else math.nan
    series = window.series[suspect.index]
    return Evidence("gpu_pcie_replays_total", series.node, series.device, own, peers, REPLAYS_MIN, "replays")


def _pauses(window: Window, node: int) -> Evidence | None:
    """Return how many more pauses the node's adapters send than other nodes'; None if they do not."""
    metric = "node_pfc_tx_pause_packets_per_second"
    values = window.node.get(metric)
    if values is None or len(window.nodes) < 3:
        return None
    lines = lines_within(window.node_times_s, LASTS_S)
    recent: Floats = values[-lines:]
    own = middle(recent[:, node])
    others = np.array([middle(recent[:, other]) for other in range(min(len(window.nodes), 64)) if other != node])
    usual = middle(others)
    sigma = SIGMA_PER_MAD * middle(np.abs(others - usual))
    line = max(PAUSES_PER_SECOND, PAUSES_RATIO * usual, usual + 5 * sigma)
    if not own > line:
        return None
    return Evidence(metric, window.nodes[node], None, own, usual, line, "packets_per_second")


def _cost(window: Window, found: list[_Suspect], onset_s: float, paced: PaceChange | None) -> Slowness:
    """Return the cost of the link: by the job's pace, the ranks' compute times, else by how long the link is busy."""
    reckoned = max((_longer_busy(window, suspect) for suspect in found), default=0.0)
    if paced is not None:
        return slowness_by_pace(paced, reckoned)
    excess = compute_excess(window, [suspect.index for suspect in found], onset_s)
    if excess is not None and excess > 0.02:
        return Slowness(excess, measured=True)
    return Slowness(reckoned, measured=False)


def _longer_busy(window: Window, suspect: _Suspect) -> float:
    """Return by what share of the time moving its peers' traffic keeps the link busy longer than theirs."""
    moved = 0.0
    for metric in TRAFFIC:
        found = compare(window, metric, suspect.index, suspect.peers, suspect.rows)
        moved = max(moved, found.peers if found is not None else 0.0)
    width, generation = (
        _compare_links(window, metric, suspect.index, suspect.peers, suspect.rows) for metric, _ in LINK_SIGNS
    )
    lanes = width or PeerComparison(float(LANES_USUAL), float(LANES_USUAL), 0.0)
    speed = generation or PeerComparison(float(GENERATION_USUAL), float(GENERATION_USUAL), 0.0)
    now, usually = lanes.own * _lane(speed.own), lanes.peers * _lane(speed.peers)
    return max(moved / now - moved / usually, 0.0) if min(now, usually) > 0 else 0.0


def _lane(generation: float) -> float:
    return LANE_BYTES_PER_SECOND.get(round(generation), LANE_BYTES_PER_SECOND[GENERATION_USUAL])


def _reported(item: Evidence) -> str:
    if item.metric == "gpu_pcie_link_width":
        return f"x{item.value:.0f} instead of x{item.peers_median:.0f}"
    if item.metric == "gpu_pcie_link_generation":
        return f"generation {item.value:.0f} instead of {item.peers_median:.0f}"
    if item.metric == "gpu_pcie_replays_total":
        return f"{item.value:.0f} replays in three minutes"
    return f"{item.metric} {item.value:.3g}, its peers' {item.peers_median:.3g}"
