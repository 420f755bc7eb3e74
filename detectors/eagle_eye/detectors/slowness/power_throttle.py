"""Detects a GPU that is slow because its power is capped."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.documented import braking_from_c
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.signs.readings import lasting, readings
from eagle_eye.detectors.signs.shared_cause import ALIKE_FACTOR, TOGETHER_S, Struck
from eagle_eye.detectors.signs.slow_clocks import SlowClock, clocks_wander, slow_clocks
from eagle_eye.detectors.signs.throttling import (
    BIT_SHARE_MIN,
    BIT_SHARE_MORE,
    CONFIDENCE_CLEAR,
    CONFIDENCE_LIKELY,
    CONFIDENCE_SURE,
    HOTTER_C,
    THERMAL_BITS,
    Throttle,
    Throttled,
    bits_evidence,
    clock_evidence,
    throttled_nodes,
    watts_evidence,
)
from eagle_eye.detectors.signs.topology import named
from eagle_eye.detectors.signs.under_load import (
    PEERS_SAMPLED,
    PeerComparison,
    bit_share,
    compare,
    lines_within,
    means,
    middle,
    nodes_among,
)
from eagle_eye.detectors.types import Blind, Evidence, Floats, Verdict, Window

# NVML's clocks-event-reasons (nvml.h): hardware slowdown and hardware power brake. The software power cap (0x4)
# flickers on every healthy GPU at full load and means nothing by itself; ThermalThrottle handles the thermal bits.
BRAKE_BITS = 0x08 | 0x80
LIMIT_RATIO = 0.97  # of the peers' power limit, below which the limit differs
POWER_DOWN_RATIO = 0.95  # of the peers' power: a GPU that is slow because it has more work draws as much or more
EARLIER_RATIO = 0.75  # of the deficit that the GPU had before and recovered from: then its clock varies by itself
DISTANCE_MIN = 5.0  # robust standard deviations of clock and of power, where no bit or limit shows it
POWER_SIGMA_FLOOR = 0.01  # of the peers' power
MEMORY_CLOCK_RATIO = 0.05  # if memory clock and power limit have differed all along, it is another GPU model
LIMIT_ROWS = 3
BEFORE_ROWS = 60  # before the onset, whose median power is the usual one
LIMIT_KEPT_S = 60.0  # how long a lowered limit is remembered: caps are lifted node by node
SHARED_LIMIT_NODES = 3  # this many nodes with a limit of their own all along are configured that way


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerThrottle:
    """Names the node with a GPU whose clock stays below its peers' because its power is held down.

    The clock (``SlowClock``: under load, against comparable GPUs on other nodes, lasting) is the first kind of
    evidence. The second is NVML's power brake or hardware slowdown bit in most rows, a power limit below the peers', or
    power itself clearly below theirs: at a lower clock only a capped or locked GPU draws less, one with more work draws
    as much. If low power is all, and its clock was as low before and recovered, or other nodes' clocks are or were as
    low for as long, it is only reported. Hot GPUs are left to ThermalThrottle. If several nodes lost power or got a
    lower limit together, the power feed or the site did it: one verdict, no node accused. Nodes that have had their own
    limit all along are peers of each other. Blind without SM clocks and while the job is not under load. Cannot see: a
    job whose GPUs are all capped alike; caps that cost
    less than 3% of the clock.
    """

    name: str = "power_throttle"
    every_s: float = 2.0  # hardware effects last longer than this

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node with a capped GPU, and one for each group capped together."""
        lowered = _lowered_limits(window)
        if lowered is None:
            return throttled_nodes(window, self.name, POWER, slow_clocks(window))
        try:
            slow_ones = slow_clocks(window)
        except Blind:
            return [lowered]
        others = [slow for slow in slow_ones if window.series[slow.index].node not in lowered.nodes]
        return [lowered, *throttled_nodes(window, self.name, POWER, others)]


