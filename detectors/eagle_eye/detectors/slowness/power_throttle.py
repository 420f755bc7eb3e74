"""Detects a GPU that is slow because its power is capped."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.documented import braking_from_c
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.signs.shared_cause import ALIKE_FACTOR, TOGETHER_S, Struck, partition
from eagle_eye.detectors.signs.slow_clocks import CLEAR_DEFICIT, SlowClock, fell_together, slow_clocks
from eagle_eye.detectors.signs.slow_share import slowness_by_clock
from eagle_eye.detectors.signs.topology import named
from eagle_eye.detectors.signs.under_load import (
    PEERS_SAMPLED,
    Comparison,
    bit_share,
    compare,
    lines_within,
    means,
    middle,
    nodes_among,
    seen_bits,
)
from eagle_eye.detectors.types import Blind, Evidence, Floats, Verdict, Window

# NVML's clocks-event-reasons (nvml.h): hardware slowdown and hardware power brake. The software power cap (0x4)
# flickers on every healthy GPU at full load and means nothing by itself; ThermalThrottle handles the thermal bits.
BRAKE_BITS = 0x08 | 0x80
THERMAL_BITS = 0x20 | 0x40
BIT_SHARE_MIN = 0.5  # of the rows
BIT_SHARE_MORE = 0.3  # than the peers
LIMIT_RATIO = 0.97  # of the peers' power limit, below which the limit differs
POWER_DOWN_RATIO = 0.95  # of the peers' power: a GPU that is slow because it has more work draws as much or more
EARLIER_RATIO = 0.75  # of the deficit that the GPU had before and recovered from: then its clock varies by itself
DISTANCE_MIN = 5.0  # robust standard deviations of clock and of power, where no bit or limit shows it
POWER_SIGMA_FLOOR = 0.01  # of the peers' power
HOTTER_C = 8.0
MEMORY_CLOCK_RATIO = 0.05  # if memory clock and power limit have differed all along, it is another GPU model
LIMIT_ROWS = 3
BEFORE_ROWS = 60  # before the onset, whose median power is the usual one
LIMIT_KEPT_S = 60.0  # how long a lowered limit is remembered: caps are lifted node by node
ACCUSED_MAX = 8  # nodes for which others with the same past trouble are searched
SHARED_LIMIT_NODES = 3  # this many nodes with a limit of their own all along are configured that way
CONFIDENCE_SURE, CONFIDENCE_CLEAR, CONFIDENCE_LIKELY = 0.96, 0.92, 0.8


@dataclass(frozen=True, slots=True, eq=False)
class _Capped:
    slow: SlowClock
    confidence: float
    kinds: frozenset[str]
    evidence: tuple[Evidence, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerThrottle:
    """Names the node with a GPU whose clock stays below its peers' because its power is held down.

    The clock (``SlowClock``: under load, against comparable GPUs on other nodes, lasting) is the first kind of
    evidence. The second is NVML's power brake or hardware slowdown bit in most rows, a power limit below the peers', or
    power itself clearly below theirs: at a lower clock only a capped or locked GPU draws less, one with more work draws
    as much. If low power is all, and the clock was as low before and recovered, it is only reported. Hot GPUs are left
    to ThermalThrottle. If several nodes lost power or got a lower limit together, the power feed or the site did it:
    one verdict, no node accused. Nodes that have had their own limit all along are peers of each other. Blind without
    SM clocks and while the job is not under load. Cannot see: a job whose GPUs are all capped alike; caps that cost
    less than 3% of the clock.
    """

    name: str = "power_throttle"
    every_s: float = 2.0  # hardware effects last longer than this

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node with a capped GPU, and one for each group capped together."""
        lowered = _lowered_limits(window)
        if lowered is not None:
            return [lowered, *self._by_clock(window, set(lowered.nodes))]
        return self._by_clock(window, set())

    def _by_clock(self, window: Window, spared: set[str]) -> list[Verdict]:
        try:
            slow_ones = slow_clocks(window)
        except Blind:
            if spared:
                return []
            raise
        capped = [
            found
            for slow in slow_ones
            if window.series[slow.index].node not in spared and (found := _capped(window, slow)) is not None
        ]
        worst: dict[int, list[_Capped]] = {}
        for found in capped:
            if found.slow.lasting:
                worst.setdefault(int(window.node_of[found.slow.index]), []).append(found)
        if not worst:
            return []
        accused = {node: _struck(node, own[0].slow) for node, own in worst.items()}
        company = [_struck(int(window.node_of[found.slow.index]), found.slow) for found in capped]
        for own in list(worst.values())[:ACCUSED_MAX]:
            company += [mate for mate in fell_together(window, own[0].slow) if _may_lack_power(window, mate)]
        alone, rooms = partition(window, accused, company)
        if sum(accused[node].onset_s is None for node in alone) >= SHARED_LIMIT_NODES:
            # So many nodes that were always slow are another kind of machine, not that many faulty ones.
            alone = [node for node in alone if accused[node].onset_s is not None]
        verdicts = [self._verdict(window, worst[node]) for node in alone]
        members = [[found for node in room for found in worst.get(node, [])] for room in rooms]
        return verdicts + [self._room(window, room, found) for room, found in zip(rooms, members, strict=True)]

    def _verdict(self, window: Window, found: list[_Capped]) -> Verdict:
        first = max(found, key=lambda capped: (capped.confidence, capped.slow.deficit))
        slow = first.slow
        series = window.series[slow.index]
        onset_s = min(capped.slow.onset_s for capped in found)
        deficit = max(capped.slow.deficit for capped in found)
        cost = slowness_by_clock(window, [capped.slow.index for capped in found], onset_s, 1 - deficit, slow.chronic)
        where = f"{series}" if len(found) == 1 else f"{len(found)} GPUs of {series.node}"
        return Verdict(
            detector=self.name,
            fault="power_throttle",
            job=window.job,
            nodes=(series.node,),
            node=series.node,
            device=series.device if len(found) == 1 else None,
            confidence=first.confidence,
            onset_s=onset_s,
            summary=(
                f"{where} is held down without being hot ({first.why}): its SM clock is {slow.clock_hz / 1e6:.0f} MHz,"
                f" its peers' {slow.peers_hz / 1e6:.0f} MHz; {cost}"
            ),
            evidence=first.evidence,
            kinds=first.kinds,
            slowdown_ratio=cost.ratio,
        )

    def _room(self, window: Window, room: tuple[int, ...], found: list[_Capped]) -> Verdict:
        nodes = tuple(window.nodes[node] for node in room)
        onset_s = min(capped.slow.onset_s for capped in found)
        deficit = max(capped.slow.deficit for capped in found)
        cost = slowness_by_clock(
            window, [capped.slow.index for capped in found[:8]], onset_s, 1 - deficit, found[0].slow.chronic
        )
        return Verdict(
            detector=self.name,
            fault="power_throttle",
            job=window.job,
            nodes=nodes,
            node=None,
            device=None,
            confidence=CONFIDENCE_CLEAR,
            onset_s=onset_s,
            summary=(
                f"{named(nodes)} have been slowed together by up to {100 * deficit:.0f}% of the clock without being"
                f" hot: a power cap of what they share, not the nodes; {cost}"
            ),
            evidence=tuple(item for capped in found[:4] for item in capped.evidence[:2]),
            kinds=frozenset({"sm_clock", "power"}),
            slowdown_ratio=cost.ratio,
            asks="notify",
        )


