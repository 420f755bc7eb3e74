"""Detects a GPU whose NVLinks have failed or lost bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.documented import nvlink_bytes_per_second, type_at
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import growth
from eagle_eye.detectors.signs.readings import READINGS_MIN, lasting, read_anew_each, readings
from eagle_eye.detectors.signs.recent_rows import grown
from eagle_eye.detectors.signs.role_medians import medians, window_roles
from eagle_eye.detectors.signs.slow_clocks import SlowClock, slow_clocks
from eagle_eye.detectors.signs.slow_share import pace_change, slowness_by_pace
from eagle_eye.detectors.signs.under_load import (
    Rows,
    compare,
    lines_within,
    loaded_rows,
    middle,
    peers_of,
    require_training,
)
from eagle_eye.detectors.types import Blind, Evidence, Floats, Integers, Verdict, Window, WindowEvent
from eagle_eye.schema.driver_facts import NVLINK5_XIDS, code_of, is_fatal

ROWS_MIN = 3
LASTS_S = 10.0
ERRORS_S = 60.0
ERRORS_MIN = 60.0  # within ERRORS_S: healthy links count a few an hour, with replays
ERRORS_RATIO = 20.0  # times a typical peer's
ERRORS_ROWS_SHARE = 0.3  # of the rows since they began to grow...
ERRORS_LAST_S = 18.0  # ...and how long before acting: a single burst is over when seen
TRAFFIC_RATIO, TRAFFIC_SIGMAS = 0.85, 5.0  # of the peers' traffic, and robust standard deviations
TRAFFIC_LASTS_S = 60.0  # where less traffic and longer steps from the same moment are the only evidence
# NVLink errors up to Hopper and since (NVIDIA's XID catalogue: drain if repeated; the other end may be to blame).
NVLINK_XIDS = frozenset({74}) | NVLINK5_XIDS
REPEATED_S = 10.0  # two this far apart are two errors, not one logged twice
STANDSTILL_S = 60.0  # an XID after which the job stands still this long is left to the stop detectors
SPARE_STEPS = 16  # newest steps that show each role's compute time
COLLECTIVE_SHARE = 0.1  # of a step within a node, if traffic is not reported: tensor-parallel jobs have more
SUSPECTS_MAX = 64
MEMBERS_SAMPLED, MOST_QUANTILE = 64, 0.75  # of a role: a count shown by fewer than a quarter of it is ignored
MANY_NODES = 3  # with fewer links all along: built that way
WHOLE_NODE_SHARE = 0.75  # of a node's GPUs: then something they share has failed
CONFIDENCE_SURE, CONFIDENCE_LINKS, CONFIDENCE_ERRORS, CONFIDENCE_TRAFFIC, CONFIDENCE_ONCE = 0.95, 0.85, 0.9, 0.8, 0.6
ACTIVE = "gpu_nvlinks_active"
TRAFFIC = ("gpu_nvlink_rx_bytes_per_second", "gpu_nvlink_tx_bytes_per_second", "gpu_nvlink_bytes_per_second")


@dataclass(frozen=True, slots=True, eq=False)
class _Suspects:
    lost: dict[int, list[int]]  # by node: series with fewer active links
    erring: dict[int, list[int]]  # by node: series with growing errors
    starved: dict[int, list[SlowClock]]  # by node: series that have begun to move less than their peers
    reported: dict[int, list[WindowEvent]]  # by node: XID 74, fatal ones of 144 to 150


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkDegraded:
    """Names the node whose GPUs have lost NVLinks or count errors on them while the job goes on.

    The kinds of evidence are fewer active links than the peers (or than the GPU itself had before), errors that keep
    growing, XID 74, less NVLink traffic than the peers' under load, and steps that became longer at the same moment. A
    verdict needs lost links or repeated XIDs; or errors with two others; or one GPU's traffic down in both directions
    and longer steps from the same moment, for a minute. If most GPUs of a node show it, the NVSwitch is likelier than
    any of them, and if several do, the other end may be to blame: then no device is named. A single XID 74 without
    effect only asks for a planned check. Blind if links, errors and traffic are all unobserved. Cannot see: a domain of
    many nodes (NVLink 5 switches) as such.
    """

    name: str = "nvlink_degraded"
    every_s: float = 2.0  # hardware effects last longer than this

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node with degraded NVLinks."""
        device = window.device
        reported = _reported(window)
        metrics = (ACTIVE, "gpu_nvlink_errors_total", *TRAFFIC)
        if not reported and not any(metric in device for metric in metrics):
            raise Blind("neither NVLinks nor their errors or traffic are reported")
        suspects = _Suspects(_lost(window), _erring(window), _starved(window), reported)
        nodes = sorted({*suspects.lost, *suspects.erring, *suspects.starved, *suspects.reported})
        if not nodes:
            return []
        require_training(window)
        rows = loaded_rows(window, lines_within(window.times_s, LASTS_S))
        verdicts = (self._judge(window, node, suspects, rows) for node in nodes)
        return [verdict for verdict in verdicts if verdict is not None]

    def _judge(self, window: Window, node: int, suspects: _Suspects, rows: Rows) -> Verdict | None:
        lost, erring = suspects.lost.get(node, []), suspects.erring.get(node, [])
        reported = suspects.reported.get(node, [])
        starved = suspects.starved.get(node, [])
        columns = lost or erring or _columns_of(window, node, reported) or [slow.index for slow in starved]
        onset_s, chronic = _onset(window, lost, erring, reported)
        if starved and not (lost or erring or reported):
            onset_s, chronic = min(slow.onset_s for slow in starved), False
        kinds: set[str] = set()
        evidence: list[Evidence] = []
        share = 0.0
        if lost:
            kinds.add("nvlinks")
            items, share = _links(window, lost)
            evidence += items
        if erring:
            kinds.add("nvlink_errors")
            evidence.append(_errors(window, erring[0]))
        if reported:
            kinds.add("xid")
            codes = ", ".join(
                dict.fromkeys(f"{event.kind.upper()} {event.attributes.get('code')}" for event in reported)
            )
            evidence.append(Evidence(reported[0].kind, window.nodes[node], _device(reported), codes))
        less = next((item for column in columns if (item := _less_traffic(window, column, rows)) is not None), None)
        if less is not None:
            kinds.add("nvlink_bandwidth")
            evidence.append(less)
        paced = pace_change(window, onset_s, chronic=chronic)
        if paced is not None and paced.clear:
            kinds.add("step_time")
        confidence, planned = _confidence(kinds, reported, window.now_s - onset_s)
        if confidence is None:
            return None
        cost = slowness_by_pace(paced, _reckoned(window, columns, rows, share))
        whole = len(columns) >= WHOLE_NODE_SHARE * int((window.node_of == node).sum()) and len(columns) > 2
        who = window.nodes[node]
        where = f"all NVLinks of {who}, likely {_switch(window, columns)}," if whole else _where(window, node, columns)
        signs = "; ".join(_said(item) for item in evidence[:2])
        return Verdict(
            detector=self.name,
            fault="nvlink_degraded",
            job=window.job,
            nodes=(who,),
            node=who,
            device=window.series[columns[0]].device if len(columns) == 1 else None,
            confidence=confidence,
            onset_s=onset_s,
            summary=f"{where} are degraded: {signs}; {cost}",
            evidence=tuple(evidence),
            kinds=frozenset(kinds),
            slowdown_ratio=cost.ratio,
            asks="drain_node" if planned else None,
        )


