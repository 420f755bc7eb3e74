"""Signs of a node's own network trouble: errors, pauses and load, compared with other nodes and its own past.

Each sign is evaluated per port if ports are observed, else for the node's sum over its ports.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.progress import hooked, typical_step_s
from eagle_eye.detectors.signs.readings import READINGS_MIN, link_read_anew, node_read_anew
from eagle_eye.detectors.signs.recent_rows import (
    HELD_LINES,
    held,
    lines_for,
    middle,
    onset_line,
    past,
    rates,
    share_of_rows,
)
from eagle_eye.detectors.signs.runs import longer_than_peers
from eagle_eye.detectors.types import Evidence, Floats, Window

HOLD_S = 15.0  # a sign must hold this long: microbursts and retrains are shorter
HELD_RATIO = 0.8  # of the rows of that time, and of that many readings
# The specified bit error rate of InfiniBand and Ethernet ports, 1e-12, is 0.4 errors/s at 400 Gb/s.
ERRORS_PER_S = 1.0
ERRORS_MIN = 10.0
ERRORS_HELD_RATIO = 0.5  # of the rows in which the counter must have grown
# A pause frame stops a priority for up to 65,535 times 512 bit times (IEEE 802.1Qbb): 84 µs at 400 Gb/s, 335 µs at 100.
PAUSES_PER_S = 200.0  # 2% of the time at 400 Gb/s
RETRANSMITS_PER_S = 20.0
PEERS_FACTOR = 5.0  # times what the others show
PAST_FACTOR = 3.0  # times its own past
ACCUSED_RATIO = 0.05  # of the nodes at most (always at least one): a sign on more of them is the network's
SUSPECTS_MAX = 64  # columns examined closely in one pass
OTHERS_SAMPLED = 512  # columns of other nodes that show how long ordinary bursts last
LOAD_RATIO = 0.7  # of the change in load of all ports: below it a port falls behind
LOAD_SIGMAS = 8.0
LOAD_ERRORS = 3.0  # standard errors of a port's own readings, which may hit or miss the bursts of its traffic
LOAD_FLOOR_RATIO = 0.03  # spread of load between similar ports
LOAD_STEPS = 3.0  # traffic comes in bursts within a step, so means cover whole steps
LOAD_COVERS_S = 120.0  # and as many readings as there are of that time
LOAD_UNKNOWN_S = 60.0  # if step length is not reported
LOAD_READINGS = 4.0  # a pause ends between two readings, and for each node at another share of them
LOAD_LINES_MAX = 64
LOAD_MIN_BYTES_PER_S = 1e7  # a port that carried less was not in use
CONGESTION_PER_S = 100.0  # notifications; a receiver sends at most one every 50 µs per flow (DCQCN, SIGCOMM 2015)
LEAF_NODES_MIN = 3  # of the job on one switch, before something they share is attributed to the switch
FEW_ELSEWHERE_RATIO = 0.25
PAUSED_RATIO = 0.5  # of the nodes receiving pauses: then lower load is the network's fault


class Sign(NamedTuple):
    """One kind of evidence against one node; ``rate`` in the metric's own unit or events per second."""

    node: int
    kind: str
    onset_s: float
    rate: float
    text: str
    evidence: Evidence


