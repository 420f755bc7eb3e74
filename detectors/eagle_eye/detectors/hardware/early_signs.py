"""Detects early signs of hardware failure that do not hurt the job yet and should be handled when it ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.faults import DefaultAction
from eagle_eye.detectors.signs.counters import grown, rises
from eagle_eye.detectors.signs.gpu_errors import (
    AT_ONCE_NODES,
    AT_ONCE_RATIO,
    BEFORE_START_S,
    gpu,
    gpu_errors,
    unknown_errors,
)
from eagle_eye.detectors.signs.link_state import outages, shared
from eagle_eye.detectors.signs.temperature_drift import drifts
from eagle_eye.detectors.types import Evidence, Floats, Verdict, Window
from eagle_eye.schema.driver_facts import CATALOGUE, NVLINK5_XIDS, unknown_recovery_of

SUSPECTS_MAX = 64  # counters examined closely in one pass, those that grew most first

PEERS_RATIO = 5.0  # of what its peers show: what all show comes from the driver or the load
REMAPS_MIN = 2  # one remapped row is the memory's normal repair (NVIDIA, GPU Memory Error Management)
REMAP_ROWS = 2  # seen at two times at least
FLAPS_TOLERATED = 2  # in five minutes (ByteRobust, SOSP 2025)
LINK_TRAINING_XID = 136
DOMAIN = "domain"  # in requested recoveries (XID 154, "Recover IMEX Domain"): nodes that share memory over NVLink
PENDING_LINES = 2  # rows in which a pending remap must show

CONFIDENCE_FACT, CONFIDENCE_COUNTED, CONFIDENCE_DRIFT = 0.99, 0.93, 0.9
# Lower than those of more specific detectors, such as a throttling GPU's, whose findings these then join.
CONFIDENCE_REPORTED, CONFIDENCE_SUPPLY = 0.5, 0.6


class _Sign(NamedTuple):
    """One sign of a coming failure, on the node and device of its evidence."""

    evidence: Evidence
    fault: str
    kind: str
    since_s: float
    confidence: float
    summary: str
    fact: bool = False
    asks: DefaultAction = "drain_node"

    @property
    def node(self) -> str:
        """The node's name."""
        return self.evidence.node or ""

    @property
    def device(self) -> int:
        """The GPU's index on its node, -1 if unknown or none."""
        return -1 if self.evidence.device is None else self.evidence.device


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counter:
    """An error counter whose growth precedes a failure, and how much growth that takes.

    It must have grown by ``least`` within ``within_s``, in ``rows_min`` rows (one burst is one bad word, or a source
    that caught up), by ``past_ratio`` of its own rate before or by ``storm`` whatever that was, and more than its
    peers. ``did`` is the summary's verb and object, with the growth in ``{count}``.
    """

    metric: str
    fault: str
    kind: str
    within_s: float
    rows_min: int
    least: float
    past_ratio: float = 0.0
    storm: float = math.inf
    did: str
    unit: str


