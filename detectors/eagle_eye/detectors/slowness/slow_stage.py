"""Detects a pipeline stage on a single node, without comparable peers, that has become slower than it was."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.medians import median_of, median_over_rows
from eagle_eye.detectors.signs.own_pace import require_pace, settled_line
from eagle_eye.detectors.signs.role_medians import medians, window_roles
from eagle_eye.detectors.types import Blind, Evidence, Floats, Integers, Verdict, Window

ROLES_MAX = 256  # more roles than any pipeline has stages
SIDE_MIN, LASTED_S = 20, 60.0  # lines on either side, and seconds since
BLOCK = 8  # lines whose means are treated as independent
DISTANCE = 8.0  # standard errors
NOISE_FLOOR = 0.004  # of the logarithm: a timer's resolution
STEADY_QUANTILE = 0.25  # of the steps since, which must also be slower
PACE_NOTED = 0.01  # growth of the step time below which it costs nothing
CONFIDENCE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStage:
    """Reports a stage whose compute has grown relative to the other stages' in a job whose steps are longer since.

    Works on each role's median compute time: its logarithm minus the median change of the other roles, so that changes
    common to all (another batch, another sequence length) cancel out. The change point is where the means before and
    after differ most; it counts from ``ratio`` on, above ``DISTANCE`` standard errors computed from means of ``BLOCK``
    steps. Only a role that runs on a single node is considered: others have comparable peers. The stage's work may have
    grown, so this only reports. Blind without compute time. Cannot see: changes from before the window.
    """

    ratio: float
    name: str = "slow_stage"
    by_step: bool = True

    def detect(self, window: Window) -> list[Verdict]:
        """Return a verdict for each such stage."""
        compute = window.steps.values.get("train_compute_seconds")
        roles = window_roles(window, 1)
        if compute is None:
            raise Blind("no compute time is reported: the hook is not installed or cannot see it")
        require_pace(window)
        first = settled_line(window)
        if not 2 <= len(roles.size) <= ROLES_MAX or len(compute) < first + 2 * SIDE_MIN:
            return []
        with np.errstate(invalid="ignore", divide="ignore"):
            levels = np.log(medians(compute, roles, 1))[first:]
        changed = levels - median_over_rows(levels)
        found = []
        for place in range(len(roles.size)):
            members = np.flatnonzero(roles.place == place)
            if len(np.unique(window.node_of[members])) == 1:
                others = np.delete(changed, place, axis=1)
                verdict = self._judge(window, members, levels[:, place], median_over_rows(others.T))
                found += [verdict] if verdict is not None else []
        return found

    def _judge(self, window: Window, members: Integers, own: Floats, others: Floats) -> Verdict | None:
        course = own - others
        if not np.isfinite(course).all():
            return None
        at = _turn(course)
        before, since = course[:at], course[at:]
        grown = median_of(since) - median_of(before)
        line = settled_line(window) + at
        onset_s = float(window.steps.times_s[line]) - window.interval_s
        steady = float(np.quantile(since, STEADY_QUANTILE)) - median_of(before) >= grown / 2
        own_grown = median_of(own[at:]) - median_of(own[:at])
        if grown < max(math.log(self.ratio), DISTANCE * _error(before, since)) or not steady or own_grown < grown / 2:
            return None
        slowdown = _pace(window, line)
        if window.now_s - onset_s < LASTED_S or not slowdown >= PACE_NOTED:
            return None
        node = window.series[int(members[0])].node
        ranks = sorted(window.series[int(i)].rank for i in members)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        own_s, was_s = (math.exp(median_of(part)) for part in (own[at:], own[:at]))
        return Verdict(
            detector=self.name,
            fault="straggler",
            job=window.job,
            nodes=(node,),
            node=node,
            device=None,
            confidence=CONFIDENCE,
            onset_s=onset_s,
            summary=(
                f"the stage of {node} ({who}) has been {100 * math.expm1(grown):.0f}% slower for {len(since)} steps"
                f" than before ({own_s:.3f} s against {was_s:.3f} s), the others have not: the node, or more work; a"
                f" check of the node, or a restart that moves the ranks, would tell;"
                f" the job's steps are {100 * slowdown:.0f}% longer for it"
            ),
            evidence=(Evidence("train_compute_seconds", node, None, own_s, was_s, was_s * self.ratio, "seconds"),),
            kinds=frozenset({"own_history", "step_time"}),
            slowdown_ratio=slowdown,
            asks="notify",
        )


def _turn(course: Floats) -> int:
    """Return where the means before and after differ most, in standard errors, at least ``SIDE_MIN`` from the ends."""
    at = np.arange(SIDE_MIN, len(course) - SIDE_MIN + 1)
    total = np.cumsum(course)
    before, since = total[at - 1] / at, (total[-1] - total[at - 1]) / (len(course) - at)
    return int(at[np.argmax((since - before) * np.sqrt(at * (len(course) - at)))])


def _error(before: Floats, since: Floats) -> float:
    """Return the standard error of the difference of two means, from block means, since steps are autocorrelated."""
    spread = 0.0
    for part in (before, since):
        blocks = part[: len(part) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(axis=1)
        spread += max(float(np.var(blocks, ddof=1)), NOISE_FLOOR**2) / len(blocks)
    return math.sqrt(spread)


def _pace(window: Window, line: int) -> float:
    """Return by what share the job's steps are longer since a line; NaN if not reported."""
    seconds = window.steps.values.get("train_step_seconds")
    if seconds is None:
        return math.nan
    paces, first = median_over_rows(seconds.T), settled_line(window)
    before, since = paces[first:line], paces[line:]
    return median_of(since[np.isfinite(since)]) / median_of(before[np.isfinite(before)]) - 1
