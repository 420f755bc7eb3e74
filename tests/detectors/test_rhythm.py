"""The rhythm of a job's activity: found where steps are longer than rows, and nothing made of what has none."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.signs.periodicity import rhythm_s, stretches
from eagle_eye.detectors.types import Floats


def activity(step_s: float, row_s: float, seconds: float = 600.0, noise: float = 0.02) -> tuple[Floats, Floats]:
    """Return what one of 16 GPUs does in each row, (rows, GPUs), of steps that end with a quarter of waiting."""
    rng = np.random.default_rng(7)
    ends_s = np.cumsum(step_s * rng.normal(1.0, 0.01, int(seconds / step_s) + 3))
    edges_s = np.sort(np.concatenate([[0.0], ends_s - 0.25 * step_s, ends_s]))
    busy_s = np.concatenate([[0.0], np.repeat(0.75 * step_s * np.arange(1, len(ends_s) + 1), 2)])
    times_s = np.arange(0.0, seconds, row_s)
    rows = np.diff(np.interp(times_s, edges_s, busy_s)) / row_s
    return rows[:, None] * rng.normal(1.0, noise, (len(rows), 16)), times_s[1:]


@pytest.mark.parametrize(("step_s", "row_s"), [(10.0, 1.0), (36.5, 3.0), (60.0, 10.0), (39.2, 15.0), (20.0, 15.0)])
def test_a_rhythm_is_a_whole_number_of_steps(step_s: float, row_s: float) -> None:
    values, times_s = activity(step_s, row_s)
    found = rhythm_s(np.median(values, axis=1), times_s)
    assert found is not None
    assert found / step_s == pytest.approx(round(found / step_s), abs=0.1)


def test_rows_that_hold_many_steps_show_none() -> None:
    values, times_s = activity(0.5, 5.0)
    assert rhythm_s(np.median(values, axis=1), times_s) is None


def test_neither_does_noise_that_remembers_nor_a_slow_drift() -> None:
    rng = np.random.default_rng(3)
    noise = np.zeros(300)
    for row in range(1, 300):
        noise[row] = 0.9 * noise[row - 1] + rng.normal()
    times_s = np.arange(300.0)
    assert rhythm_s(1 + 0.02 * noise, times_s) is None
    assert rhythm_s(1 + 0.04 * np.sin(times_s / 150), times_s) is None


def test_nor_a_counter_that_stands_still_or_is_hardly_seen() -> None:
    assert rhythm_s(np.full(100, 0.5), np.arange(100.0)) is None
    assert rhythm_s(np.full(100, np.nan), np.arange(100.0)) is None
    assert rhythm_s(np.ones(3), np.arange(3.0)) is None


def test_a_rhythm_survives_missing_rows() -> None:
    values, times_s = activity(10.0, 1.0)
    kept = np.random.default_rng(5).random(len(times_s)) > 0.2
    assert rhythm_s(np.median(values, axis=1)[kept], times_s[kept]) == pytest.approx(10.0, rel=0.02)


def test_whole_steps_differ_by_their_own_noise_alone() -> None:
    values, times_s = activity(39.2, 15.0)
    found = rhythm_s(np.median(values, axis=1), times_s)
    assert found is not None
    whole, parts = (np.median(stretches(values, times_s, length_s), axis=1) for length_s in (found, 60.0))
    assert whole.std() < 0.3 * parts.std()


def test_a_stretch_is_the_mean_of_its_time_and_none_spans_missing_rows() -> None:
    values = np.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0]])
    times_s = np.array([1.0, 2.0, 3.0, 4.0, 8.0, 9.0, 10.0])
    assert stretches(values, times_s, 2.0)[:, 0].tolist() == [1.5, 3.5, 5.5]
    assert stretches(values, times_s, 1.5)[:, 0].tolist() == pytest.approx([4 / 3, 8 / 3, 16 / 3, 20 / 3])


def test_a_missing_value_is_like_the_others_of_its_row() -> None:
    values = np.array([[1.0, 1.0, 1.0], [3.0, np.nan, 3.0]])
    assert stretches(values, np.array([1.0, 2.0]), 2.0).tolist() == [[2.0, 2.0, 2.0]]
