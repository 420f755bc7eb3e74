"""Says whether a job has a pace of its own, which whoever claims that its steps are longer must know."""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.detectors.types import Blind, Curve, Window

WARMUP_LINES = 5  # first reports of an attempt, slow by nature: compilation, caches, allocators, first loads of data
PACE_LINES = 12  # reports of steps after them: the error of their median is a third of their noise


def require_pace(window: Window) -> None:
    """Raise Blind until the attempt has made enough steps after its first ones.

    A job whose ranks report no steps has none; the pace of its activity is another matter (``activity_pace``).
    """
    reported, needed = len(window.curve.number), WARMUP_LINES + PACE_LINES
    if math.isfinite(window.last_step) and reported < needed:
        raise Blind(
            f"{reported} reports of this attempt's steps, {needed} needed: its pace is not known yet, and so no cost"
        )


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
