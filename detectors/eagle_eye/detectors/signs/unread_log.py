"""Tells a log that goes on and is not understood from one that says nothing: its steps are unknown, not missing."""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import latest
from eagle_eye.detectors.types import Window

LINES = "train_log_lines_since_step"
LINES_MIN = 50.0  # a program that stands still may say that much about it...
TIMES = 3.0  # ...and a program that makes steps so many times as much as usual between two of them
NEWEST_ROWS = 8


@once
def unread_log(window: Window) -> str:
    """Return that, and for how long, no step was read in the log of a rank that goes on; "" if it is read."""
    values = window.device.get(LINES)
    if values is None or not len(values):
        return ""
    lines = float(np.fmax.reduce(latest(values, NEWEST_ROWS), initial=0.0))
    before = values[window.times_s <= window.advanced_s]
    usual = float(np.fmax.reduce(before, axis=None, initial=0.0)) if math.isfinite(window.last_step) else 0.0
    if lines < max(LINES_MIN, TIMES * usual):
        return ""
    if not math.isfinite(window.last_step):
        return f"{lines:,.0f} lines of the job's log, none with a step that is understood"
    return f"{lines:,.0f} lines of the job's log, none read since step {window.last_step:.0f}"
