"""A node that makes every step longer, found against its comparable peers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.medians import median_of_others, median_over_rows, quantile_over_rows
from eagle_eye.detectors.types import Blind, Evidence, Floats, Verdict, Window

SIGMA_PER_MAD = 1.4826  # of a normal distribution
MEDIAN_EFFICIENCY = 1.2533  # standard error of a median over that of a mean, normal distribution
ROWS_MIN = 3  # a median of fewer says nothing about persistence
PEERS_MIN = 2  # with one peer nobody can say which of the two is off
NOISE_FLOOR_RATIO = 0.004  # identical peers still differ by a timer's grain


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Names the series whose compute time exceeds its peers', and that arrives last in collectives.

    Each row's compute time is divided by the median of the other series of the same role. A series is slow when the
    median of these ratios over some stretch is above ``ratio`` and above what the job's own noise explains:
    ``sigmas`` standard errors of a median, with the noise taken from the peers (Iglewicz & Hoaglin 1993). Stretches
    double in length from ``floor_s``, so that a large slowdown is found soon and a small one when it has lasted; none
    counts before it has lasted ``floor_s``. Late arrival is the second, independent kind of evidence: the last to
    arrive waits least. Without it (collective time not observed, or not least) the verdict carries one kind only.
    Only rows in which a step finished count. Blind with fewer than three comparable series or no compute time.
    Cannot see: a whole role that is slow; causes.
    """

    ratio: float
    floor_s: float
    steps: int
    sigmas: float = 6.0
    waiting_ratio: float = 0.7  # of the peers' time in collectives, below which a series arrived late
    name: str = "straggler"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each slow node."""
        compute = window.device.get("train_compute_seconds")
        if compute is None or len(window.times_s) < ROWS_MIN:
            raise Blind("no compute time is reported: the hook is not installed or cannot see it")
        relative = self._relative(window, compute)
        lines = max(ROWS_MIN, self.steps, int(np.ceil(self.floor_s / window.interval_s)))
        worst: dict[str, Verdict] = {}
        while lines <= 2 * len(window.times_s):
            for index, ratio, noise in self._slow(relative[-lines:]):
                node = window.series[index].node
                onset_s = self._onset_s(window, relative[:, index], ratio)
                if node not in worst and window.times_s[-1] - onset_s >= self.floor_s:
                    worst[node] = self._verdict(window, index, onset_s, min(lines, len(relative)), ratio, noise)
            lines *= 2
        return list(worst.values())

    def _relative(self, window: Window, compute: Floats) -> Floats:
        """Return each row's compute time over its peers' median, NaN where no step finished or peers are too few."""
        fresh = np.isfinite(compute) & _step_finished(window)
        values = np.where(fresh, compute, np.nan).astype(np.float64)
        relative = np.full(values.shape, np.nan)
        comparable = False
        for role in np.unique(window.role_of):
            members = np.flatnonzero(window.role_of == role)
            if len(members) <= PEERS_MIN:
                continue
            comparable = True
            group = values[:, members]
            relative[:, members] = group / median_of_others(group, PEERS_MIN)
        if not comparable:
            raise Blind(f"no role has {PEERS_MIN + 1} comparable series: nobody can say which is off")
        return relative

    def _slow(self, relative: Floats) -> list[tuple[int, float, float]]:
        """Return (series, median ratio, its standard error) of the series that are slow over these rows."""
        rows = np.isfinite(relative).sum(axis=0)
        enough = rows >= max(ROWS_MIN, self.steps)
        if not enough.any():
            return []
        centre = np.where(enough, median_over_rows(relative), np.nan)
        # The culprit's own low quartile guards against a few very slow rows among ordinary ones.
        steady = quantile_over_rows(relative, 0.25) >= 1 + (self.ratio - 1) / 2
        suspects = np.flatnonzero((centre >= self.ratio) & steady)
        if len(suspects) == 0:
            return []
        spread = np.abs(relative - centre)
        found = []
        for index in suspects:
            peers = np.delete(spread, index, axis=1)
            peers = peers[np.isfinite(peers)]
            noise = SIGMA_PER_MAD * float(np.median(peers)) if len(peers) else np.inf
            error = MEDIAN_EFFICIENCY * max(noise, NOISE_FLOOR_RATIO) / np.sqrt(rows[index])
            if centre[index] - 1 >= self.sigmas * error:
                found.append((int(index), float(centre[index]), float(error)))
        return found

    def _verdict(self, window: Window, index: int, onset_s: float, lines: int, ratio: float, error: float) -> Verdict:
        series = window.series[index]
        own_s, peers_s = _medians(window, "train_compute_seconds", index, lines)
        evidence = [
            Evidence(
                "train_compute_seconds",
                series.node,
                series.device,
                own_s,
                peers_s,
                peers_s * max(self.ratio, 1 + self.sigmas * error),
                "seconds",
            )
        ]
        kinds = {"compute_time"}
        waits_s, peers_wait_s = _medians(window, "nccl_collective_seconds", index, lines)
        late = np.isfinite(waits_s) and waits_s <= self.waiting_ratio * peers_wait_s
        if late:
            kinds.add("collective_arrival")
            evidence.append(
                Evidence(
                    "nccl_collective_seconds",
                    series.node,
                    series.device,
                    waits_s,
                    peers_wait_s,
                    self.waiting_ratio * peers_wait_s,
                    "seconds",
                )
            )
        step_s, _ = _medians(window, "train_step_seconds", index, lines)
        excess_s = own_s - peers_s
        slowdown = excess_s / (step_s - excess_s) if np.isfinite(step_s) and step_s > excess_s else ratio - 1
        tail = f" and waits least in collectives ({waits_s:.3f} s against {peers_wait_s:.3f} s)" if late else ""
        return Verdict(
            detector=self.name,
            fault="straggler",
            job=window.job,
            nodes=(series.node,),
            node=series.node,
            device=series.device,
            confidence=0.95 if late else 0.6,
            onset_s=onset_s,
            summary=(
                f"{series.node} computes {ratio:.2f} times as long as its peers"
                f" ({own_s:.3f} s against {peers_s:.3f} s){tail};"
                f" the job's steps are {100 * slowdown:.0f}% longer for it"
            ),
            evidence=tuple(evidence),
            kinds=frozenset(kinds),
            slowdown_ratio=float(slowdown),
        )

    def _onset_s(self, window: Window, relative: Floats, ratio: float) -> float:
        """Return the start of the interval from which on the series has been slow."""
        ordinary = np.flatnonzero(np.isfinite(relative) & (relative < (1 + ratio) / 2))
        first = int(ordinary[-1]) + 1 if len(ordinary) else 0
        slow = np.flatnonzero(np.isfinite(relative[first:]))
        line = first + int(slow[0]) if len(slow) else first
        return float(window.times_s[min(line, len(window.times_s) - 1)]) - window.interval_s


def _step_finished(window: Window) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return (T, S): whether a step finished in the row; True everywhere when steps are not reported."""
    steps = window.device.get("train_step")
    compute = window.device["train_compute_seconds"]
    if steps is None:
        return np.ones(compute.shape, dtype=np.bool_)
    before = np.fmax.accumulate(np.vstack([np.full((1, steps.shape[1]), -np.inf), steps[:-1]]), axis=0)
    return np.asarray(steps > before)


def _medians(window: Window, metric: str, index: int, lines: int) -> tuple[float, float]:
    """Return the series' median over the newest lines and the median of its peers' medians; NaN where not observed."""
    values = window.device.get(metric)
    if values is None:
        return float("nan"), float("nan")
    recent = np.where(_step_finished(window)[-lines:], values[-lines:], np.nan)
    peers = np.flatnonzero(window.role_of == window.role_of[index])
    medians = {int(p): _median(recent[:, p]) for p in peers}
    return medians[index], _median(np.array([m for p, m in medians.items() if p != index]))


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")
