"""Says whether a job has a pace of its own, which whoever claims that its steps are longer must know.

It has none in its first steps, and none while its ranks wait for CPUs that others use.
"""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.detectors.signs.medians import quantile_over_rows
from eagle_eye.detectors.types import Blind, Curve, Verdict, Window

WARMUP_LINES = 5  # first reports of an attempt, slow by nature: compilation, caches, allocators, first loads of data
PACE_LINES = 12  # reports of steps after them: the error of their median is a third of their noise
# By these most hosts of a job are short of CPU. Where they are, the share of time in which some task waited is near 1
# with one process too many per core; hosts of GPUs whose loaders keep all cores busy show less than this.
CPU_SHORT = (("node_cpu_pressure_ratio", 0.3), ("node_cpu_utilization_ratio", 0.97))
CPU_SHORT_S, CPU_SHORT_QUANTILE = 120.0, 0.75  # of the rows of this time, which what is judged now rests on


def require_pace(window: Window) -> None:
    """Raise Blind until the attempt has made enough steps after its first ones.

    A job whose ranks report no steps has none; the pace of its activity is another matter (``activity_pace``).
    """
    reported, needed = len(window.curve.number), WARMUP_LINES + PACE_LINES
    if math.isfinite(window.last_step) and reported < needed:
        raise Blind(
            f"{reported} reports of this attempt's steps, {needed} needed: its pace is not known yet, and so no cost"
        )


def require_cpu(window: Window) -> None:
    """Raise Blind while most hosts are short of CPU: ranks' times then show when they were scheduled.

    One host that is shorter of it than the others is another matter (``CpuContention``).
    """
    short = short_of_cpu(window)
    if short:
        raise Blind(
            f"{short}: their ranks' times show when they were scheduled; give them more cores, or run less beside it"
        )


def short_of_cpu(window: Window) -> str:
    """Return how many hosts are short of CPU, and by what; "" unless most are."""
    rows = window.node_times_s > window.now_s - CPU_SHORT_S
    for metric, limit in CPU_SHORT:
        values = window.node.get(metric)
        levels = (
            np.zeros(0) if values is None or not rows.any() else quantile_over_rows(values[rows], CPU_SHORT_QUANTILE)
        )
        levels = levels[np.isfinite(levels)]
        short = levels[levels >= limit]
        if 2 * len(short) > len(levels):
            return f"{len(short)} of {len(levels)} hosts are short of CPU ({metric} {short.min():.2f}, from {limit} on)"
        if len(levels):
            return ""
    return ""


def with_pace(window: Window, found: list[Verdict], sure: list[Verdict]) -> list[Verdict]:
    """Return the verdicts found, or those that are sure while the job has no pace or most hosts are short of CPU.

    Raises Blind if none is.
    """
    try:
        require_pace(window)
        require_cpu(window)
    except Blind:
        if not sure:
            raise
        return sure
    return found


def settled_line(window: Window) -> int:
    """Return the first line of ``steps`` that is not among the first ones of the attempt."""
    numbers = window.curve.number
    end = numbers[WARMUP_LINES] if len(numbers) > WARMUP_LINES else math.inf
    return int(np.searchsorted(window.steps.number, end))


def settled_curve(window: Window) -> Curve:
    """Return the curve without the first reports of the attempt: what its steps are usually like."""
    curve = window.curve
    values = {name: course[WARMUP_LINES:] for name, course in curve.values.items()}
    return Curve(curve.number[WARMUP_LINES:], curve.times_s[WARMUP_LINES:], values)
