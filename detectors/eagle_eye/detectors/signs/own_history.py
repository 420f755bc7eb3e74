"""Tests whether a rank computed faster before: its own series across the onset, relative to its peers'.

A rank that computed as fast as its peers, and from some moment computes longer while they do not, has changed itself,
unless it was given more to do (``even_work``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.medians import median_of, median_over_rows
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import PEERS_MIN, SIGMA_PER_MAD
from eagle_eye.detectors.signs.under_load import peers_of
from eagle_eye.detectors.types import Floats, Window

STEPS_BEFORE_MIN, STEPS_SINCE_MIN = 10, 3  # lines of steps
STEPS_LOOKED_AT = 96  # on each side, at most
DISTANCE = 6.0  # robust deviations of the peers' own changes, beyond which only this rank has changed
SPREAD_FLOOR = 0.005  # of a change: noise of clocks and timers
FEW_PEERS = 4.0  # a spread of n peers counts 1 + 4/n times
OWN_SHARE = 0.5  # of the excess over the peers, that its own change must account for


class ComputeChange(NamedTuple):
    """A rank's compute over its peers', before the onset and since."""

    before: float
    since: float

    @property
    def ratio(self) -> float:
        """How many times as long as before it computes, relative to its peers."""
        return self.since / self.before


@once
def own_change(window: Window, index: int, onset: int) -> ComputeChange | None:
    """Return how a rank's compute has changed at step line ``onset``; None if its past does not show that it did.

    The change must account for the slowness: a rank that always was the slowest has not changed. Its own time has
    grown, its peers' has not fallen, and few of them have changed likewise.
    """
    relative = window.steps.relative_compute
    earlier, later = relative[max(onset - STEPS_LOOKED_AT, 0) : onset], relative[onset:][-STEPS_LOOKED_AT:]
    own = [part[np.isfinite(part[:, index]), index] for part in (earlier, later)]
    if len(own[0]) < STEPS_BEFORE_MIN or len(own[1]) < STEPS_SINCE_MIN:
        return None
    found = ComputeChange(median_of(own[0]), median_of(own[1]))
    if not (found.before > 0 and found.since - found.before >= OWN_SHARE * (found.since - 1) > 0):
        return None
    peers = peers_of(window, index, window.role_of)
    others = growths(earlier[:, peers], later[:, peers])
    if len(others) < PEERS_MIN:
        return None
    growth, centre = math.log(found.ratio), median_of(others)
    sigma = max(SIGMA_PER_MAD * median_of(np.abs(others - centre)), SPREAD_FLOOR) * (1 + FEW_PEERS / len(others))
    if growth - centre < DISTANCE * sigma:
        return None
    longer = growths(*(part[:, [index]] for part in _seconds(window, onset)))
    return found if len(longer) and longer[0] >= OWN_SHARE * growth else None


def growths(earlier: Floats, later: Floats) -> Floats:
    """Return the logarithm of the growth of each column's median, for columns where it is known."""
    with np.errstate(invalid="ignore", divide="ignore"):
        grown = np.log(median_over_rows(later) / median_over_rows(earlier))
    return np.asarray(grown[np.isfinite(grown)])


def _seconds(window: Window, onset: int) -> tuple[Floats, Floats]:
    """Return the seconds of compute, per unit of work where reported, before a line and since."""
    seconds, work = (window.steps.values.get(name) for name in ("train_compute_seconds", "train_work_units"))
    if seconds is None:
        return np.zeros((0, len(window.series))), np.zeros((0, len(window.series)))
    if work is not None and np.isfinite(work[onset:]).any():
        with np.errstate(invalid="ignore", divide="ignore"):
            seconds = seconds / np.where(work > 0, work, np.nan)
    return seconds[max(onset - STEPS_LOOKED_AT, 0) : onset], seconds[onset:][-STEPS_LOOKED_AT:]