class _Source(NamedTuple):
    metric: str
    values: Floats
    times_s: Floats
    by_link: bool

    def read_anew(self, window: Window, columns: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return in which rows the source was read, where others repeat the last values: (T, columns)."""
        return (link_read_anew if self.by_link else node_read_anew)(window, columns)


def error_signs(window: Window) -> list[Sign]:
    """Return the nodes whose error counters grow steadily and far beyond the specified bit error rate."""
    source = _source(window, "link_errors_total", "node_rdma_errors_total")
    if source is None or len(source.values) <= HELD_LINES:
        return []
    lines = min(lines_for(source.times_s, window.interval_s, HOLD_S), len(source.values) - 1)
    found = rates(source.values, source.times_s, lines)
    least = max(ERRORS_PER_S, ERRORS_MIN / (source.times_s[-1] - source.times_s[-lines - 1]))
    others = middle(found)
    signs = []
    for column in _suspects(window, source, found, max(least, PEERS_FACTOR * others)):
        rate = float(found[column])
        rising = np.where(source.read_anew(window, (column,))[:, 0], _rising(source.values[:, column]), np.nan)
        if share_of_rows(_readings(rising, lines)) < ERRORS_HELD_RATIO or rate < PAST_FACTOR * _first_rate(
            source, column
        ):
            continue
        signs.append(
            _sign(
                window, source, column, "nic_errors", onset_line(rising, window.interval_s), rate, others, least,
                "errors_per_second", f"{rate:.1f} errors/s on",
            )
        )  # fmt: skip
    return _worst(signs)


def pause_signs(window: Window) -> list[Sign]:
    """Return the nodes that send far more PFC pauses than others: their buffers fill (Minder's first sign)."""
    source = _source(window, "link_pfc_tx_pause_packets_per_second", "node_pfc_tx_pause_packets_per_second")
    return _high(window, source, "pfc", PAUSES_PER_S, "packets_per_second", "PFC pauses/s sent by")


def retransmit_signs(window: Window) -> list[Sign]:
    """Return the nodes that retransmit far more TCP segments than others."""
    source = _source(window, "", "node_tcp_retransmits_per_second")
    text = "TCP segments/s sent again by"
    return _high(window, source, "retransmits", RETRANSMITS_PER_S, "segments_per_second", text)


def load_signs(window: Window, since_s: float) -> list[Sign]:
    """Return the ports that carry clearly less than before ``since_s``, relative to the change of all ports' load."""
    source = _source(window, "link_tx_bytes_per_second", "node_rdma_tx_bytes_per_second")
    if source is None or window.now_s - since_s < LOAD_READINGS * window.interval_s:
        return []
    before = int(np.searchsorted(source.times_s, since_s, side="right"))
    if before < HELD_LINES or len(source.values) - before < HELD_LINES:
        return []
    cycle_s = LOAD_STEPS * typical_step_s(window) if hooked(window) else LOAD_UNKNOWN_S
    span_s = max(cycle_s, LOAD_READINGS * window.interval_s, LOAD_COVERS_S)
    recent = slice(-min(lines_for(source.times_s, window.interval_s, span_s), len(source.values) - before), None)
    earlier = slice(max(before - LOAD_LINES_MAX, 0), before)
    usual, now = _mean(source.values[earlier]), _mean(source.values[recent])
    used = usual >= LOAD_MIN_BYTES_PER_S
    ratio = np.divide(now, usual, out=np.full(len(now), np.nan), where=used & np.isfinite(now))
    known = ratio[np.isfinite(ratio)]
    if len(known) <= 2:
        return []
    others = middle(ratio)
    if not others > 0.1:
        return []  # no traffic: an evaluation, a checkpoint, a standstill
    sigma = max(1.4826 * middle(np.abs(known - others)), LOAD_FLOOR_RATIO * others)
    low = ratio < min(LOAD_RATIO * others, others - LOAD_SIGMAS * sigma)
    for column in np.flatnonzero(low).tolist():
        error = _burst_error(window, source, column, earlier, recent)
        low[column] = usual[column] * others - now[column] >= LOAD_ERRORS * error * others
    signs = [
        _sign(
            window, source, column, "bandwidth", before, float(now[column]), float(usual[column]) * others,
            LOAD_RATIO * float(usual[column]) * others, "bytes_per_second",
            f"{now[column] / 1e9:.1f} GB/s where {usual[column] * others / 1e9:.1f} were due on",
        )
        for column in _suspects(window, source, np.where(low, -ratio, -np.inf), -np.inf)
    ]  # fmt: skip
    return _worst(signs)


def _burst_error(window: Window, source: _Source, column: int, earlier: slice, recent: slice) -> float:
    """Return the standard error of a port's mean load in the recent rows, from how its earlier readings vary."""
    values = np.where(source.read_anew(window, (column,))[:, 0], source.values[:, column], np.nan)
    before, count = values[earlier], int(np.isfinite(values[recent]).sum())
    return float(np.std(before[np.isfinite(before)])) / math.sqrt(max(count, 1))


def congested(window: Window) -> bool:
    """Whether congestion notifications have started somewhere: then errors and loss may be the network's."""
    return bool(_notified(window).any())


def paused_by_others(window: Window) -> bool:
    """Whether at least half of the nodes receive pauses: then a port may carry less through no fault of its own."""
    values = window.node.get("node_pfc_rx_pause_packets_per_second")
    return values is not None and len(values) > 0 and float((held(values) >= PAUSES_PER_S).mean()) >= PAUSED_RATIO


def leaf_congested(window: Window, node: int) -> bool:
    """Whether congestion notifications go to every node of this node's switch, and to few others.

    A slow adapter causes notifications to all its senders, on its switch or not.
    """
    notified, own = _notified(window), window.switches[node] if window.switches else ""
    leaf = np.array([bool(own) and switch == own for switch in window.switches], dtype=np.bool_)
    if len(leaf) != len(notified) or int(leaf.sum()) < LEAF_NODES_MIN:
        return False
    elsewhere = notified[~leaf]
    return bool(notified[leaf].all()) and len(elsewhere) > 0 and float(elsewhere.mean()) < FEW_ELSEWHERE_RATIO


def _notified(window: Window) -> NDArray[np.bool_]:
    """Return which nodes receive congestion notifications at a significant rate: (N,)."""
    values = window.node.get("node_congestion_notifications_total")
    if values is None or len(values) <= HELD_LINES:
        return np.zeros(len(window.nodes), dtype=np.bool_)
    lines = lines_for(window.node_times_s, window.interval_s, HOLD_S)
    return np.asarray(rates(values, window.node_times_s, lines) >= CONGESTION_PER_S)


def _source(window: Window, of_link: str, of_node: str) -> _Source | None:
    values = window.link.get(of_link)
    if values is not None:
        return _Source(of_link, values, window.link_times_s, by_link=True)
    values = window.node.get(of_node)
    return None if values is None else _Source(of_node, values, window.node_times_s, by_link=False)


def _high(window: Window, source: _Source | None, kind: str, least: float, unit: str, text: str) -> list[Sign]:
    if source is None or len(source.values) < HELD_LINES:
        return []
    low = held(source.values)
    if not (low >= least).any():
        return []
    lines = lines_for(source.times_s, window.interval_s, HOLD_S)
    # Over the same time as its own: when all stop at once, some nodes' rows show it sooner than others'.
    others = np.fmax(middle(low), middle(median_over_rows(source.values[-lines:])))
    threshold = max(least, PEERS_FACTOR * others)
    signs = []
    for column in _suspects(window, source, low, threshold):
        own = source.values[:, column]
        above = np.where(np.isfinite(own) & source.read_anew(window, (column,))[:, 0], own >= threshold, np.nan)
        if share_of_rows(_readings(above, lines)) < HELD_RATIO or _usual_elsewhere(
            window, source, column, above, threshold
        ):
            continue
        onset = onset_line(above, window.interval_s)
        rate = middle(own[-lines:])
        usual = float(past(own[:, None], onset)[0])
        if np.isfinite(usual) and rate < PAST_FACTOR * usual:
            continue
        signs.append(_sign(window, source, column, kind, onset, rate, others, threshold, unit, f"{rate:.0f} {text}"))
    return _worst(signs)


def _usual_elsewhere(window: Window, source: _Source, column: int, above: Floats, threshold: float) -> bool:
    """Whether ports of other nodes show such runs, too, and get over them: bursts are ordinary on such a fabric."""
    owners = np.array([link.node for link in window.links] if source.by_link else window.nodes)
    others = np.flatnonzero(owners != owners[column])
    others = others[:: len(others) // OTHERS_SAMPLED + 1]
    values = source.values[:, others]
    seen = source.read_anew(window, tuple(others.tolist())) & np.isfinite(values)
    with np.errstate(invalid="ignore"):
        beyond = values >= threshold
    times = int(np.nansum(above[onset_line(above, window.interval_s) :]))
    return not longer_than_peers(times, beyond, seen)


def _sign(
    window: Window, source: _Source, column: int, kind: str, line: int, rate: float, others: float, threshold: float,
    unit: str, text: str,
) -> Sign:  # fmt: skip
    name = window.links[column].node if source.by_link else window.nodes[column]
    port = f" {window.links[column].link}" if source.by_link else ""
    onset_s = float(source.times_s[min(line, len(source.times_s) - 1)]) - window.interval_s
    evidence = Evidence(source.metric, name, None, rate, others if np.isfinite(others) else None, threshold, unit)
    node = window.nodes.index(name) if name in window.nodes else -1
    return Sign(node, kind, onset_s, rate, f"{text} {name}{port}", evidence)


def _readings(values: Floats, lines: int) -> Floats:
    """Return what was observed in the newest lines, at least READINGS_MIN readings if there are that many.

    Nodes' rows interleave, so a few lines may hold one reading, and a single reading lasts for no time.
    """
    known = np.flatnonzero(np.isfinite(values))
    first = min(len(values) - lines, int(known[-READINGS_MIN])) if len(known) >= READINGS_MIN else 0
    return values[first:]


def _first_rate(source: _Source, column: int) -> float:
    """Return how fast a counter grew in the oldest third of the window, per second; 0 if not known.

    A port that has always counted errors is not what has made the job slower now.
    """
    own = source.values[: len(source.values) // 3, column : column + 1]
    if len(own) <= HELD_LINES:
        return 0.0
    rate = float(rates(own, source.times_s[: len(own)], len(own) - 1)[0])
    return rate if np.isfinite(rate) else 0.0


def _rising(counter: Floats) -> Floats:
    """Return for each row whether the counter grew since the last observed one: 1.0, 0.0, NaN not observed."""
    rising = np.full(len(counter), np.nan)
    known = np.flatnonzero(np.isfinite(counter))
    rising[known[1:]] = (np.diff(counter[known]) > 0).astype(np.float64)
    return rising


def _suspects(window: Window, source: _Source, values: Floats, least: float) -> list[int]:
    """Return the columns above ``least``, highest first; [] if too many nodes have one: not a node's own trouble."""
    columns = np.flatnonzero(values > least) if np.isinf(least) else np.flatnonzero(values >= least)
    accused_max = max(1, int(ACCUSED_RATIO * len(window.nodes)))
    of_links = {window.links[column].node for column in columns.tolist()} if source.by_link else set()
    nodes = len(of_links) if source.by_link else len(columns)
    if nodes > accused_max:
        return []
    ordered: list[int] = columns[np.argsort(-values[columns], kind="stable")][:SUSPECTS_MAX].tolist()
    return ordered


def _worst(signs: list[Sign]) -> list[Sign]:
    """Return the first, and so the worst, sign of each node."""
    worst: dict[int, Sign] = {}
    for sign in signs:
        if sign.node >= 0:
            worst.setdefault(sign.node, sign)
    return list(worst.values())


def _mean(values: Floats) -> Floats:
    """Return each column's mean over the observed rows: (columns,), NaN if there are none."""
    known = np.isfinite(values)
    count = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0, dtype=np.float64)
    mean: Floats = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return mean
