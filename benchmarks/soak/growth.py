"""Whether something grows: the slope of the medians of stretches of time, against the level. Pure.

Medians of stretches leave out what comes and goes, such as compaction; the slope is Theil and Sen's, the median of
those between all pairs, with the interval that Kendall's statistic gives it (95%).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

STRETCHES = 24
STRETCHES_MIN = 8  # fewer tell nothing
LOOKS_MIN = 5  # in each
GROWTH_MAX = 0.01
_Z = 1.96

Word = Literal["flat", "grows", "cannot tell"]


class Growth(NamedTuple):
    """By which part of its level something grew in the time looked at, at least and at most; ``word`` judges that."""

    level: float
    ratio: float
    low: float
    high: float
    word: Word


def growth(times_s: Sequence[float], values: Sequence[float]) -> Growth:
    """Return the growth of values, NaN where nothing was seen; "cannot tell" where there are too few.

    "grows" is said only if the whole interval lies above the limit; "flat" if the growth itself does not.
    """
    known = [(at_s, value) for at_s, value in zip(times_s, values, strict=True) if math.isfinite(value)]
    stretches = min(STRETCHES, len(known) // LOOKS_MIN)
    if stretches < STRETCHES_MIN:
        level = float(np.median([value for _, value in known])) if known else math.nan
        return Growth(level, math.nan, math.nan, math.nan, "cannot tell")
    parts = np.array_split(np.array(known), stretches)
    at_s, medians = (np.array([float(np.median(part[:, column])) for part in parts]) for column in (0, 1))
    level = float(np.median(medians))
    first, second = np.triu_indices(stretches, 1)
    slopes = np.sort((medians[second] - medians[first]) / (at_s[second] - at_s[first]))
    span_s = float(known[-1][0] - known[0][0])
    spread = _Z * math.sqrt(stretches * (stretches - 1) * (2 * stretches + 5) / 18)
    low, high = (int(np.clip(round((len(slopes) + side * spread) / 2), 0, len(slopes) - 1)) for side in (-1, 1))
    scale = span_s / level if level > 0 else 0.0
    ratio, least, most = (float(slope) * scale for slope in (np.median(slopes), slopes[low], slopes[high]))
    word: Word = "flat" if ratio <= GROWTH_MAX else "grows" if least > GROWTH_MAX else "cannot tell"
    return Growth(level, ratio, least, most, word)