def _capped(window: Window, slow: SlowClock) -> Throttled | None:
    """Return the evidence that power explains a low clock; None if there is none, or if heat may explain it."""
    if _heat(window, slow) or _another_model(window, slow):
        return None
    power = compare(window, "gpu_power_watts", slow.index, slow.peers, slow.stretch)
    limit = compare(window, "gpu_power_limit_watts", slow.index, slow.peers, slow.rows)
    braked = _braked(window, slow)
    if power is not None and power.ratio > 1 and not braked:
        return None  # it draws more, so it does more work
    limited = limit if limit is not None and limit.ratio < LIMIT_RATIO else None
    down = power if power is not None and power.ratio <= POWER_DOWN_RATIO else None
    if braked:
        why = "hardware power brake"
        confidence = CONFIDENCE_SURE if down else CONFIDENCE_CLEAR if power is None else CONFIDENCE_LIKELY
    elif limited is not None:
        why = f"power limit {limited.own:.0f} W, its peers' {limited.peers:.0f} W"
        confidence = CONFIDENCE_SURE if down else CONFIDENCE_CLEAR
    elif down is not None and (_far(slow, down) or _fell(window, slow)):
        why = f"it draws {down.own:.0f} W, its peers {down.peers:.0f} W"
        by_itself = slow.earlier_deficit >= EARLIER_RATIO * slow.deficit or clocks_wander(window, slow)
        confidence = CONFIDENCE_LIKELY if by_itself else CONFIDENCE_CLEAR
    else:
        return None
    # Always so: with one other node it is undecidable which is off, and it may be another GPU model.
    undecidable = slow.chronic and not braked and (nodes_among(window, slow.peers) < 2 or limit is None)
    if undecidable:
        confidence = min(confidence, CONFIDENCE_LIKELY)
    kinds, evidence = _evidence(window, slow, down, limited, braked)
    return Throttled(slow, confidence, kinds, evidence, f"is held down without being hot ({why})", undecidable)


def _far(slow: SlowClock, power: PeerComparison) -> bool:
    """Whether clock and power are lower than any spread between healthy GPUs explains."""
    sigma = max(power.sigma, POWER_SIGMA_FLOOR * power.peers)
    return slow.distance >= DISTANCE_MIN and power.peers - power.own >= DISTANCE_MIN * sigma


def _fell(window: Window, slow: SlowClock) -> bool:
    """Whether its power fell at the onset while its peers' did not: where stages differ, the spread hides it."""
    power = window.device.get("gpu_power_watts")
    onset = int(np.searchsorted(window.times_s, slow.onset_s, side="right"))
    before = np.arange(max(onset - BEFORE_ROWS, 0), max(onset - 1, 0))
    if power is None or slow.chronic or slow.distance < DISTANCE_MIN or len(before) < LIMIT_ROWS:
        return False
    columns = np.concatenate([[slow.index], slow.peers])
    with np.errstate(invalid="ignore", divide="ignore"):
        change = means(power[np.ix_(slow.stretch, columns)]) / means(power[np.ix_(before, columns)])
    usual = middle(change[1:])
    sigma = max(SIGMA_PER_MAD * middle(np.abs(change[1:] - usual)), POWER_SIGMA_FLOOR)
    return bool(change[0] <= POWER_DOWN_RATIO * usual and usual - change[0] >= DISTANCE_MIN * sigma)


