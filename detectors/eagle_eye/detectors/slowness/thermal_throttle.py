"""Detects a GPU that is slow because it is hot."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.documented import braking_from_c
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.signs.shared_cause import TOGETHER_S, Struck, partition
from eagle_eye.detectors.signs.slow_clocks import CLEAR_DEFICIT, SlowClock, fell_together, slow_clocks
from eagle_eye.detectors.signs.slow_share import slowness_by_clock
from eagle_eye.detectors.signs.topology import named
from eagle_eye.detectors.signs.under_load import bit_share, compare, lines_within, seen_bits
from eagle_eye.detectors.types import Evidence, Verdict, Window

# NVML's clocks-event-reasons (nvml.h): software thermal slowdown and hardware thermal slowdown...
THERMAL_BITS = 0x20 | 0x40
HARDWARE_SLOWDOWN_BIT = 0x08  # ...and this one, which a power brake sets as well
BIT_SHARE_MIN = 0.5  # of the rows: a flickering bit means nothing
BIT_SHARE_MORE = 0.3  # than the peers
WARM_C = 75.0  # some cards and firmware versions slow down earlier
HOTTER_C = 8.0  # than the peers
POWER_DOWN_RATIO = 0.97  # of the peers' power: a GPU with more work is hotter too, but draws more
RISEN_C = 4.0  # more than the job's GPUs did: growing hot...
RISEN_SIGMAS = 4.0  # ...and so many robust standard deviations of all rises
RISEN_NODES_MIN, RISEN_NODES_RATIO = 2, 0.02  # of the job: fewer than both are chance
RISE_S = 300.0
ACCUSED_MAX = 8  # nodes for which others with the same past trouble are searched
CONFIDENCE_SURE, CONFIDENCE_CLEAR, CONFIDENCE_LIKELY = 0.96, 0.92, 0.8


@dataclass(frozen=True, slots=True, eq=False)
class _Hot:
    slow: SlowClock
    confidence: float
    kinds: frozenset[str]
    evidence: tuple[Evidence, ...]
    temperature_c: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThermalThrottle:
    """Names the node with a GPU whose SM clock stays below its peers' because it is hot.

    The clock (``SlowClock``: under load, against comparable GPUs on other nodes, lasting 10 s where it is 10% low and
    60 s from 3%) is the first kind of evidence. The second is NVML's thermal slowdown bit in most rows, or a
    temperature at the limit and well above the peers'. Power below the peers' supports both, since a GPU that is hot
    from more work draws more. A hot GPU that keeps its clock is not at fault. If several nodes, or most of a switch's,
    grew hot together, the room is hot: one verdict for all of them, no node accused. Blind without SM clocks and while
    the job is not under load. Cannot see: a job whose GPUs are all equally hot; throttling of less than 3%.
    """

    name: str = "thermal_throttle"
    every_s: float = 2.0  # hardware effects last longer than this

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node with a throttling GPU, and one for each hot room."""
        hot = [found for slow in slow_clocks(window) if (found := _hot(window, slow)) is not None]
        worst: dict[int, list[_Hot]] = {}
        for found in hot:
            if found.slow.lasting:
                worst.setdefault(int(window.node_of[found.slow.index]), []).append(found)
        if not worst:
            return []
        accused = {node: _struck(node, own[0].slow) for node, own in worst.items()}
        company = [_struck(int(window.node_of[found.slow.index]), found.slow) for found in hot]
        for own in list(worst.values())[:ACCUSED_MAX]:
            company += [mate for mate in fell_together(window, own[0].slow) if _may_be_warm(window, mate)]
        alone, rooms = partition(window, accused, company + _grown_hot(window, accused))
        verdicts = [self._verdict(window, worst[node]) for node in alone]
        for room in rooms:
            members = [found for node in room for found in worst.get(node, [])]
            verdicts.append(self._room(window, room, members))
        return verdicts

    def _verdict(self, window: Window, found: list[_Hot]) -> Verdict:
        first = max(found, key=lambda hot: (hot.confidence, hot.slow.deficit))
        slow = first.slow
        series = window.series[slow.index]
        onset_s = min(hot.slow.onset_s for hot in found)
        columns = [hot.slow.index for hot in found]
        cost = slowness_by_clock(window, columns, onset_s, 1 - max(hot.slow.deficit for hot in found), slow.chronic)
        where = f"{series}" if len(found) == 1 else f"{len(found)} GPUs of {series.node}"
        heat = f" at {first.temperature_c:.0f} C" if math.isfinite(first.temperature_c) else ""
        return Verdict(
            detector=self.name,
            fault="thermal_throttle",
            job=window.job,
            nodes=(series.node,),
            node=series.node,
            device=series.device if len(found) == 1 else None,
            confidence=first.confidence,
            onset_s=onset_s,
            summary=(
                f"{where} throttles{heat}: its SM clock is {slow.clock_hz / 1e6:.0f} MHz,"
                f" its peers' {slow.peers_hz / 1e6:.0f} MHz; {cost}"
            ),
            evidence=first.evidence,
            kinds=first.kinds,
            slowdown_ratio=cost.ratio,
        )

    def _room(self, window: Window, room: tuple[int, ...], found: list[_Hot]) -> Verdict:
        nodes = tuple(window.nodes[node] for node in room)
        onset_s = min(hot.slow.onset_s for hot in found)
        deficit = max(hot.slow.deficit for hot in found)
        cost = slowness_by_clock(
            window, [hot.slow.index for hot in found[:8]], onset_s, 1 - deficit, found[0].slow.chronic
        )
        return Verdict(
            detector=self.name,
            fault="thermal_throttle",
            job=window.job,
            nodes=nodes,
            node=None,
            device=None,
            confidence=CONFIDENCE_CLEAR,
            onset_s=onset_s,
            summary=(
                f"{named(nodes)} have grown hot together and GPUs throttle by up to {100 * deficit:.0f}%:"
                f" the cooling of what they share, not the nodes; {cost}"
            ),
            evidence=tuple(item for hot in found[:4] for item in hot.evidence[:2]),
            kinds=frozenset({"sm_clock", "temperature"}),
            slowdown_ratio=cost.ratio,
            asks="notify",
        )


