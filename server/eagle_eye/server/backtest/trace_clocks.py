"""Finds nodes of a trace with a wrong clock by the times of their rows, as traces have no times of receipt."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from eagle_eye.schema.names import NAME_CHARS_MAX

OFFSET_S_MIN = 30.0  # smaller offsets are left to the detectors, which tolerate them
OFFSET_INTERVALS_MIN = 3.0
NODES_MIN = 3  # minimum number of nodes; among fewer no outlier can be identified


class RowSpan(NamedTuple):
    """When a node's first and last row ended, Unix seconds."""

    first_s: float
    last_s: float


def clock_offsets(spans: Mapping[str, RowSpan], interval_s: float) -> dict[str, float]:
    """Return how many seconds nodes' clocks are ahead of the others' (behind: negative), {} for none.

    A wrong clock shifts all rows of a node by the same time, so that they begin and end too late, or too early, by the
    same amount. A node that joined late, left early or replaced another does only one of the two. The time of more than
    half of the nodes is taken as correct. Does not detect: offsets below 30 s or three intervals; clocks that are
    corrected in between; a node whose first and last rows are missing as well.
    """
    if len(spans) < NODES_MIN:
        return {}
    usual = RowSpan(median(span.first_s for span in spans.values()), median(span.last_s for span in spans.values()))
    least_s = max(OFFSET_S_MIN, OFFSET_INTERVALS_MIN * interval_s)
    found = {}
    for node, span in spans.items():
        early, late = span.first_s - usual.first_s, span.last_s - usual.last_s
        alike = abs(early - late) <= max(least_s / 3.0, 0.01 * abs(early))
        if alike and min(abs(early), abs(late)) >= least_s and early * late > 0.0:
            found[node] = (early + late) / 2.0
    return found if 2 * len(found) < len(spans) else {}


def clock_lines(trace: str, offsets_s: Mapping[str, float]) -> list[str]:
    """Return messages about nodes whose clocks were wrong."""
    return [
        f"{trace}: the clock of node {node[:NAME_CHARS_MAX]!r} is {abs(offset_s):.0f} s"
        f" {'ahead of' if offset_s > 0.0 else 'behind'} the others'; what it tells is judged at their time"
        for node, offset_s in sorted(offsets_s.items())
    ]