def _confidence(kinds: set[str], reported: list[WindowEvent], lasted_s: float) -> tuple[float | None, bool]:
    """Return the probability that the claim is true (None: no claim), and whether it only asks for a planned check."""
    repeated = len(reported) > 1 and reported[-1].time_s - reported[0].time_s >= REPEATED_S
    if "nvlinks" in kinds:
        return (CONFIDENCE_SURE if len(kinds) > 1 and lasted_s >= LASTS_S else CONFIDENCE_LINKS), False
    if "xid" in kinds and (len(kinds) > 1 or repeated):
        return CONFIDENCE_ERRORS, len(kinds) == 1
    if "nvlink_errors" in kinds and len(kinds) > 2:
        return (CONFIDENCE_ERRORS if lasted_s >= ERRORS_LAST_S else CONFIDENCE_ONCE), False
    if kinds == {"nvlink_errors", "nvlink_bandwidth"}:
        return CONFIDENCE_ONCE, False  # its cost to the job is not known yet
    if kinds == {"nvlink_bandwidth", "step_time"}:
        # A victim of another node's slowness also moves less: on its own this is only reported.
        return (CONFIDENCE_TRAFFIC if lasted_s >= TRAFFIC_LASTS_S else None), False
    if "xid" in kinds:
        return CONFIDENCE_ONCE, True
    return None, False