def _struck(node: int, slow: SlowClock) -> Struck:
    return Struck(node, None if slow.chronic else slow.onset_s)


def _hot(window: Window, slow: SlowClock) -> _Hot | None:
    """Return the evidence that heat explains a low clock; None if there is none."""
    heat = compare(window, "gpu_temperature_celsius", slow.index, slow.peers, slow.rows)
    power = compare(window, "gpu_power_watts", slow.index, slow.peers, slow.rows)
    own_c = heat.own if heat is not None else math.nan
    hotter = heat is not None and heat.own - heat.peers >= HOTTER_C
    down = power if power is not None and power.ratio <= POWER_DOWN_RATIO else None
    at_limit = own_c >= (limit_c := braking_from_c(window, slow.index))
    thermal = _thermal(window, slow, at_limit)
    confidence = _confidence(own_c, at_limit, hotter, down is not None, power is not None, thermal)
    if confidence is None:
        return None
    who = window.series[slow.index].node, window.series[slow.index].device
    kinds = {"sm_clock"}
    line_hz = slow.peers_hz * (1 - CLEAR_DEFICIT)
    evidence = [Evidence("gpu_sm_clock_hertz", *who, slow.clock_hz, slow.peers_hz, line_hz, "hertz")]
    if thermal:
        kinds.add("throttle_reason")
        bits = seen_bits(window, slow.index, slow.rows)
        evidence.append(Evidence("gpu_throttle_reasons", *who, bits, None, float(THERMAL_BITS), "bitmask"))
    if heat is not None:
        evidence.append(Evidence("gpu_temperature_celsius", *who, heat.own, heat.peers, limit_c, "celsius"))
        if at_limit or hotter:
            kinds.add("temperature")
    if down is not None:
        kinds.add("power")
        line = down.peers * POWER_DOWN_RATIO
        evidence.append(Evidence("gpu_power_watts", *who, down.own, down.peers, line, "watts"))
    return _Hot(slow, confidence, frozenset(kinds), tuple(evidence), own_c)


def _confidence(
    own_c: float, at_limit: bool, hotter: bool, down: bool, metered: bool, thermal: bool | None
) -> float | None:
    """Return the probability that heat is the reason: ``thermal`` is what NVML reports, None if it reports nothing."""
    if thermal:
        return CONFIDENCE_SURE if at_limit or hotter else CONFIDENCE_CLEAR
    if not hotter or not own_c >= WARM_C or (metered and not down):
        return None  # a GPU that is hotter because it works more draws more
    if at_limit and thermal is None:
        return CONFIDENCE_CLEAR if down else CONFIDENCE_LIKELY
    return CONFIDENCE_LIKELY if down else None  # hot enough for some cards, but NVML does not report throttling


def _thermal(window: Window, slow: SlowClock, at_limit: bool) -> bool | None:
    """Return whether NVML reports that the GPU throttles for heat; None if it reports nothing."""
    # At the limit, the hardware slowdown bit alone also means heat.
    mask = THERMAL_BITS | HARDWARE_SLOWDOWN_BIT if at_limit else THERMAL_BITS
    own = bit_share(window, mask, np.array([slow.index]), slow.rows)
    peers = bit_share(window, THERMAL_BITS, slow.peers, slow.rows)
    if not math.isfinite(own):
        return None
    return own >= BIT_SHARE_MIN and own >= (peers if math.isfinite(peers) else 0.0) + BIT_SHARE_MORE


def _may_be_warm(window: Window, struck: Struck) -> bool:
    """Whether a GPU of a node was warm at about the onset, or that is unknown: clocks fall for other reasons too."""
    temperature = window.device.get("gpu_temperature_celsius")
    if temperature is None or struck.onset_s is None:
        return True
    about = temperature[window.times_s > struck.onset_s - TOGETHER_S][:, window.node_of == struck.node]
    return not np.isfinite(about).any() or bool(np.nanmax(about) >= WARM_C)


def _grown_hot(window: Window, accused: dict[int, Struck]) -> list[Struck]:
    """Return the nodes that recently grew hotter than the job's GPUs in general and may share the accused's cause.

    A node that has always been warm is not among them.
    """
    temperature = window.device.get("gpu_temperature_celsius")
    if temperature is None or len(temperature) < 3:
        return []
    now = np.fmax.reduce(temperature[-3:], axis=0)
    begin = len(temperature) - lines_within(window.times_s, RISE_S)
    then = np.fmin.reduce(temperature[begin : begin + 3], axis=0)
    rise = now - then
    known = np.isfinite(rise)
    if not known.any():
        return []
    centre = float(np.median(rise[known]))
    sigma = SIGMA_PER_MAD * float(np.median(np.abs(rise[known] - centre)))
    risen = np.where(known, rise - centre, -np.inf) >= max(RISEN_C, RISEN_SIGMAS * sigma)
    nodes = [int(node) for node in np.unique(window.node_of[risen & (now >= WARM_C)]) if int(node) not in accused]
    onsets = [struck.onset_s for struck in accused.values() if struck.onset_s is not None]
    if not onsets or len(nodes) < max(RISEN_NODES_MIN, RISEN_NODES_RATIO * len(window.nodes)):
        return []
    return [Struck(node, min(onsets)) for node in nodes]
