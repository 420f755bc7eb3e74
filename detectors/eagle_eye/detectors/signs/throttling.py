"""Turns GPUs with a low clock into verdicts, given what may throttle them: heat or a power cap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eagle_eye.detectors.signs.shared_cause import Struck, partition
from eagle_eye.detectors.signs.slow_clocks import CLEAR_DEFICIT, SlowClock, fell_together
from eagle_eye.detectors.signs.slow_share import Slowness, slowness_by_clock
from eagle_eye.detectors.signs.topology import named
from eagle_eye.detectors.signs.under_load import PeerComparison, seen_bits
from eagle_eye.detectors.types import Evidence, Verdict, Window

# NVML's clocks-event-reasons (nvml.h): software thermal slowdown and hardware thermal slowdown
THERMAL_BITS = 0x20 | 0x40
BIT_SHARE_MIN = 0.5  # of the rows: a flickering bit means nothing
BIT_SHARE_MORE = 0.3  # than the peers
HOTTER_C = 8.0  # than the peers
ACCUSED_MAX = 8  # nodes for which others with the same past trouble are searched
GROUP_GPUS_MAX = 8  # whose ranks give the cost of a verdict on several nodes
CONFIDENCE_SURE, CONFIDENCE_CLEAR, CONFIDENCE_LIKELY = 0.96, 0.92, 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Throttled:
    """A GPU whose clock is low for a known reason; ``how`` is the predicate of the summary's sentence about it.

    ``perhaps_made_so``: it may be other hardware, whatever else shows that it is slower.
    """

    slow: SlowClock
    confidence: float
    kinds: frozenset[str]
    evidence: tuple[Evidence, ...]
    how: str
    perhaps_made_so: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Throttle:
    """One thing that throttles GPUs, such as heat.

    ``explain`` returns the evidence that it explains a GPU's low clock, None if there is none. ``may_explain`` says
    whether it may explain that another node's clock fell at the same time, ``also_struck`` finds more nodes that may
    share the cause of the given ones. ``by_depth``: a shared cause lowers clocks about equally. If ``chronic_nodes``
    or more would be accused of a clock that was low all along, none of these is. ``kind`` is the kind of evidence of a
    shared cause; ``together`` is what the summary says about it, with the largest deficit in ``{percent}``.
    """

    fault: str
    explain: Callable[[Window, SlowClock], Throttled | None]
    may_explain: Callable[[Window, Struck], bool]
    also_struck: Callable[[Window, dict[int, Struck]], list[Struck]] | None = None
    by_depth: bool = False
    chronic_nodes: float = math.inf
    kind: str
    together: str


def throttled_nodes(window: Window, detector: str, throttle: Throttle, slow_ones: Iterable[SlowClock]) -> list[Verdict]:
    """Return one verdict for each node with a throttled GPU, and one for each group of nodes throttled together."""
    found = [gpu for slow in slow_ones if (gpu := throttle.explain(window, slow)) is not None]
    lasting: dict[int, list[Throttled]] = {}
    for gpu in found:
        if gpu.slow.lasting:
            lasting.setdefault(int(window.node_of[gpu.slow.index]), []).append(gpu)
    if not lasting:
        return []
    accused = {node: _struck(window, throttle, own[0]) for node, own in lasting.items()}
    company = [_struck(window, throttle, gpu) for gpu in found]
    for own in list(lasting.values())[:ACCUSED_MAX]:
        company += [mate for mate in fell_together(window, own[0].slow) if throttle.may_explain(window, mate)]
    if throttle.also_struck is not None:
        company += throttle.also_struck(window, accused)
    alone, groups = partition(window, accused, company)
    chronic = {node for node in alone if accused[node].onset_s is None}
    if len(chronic) >= throttle.chronic_nodes:
        # So many nodes that were always slow are another kind of machine, not that many faulty ones.
        alone = [node for node in alone if node not in chronic]
    verdicts = [_of_node(window, detector, throttle, lasting[node]) for node in alone]
    members = [[gpu for node in group for gpu in lasting.get(node, [])] for group in groups]
    return verdicts + [
        _of_group(window, detector, throttle, group, own) for group, own in zip(groups, members, strict=True)
    ]


def clock_evidence(window: Window, slow: SlowClock) -> Evidence:
    """Return the low clock as evidence."""
    series, line_hz = window.series[slow.index], slow.peers_hz * (1 - CLEAR_DEFICIT)
    return Evidence("gpu_sm_clock_hertz", series.node, series.device, slow.clock_hz, slow.peers_hz, line_hz, "hertz")


def watts_evidence(window: Window, slow: SlowClock, metric: str, found: PeerComparison, ratio: float) -> Evidence:
    """Return as evidence that a GPU's watts are below ``ratio`` of its peers'."""
    series = window.series[slow.index]
    return Evidence(metric, series.node, series.device, found.own, found.peers, found.peers * ratio, "watts")


def bits_evidence(window: Window, slow: SlowClock, mask: int) -> Evidence:
    """Return the clocks-event reasons that a GPU reported as evidence."""
    series, bits = window.series[slow.index], seen_bits(window, slow.index, slow.rows)
    return Evidence("gpu_throttle_reasons", series.node, series.device, bits, None, float(mask), "bitmask")


def _struck(window: Window, throttle: Throttle, gpu: Throttled) -> Struck:
    slow = gpu.slow
    depth = slow.deficit if throttle.by_depth else None
    return Struck(int(window.node_of[slow.index]), None if slow.chronic else slow.onset_s, depth)


def _cost(
    window: Window, found: list[Throttled], chronic: bool, gpus_max: int | None = None
) -> tuple[float, float, Slowness]:
    """Return the onset and the largest deficit of throttled GPUs, and what they cost, by at most ``gpus_max`` ranks."""
    onset_s = min(gpu.slow.onset_s for gpu in found)
    deficit = max(gpu.slow.deficit for gpu in found)
    columns = [gpu.slow.index for gpu in found[:gpus_max]]
    return onset_s, deficit, slowness_by_clock(window, columns, onset_s, 1 - deficit, chronic)


def _of_node(window: Window, detector: str, throttle: Throttle, found: list[Throttled]) -> Verdict:
    first = max(found, key=lambda gpu: (gpu.confidence, gpu.slow.deficit))
    slow, series = first.slow, window.series[first.slow.index]
    onset_s, _, cost = _cost(window, found, slow.chronic)
    others = len(found) - 1
    where = f"{series}, like {others} other GPU{'s' * (others > 1)} of its node," if others else f"{series}"
    return Verdict(
        detector=detector,
        fault=throttle.fault,
        job=window.job,
        nodes=(series.node,),
        node=series.node,
        device=series.device if len(found) == 1 else None,
        confidence=first.confidence,
        onset_s=onset_s,
        summary=(
            f"{where} {first.how}: its SM clock is {slow.clock_hz / 1e6:.0f} MHz,"
            f" its peers' {slow.peers_hz / 1e6:.0f} MHz; {cost}"
        ),
        evidence=first.evidence,
        kinds=first.kinds,
        slowdown_ratio=cost.ratio,
        asks="notify" if first.perhaps_made_so else None,
    )


def _of_group(
    window: Window, detector: str, throttle: Throttle, group: tuple[int, ...], found: list[Throttled]
) -> Verdict:
    nodes = tuple(window.nodes[node] for node in group)
    onset_s, deficit, cost = _cost(window, found, found[0].slow.chronic, GROUP_GPUS_MAX)
    return Verdict(
        detector=detector,
        fault=throttle.fault,
        job=window.job,
        nodes=nodes,
        node=None,
        device=None,
        confidence=CONFIDENCE_CLEAR,
        onset_s=onset_s,
        summary=f"{named(nodes)} {throttle.together.format(percent=100 * deficit)}, not the nodes; {cost}",
        evidence=tuple(item for gpu in found[:4] for item in gpu.evidence[:2]),
        kinds=frozenset({"sm_clock", throttle.kind}),
        slowdown_ratio=cost.ratio,
        asks="notify",
    )