def _reported(window: Window) -> dict[int, list[WindowEvent]]:
    """Return each node's fatal link XIDs that the job survived, oldest first; NvSwitch handles SXIDs."""
    found: dict[int, list[WindowEvent]] = {}
    for event in window.events:
        if (
            event.kind == "xid"
            and code_of(event.attributes) in NVLINK_XIDS
            and is_fatal(event.attributes)
            and event.node in window.nodes
            and event.time_s >= window.started_s
        ):
            found.setdefault(window.nodes.index(event.node), []).append(event)
    if found and math.isfinite(window.last_step) and window.now_s - window.advanced_s > STANDSTILL_S:
        return {}
    return {node: sorted(events, key=lambda event: event.time_s) for node, events in found.items()}


def _lost(window: Window) -> dict[int, list[int]]:
    """Return by node the series that held fewer links than their role or they themselves had."""
    values = window.device.get(ACTIVE)
    if values is None or len(values) < ROWS_MIN:
        return {}
    held = np.fmax.reduce(values[-ROWS_MIN:], axis=0)
    roles = window_roles(window, 1)
    usually = medians(held[None, :], roles, 1)[0][roles.place]
    low, fell = held < usually, held < np.fmax.reduce(values[:: max(len(values) // 8, 1)], axis=0)
    if not (low | fell).any():
        # All have the same; a whole job that lost links is no finding about a node.
        return {}
    found: dict[int, list[int]] = {}
    for index in [*np.flatnonzero(low), *np.flatnonzero(fell & ~low)][: 4 * SUSPECTS_MAX]:
        now = _now(window, int(index))
        usual = middle(held[peers_of(window, int(index), window.role_of)])
        if now < usual or (now < _before(window, int(index)) and not now > usual):
            found.setdefault(int(window.node_of[index]), []).append(int(index))
    always = [node for node, columns in found.items() if not any(_fell(window, column) for column in columns)]
    if len(always) >= MANY_NODES:
        found = {node: columns for node, columns in found.items() if node not in always}
    return found


def _fell(window: Window, column: int) -> bool:
    return _now(window, column) < _before(window, column)


@once
def _now(window: Window, column: int) -> float:
    """Return the highest link count in the newest readings; NaN with fewer than READINGS_MIN."""
    own = readings(window, ACTIVE, column)
    newest = own[np.isfinite(own)][-READINGS_MIN:]
    return float(newest.max()) if len(newest) == READINGS_MIN else math.nan


def _had(window: Window, column: int) -> Floats:
    """Return the link counts that the series has shown, (T,); NaN in rows that are repeated or implausible."""
    return lasting(readings(window, ACTIVE, column))


def _before(window: Window, column: int) -> float:
    """Return the highest link count of the series before: at most that of GPUs of its role."""
    own = np.fmax.reduce(_had(window, column))
    return float(np.fmin(own, _most(window, int(window.role_of[column]))))


@once
def _most(window: Window, role: int) -> float:
    """Return how many links a role's GPUs have had; a few readings may exceed the real number."""
    members = np.flatnonzero(window.role_of == role)
    members = members[:: math.ceil(len(members) / MEMBERS_SAMPLED)]
    anew = read_anew_each(window, tuple(members.tolist()))
    counts = np.where(anew, window.device[ACTIVE][:, members], np.nan)
    each = np.array([np.fmax.reduce(lasting(own)) for own in counts.T])
    each = each[np.isfinite(each)]
    return float(np.quantile(each, MOST_QUANTILE, method="lower")) if len(each) else math.nan


def _erring(window: Window) -> dict[int, list[int]]:
    """Return by node the series whose errors keep growing far beyond the typical one's."""
    values = window.device.get("gpu_nvlink_errors_total")
    if values is None or len(values) < ROWS_MIN + 1:
        return {}
    lines = lines_within(window.times_s, ERRORS_S)
    if not (grown(values, lines) >= ERRORS_MIN).any():
        return {}
    total = growth(values, lines + 1)
    known = total[np.isfinite(total)]
    if len(known) == 0:
        return {}
    line = max(ERRORS_MIN, ERRORS_RATIO * float(np.median(known)))
    times_s = window.times_s[-lines - 1 :]
    found: dict[int, list[int]] = {}
    for index in np.flatnonzero(total >= line)[:SUSPECTS_MAX].tolist():
        own = values[-lines - 1 :, index]
        reported = np.isfinite(own)
        steps = np.diff(own[reported])
        first = int(np.argmax(steps > 0))
        rows = max(ROWS_MIN, ERRORS_ROWS_SHARE * (len(steps) - first))
        if times_s[-1] - times_s[reported][first] >= LASTS_S and np.count_nonzero(steps > 0) >= rows:
            found.setdefault(int(window.node_of[index]), []).append(index)
    return found


def _starved(window: Window) -> dict[int, list[SlowClock]]:
    """Return by node the series that have begun to move far less than their peers, at most half of a node's.

    In a synchronous job all ranks of a role move the same amount, equally in both directions: a drop in one direction
    is the counter's fault. If a whole node moves less, its host or network is the reason.
    """
    less: dict[int, SlowClock] | None = None
    for metric in [metric for metric in TRAFFIC if metric in window.device]:
        if less is None or less:
            this_way = {slow.index: slow for slow in _moves_less(window, metric)}
            less = this_way if less is None else {index: less[index] for index in less if index in this_way}
    found: dict[int, list[SlowClock]] = {}
    for slow in (less or {}).values():
        found.setdefault(int(window.node_of[slow.index]), []).append(slow)
    return {node: own for node, own in found.items() if 2 * len(own) <= int((window.node_of == node).sum())}


def _moves_less(window: Window, metric: str) -> list[SlowClock]:
    try:
        slow_ones = slow_clocks(window, metric, 1 - TRAFFIC_RATIO)
    except Blind:
        return []  # links and errors remain as evidence
    return [slow for slow in slow_ones if slow.distance >= TRAFFIC_SIGMAS and slow.lasting and not slow.chronic]


def _onset(window: Window, lost: list[int], erring: list[int], reported: list[WindowEvent]) -> tuple[float, bool]:
    """Return the onset, and whether the window shows no time before it."""
    begins = [reported[0].time_s] if reported else []
    chronic = not reported
    for column in lost:
        higher = np.flatnonzero(_had(window, column) > _now(window, column))
        if len(higher):
            begins.append(float(window.times_s[higher[-1]]))
            chronic = False
    for column in erring:
        own = window.device["gpu_nvlink_errors_total"][:, column]
        flat = np.flatnonzero(own <= own[np.isfinite(own)].min())
        begins.append(float(window.times_s[flat[-1]]) if len(flat) else float(window.times_s[0]))
        chronic = chronic and len(flat) <= 1
    return (min(begins) if begins else float(window.times_s[0]) - window.interval_s), chronic


def _links(window: Window, lost: list[int]) -> tuple[list[Evidence], float]:
    values = window.device[ACTIVE]
    held = np.fmax.reduce(values[-ROWS_MIN:], axis=0)
    items, worst = [], 0.0
    for column in lost[:4]:
        series = window.series[column]
        usual = max(middle(held[peers_of(window, column, window.role_of)]), _before(window, column))
        own = _now(window, column)
        worst = max(worst, 1 - own / usual if usual > 0 else 0.0)
        items.append(Evidence(ACTIVE, series.node, series.device, own, usual, usual, "links"))
    return items, worst


def _errors(window: Window, column: int) -> Evidence:
    values = window.device["gpu_nvlink_errors_total"]
    lines = lines_within(window.times_s, ERRORS_S) + 1
    own = float(growth(values[:, column : column + 1], lines)[0])
    peers = middle(growth(values[:, peers_of(window, column, window.role_of)], lines))
    series = window.series[column]
    return Evidence("gpu_nvlink_errors_total", series.node, series.device, own, peers, ERRORS_MIN, "errors")


def _less_traffic(window: Window, column: int, rows: Rows) -> Evidence | None:
    if len(rows) < ROWS_MIN:
        return None
    series = window.series[column]
    peers = peers_of(window, column, window.role_of)
    for metric in TRAFFIC:
        found = compare(window, metric, column, peers, rows)
        if found is None:
            continue
        if found.ratio <= TRAFFIC_RATIO and found.peers - found.own >= TRAFFIC_SIGMAS * found.sigma:
            line = TRAFFIC_RATIO * found.peers
            return Evidence(metric, series.node, series.device, found.own, found.peers, line, "bytes_per_second")
    return None


def _reckoned(window: Window, columns: list[int], rows: Rows, lost_share: float) -> float:
    """Return the expected cost of lost links: the traffic takes longer over the remaining ones."""
    if lost_share <= 0 or not columns:
        return 0.0
    peers: Integers = peers_of(window, columns[0], window.role_of)
    moved = [found.peers for m in TRAFFIC if (found := compare(window, m, columns[0], peers, rows)) is not None]
    links = compare(window, ACTIVE, columns[0], peers, rows)
    busy = COLLECTIVE_SHARE
    if moved and links is not None and links.peers > 0:
        busy = min(max(moved) / (links.peers * nvlink_bytes_per_second(window, columns[0])), 1.0)
    cost = busy * lost_share / max(1 - lost_share, 0.1)
    return 0.0 if cost < _spare(window, columns[0]) else cost


def _spare(window: Window, column: int) -> float:
    """Return by what share of a step the GPU's role computes less than the longest role, which the pipeline waits for.

    0 if not reported.
    """
    compute, seconds = window.steps.values.get("train_compute_seconds"), window.steps.values.get("train_step_seconds")
    if compute is None or seconds is None or not len(compute):
        return 0.0
    roles = window_roles(window, 1)
    levels = medians(compute[-SPARE_STEPS:], roles, 1)
    step_s = middle(seconds[-SPARE_STEPS:, column])
    each = np.array([middle(level) for level in levels.T])
    spare = (float(np.fmax.reduce(each)) - float(each[roles.place[column]])) / step_s if step_s > 0 else 0.0
    return spare if math.isfinite(spare) else 0.0


def _columns_of(window: Window, node: int, reported: list[WindowEvent]) -> list[int]:
    devices = {event.device for event in reported if event.device >= 0}
    return [i for i in np.flatnonzero(window.node_of == node).tolist() if window.series[i].device in devices]


def _device(reported: list[WindowEvent]) -> int | None:
    devices = {event.device for event in reported}
    return devices.pop() if len(devices) == 1 and min(devices) >= 0 else None


def _switch(window: Window, columns: list[int]) -> str:
    kind = type_at(window, columns[0])
    return "its NVSwitch" if kind is None or kind.rack is None else "what joins it to its rack's NVLink switches"


def _where(window: Window, node: int, columns: list[int]) -> str:
    return f"NVLinks of {window.series[columns[0]] if len(columns) == 1 else window.nodes[node]}"


def _said(item: Evidence) -> str:
    if item.metric == ACTIVE:
        return f"{item.value:.0f} of {item.peers_median:.0f} links are up"
    if item.metric == "gpu_nvlink_errors_total":
        return f"{item.value:.0f} errors in a minute"
    if item.peers_median is None:
        return f"{item.value}"
    return f"{item.metric} {item.value:.3g}, its peers' {item.peers_median:.3g}"
