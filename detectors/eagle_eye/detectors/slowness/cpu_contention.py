"""Detects other load on a node's CPUs that its training needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.activity_pace import GROWTH_DISTANCE, began_then, lasting_change
from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.own_pace import require_pace
from eagle_eye.detectors.signs.peers import PEERS_MIN, SIGMA_PER_MAD
from eagle_eye.detectors.signs.progress import hooked, typical_step_s
from eagle_eye.detectors.signs.readings import node_read_anew
from eagle_eye.detectors.signs.runs import longer_than_peers
from eagle_eye.detectors.signs.shared_cause import TOGETHER_ROWS, TOGETHER_S, Struck, partition
from eagle_eye.detectors.signs.slow_share import Slowness, pace_change, slowness_by_pace
from eagle_eye.detectors.signs.step_noise import spread_of
from eagle_eye.detectors.signs.topology import named
from eagle_eye.detectors.signs.under_load import (
    ROWS_MIN,
    Rows,
    carried,
    compare,
    lines_within,
    loaded_rows,
    middle,
    peers_of,
    require_training,
)
from eagle_eye.detectors.types import Blind, Evidence, Floats, Integers, Verdict, Window

# Signs of a busy host: metric, and the excess over its peers and its own past that counts.
HOST_SIGNS = (
    ("node_cpu_utilization_ratio", 0.20),
    ("node_cpu_pressure_ratio", 0.15),
    ("node_cpu_steal_ratio", 0.05),
    ("node_memory_pressure_ratio", 0.10),
)
DISTANCE_MIN = 6.0  # robust standard deviations of the peers
LASTS_S, CHRONIC_LASTS_S = 10.0, 60.0
LOW_SHARE = 0.7  # of the rows since the onset that must show the sign
PAST_SHARE = 0.5  # of the excess that the node's own past must not have shown
PAIR, PAST_ROWS_MIN = 2, 8  # nodes of a job in which a host's own past, in so many rows, says how far it strays
NODES_SAMPLED = 128
SATURATED_RATIO = 0.99  # a saturated value cannot rise further and is the same in every reading
# Effects on the GPUs of a slow host: metric, share of the peers' level below which the GPU does less.
GPU_SIGNS = (
    ("gpu_tensor_active_ratio", 0.93),
    ("gpu_sm_active_ratio", 0.95),
    ("gpu_power_watts", 0.95),
    ("gpu_utilization_ratio", 0.96),
)
EFFECT_SIGMAS = 4.0  # of the spread between peers
ALL_SHARE = 0.75  # of the node's GPUs or ranks that must show it: a host problem affects more than one GPU
COMPUTE_RATIO = 1.05  # of the peers' compute time
WAIT_SHARE = 0.03  # of a step: longer waits for data, or shorter waits in collectives, than the peers'
ARRIVAL_RATIO = 0.7  # of the peers' time in collectives
STEPS_MIN, STEPS_MAX = 2, 32
SUSPECTS_MAX = 16
IN_GENERAL = "all its GPUs are held up ({})"
JOB_ACTIVITY = "job_activity"
HELD_UP = {JOB_ACTIVITY: "the job has been slower since the same moment"}
CONFIDENCE_SURE, CONFIDENCE_CLEAR, CONFIDENCE_LIKELY = 0.95, 0.92, 0.75

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Busy:
    node: int
    onset_s: float
    chronic: bool
    common: bool  # whether other hosts are as busy for as long now and then
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Sign:
    onset_s: float
    chronic: bool
    common: bool
    evidence: Evidence


@dataclass(frozen=True, slots=True, eq=False)
class _Effect:
    kind: str
    ratio: float  # by what share of a step it makes the job longer, 0 unknown
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuContention:
    """Names the node whose host is busy with something else while all its GPUs slow down together.

    The host's CPU utilisation, pressure (PSI), steal or memory pressure must be well above its peers' and its own past;
    that alone is no fault (a checkpoint writer, rank 0's logging). The second kind of evidence is the effect on
    training, on most of the node's GPUs at once and from the same time: less tensor activity, power or utilisation than
    the peers', longer compute times, longer waits for data, or the shortest waits in collectives. Where ranks report
    nothing and waiting leaves GPUs idle, as the late ones are, it is the job itself, slower since the same moment. In a
    job of two nodes the host's own past stands in for the peers' spread. If the host has always been busy, two of these
    are needed; if others are as busy for as long now and then, one is reported without action. If several nodes became
    busy together, something runs on all of them: reported, and no node is accused. Blind if no host metric is reported,
    or neither GPUs nor ranks are. Cannot see: late kernel launches without a busy host (garbage collection): Straggler
    does.
    """

    name: str = "cpu_contention"
    every_s: float = 2.0  # hardware effects last longer than this

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node whose host slows its GPUs."""
        if not any(metric in window.node for metric, _ in HOST_SIGNS):
            raise Blind("no host metric (CPU utilisation, pressure, steal) is reported")
        suspects = _screen(window)
        if not suspects:
            return []
        require_training(window)
        require_pace(window)
        rows = loaded_rows(window, len(window.times_s))
        if not len(rows) or rows[-1] < len(window.times_s) - ROWS_MIN:
            raise Blind("the job is not under load: nothing says whether a busy host holds it up")
        found = []
        for node in suspects:
            busy = _busy(window, node)
            if busy is None:
                continue
            effects = _effects(window, busy, rows[window.times_s[rows] > busy.onset_s + window.interval_s / 2])
            if effects and (len(effects) > 1 or not busy.chronic):
                found.append((busy, effects))
        accused = {busy.node: Struck(busy.node, None if busy.chronic else busy.onset_s) for busy, _ in found}
        alone, cohorts = partition(
            window, accused, [mate for busy, _ in found for mate in _rose_together(window, busy)]
        )
        verdicts = [self._verdict(window, busy, effects) for busy, effects in found if busy.node in alone]
        verdicts += [self._shared(window, cohort, found) for cohort in cohorts]
        return verdicts

    def _verdict(self, window: Window, busy: _Busy, effects: list[_Effect]) -> Verdict:
        who = window.nodes[busy.node]
        cost = _cost(window, busy, effects)
        host = busy.evidence[0]
        return Verdict(
            detector=self.name,
            fault="cpu_contention",
            job=window.job,
            nodes=(who,),
            node=who,
            device=None,
            confidence=_confidence(busy, effects),
            onset_s=busy.onset_s,
            summary=(
                f"the host of {who} is busy ({host.metric} {host.value:.2f}, its peers' {host.peers_median:.2f})"
                f" and {HELD_UP.get(effects[0].kind, IN_GENERAL).format(effects[0].kind.replace('_', ' '))}; {cost}"
            ),
            evidence=(*busy.evidence, *(effect.evidence for effect in effects)),
            kinds=frozenset({"host_cpu", *(effect.kind for effect in effects)}),
            slowdown_ratio=cost.ratio,
        )

    def _shared(self, window: Window, cohort: tuple[int, ...], found: list[tuple[_Busy, list[_Effect]]]) -> Verdict:
        found = [item for item in found if item[0].node in cohort]
        together = tuple(window.nodes[node] for node in cohort)
        nodes = tuple(window.nodes[busy.node] for busy, _ in found)
        costs = [_cost(window, busy, effects) for busy, effects in found]
        return Verdict(
            detector=self.name,
            fault="cpu_contention",
            job=window.job,
            nodes=nodes,
            node=None,
            device=None,
            confidence=CONFIDENCE_LIKELY,
            onset_s=min(busy.onset_s for busy, _ in found),
            summary=(
                f"the hosts of {named(together)} became busy together and GPUs of {named(nodes)} are held up:"
                " something runs on all"
            ),
            evidence=tuple(busy.evidence[0] for busy, _ in found[:4]),
            kinds=frozenset({"host_cpu"}),
            slowdown_ratio=max((cost.ratio for cost in costs), default=0.0),
            asks="notify",
        )


def _confidence(busy: _Busy, effects: list[_Effect]) -> float:
    """What the job's pace alone says is told and not acted on: the job may itself be what keeps that host busy.

    So is one effect of a host that is no busier than others are at times.
    """
    if [effect.kind for effect in effects] == [JOB_ACTIVITY] or (busy.common and len(effects) == 1):
        return CONFIDENCE_LIKELY
    return CONFIDENCE_SURE if len(effects) > 1 and not busy.chronic else CONFIDENCE_CLEAR


def _screen(window: Window) -> list[int]:
    """Return the nodes with a sign in all of the newest rows, worst first."""
    worst: dict[int, float] = {}
    for metric, least in HOST_SIGNS:
        values = window.node.get(metric)
        if values is None or len(values) < ROWS_MIN:
            continue
        held = np.fmin.reduce(values[-ROWS_MIN:], axis=0)
        known = len(held) - int(np.isnan(held).sum())
        if known < PAIR:
            continue
        half = 0 if known == PAIR else known // 2
        line = float(np.partition(held, half)[half]) + least
        for node in np.flatnonzero(held > line).tolist():
            worst[node] = max(worst.get(node, 0.0), float(held[node] - line) / least)
    return sorted(worst, key=lambda node: (-worst[node], node))[:SUSPECTS_MAX]


def _busy(window: Window, node: int) -> _Busy | None:
    """Return the signs by which a host is busier than its peers and its past; None if none lasts long enough."""
    found = [sign for metric, least in HOST_SIGNS if (sign := _sign(window, node, metric, least)) is not None]
    if not found:
        return None
    return _Busy(
        node,
        min(sign.onset_s for sign in found),
        all(sign.chronic for sign in found),
        all(sign.common for sign in found),
        tuple(sign.evidence for sign in found),
    )


def _sign(window: Window, node: int, metric: str, least: float) -> _Sign | None:
    values = window.node.get(metric)
    if values is None:
        return None
    others = np.delete(np.arange(len(window.nodes)), node)
    others = others[:: math.ceil(len(others) / NODES_SAMPLED)]
    own, peers = values[:, node], carried(_row_medians(values[:, others], min(PEERS_MIN, len(others))))
    lines = lines_within(window.node_times_s, LASTS_S)
    level, usual = middle(own[-lines:]), middle(peers[-lines:])
    excess = level - usual
    if not excess >= least:
        return None
    levels = median_over_rows(values[-lines:, others])
    sigma = SIGMA_PER_MAD * middle(np.abs(levels - middle(levels)))
    if not excess >= DISTANCE_MIN * sigma:
        return None
    known = np.flatnonzero(np.isfinite(own) & np.isfinite(peers))
    high = (own - peers)[known] > excess / 2
    quiet = np.flatnonzero(~high[:-1] & ~high[1:])  # two ordinary rows in a row end the episode
    first = min(int(quiet[-1]) + 2, len(known) - 1) if len(quiet) else 0
    chronic = first == 0
    onset_s = float(window.node_times_s[known[first]]) - window.interval_s
    lasted_s = float(window.node_times_s[known[-1]]) - onset_s
    if len(known) - first < ROWS_MIN or lasted_s < (CHRONIC_LASTS_S if chronic else LASTS_S):
        return None
    before = own[known[:first]]
    past = middle(before)
    if float(high[first:].mean()) < LOW_SHARE or (not chronic and level - past < PAST_SHARE * excess):
        return None
    if len(others) < PEERS_MIN:
        # One other host says little of how far hosts lie apart: the host's own past does.
        sigma = SIGMA_PER_MAD * middle(np.abs(before - past))
        if len(before) < PAST_ROWS_MIN or level - past < DISTANCE_MIN * sigma:
            return None
    line = usual + max(least, DISTANCE_MIN * sigma)
    times = int(np.count_nonzero(high[first:] & node_read_anew(window, (node,))[known[first:], 0]))
    with np.errstate(invalid="ignore"):
        beyond = values[:, others] - peers[:, None] > excess / 2
    seen = node_read_anew(window, tuple(others.tolist())) & np.isfinite(values[:, others])
    common = not longer_than_peers(times, beyond, seen)
    return _Sign(onset_s, chronic, common, Evidence(metric, window.nodes[node], None, level, usual, line, "ratio"))


def _rose_together(window: Window, busy: _Busy) -> list[Struck]:
    """Return the other nodes that became busy at about the same time, even if they no longer are."""
    if busy.chronic:
        return []
    sign = busy.evidence[0]
    values = window.node[sign.metric]
    together_s = max(TOGETHER_S, TOGETHER_ROWS * window.interval_s)
    since_s = window.node_times_s - busy.onset_s
    lines = lines_within(window.node_times_s, LASTS_S)
    before = np.flatnonzero(since_s <= -together_s)[-lines:]
    if len(before) == 0:
        before = np.flatnonzero(since_s <= 0)[:lines]
    after = np.flatnonzero((since_s > -together_s) & (since_s <= together_s + LASTS_S))
    if len(before) == 0 or not isinstance(sign.value, float):
        return []
    least = (sign.value - (sign.peers_median or 0.0)) / 2
    usual = median_over_rows(values[before])
    rose = np.zeros(values.shape[1], dtype=np.bool_)
    for first in range(0, len(after), lines):
        block = values[after[first : first + lines]]
        if len(block) >= ROWS_MIN:
            rose |= (median_over_rows(block) - usual >= least) & _read_twice(block, usual + least)
    return [Struck(int(node), busy.onset_s) for node in np.flatnonzero(rose) if int(node) != busy.node]


def _read_twice(block: Floats, line: Floats) -> Flags:
    """Return which columns were read above their threshold more than once: a repeated value is a single reading."""
    with np.errstate(invalid="ignore"):
        high = np.where(block >= line, block, np.nan)
        lowest, highest = np.fmin.reduce(high, axis=0), np.fmax.reduce(high, axis=0)
        return np.asarray((highest > lowest) | (lowest >= SATURATED_RATIO))


def _row_medians(values: Floats, least: int) -> Floats:
    ordered = np.sort(values, axis=1)
    count = np.isfinite(values).sum(axis=1)
    at = np.clip(count // 2, 0, max(values.shape[1] - 1, 0))
    return np.where(count >= least, ordered[np.arange(len(ordered)), at], np.nan)


def _effects(window: Window, busy: _Busy, rows: Rows) -> list[_Effect]:
    """Return the effects of the busy host on training, at most one of each independent kind."""
    columns = np.flatnonzero(window.node_of == busy.node)
    if len(columns) == 0:
        return []
    lines = lines_within(window.times_s, LASTS_S)
    found = [_gpus_do_less(window, columns, rows[-lines:]), *_steps_tell(window, columns, busy)]
    if not any(found):
        found = [_job_slowed(window, busy)]
    return [effect for effect in found if effect is not None]


def _gpus_do_less(window: Window, columns: Integers, rows: Rows) -> _Effect | None:
    if len(rows) < ROWS_MIN:
        return None
    for metric, share in GPU_SIGNS:
        pairs = [compare(window, metric, c, peers_of(window, c, window.role_of), rows) for c in columns.tolist()]
        known = [pair for pair in pairs if pair is not None and pair.peers > 0]
        less = [p for p in known if p.ratio <= share and p.peers - p.own >= EFFECT_SIGMAS * p.sigma]
        if known and len(less) >= max(ALL_SHARE * len(known), 1):
            own, peers = middle(np.array([p.own for p in known])), middle(np.array([p.peers for p in known]))
            node = window.series[int(columns[0])].node
            return _Effect("gpu_activity", 0.0, Evidence(metric, node, None, own, peers, share * peers))
    return None


def _job_slowed(window: Window, busy: _Busy) -> _Effect | None:
    """Return that a job whose ranks report nothing became slower as the host became busy, and stayed so."""
    if busy.chronic or hooked(window):
        return None
    change = lasting_change(window, busy.onset_s)
    if change is None or not change.clear or not began_then(window, busy.onset_s, change.growth):
        return None
    line = 1 + GROWTH_DISTANCE * change.error
    evidence = Evidence("job_activity_slowdown", None, None, 1 + change.growth, 1.0, line, "ratio")
    return _Effect(JOB_ACTIVITY, 0.0, evidence)


def _steps_tell(window: Window, columns: Integers, busy: _Busy) -> list[_Effect | None]:
    steps = window.steps
    step_s = typical_step_s(window)
    lines = np.flatnonzero(steps.times_s >= busy.onset_s + step_s + window.interval_s)[-STEPS_MAX:]
    if len(lines) < STEPS_MIN:
        return []
    node = window.series[int(columns[0])].node
    columns = columns[columns < steps.relative_compute.shape[1]]  # other ranks joined after these steps
    found: list[_Effect | None] = []
    relative = median_over_rows(steps.relative_compute[lines])
    own, others = relative[columns], relative[window.node_of[: len(relative)] != busy.node]
    own, others = own[np.isfinite(own)], others[np.isfinite(others)]
    line = max(COMPUTE_RATIO, 1 + EFFECT_SIGMAS * spread_of(others))
    if len(own) and (own >= line).mean() >= ALL_SHARE:
        level = middle(own)
        longer = (1 - 1 / level) * middle(steps.values["train_compute_seconds"][lines][:, columns].ravel()) / step_s
        found.append(_effect("compute_time", longer / max(1 - longer, 0.1), "relative_compute", node, level, 1.0, line))
    for metric, kind, sign in (
        ("train_data_wait_seconds", "data_wait", 1.0),
        ("nccl_collective_seconds", "collective_arrival", -1.0),
    ):
        values = steps.values.get(metric)
        if values is None:
            continue
        own_s, peers_s, spread_s = _levels(window, values, lines, columns)
        known, least_s = sign * (own_s - peers_s), np.maximum(WAIT_SHARE * step_s, EFFECT_SIGMAS * spread_s)
        late = known >= least_s
        if sign < 0:
            late &= own_s <= ARRIVAL_RATIO * peers_s
        if len(late) and late.mean() >= ALL_SHARE:
            more, own_level, peers = middle(known), middle(own_s), middle(peers_s)
            line = peers + sign * middle(least_s)
            found.append(_effect(kind, more / max(step_s - more, step_s / 10), metric, node, own_level, peers, line))
    return found


def _effect(kind: str, ratio: float, metric: str, node: str, own: float, peers: float, line: float) -> _Effect:
    unit = "ratio" if metric == "relative_compute" else "seconds"
    return _Effect(kind, ratio, Evidence(metric, node, None, own, peers, line, unit))


def _levels(window: Window, values: Floats, lines: Integers, columns: Integers) -> tuple[Floats, Floats, Floats]:
    """Return the ranks' own levels, their peers', and how far peers' levels lie apart, where both were observed."""
    found = []
    for column in columns.tolist():
        peers = peers_of(window, column, window.role_of)
        levels = median_over_rows(values[np.ix_(lines, peers[peers < values.shape[1]])])
        levels, own = levels[np.isfinite(levels)], middle(values[lines, column])
        if len(levels) >= PEERS_MIN and math.isfinite(own):
            found.append((own, middle(levels), spread_of(levels)))
    own_s, peers_s, spread_s = np.array(found).reshape(-1, 3).T
    return own_s, peers_s, spread_s


def _cost(window: Window, busy: _Busy, effects: list[_Effect]) -> Slowness:
    """Return the cost to the job: by its pace since the onset, else by what its ranks show."""
    caused = sum(effect.ratio for effect in effects if effect.kind in ("compute_time", "data_wait"))
    caused = caused or sum(effect.ratio for effect in effects)  # its peers' wait for it, where compute does not show it
    if caused > 0:
        # A pipeline stage with time to spare costs the job nothing.
        change = pace_change(window, busy.onset_s, chronic=busy.chronic)
        return slowness_by_pace(change, caused) if change is not None else Slowness(caused, measured=True)
    paced = pace_change(window, busy.onset_s, chronic=busy.chronic)
    activity = next((e.evidence for e in effects if e.kind == "gpu_activity"), None)
    if activity is not None and activity.peers_median and isinstance(activity.value, float) and activity.value > 0:
        return slowness_by_pace(paced, max(activity.peers_median / activity.value - 1, 0.0) / 2)
    return slowness_by_pace(paced, 0.0)
