"""Detects a node that makes every step longer, by comparing its ranks with comparable peers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.beside_its_past import beside_its_past
from eagle_eye.detectors.signs.even_work import even_work, slow_with_its_data, slow_with_others, work_is_told
from eagle_eye.detectors.signs.medians import (
    TRIM_RATIO,
    median_over_rows,
    quantile_over_rows,
    trimmed_means,
)
from eagle_eye.detectors.signs.own_pace import with_pace
from eagle_eye.detectors.signs.peers import PEERS_MIN, step_levels
from eagle_eye.detectors.signs.progress import SHORT_STEP_S, typical_step_s
from eagle_eye.detectors.signs.rank_cost import ONSET_MARGIN, PACE_NOTED, cost_since, waited_for
from eagle_eye.detectors.signs.slow_share import Slowness
from eagle_eye.detectors.signs.step_noise import (
    SCREEN_STEPS,
    STEPS_MIN,
    chance_digits,
    highest,
    noise_of_peers,
    peers_elsewhere,
    screening_noise,
    step_peers,
    unheard_of,
)
from eagle_eye.detectors.signs.topology import named
from eagle_eye.detectors.signs.under_load import LIMITS_ALIKE_RATIO, nodes_among, power_limits
from eagle_eye.detectors.types import Blind, Evidence, Floats, Integers, Verdict, Window

DAY_S = 86_400.0
STEPS_TOLD = 2  # fewer than STEPS_MIN, reported if both are slower than any step of any peer, and long enough
# Numbers of steps examined: a large slowdown shows in few, a small one only once it has lasted.
STRETCHES = (2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
SCREEN_RATIO = 0.7  # of the excess that counts, which a plain mean must show before a rank is examined closely
MILD_STEPS_MIN = 20  # a slowdown below ``ratio`` must have lasted this many steps to be acted on...
MILD_STEPS_TOLD, MILD_FLOORS = 5, 2.0  # ...and this many steps, and this many floors of time, to be reported
TOLD_MORE_OFTEN = 10.0  # by chance, than a false exclusion: a needless page costs less than a needless restart
SCREEN_SIGMAS = 4.0  # or as many standard errors of the noise
SUSPECTS_MAX = 24  # ranks examined closely per number of steps, worst first
LONE_STEP_NOISE_MAX = 0.03  # of single steps, above which single steps are no evidence: heavy tails (packed sequences)
# Steps needed in that case (0.15% of worker-windows of 20 exceed 1.1 by chance, Lin et al., OSDI 2025).
NOISY_STEPS_MIN = 18
STEADY_QUANTILE = 0.25  # this low quantile must be high too: a few very slow steps do not make a slow node
ARRIVAL_RATIO = 0.7  # of the peers' time in collectives, below which a rank arrived late...
ARRIVAL_EXCESS_RATIO = 0.5  # ...or whose missing wait accounts for this much of its excess compute
# Evidence from the hook's timer alone must last longer than evidence backed by GPU counters: profiling one rank passes.
RIPE_ALONE = 1.5
CONFIDENCE_LONE, CONFIDENCE_TOLD, CONFIDENCE_EARLY, CONFIDENCE_RIPE = 0.6, 0.65, 0.85, 0.95

# What would settle an undecided case.
UNEVEN = "; it may have more work: train_work_units, or a restart that moves the ranks, would tell"
UNEXPLAINED = "; its work may not be what train_work_units says: a restart that moves the ranks would tell"
LIMITED = "; its GPUs have a lower power limit than its peers', as those of other nodes"
ALONE = "; nothing else says so: collective times, or a restart that moves the ranks, would"


class _Suspect(NamedTuple):
    """A rank whose trimmed mean over ``length`` steps stands out, with its peers' noise and the mean's standard error.

    NaN: too few steps to know. ``rank`` is its series' index.
    """

    rank: int
    length: int
    centre: float
    noise: float
    error: float


class _Slow(NamedTuple):
    """A rank's mean over some steps, and the threshold it must exceed.

    ``early``: too early to act on. ``noisy``: single steps are no evidence.
    """

    centre: float
    threshold: float
    early: bool
    noisy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Names the rank whose compute time exceeds its peers' and that arrives last in collectives.

    Works on ``steps.relative_compute``: each rank's compute time in a step over the median of the other ranks of its
    role, corrected for reported work. A rank is slow if the trimmed mean of these over some number of steps is above
    ``ratio`` (``mild_ratio`` once it has lasted) and above what chance explains: as many standard errors as
    ``false_per_1000_node_days`` allows, with the error taken from the peers' own means over those steps (their spread,
    and their step-to-step noise). Where single steps are noisy (packed sequences: 21% of single worker-steps are over
    10% slower than their peers, Lin et al., OSDI 2025) only many steps count; where a step's noise persists into the
    next (``signs/step_noise``) many slow steps may be one disturbance, which is reported without action.

    Late arrival is the second, independent kind of evidence: the last to arrive waits least (correlation -1.0 for
    reduce-scatter in the same work), so its missing wait equals its excess compute. Further kinds are its own past
    (``signs/own_history``) and its GPU's activity while its peers wait (``signs/busy_among_waiting``). Where work may
    be uneven (``signs/even_work``), or nodes share a lower power limit, none of them makes it certain. If the ranks of
    other pipeline stages that have the same data are equally slow, the data slice is the reason: one
    ``workload_imbalance`` with all their nodes. Three nodes that became about as slow at one moment share a cause: one
    verdict that accuses none of them.

    A verdict that may be acted on needs ``STEPS_MIN`` steps and ``floor_s``. Reported earlier: two steps beyond all
    that any rank showed, a mild slowdown of a few steps, or one that chance produces ten times as often, once the job's
    pace shows its cost. Confidence rises after ``ripe_s``, since passing disturbances are over by then. A rank that no
    step waits for is not a straggler: with heavy-tailed noise, or little compute in a step, some rank always computes
    longest. A rank whose excess the job's pace does not show (a stage with time to spare, or not yet) is recorded
    without notification. Blind with fewer than three comparable ranks or no compute times, and, for what is only told
    of, while the job has no pace yet or most hosts are short of CPU (``signs/own_pace``). Cannot see: a whole role that
    is slow; causes.
    """

    ratio: float
    mild_ratio: float
    floor_s: float
    ripe_s: float
    false_per_1000_node_days: float
    name: str = "straggler"
    by_step: bool = True

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each slow node."""
        relative = window.steps.relative_compute
        if "train_compute_seconds" not in window.device:
            raise Blind("no compute time is reported: the hook is not installed or cannot see it")
        if len(relative) < STEPS_MIN:
            return []
        if not np.isfinite(relative[-STEPS_MIN:]).any():
            raise Blind(f"no rank has {PEERS_MIN} comparable peers that report: nobody can say which is off")
        worst: dict[str, Verdict] = {}
        uneven: list[Verdict] = []
        for suspect in self._suspects(window):
            node = window.series[suspect.rank].node
            known = worst.get(node)
            if known is None or known.confidence < CONFIDENCE_RIPE:
                verdict = self._judge(window, suspect)
                if verdict is not None and verdict.node is None:
                    uneven.append(verdict)
                elif verdict is not None and (known is None or verdict.confidence > known.confidence):
                    worst[node] = verdict
        # One verdict per data slice or rack: the same nodes' ranks are found again for every number of steps.
        shared = {verdict.nodes: verdict for verdict in sorted(uneven, key=lambda verdict: verdict.slowdown_ratio)}
        found = [*worst.values(), *shared.values()]
        sure = [verdict for verdict in found if verdict.confidence >= CONFIDENCE_EARLY]
        return found if len(sure) == len(found) else with_pace(window, found, sure)

    def _suspects(self, window: Window) -> list[_Suspect]:
        """Return the ranks whose mean over some steps is high enough to examine closely, fewest steps first."""
        relative = window.steps.relative_compute
        found: list[_Suspect] = []
        noise = screening_noise(relative)
        lengths = sorted({min(length, len(relative)) for length in STRETCHES})
        total, seen = _sums(relative, lengths)
        ratios = (self.ratio if length < MILD_STEPS_TOLD else self.mild_ratio for length in lengths)
        least = [
            SCREEN_RATIO * max(ratio - 1, SCREEN_SIGMAS * noise / math.sqrt(length))
            for ratio, length in zip(ratios, lengths, strict=True)
        ]
        excess = total - seen * (1 + np.array(least)[:, None])
        suspect = excess > 0
        for place in np.flatnonzero(suspect.any(axis=1)).tolist():
            length, own = lengths[place], np.broadcast_to(seen[place], excess[place].shape)
            high = np.flatnonzero(suspect[place] & (2 * own >= length) & (own >= STEPS_TOLD))
            if len(high) > SUSPECTS_MAX:
                high = high[np.argpartition(-excess[place][high] / own[high], SUSPECTS_MAX)[:SUSPECTS_MAX]]
            found.extend(self._stand_out(window, high, length))
        return found

    def _stand_out(self, window: Window, indexes: Integers, length: int) -> list[_Suspect]:
        """Return the ranks that are slow overall, not just in a few steps, and beyond what chance explains."""
        own = window.steps.relative_compute[-length:, indexes]
        steps = np.isfinite(own).sum(axis=0)
        least = np.where(steps < MILD_STEPS_TOLD, self.ratio, self.mild_ratio)
        centres, low = _centres(own, steps), quantile_over_rows(own, STEADY_QUANTILE)
        high = np.flatnonzero((centres >= least) & (low >= 1 + ONSET_MARGIN * (least - 1)))
        indexes, steps, centres = indexes[high], steps[high], centres[high]
        noise, error = noise_of_peers(window, indexes, steps, -length)
        few = steps < STEPS_MIN  # too few to estimate noise
        noise[few] = error[few] = np.nan
        kept = np.flatnonzero(~(centres < self._line(window, length, error, TOLD_MORE_OFTEN)))
        columns = (indexes[kept], np.full(len(kept), length), centres[kept], noise[kept], error[kept])
        return [_Suspect(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def _judge(self, window: Window, suspect: _Suspect) -> Verdict | None:
        relative = window.steps.relative_compute
        index, length, centre = suspect.rank, suspect.length, suspect.centre
        seen = len(relative) - length + np.flatnonzero(np.isfinite(relative[-length:, index]))
        own = relative[seen, index]
        if len(np.unique(window.steps.times_s[seen])) < min(len(own), STEPS_MIN):
            return None  # a row that covers several steps is one report of them
        found = self._slow(window, suspect, own)
        if found is None:
            return None
        peers = step_peers(window, index)
        onset = self._onset(relative[:, index], centre, len(own))
        if found.noisy and length >= NOISY_STEPS_MIN:
            line = 1 + ONSET_MARGIN * (centre - 1)
            if not float(trimmed_means(own[-NOISY_STEPS_MIN // 2 :, None])[0]) >= line:
                return None  # it is over
            onset = min(onset, len(relative) - length + _turn(relative[-length:, index] - line, centre - line))
        step_s, _ = step_levels(window, "train_step_seconds", onset, index, peers)  # steps since the onset
        step_s = step_s if math.isfinite(step_s) else typical_step_s(window)
        onset_s = float(window.steps.times_s[onset]) - max(window.interval_s, step_s)
        floors = MILD_FLOORS if found.early and centre < self.ratio else 1.0
        if window.now_s - onset_s < floors * self.floor_s:
            return None
        return self._verdict(window, index, onset, onset_s, found, peers)

    def _slow(self, window: Window, suspect: _Suspect, own: Floats) -> _Slow | None:
        """Return a rank's mean over some steps if chance does not explain it."""
        relative, index, length = window.steps.relative_compute, suspect.rank, suspect.length
        noise, error, centre = np.array([suspect.noise]), np.array([suspect.error]), suspect.centre
        if len(own) < STEPS_MIN:
            most = max(highest(relative[:, peers_elsewhere(window, index)]), highest(relative[:-length, index]))
            if not own.min() > most:
                return None
            noise, error = noise_of_peers(
                window, np.array([index]), np.array([len(own)]), -length - SCREEN_STEPS, -length
            )
        noisy = bool(noise[0] > LONE_STEP_NOISE_MAX)
        if noisy and len(own) < NOISY_STEPS_MIN and not unheard_of(own, relative[:, peers_elsewhere(window, index)]):
            return None
        ratio = self.ratio if len(own) < MILD_STEPS_MIN else self.mild_ratio
        sure = max(ratio, float(self._line(window, length, error, 1.0)[0]))
        if centre >= sure and len(own) >= STEPS_MIN:
            rare = chance_digits(window, index, centre, len(own)) >= -math.log10(self._tail(window, length, 1.0))
            return _Slow(centre, sure, early=not rare, noisy=noisy)
        line = float(self._line(window, length, error, TOLD_MORE_OFTEN)[0])
        return _Slow(centre, line, early=True, noisy=noisy) if centre >= line else None

    def _line(self, window: Window, length: int, error: Floats, more_often: float) -> Floats:
        """Return the highest mean over ``length`` steps that chance explains; NaN if the error is not known."""
        sigmas = NormalDist().inv_cdf(1 - self._tail(window, length, more_often))
        line: Floats = np.maximum(self.mild_ratio, 1 + sigmas * error)
        return line

    def _tail(self, window: Window, length: int, more_often: float) -> float:
        """Return the chance probability allowed per test, at ``more_often`` times the site's false exclusions."""
        ranks = len(window.series) / max(len(window.nodes), 1)
        tests_per_node_day = ranks * DAY_S / max(length * typical_step_s(window), 1.0)
        tail = more_often * self.false_per_1000_node_days / 1000 / tests_per_node_day
        return min(max(tail, 1e-15), 0.01)

    def _onset(self, relative: Floats, centre: float, steps: int) -> int:
        """Return the line from which on the rank has been slow."""
        ordinary = np.flatnonzero(np.isfinite(relative) & (relative < 1 + ONSET_MARGIN * (centre - 1)))
        first = int(ordinary[-1]) + 1 if len(ordinary) else 0
        least = min(steps, STEPS_MIN)
        if len(relative) - first < least:  # noise: the last ordinary step may be one of the slow ones
            first = max(len(relative) - least, 0)
        return first

    def _verdict(
        self, window: Window, index: int, onset: int, onset_s: float, slow: _Slow, peers: Integers
    ) -> Verdict | None:
        centre = slow.centre
        series = window.series[index]
        own_s, peers_s = step_levels(window, "train_compute_seconds", onset, index, peers)
        if not math.isfinite(own_s):
            return None  # its reports of these steps have not arrived
        evidence = [
            Evidence(
                "train_compute_seconds", series.node, series.device, own_s, peers_s, peers_s * slow.threshold, "seconds"
            )
        ]
        kinds = {"compute_time"}
        late = self._late(window, onset, index, peers, own_s - peers_s)
        if late is not None:
            kinds.add("collective_arrival")
            evidence.append(late)
        waited = waited_for(window, onset, index, centre, peers)
        cost = cost_since(window, onset, index, centre, peers, waited)
        if waited < PACE_NOTED or (slow.early and cost is None):
            return None  # no rank waits for it; or with others it would be acted on although it may cost nothing
        if cost is None:
            cost = Slowness(waited, measured=False)
        elif cost.ratio > 0:
            kinds.add("step_time")
        shared = self._shared(window, index, onset, onset_s, centre, cost, evidence)
        if shared is not None:
            return shared
        limited = _limited_with_others(window, index, peers)
        even, seen = even_work(window, index, onset) and not limited, cost.ratio if "step_time" in kinds else 0.0
        before = beside_its_past(window, index, onset, onset_s, seen if even else 0.0)
        alone = late is None and not (before.kinds and seen > 0 and centre >= self.ratio)
        kinds |= before.kinds
        evidence += before.evidence
        ripe_s = self.ripe_s if typical_step_s(window) >= SHORT_STEP_S else max(self.ripe_s, self.floor_s)
        if late is None and "gpu_activity" not in kinds:
            ripe_s *= RIPE_ALONE
        confidence = CONFIDENCE_LONE
        if slow.early or not even:
            confidence = CONFIDENCE_TOLD if late is not None else CONFIDENCE_LONE
        elif not alone:
            confidence = CONFIDENCE_RIPE if window.now_s - onset_s >= ripe_s else CONFIDENCE_EARLY
        uneven = UNEXPLAINED if work_is_told(window, index, onset) else UNEVEN
        settle = "" if slow.early else uneven if not even else ALONE if alone else ""
        settle = LIMITED if limited else settle
        tail = f" and waits least in collectives ({late.value:.3f} s against {late.peers_median:.3f} s)" if late else ""
        return Verdict(
            detector=self.name,
            fault="straggler",
            job=window.job,
            nodes=(series.node,),
            node=series.node,
            device=series.device,
            confidence=confidence,
            onset_s=onset_s,
            summary=(
                f"{series.node} computes {centre:.2f} times as long as its peers"
                f" ({own_s:.3f} s against {peers_s:.3f} s){before.words}{tail}{settle}; {_in_words(cost)}"
            ),
            evidence=tuple(evidence),
            kinds=frozenset(kinds),
            slowdown_ratio=float(cost.ratio),
            # Do not drain a node for the work or the power limit that it was given.
            asks="none" if cost.ratio <= 0 else None if even else "notify",
        )

    def _shared(
        self,
        window: Window,
        index: int,
        onset: int,
        onset_s: float,
        centre: float,
        cost: Slowness,
        evidence: list[Evidence],
    ) -> Verdict | None:
        """Return the verdict, accusing no node, on a rank that is slow with its data, or with other nodes at once."""
        mates = slow_with_its_data(window, index, onset)
        nodes = tuple(sorted({window.series[index].node, *mates})) if mates else slow_with_others(window, index, onset)
        if not nodes:
            return None
        why = (
            f"the ranks of one slice of the data compute {centre:.2f} times as long as their peers in"
            f" {len(nodes)} pipeline stages at once ({nodes[0]} and its like): it has more work, no node is slow"
            if mates
            else f"{named(nodes)} became slow together, up to {centre:.2f} times as long as their peers: what they"
            " share (power, cooling, work), not the nodes"
        )
        return Verdict(
            detector=self.name,
            fault="workload_imbalance" if mates else "straggler",
            job=window.job,
            nodes=nodes,
            node=None,
            device=None,
            confidence=CONFIDENCE_TOLD,
            onset_s=onset_s,
            summary=f"{why}; {_in_words(cost)}",
            evidence=tuple(evidence),
            kinds=frozenset({"compute_time"}),
            slowdown_ratio=float(cost.ratio),
            asks="none" if cost.ratio <= 0 else None if mates else "notify",
        )

    def _late(self, window: Window, onset: int, index: int, peers: Integers, excess_s: float) -> Evidence | None:
        """Return the evidence that the rank arrives last; None if it does not, or waiting is not reported."""
        for metric in ("nccl_reduce_scatter_seconds", "nccl_collective_seconds"):
            waits_s, peers_s = step_levels(window, metric, onset, index, peers)
            limit_s = max(ARRIVAL_RATIO * peers_s, peers_s - ARRIVAL_EXCESS_RATIO * excess_s)
            if math.isfinite(waits_s) and waits_s <= limit_s:
                series = window.series[index]
                return Evidence(metric, series.node, series.device, waits_s, peers_s, limit_s, "seconds")
        return None


