"""Which stretch of time a chart shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.charts.plots import BEFORE_S, LENGTH_S_MAX, STEPS_S, around, stretch
from tests.server.builders import NOW, incident

DAY_S = 86_400.0


@given(st.floats(0, 2e9), st.floats(1, LENGTH_S_MAX), st.integers(10, 2_000))
def test_a_stretch_holds_all_that_was_asked_for_in_few_steps_of_a_round_length(
    start_s: float, length_s: float, points: int
) -> None:
    found = stretch(start_s, start_s + length_s, points)
    assert found.start_s <= start_s
    assert found.end_s >= start_s + length_s - 1e-6
    assert found.step_s in STEPS_S
    assert found.steps <= points + 2
    assert len(found.times_s) == found.steps


def test_a_stretch_has_no_shorter_steps_than_its_source() -> None:
    assert stretch(0.0, 600.0, 300, least_s=30.0).step_s == 30.0


def test_what_was_usual_before_the_onset_is_in_view_and_the_future_is_not() -> None:
    found = incident(onset_s=NOW - 10, detected_s=NOW, seen_s=NOW)
    assert around(found, NOW + 5) == (NOW - 10 - BEFORE_S, NOW + 5)


def test_a_drift_of_days_is_shown_from_its_onset_to_after_its_verdict() -> None:
    start_s, end_s = around(incident(onset_s=NOW - 2 * DAY_S, detected_s=NOW, seen_s=NOW), NOW + 30 * DAY_S)
    assert start_s == NOW - 4 * DAY_S
    assert end_s == NOW + DAY_S


@given(st.floats(0, 60 * DAY_S), st.floats(0, 60 * DAY_S), st.floats(0, 60 * DAY_S))
def test_no_incident_asks_for_more_than_a_picture_shows(lasted_s: float, later_s: float, ago_s: float) -> None:
    found = incident(onset_s=NOW - lasted_s, detected_s=NOW, ended_s=NOW + later_s)
    start_s, end_s = around(found, NOW + ago_s)
    assert 0 < end_s - start_s <= LENGTH_S_MAX + 1.0


@pytest.mark.parametrize("later_s", [-5.0, 0.0])
def test_a_clock_that_was_set_back_leaves_a_picture(later_s: float) -> None:
    start_s, end_s = around(incident(onset_s=NOW, detected_s=NOW), NOW - 1_000 + later_s)
    assert end_s > start_s