def _struck(node: int, slow: SlowClock) -> Struck:
    return Struck(node, None if slow.chronic else slow.onset_s, slow.deficit)


def _capped(window: Window, slow: SlowClock) -> _Capped | None:
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
        by_itself = slow.earlier_deficit >= EARLIER_RATIO * slow.deficit
        confidence = CONFIDENCE_LIKELY if by_itself else CONFIDENCE_CLEAR
    else:
        return None
    if slow.chronic and not braked and (nodes_among(window, slow.peers) < 2 or limit is None):
        # Always so: with one other node it is undecidable which is off, and it may be another GPU model.
        confidence = min(confidence, CONFIDENCE_LIKELY)
    kinds, evidence = _evidence(window, slow, down, limited, braked)
    return _Capped(slow, confidence, kinds, evidence, why)


def _far(slow: SlowClock, power: Comparison) -> bool:
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
    window: Window, slow: SlowClock, power: Comparison | None, limit: Comparison | None, braked: bool
) -> tuple[frozenset[str], tuple[Evidence, ...]]:
    """Return the kinds of evidence, and the evidence."""
    who = window.series[slow.index].node, window.series[slow.index].device
    line_hz = slow.peers_hz * (1 - CLEAR_DEFICIT)
    kinds = {"sm_clock"}
    evidence = [Evidence("gpu_sm_clock_hertz", *who, slow.clock_hz, slow.peers_hz, line_hz, "hertz")]
    if power is not None:
        kinds.add("power")
        line = power.peers * POWER_DOWN_RATIO
        evidence.append(Evidence("gpu_power_watts", *who, power.own, power.peers, line, "watts"))
    if limit is not None:
        kinds.add("power_limit")
        line = limit.peers * LIMIT_RATIO
        evidence.append(Evidence("gpu_power_limit_watts", *who, limit.own, limit.peers, line, "watts"))
    if braked:
        kinds.add("throttle_reason")
        bits = seen_bits(window, slow.index, slow.rows)
        evidence.append(Evidence("gpu_throttle_reasons", *who, bits, None, float(BRAKE_BITS), "bitmask"))
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
