"""The time range that a chart shows, and the length of its steps. Pure."""

from __future__ import annotations

from typing import NamedTuple

from eagle_eye.server.model.records import Incident

POINTS = 300  # approximate number of steps: a screen has few more columns
POINTS_MAX = 2_000
# Lengths aligned with minutes and hours, so that downsampled buckets fill whole steps.
STEPS_S = (
    1.0,
    2.0,
    5.0,
    10.0,
    15.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1_800.0,
    3_600.0,
    10_800.0,
    21_600.0,
    86_400.0,
    172_800.0,
)
BEFORE_S = 180.0  # normal behaviour must be visible...
AFTER_S = 120.0  # ...and whether it continued
LENGTH_S_MAX = 14 * 86_400.0


class Stretch(NamedTuple):
    """A time range in steps: the start of its first step, their length and number."""

    start_s: float
    step_s: float
    steps: int

    @property
    def end_s(self) -> float:
        """The end of the last step."""
        return self.start_s + self.steps * self.step_s

    @property
    def times_s(self) -> list[float]:
        """The start of each step."""
        return [self.start_s + at * self.step_s for at in range(self.steps)]


def stretch(start_s: float, end_s: float, points: int = POINTS, least_s: float = 0.0) -> Stretch:
    """Return the range in about ``points`` steps of a round length, none shorter than ``least_s``."""
    wanted_s = max((end_s - start_s) / points, least_s, STEPS_S[0])
    step_s = next((length for length in STEPS_S if length >= wanted_s), STEPS_S[-1])
    begin_s = start_s // step_s * step_s
    return Stretch(begin_s, step_s, max(1, int(-((begin_s - end_s) // step_s))))


def around(incident: Incident, now_s: float) -> tuple[float, float]:
    """Return start and end of the range that shows an incident: from before its onset to after its verdict or end."""
    reported_s = max(incident.detected_s, incident.onset_s)
    lasted_s = reported_s - incident.onset_s
    over_s = incident.ended_s if incident.ended_s is not None else incident.seen_s
    end_s = max(reported_s, min(over_s, reported_s + max(lasted_s, 2 * AFTER_S))) + max(AFTER_S, lasted_s / 2)
    start_s = max(incident.onset_s - max(BEFORE_S, lasted_s), end_s - LENGTH_S_MAX)
    return start_s, max(min(end_s, now_s), start_s + 1.0)