def _may_lack_power(window: Window, struck: Struck) -> bool:
    """Whether a node drew less than the job while a clock of it was low, or that is unknown: noise saves no power."""
    power, clock = window.device.get("gpu_power_watts"), window.device["gpu_sm_clock_hertz"]
    if power is None or struck.onset_s is None or struck.depth is None:
        return True
    rows = np.flatnonzero(window.times_s > struck.onset_s - TOGETHER_S)
    before = np.flatnonzero(window.times_s <= struck.onset_s - TOGETHER_S)[-BEFORE_ROWS:]
    if len(before) < LIMIT_ROWS:
        return True
    columns = np.flatnonzero(window.node_of == struck.node)
    job = np.arange(0, len(window.series), max(len(window.series) // PEERS_SAMPLED, 1))
    low = clock[np.ix_(rows, columns)] < (1 - struck.depth / 2) * means(clock[np.ix_(before, columns)])
    with np.errstate(invalid="ignore", divide="ignore"):
        usual = middle(means(power[np.ix_(rows, job)]) / means(power[np.ix_(before, job)]))
        drawn = means(np.where(low, power[np.ix_(rows, columns)], np.nan)) / means(power[np.ix_(before, columns)])
    return not np.isfinite(drawn).any() or bool(np.nanmin(drawn) <= POWER_DOWN_RATIO * usual)


def _evidence(
    window: Window, slow: SlowClock, power: PeerComparison | None, limit: PeerComparison | None, braked: bool
) -> tuple[frozenset[str], tuple[Evidence, ...]]:
    """Return the kinds of evidence, and the evidence."""
    kinds = {"sm_clock"}
    evidence = [clock_evidence(window, slow)]
    if power is not None:
        kinds.add("power")
        evidence.append(watts_evidence(window, slow, "gpu_power_watts", power, POWER_DOWN_RATIO))
    if limit is not None:
        kinds.add("power_limit")
        evidence.append(watts_evidence(window, slow, "gpu_power_limit_watts", limit, LIMIT_RATIO))
    if braked:
        kinds.add("throttle_reason")
        evidence.append(bits_evidence(window, slow, BRAKE_BITS))
    return frozenset(kinds), tuple(evidence)


def _heat(window: Window, slow: SlowClock) -> bool:
    """Whether the GPU is hot, so that heat may be the reason."""
    thermal = bit_share(window, THERMAL_BITS, np.array([slow.index]), slow.rows)
    if math.isfinite(thermal) and thermal >= BIT_SHARE_MIN:
        return True
    heat = compare(window, "gpu_temperature_celsius", slow.index, slow.peers, slow.rows)
    return heat is not None and (heat.own >= braking_from_c(window, slow.index) or heat.own - heat.peers >= HOTTER_C)


def _another_model(window: Window, slow: SlowClock) -> bool:
    """Whether it has also differed in memory clock and power limit all along: undeclared different hardware."""
    if not slow.chronic:
        return False
    memory = compare(window, "gpu_memory_clock_hertz", slow.index, slow.peers, slow.rows)
    limit = compare(window, "gpu_power_limit_watts", slow.index, slow.peers, slow.rows)
    if memory is None or limit is None:
        return False
    return abs(memory.ratio - 1) > MEMORY_CLOCK_RATIO and abs(limit.ratio - 1) > 1 - LIMIT_RATIO


def _braked(window: Window, slow: SlowClock) -> bool:
    own = bit_share(window, BRAKE_BITS, np.array([slow.index]), slow.rows)
    peers = bit_share(window, BRAKE_BITS, slow.peers, slow.rows)
    more = own - (peers if math.isfinite(peers) else 0.0)
    return math.isfinite(own) and own >= BIT_SHARE_MIN and more >= BIT_SHARE_MORE


def _lowered_limits(window: Window) -> Verdict | None:
    """Return one verdict for several nodes' power limits that were lowered together; None if that did not happen."""
    limits = window.device.get("gpu_power_limit_watts")
    if limits is None or len(limits) <= 2 * LIMIT_ROWS:
        return None
    limits = np.where(limits > 0, limits, np.nan)  # a working GPU has a limit: zero is a failed reading
    kept = lines_within(window.times_s, LIMIT_KEPT_S)
    now: Floats = np.fmin.reduce(limits[-kept:], axis=0)
    then: Floats = np.fmax.reduce(limits[:LIMIT_ROWS], axis=0)
    for column in np.flatnonzero(now < LIMIT_RATIO * then).tolist():
        then[column] = np.fmax.reduce(lasting(readings(window, "gpu_power_limit_watts", column)))
    lowered = now < LIMIT_RATIO * then  # NaN is not
    if not lowered.any():
        return None
    depth = 1 - now / then
    shared = lowered & (depth <= ALIKE_FACTOR * middle(depth[lowered]))  # a node that lost far more lost it alone
    nodes = np.unique(window.node_of[shared])
    if len(nodes) < SHARED_LIMIT_NODES and not (len(nodes) == 2 and len(window.nodes) <= 4):
        return None
    index = int(np.flatnonzero(shared)[0])
    low = np.flatnonzero(limits[:, index] < then[index] * LIMIT_RATIO)
    names = tuple(window.nodes[int(node)] for node in nodes)
    own, before = float(now[index]), float(then[index])
    return Verdict(
        detector="power_throttle",
        fault="power_throttle",
        job=window.job,
        nodes=names,
        node=None,
        device=None,
        confidence=CONFIDENCE_SURE,
        onset_s=float(window.times_s[max(int(low[0]) - 1, 0)]),
        summary=(
            f"the power limit of {named(names)} was lowered from {before:.0f} to {own:.0f} W:"
            " a cap of what they share, not the nodes"
        ),
        evidence=(Evidence("gpu_power_limit_watts", names[0], None, own, before, before * LIMIT_RATIO, "watts"),),
        kinds=frozenset({"power_limit"}),
        slowdown_ratio=math.sqrt(before / own) - 1 if own > 0 else 0.0,  # clocks fall no faster than sqrt(power)
        asks="notify",
    )


POWER = Throttle(
    fault="power_throttle",
    explain=_capped,
    may_explain=_may_lack_power,
    by_depth=True,
    chronic_nodes=SHARED_LIMIT_NODES,
    kind="power",
    together=(
        "have been slowed together by up to {percent:.0f}% of the clock without being hot:"
        " a power cap of what they share"
    ),
)
