"""Detects a GPU that is slow because it is hot."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.documented import braking_from_c
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.signs.shared_cause import TOGETHER_S, Struck
from eagle_eye.detectors.signs.slow_clocks import SlowClock, slow_clocks
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
from eagle_eye.detectors.signs.under_load import bit_share, compare, lines_within
from eagle_eye.detectors.types import Evidence, Verdict, Window

HARDWARE_SLOWDOWN_BIT = 0x08  # NVML's clocks-event-reasons (nvml.h): a power brake sets it as well
WARM_C = 75.0  # some cards and firmware versions slow down earlier
POWER_DOWN_RATIO = 0.97  # of the peers' power: a GPU with more work is hotter too, but draws more
RISEN_C = 4.0  # more than the job's GPUs did: growing hot...
RISEN_SIGMAS = 4.0  # ...and so many robust standard deviations of all rises
RISEN_NODES_MIN, RISEN_NODES_RATIO = 2, 0.02  # of the job: fewer than both are chance
RISE_S = 300.0


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
        """Return one verdict for each node with a throttling GPU, and one for each group that grew hot together."""
        return throttled_nodes(window, self.name, HEAT, slow_clocks(window))


def _hot(window: Window, slow: SlowClock) -> Throttled | None:
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
    kinds = {"sm_clock"}
    evidence = [clock_evidence(window, slow)]
    if thermal:
        kinds.add("throttle_reason")
        evidence.append(bits_evidence(window, slow, THERMAL_BITS))
    if heat is not None:
        who = window.series[slow.index].node, window.series[slow.index].device
        evidence.append(Evidence("gpu_temperature_celsius", *who, heat.own, heat.peers, limit_c, "celsius"))
        if at_limit or hotter:
            kinds.add("temperature")
    if down is not None:
        kinds.add("power")
        evidence.append(watts_evidence(window, slow, "gpu_power_watts", down, POWER_DOWN_RATIO))
    how = f"throttles at {own_c:.0f} C" if math.isfinite(own_c) else "throttles"
    return Throttled(slow, confidence, frozenset(kinds), tuple(evidence), how)


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


HEAT = Throttle(
    fault="thermal_throttle",
    explain=_hot,
    may_explain=_may_be_warm,
    also_struck=_grown_hot,
    kind="temperature",
    together="have grown hot together and GPUs throttle by up to {percent:.0f}%: the cooling of what they share",
)