# Some GPUs correct a few memory errors all their life; one that starts to and continues will fail.
CORRECTED = _Counter(
    metric="gpu_ecc_corrected_total",
    fault="gpu_memory_error",
    kind="corrected",
    within_s=300.0,
    rows_min=3,
    least=20.0,
    past_ratio=5.0,
    storm=200.0,
    did="corrected {count:.0f} memory errors",
    unit="errors in 5 minutes",
)
# NVIDIA DCGM's health check warns of more than 8 PCIe replays per minute; twice that, for minutes, is not noise.
REPLAYS = _Counter(
    metric="gpu_pcie_replays_total",
    fault="pcie_degraded",
    kind="pcie_replays",
    within_s=180.0,
    rows_min=3,
    least=48.0,
    did="repeated {count:.0f} PCIe packets",
    unit="replays in 3 minutes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlySigns:
    """Finds what asks for a drain before it becomes a fault; nothing here excludes a node or restarts a job.

    ``gpu_memory_error``: a pending row remap, repeated row remaps, repeated XID 63 or 92, or corrected errors that have
    started (against the GPU's own past and its peers). ``pcie_degraded``: replays far above DCGM's limit.
    ``nic_degraded``: a port that goes down more than twice in five minutes while its switch's others do not.
    ``thermal_throttle``: a temperature well above its own past and its peers, near the limit, at the same power.
    ``nvlink_degraded``: XID 136; non-fatal XIDs 144 to 150 are only reported. ``power_throttle``: XID 54, for an
    operator to check (notify). ``host_errors``: an XID that is in no catalogue, or an unknown recovery requested by the
    driver (notify); for an IMEX domain, one verdict for all its nodes. Sources: NVIDIA, XID Errors; NVIDIA, GPU Memory
    Error Management; NVIDIA DCGM health checks; Meta, "Revisiting Reliability" (HPCA 2025): PCIe errors precede XID 79.
    Reads counters (T, S), temperatures (T, S), ports (Tl, L) and events; a part whose metric is absent finds nothing.
    Cannot see: drifts slower than the window (the node history across jobs shows those).
    """

    name: str = "early_signs"
    every_s: float = 5.0  # hardware effects last longer than this

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node and fault, the most certain sign first."""
        found: dict[tuple[str, str], list[_Sign]] = {}
        for sign in (
            *_remaps(window),
            *_counted(window, CORRECTED),
            *_counted(window, REPLAYS),
            *_logged(window),
            *_unknown(window),
            *_flaps(window),
            *_heat(window),
        ):
            found.setdefault((sign.node, sign.fault), []).append(sign)
        verdicts = [self._verdict(window, sorted(signs, key=_surest)) for signs in found.values()]
        return verdicts + [self._asked(window, words, said) for words, said in _recoveries(window).items()]

    def _verdict(self, window: Window, signs: list[_Sign]) -> Verdict:
        first = signs[0]
        return Verdict(
            detector=self.name,
            fault=first.fault,
            job=window.job,
            nodes=(first.node,),
            node=first.node,
            device=first.device if first.device >= 0 else None,
            confidence=first.confidence,
            onset_s=min(*(sign.since_s for sign in signs), window.now_s),
            summary="; ".join(dict.fromkeys(sign.summary for sign in signs[:2])),
            evidence=tuple(sign.evidence for sign in signs[:3]),
            kinds=frozenset(sign.kind for sign in signs),
            fact=first.fact,
            asks=first.asks,
        )

    def _asked(self, window: Window, words: str, said: dict[str, float]) -> Verdict:
        """Return the verdict on a recovery that drivers request and that is unknown or no single node's fault."""
        domain = DOMAIN in words.lower()
        whose = "a matter of the domain that they share" if domain else f"of which {CATALOGUE} says nothing"
        who = f"the drivers of {len(said)} nodes ask" if len(said) > 1 else f"the driver of {next(iter(said))} asks"
        return Verdict(
            detector=self.name,
            fault="nvlink_degraded" if domain else "host_errors",
            job=window.job,
            nodes=tuple(said),
            node=None,
            device=None,
            confidence=CONFIDENCE_REPORTED,
            onset_s=min(*said.values(), window.now_s),
            summary=f"{who} for {words}, {whose}",
            evidence=tuple(Evidence("xid", node, None, f"154 ({words})") for node in list(said)[:3]),
            kinds=frozenset({"xid"}),
            fact=False,
            asks="notify",
        )


def _recoveries(window: Window) -> dict[str, dict[str, float]]:
    """Return each unknown recovery that drivers request, by its text: the nodes and when each first did."""
    found: dict[str, dict[str, float]] = {}
    for event in window.events:
        if event.kind == "xid" and event.node in window.nodes and event.time_s >= window.started_s - BEFORE_START_S:
            words = unknown_recovery_of(event.attributes)
            if words:
                said = found.setdefault(words, {})
                said[event.node] = min(event.time_s, said.get(event.node, event.time_s))
    return found


def _surest(sign: _Sign) -> tuple[float, float, int]:
    return -sign.confidence, sign.since_s, sign.device


def _remaps(window: Window) -> Iterator[_Sign]:
    pending = window.device.get("gpu_remap_pending")
    if pending is not None and len(pending):
        recent = pending[-2 * PENDING_LINES :]  # the newest rows of some nodes may not have arrived yet
        shown = (recent > 0).sum(axis=0)
        for index in np.flatnonzero((shown >= PENDING_LINES) & (shown == np.isfinite(recent).sum(axis=0))).tolist():
            began = np.flatnonzero(pending[:, index] == 0)
            since_s = float(window.times_s[began[-1]] if len(began) else window.times_s[0])
            evidence = _of_gpu(window, index, "gpu_remap_pending", 1.0, 0.0, 0.0)
            summary = f"{window.series[index]} has a row remap pending: its memory needs a reset to repair itself"
            yield _Sign(evidence, "gpu_memory_error", "remap", since_s, CONFIDENCE_FACT, summary, fact=True)
    rows = window.device.get("gpu_remapped_rows_total")
    if rows is None:
        return
    for index in _suspects(rows):
        up = rises(rows[:, index])
        count = sum(rise.amount for rise in up)
        if len(up) >= REMAP_ROWS and count >= REMAPS_MIN:
            since_s = float(window.times_s[up[0].line]) - window.interval_s
            evidence = _of_gpu(window, index, "gpu_remapped_rows_total", count, 0.0, 1.0, "rows")
            summary = f"{window.series[index]} has remapped {count:.0f} memory rows, again and again"
            yield _Sign(evidence, "gpu_memory_error", "remap", since_s, CONFIDENCE_COUNTED, summary)


def _counted(window: Window, counter: _Counter) -> Iterator[_Sign]:
    """Yield the GPUs whose errors have begun to grow, against their own past and their peers."""
    for index, recent, before, median, since_s in _rising(window, counter):
        begun = recent >= max(counter.least, counter.past_ratio * before) or recent >= counter.storm
        if begun and recent >= PEERS_RATIO * median:
            evidence = _of_gpu(window, index, counter.metric, recent, median, counter.least, counter.unit)
            did = counter.did.format(count=recent)
            summary = f"{window.series[index]} {did} in {counter.within_s:.0f} s ({before:.0f} before)"
            yield _Sign(evidence, counter.fault, counter.kind, since_s, CONFIDENCE_COUNTED, summary)


def _of_gpu(
    window: Window, index: int, metric: str, value: float, peers_median: float, threshold: float, unit: str = ""
) -> Evidence:
    series = window.series[index]
    return Evidence(metric, series.node, series.device, value, peers_median, threshold, unit)


def _rising(window: Window, counter: _Counter) -> Iterator[tuple[int, float, float, float, float]]:
    """Yield column, newest growth, growth before (scaled to the same time), the peers', the onset.

    Only columns that grew in enough rows of that time; none if many nodes' did, since that is no node's own.
    """
    values = window.device.get(counter.metric)
    suspects = _suspects(values) if values is not None else []
    if values is None or not suspects:
        return
    start = int(np.searchsorted(window.times_s, window.now_s - counter.within_s, side="right"))
    found = []
    for index in suspects:
        up = rises(values[:, index])
        recent = [rise for rise in up if rise.line >= start]
        if len(recent) < counter.rows_min:
            continue
        past_s = float(window.times_s[max(start - 1, 0)] - window.times_s[0])
        before = sum(rise.amount for rise in up if rise.line < start) * (
            counter.within_s / past_s if past_s > 0 else 0.0
        )
        since_s = float(window.times_s[recent[0].line]) - window.interval_s
        found.append((index, sum(rise.amount for rise in recent), before, since_s))
    if not found:
        return
    nodes = {int(window.node_of[index]) for index, *_ in found}
    if len(nodes) >= AT_ONCE_NODES and len(nodes) > AT_ONCE_RATIO * len(window.nodes):
        return
    now, then = np.fmax.reduce(values[-3:], axis=0), values[max(start - 1, 0)]
    for index, recent_count, before, since_s in found:
        peers = (window.role_of == window.role_of[index]) & (window.node_of != window.node_of[index])
        growth = (now - then)[peers]
        growth = growth[np.isfinite(growth)]
        yield index, recent_count, before, float(np.median(growth)) if len(growth) else 0.0, since_s


def _suspects(values: Floats) -> list[int]:
    """Return the columns that grew, most growth first, at most as many as can be examined closely."""
    columns = grown(values)
    if len(columns) > SUSPECTS_MAX:
        gain = np.nanmax(values[-3:][:, columns], axis=0) - np.fmin.reduce(values[:3][:, columns], axis=0)
        columns = columns[np.argsort(-np.nan_to_num(gain), kind="stable")[:SUSPECTS_MAX]]
    return [int(column) for column in columns]


def _logged(window: Window) -> Iterator[_Sign]:
    """Yield signs from the kernel log: repeated remaps, power and link training errors, requested drains."""
    for error in gpu_errors(window) if window.events else ():
        kind, code = error.fact.kind, error.fact.code
        drain = error.recovery in ("drain_p2p", "drain_and_reset", "reset", "reboot")
        sign = _Sign(
            error.evidence, error.fact.fault, error.channel, error.first_s, CONFIDENCE_FACT, error.named, fact=True
        )
        if kind in ("remap", "watch") and (error.occurrences >= REMAPS_MIN or drain):
            often = f"{error.occurrences} times" if error.occurrences > 1 else "and its driver wants it drained"
            yield sign._replace(fault="gpu_memory_error", summary=f"{error.named}, {often}")
        elif code == LINK_TRAINING_XID:
            yield sign._replace(fault="nvlink_degraded")
        elif code in NVLINK5_XIDS and error.fatal_s == math.inf:
            yield _to_report(sign, CONFIDENCE_REPORTED, f"{error.named}, not said to be fatal")
        elif kind == "power":
            yield _to_report(sign, CONFIDENCE_SUPPLY, f"{error.named}: its power cable or supply")


def _to_report(sign: _Sign, confidence: float, summary: str) -> _Sign:
    """Return the sign as one that only an operator can judge."""
    return sign._replace(confidence=confidence, summary=summary, fact=False, asks="notify")


def _unknown(window: Window) -> Iterator[_Sign]:
    """Yield the driver's unknown errors: they are reported, but no action rests on them."""
    for since_s, node, device, code in unknown_errors(window) if window.events else ():
        evidence = Evidence("xid", node, device if device >= 0 else None, str(code))
        summary = f"{gpu(node, device)}: XID {code}, of which {CATALOGUE} says nothing"
        yield _Sign(evidence, "host_errors", "xid", since_s, CONFIDENCE_REPORTED, summary, asks="notify")


def _flaps(window: Window) -> Iterator[_Sign]:
    if not (window.link or "node_rdma_link_downed_total" in window.node or window.events):
        return
    found = [item for item in outages(window) if item.downs > FLAPS_TOLERATED]
    if not found or shared(window, found) is not None:
        return
    for item in found:
        node = window.nodes[item.node]
        evidence = Evidence(
            "link_downed_total", node, None, float(item.downs), 0.0, float(FLAPS_TOLERATED), "times in 5 minutes"
        )
        summary = f"{item.link or 'a port'} of {node} went down {item.downs} times in 5 minutes"
        yield _Sign(evidence, "nic_degraded", "link_flaps", item.since_s, CONFIDENCE_COUNTED, summary)


def _heat(window: Window) -> Iterator[_Sign]:
    for drift in drifts(window):
        series, rise = window.series[drift.column], drift.level - drift.before
        evidence = _of_gpu(
            window, drift.column, drift.metric, drift.level, drift.peers_median, drift.threshold, "celsius"
        )
        summary = (
            f"{series} has grown {rise:.0f} degrees hotter at the same power"
            f" ({drift.level:.0f} C, its peers {drift.peers_median:.0f} C)"
        )
        yield _Sign(evidence, "thermal_throttle", "temperature_drift", drift.since_s, CONFIDENCE_DRIFT, summary)
