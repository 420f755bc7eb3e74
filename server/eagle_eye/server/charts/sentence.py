"""Describes a chart in sentences, for people who cannot see it or have no time to look. Pure."""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.schema.labels import metric_label, throttled_by
from eagle_eye.schema.metrics import MetricSpec
from eagle_eye.schema.notation import number
from eagle_eye.server.charts.band import Band, Floats
from eagle_eye.server.charts.drawing import Drawing
from eagle_eye.server.charts.peer_selection import Cast
from eagle_eye.server.charts.windows import Stretch


def said(found: Band, shown: Stretch, drawing: Drawing, cast: Cast, name: str, detected_s: float) -> list[str]:
    """Return what the chart shows at the verdict, what was not observed, and what it leaves out."""
    unit = drawing.metric.unit
    at = min(max(int((detected_s - shown.start_s) // shown.step_s), 0), shown.steps - 1)
    sentences = [_at_verdict(found, at, drawing, name, unit)]
    if drawing.threshold is not None:
        sentences.append(f"The threshold is {number(drawing.threshold, unit)}.")
    intervals = f"{shown.steps} intervals of {shown.step_s:g} s"
    missing = np.isnan(found.accused) & (found.seen > 0)
    if found.accused_series and missing.any():
        sentences.append(f"No data from {name} in {missing.sum()} of {intervals} in which its peers reported.")
    nobody = np.isnan(found.accused) & (found.seen == 0)
    if nobody.any() and not nobody.all():
        sentences.append(f"No data from any node in {nobody.sum()} of {intervals}.")
    if np.isinf(found.accused).any():
        sentences.append(f"{name} was not finite in {np.isinf(found.accused).sum()} of {intervals}.")
    if found.not_finite:
        sentences.append(f"{found.not_finite} values of its peers were not finite and are left out of the band.")
    sentences.append(f"Compared with {cast.said}." if cast.accused else f"Shown: {cast.said}.")
    return sentences


def what(metric: MetricSpec, drawing: Drawing) -> str:
    """Return the label of the vertical axis."""
    words = metric.help.rstrip(".")
    if drawing.form == "growth":
        return f"{words}: increase since the start of the chart"
    if drawing.form == "behind":
        return f"{words}: lag behind the furthest rank"
    if drawing.form == "bits":
        return f"Whether the clock is held down by {_reasons(drawing)}"
    return words


def _reasons(drawing: Drawing) -> str:
    """Return the reasons that the drawing's mask stands for."""
    return throttled_by(drawing.mask) if drawing.mask > 0 else "anything but an idle GPU or clocks set by a user"


def _at_verdict(found: Band, at: int, drawing: Drawing, name: str, unit: str) -> str:
    own, median = _near(found.accused, at), _near(found.median, at)
    if not found.accused_series and not found.peer_series:
        return f"The history has no {metric_label(drawing.metric.name)!r} for this time."
    if not found.accused_series:
        subject = (
            f"At the verdict the median is {number(median, unit)}" if np.isfinite(median) else "No data at the verdict"
        )
    elif np.isnan(own):
        subject = f"At the verdict there is no data from {name}"
    elif drawing.form == "bits":
        held = "was" if own > 0 else "was not"
        return f"At the verdict the clock of {name} {held} held down by {_reasons(drawing)}."
    else:
        subject = f"At the verdict {name} was at {number(own, unit)}"
    if found.accused_series and np.isfinite(median):
        subject += f", its peers' median at {number(median, unit)}"
    low, high = _near(found.low, at), _near(found.high, at)
    if np.isfinite(low) and np.isfinite(high):
        subject += f" (5% to 95%: {number(low, unit)} to {number(high, unit)})"
    return f"{subject}."


def _near(values: Floats, at: int) -> float:
    """Return the value of the step, or of one of the two before it."""
    known = [value for value in values[max(at - 2, 0) : at + 1] if not np.isnan(value)]
    return float(known[-1]) if known else math.nan
