"""Detects steps that are long because work is uneven, not because a node is bad."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.medians import median_of, median_over_rows
from eagle_eye.detectors.signs.own_pace import require_pace, settled_line, with_pace
from eagle_eye.detectors.signs.role_medians import Roles, medians, window_roles
from eagle_eye.detectors.types import Blind, Evidence, Floats, Verdict, Window

STEPS_MIN = 50  # minimum number of steps
SCREEN_LINES = 2  # newest steps, one of which must look uneven before more are examined
LOSS_RATIO = 0.15  # of the step, spent waiting for the slowest
# What a job has done from the start is its design and data; a later change must cost what EROICA looks at (5% of an
# iteration, NSDI 2026). A steadily slow node would show within this many steps.
BEGUN_RATIO, BEGUN_TIMES = 0.05, 3.0
BEGUN_STEPS = 20
USUAL_QUANTILE, USUAL_LINES = 0.25, 32  # of earlier steps; this many of them are examined...
USUAL_MIN = 12  # ...if there are at least this many: the lower quartile of them is the third lowest
CELLS_MAX = 1_000_000  # steps times ranks examined in one pass: fewer steps for large jobs
SLOWEST_RATIO = 0.5  # of the steps in which one node may be the slowest; above, that node is at fault
CHANGING_SHARE = 0.5  # of the loss that remains when each rank is measured against its own usual excess
NODES_MIN = 3  # with fewer, the slowest node cannot vary enough to tell chance from a bad node
RANKS_MIN = 3  # of a role, of which one can be slower than the others
LONGER_QUANTILE = 0.25  # of the steps, which must also show an imbalance of stages, or one that began
CONFIDENCE = 0.7
RANKS_SAMPLED = 512  # of a large role, for its median


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadImbalance:
    """Measures how much of the job's time is spent waiting for the rank with the most work.

    Two forms (most of the slow jobs at ByteDance: Lin et al., OSDI 2025). Among comparable ranks the slowest computes
    much longer than the median, on another node in each step: packed sequences. Or all ranks of a role (a pipeline
    stage) compute longer than the other roles': uneven stages; the last one is usually longer by design, so only a
    large loss, or one that grew, counts. The loss is the excess compute divided by the step, a median over at least
    ``STEPS_MIN`` steps, and must be at least ``ratio``; or ``BEGUN_RATIO`` over ``BEGUN_STEPS`` if the job was even
    before. If one node is slowest in most steps it is a straggler and not reported here. Blind without compute and step
    times, while the job has no pace yet, and, to the first form, where most hosts are short of CPU
    (``signs/own_pace``). Cannot see: imbalance within a rank's micro-batches, or hidden by overlap; whether half of the
    ranks are another pipeline stage or other hardware.
    """

    ratio: float = LOSS_RATIO
    name: str = "workload_imbalance"
    by_step: bool = True

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict, that with the larger loss."""
        if not {"train_compute_seconds", "train_step_seconds"} <= window.device.keys():
            raise Blind("compute and step times are not both reported")
        require_pace(window)
        first = settled_line(window)
        compute, seconds = (
            values[first:] if (values := window.steps.values.get(name)) is not None else None
            for name in ("train_compute_seconds", "train_step_seconds")
        )
        if compute is None or seconds is None or len(compute) < BEGUN_STEPS + USUAL_MIN:
            return []
        newest = compute[-SCREEN_LINES:]
        low, high = np.fmin.reduce(newest, axis=None), np.fmax.reduce(newest, axis=None)
        if not float(high - low) > BEGUN_RATIO * _middles(seconds[-1:])[0]:
            return []
        roles = window_roles(window, 1)
        ranks, stages = self._ranks(window, compute, seconds), self._stages(window, compute, seconds, roles)
        found = [verdict for verdict in (ranks, stages) if verdict is not None]
        if ranks is not None:
            found = with_pace(window, found, [stages] if stages is not None else [])
        return [max(found, key=lambda verdict: verdict.slowdown_ratio)] if found else []

    def _ranks(self, window: Window, compute: Floats, seconds: Floats) -> Verdict | None:
        """Return the verdict if a different rank is far slower than its peers in each step."""
        roles = window_roles(window, RANKS_MIN)
        if not len(roles.size) or len(window.nodes) < NODES_MIN:
            return None
        # Two steps suffice to see that nothing is uneven; a pass over a healthy job must cost no more.
        if not np.fmax.reduce(_excess(compute[-SCREEN_LINES:], seconds[-SCREEN_LINES:], roles)[0]) > BEGUN_RATIO:
            return None
        for lines, least in ((STEPS_MIN, self.ratio), (BEGUN_STEPS, BEGUN_RATIO)):
            if len(compute) < lines:
                continue
            stride = max(lines * compute.shape[1] // CELLS_MAX, 1)
            newest, newest_s = compute[-lines::stride], seconds[-lines::stride]
            loss, slowest = _excess(newest, newest_s, roles)
            known = np.isfinite(loss)
            if int(known.sum()) < len(loss) // 2:
                continue
            share = float(np.median(loss[known]))
            often = float(np.bincount(window.node_of[slowest[known]]).max() / known.sum())
            if share < least or often > SLOWEST_RATIO:
                continue
            if least < self.ratio and float(np.quantile(loss[known], LONGER_QUANTILE)) < least / 2:
                continue  # a few uneven steps are not uneven work
            if not _changing(newest, newest_s, roles) >= CHANGING_SHARE * share:
                continue  # the same ranks are slow all the time: then it is what they share, not their work
            before = _usual(compute[:-lines], seconds[:-lines], roles)
            if least < self.ratio and not share > BEGUN_TIMES * before:
                continue  # as uneven as its data has always been
            was = f", where {100 * before:.1f}% was usual" if share > BEGUN_TIMES * before else ""
            return self._verdict(
                window,
                share,
                lines,
                f"{100 * share:.0f}% of each step is waiting for the slowest rank{was}, and that is another in each"
                f" step (no node in more than {100 * often:.0f}% of {lines}): the work is uneven, no node is slow",
                Evidence("slowest_node_share", None, None, often, None, SLOWEST_RATIO, "ratio"),
            )
        return None

    def _stages(self, window: Window, compute: Floats, seconds: Floats, roles: Roles) -> Verdict | None:
        """Return the verdict if a whole role computes far longer than the mean of the roles."""
        if len(roles.size) < 2 or len(roles.size) == len(window.series) or len(np.unique(roles.size)) > 1:
            return None  # pipeline stages have equally many ranks; kinds of hardware usually do not
        older = max(len(compute) - STEPS_MIN, 0)
        levels, step_s = _levels(compute[older:], seconds[older:], roles)
        for lines, least in ((STEPS_MIN, self.ratio), (BEGUN_STEPS, BEGUN_RATIO)):
            newest, newest_s = levels[-lines:], step_s[-lines:]
            complete = np.isfinite(newest).all(axis=1) & (newest_s > 0)
            if len(compute) < lines or int(complete.sum()) < lines // 2:
                continue
            newest, newest_s = newest[complete], newest_s[complete]
            longest = int(np.argmax(np.median(newest, axis=0)))
            loss = (newest[:, longest] - newest.mean(axis=1)) / newest_s
            share = float(np.median(loss))
            if share < least or float(np.quantile(loss, LONGER_QUANTILE)) < least / 2:
                continue
            stride = max(older // USUAL_LINES, 1)
            past, past_s = _levels(compute[:older:stride], seconds[:older:stride], roles)
            past, past_s = np.concatenate([past, levels[:-lines]]), np.concatenate([past_s, step_s[:-lines]])
            earlier = (past[:, longest] - past.mean(axis=1)) / past_s
            earlier = earlier[np.isfinite(earlier)]
            before = float(np.median(earlier)) if len(earlier) >= USUAL_MIN else float("inf")
            # Stages are unequal by design: only the increase counts.
            if least < self.ratio and share - before < BEGUN_RATIO:
                continue
            members = np.flatnonzero(roles.place == longest)
            nodes = sorted({window.series[int(i)].node for i in members})
            own, mean = float(np.median(newest[:, longest])), float(np.median(newest.mean(axis=1)))
            was = f", where {100 * before:.1f}% was usual" if share - before >= BEGUN_RATIO else ""
            who = f"{nodes[0]} and its like" if len(nodes) > 1 else f"or their only node, {nodes[0]},"
            return self._verdict(
                window,
                share,
                lines,
                f"the {len(members)} ranks of one pipeline stage or kind of GPU ({who}) compute"
                f" {own:.3g} s a step where the mean is {mean:.3g} s: shared evenly it would save {100 * share:.0f}%"
                + was,
                Evidence(
                    "train_compute_seconds",
                    None,
                    None,
                    own,
                    mean,
                    mean + least * float(np.median(newest_s)),
                    "seconds",
                ),
            )
        return None

    def _verdict(self, window: Window, share: float, lines: int, summary: str, evidence: Evidence) -> Verdict:
        return Verdict(
            detector=self.name,
            fault="workload_imbalance",
            job=window.job,
            nodes=(),
            node=None,
            device=None,
            confidence=CONFIDENCE,
            onset_s=float(window.steps.times_s[-lines]) - window.interval_s,
            summary=summary,
            evidence=(Evidence("lost_step_share", None, None, share, None, self.ratio, "ratio"), evidence),
            kinds=frozenset({"compute_time"}),
            slowdown_ratio=share / (1 - share) if share < 1 else 1.0,
        )


def _levels(compute: Floats, seconds: Floats, roles: Roles) -> tuple[Floats, Floats]:
    """Return each role's median compute (lines, roles) and the step length (lines,)."""
    return medians(compute, roles, 1), _middles(seconds)


def _changing(compute: Floats, seconds: Floats, roles: Roles) -> float:
    """Return the loss (a median over the steps) beyond each rank's constant deviation from its role."""
    middle = np.where(roles.place >= 0, medians(compute, roles, RANKS_MIN)[:, roles.place], np.nan)
    over = compute - middle
    over = over - np.sort(np.where(np.isfinite(over), over, 0.0), axis=0)[len(over) // 2]
    worst = np.where(np.isfinite(over), over, -np.inf).max(axis=1)
    return _middle(worst / _middles(seconds))


def _usual(compute: Floats, seconds: Floats, roles: Roles) -> float:
    """Return the share of the step lost to waiting for the slowest in earlier steps; inf if too few are known."""
    stride = max(len(compute) // USUAL_LINES, len(compute) * compute.shape[1] // CELLS_MAX, 1)
    if len(compute) < USUAL_MIN:
        return float("inf")
    loss = _excess(compute[::stride], seconds[::stride], roles)[0]
    known = loss[np.isfinite(loss)]
    return float(np.quantile(known, USUAL_QUANTILE)) if 2 * len(known) >= len(loss) else float("inf")


def _excess(compute: Floats, seconds: Floats, roles: Roles) -> tuple[Floats, NDArray[np.intp]]:
    """Return by what share of the step the slowest rank computes longer than its role's median, and its column.

    (lines,) each; NaN if not known.
    """
    middle = np.where(roles.place >= 0, medians(compute, roles, RANKS_MIN)[:, roles.place], np.nan)
    over = compute - middle
    slowest = np.argmax(np.where(np.isfinite(over), over, -np.inf), axis=1)
    return over[np.arange(len(over)), slowest] / _middles(seconds), slowest


def _middles(values: Floats) -> Floats:
    """Return each line's median of what is known, of a sample if there are many: (lines,), NaN if nothing is."""
    ranks = values.shape[1]
    sampled = values[:, :: ranks // RANKS_SAMPLED] if ranks > RANKS_SAMPLED else values
    return median_over_rows(sampled.T).astype(np.float64)


def _middle(values: Floats) -> float:
    return median_of(values[np.isfinite(values)])