def _in_words(cost: Slowness) -> str:
    return f"the job's steps are {100 * cost.ratio:.0f}% longer for it" if cost.ratio > 0 else str(cost)


def _limited_with_others(window: Window, index: int, peers: Integers) -> bool:
    """Whether a rank's GPU has a lower power limit than most of its peers', and so do GPUs of other nodes."""
    newest = power_limits(window)
    if newest is None:
        return False
    lowest = newest <= (1 + LIMITS_ALIKE_RATIO) * newest[index]
    return bool(np.mean(lowest[peers]) < 0.5 and nodes_among(window, np.flatnonzero(lowest)) > 1)


def _sums(relative: Floats, lengths: list[int]) -> tuple[Floats, Floats]:
    """Return for each length the sum over that many newest lines (lengths, S), and their count (lengths, S or 1)."""
    known = np.isfinite(relative[-lengths[-1] :])
    complete = bool(known.all())  # the usual case
    filled = relative[-lengths[-1] :] if complete else np.where(known, relative[-lengths[-1] :], 0.0)
    total = np.empty((len(lengths), relative.shape[1]))
    seen = np.array(lengths, dtype=np.float64)[:, None] if complete else np.empty_like(total)
    longest, before = lengths[-1], 0
    for place, length in enumerate(lengths):
        fresh = slice(longest - length, longest - before)
        total[place] = np.add.reduce(filled[fresh], axis=0)
        if not complete:
            seen[place] = np.add.reduce(known[fresh], axis=0)
        before = length
    np.cumsum(total, axis=0, out=total)
    return total, seen if complete else np.cumsum(seen, axis=0)


def _turn(excess: Floats, most: float) -> int:
    """Return where a noisy series most likely rose above a threshold: the largest sum from there on (Page 1954)."""
    steps = np.clip(np.where(np.isfinite(excess), excess, 0.0), -most, most)
    return int(np.argmax(np.cumsum(steps[::-1])[::-1]))


def _centres(own: Floats, count: Integers) -> Floats:
    """Return the trimmed mean of each column of (steps, ranks), ``count`` of them observed.

    At most the median if there is too little to trim: one step may be long.
    """
    means = trimmed_means(own)
    few = count * TRIM_RATIO < 1
    if few.any():
        means[few] = np.minimum(means[few], median_over_rows(own[:, few]))
    return means
