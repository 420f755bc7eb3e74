"""Change points: found where they are, and not where there is none."""

from __future__ import annotations

import time

import numpy as np
import pytest

from eagle_eye.detectors.signs.changepoint import LENGTH_MAX, cusum, excursion_start, run_lengths, smoothed

NOISE = np.random.default_rng(0).normal(size=300)


def test_without_a_change_the_run_is_as_long_as_the_series() -> None:
    found = run_lengths(NOISE)
    assert int(found.length[np.argmax(found.mass)]) == len(NOISE)


@pytest.mark.parametrize("ago", [5, 20, 100])
def test_a_change_is_dated(ago: int) -> None:
    values = NOISE.copy()
    values[-ago:] += 6
    found = run_lengths(values)
    assert abs(int(found.length[np.argmax(found.mass)]) - ago) <= 1
    assert found.within(ago - 2, ago + 2) > 0.9


def test_the_posterior_sums_to_one() -> None:
    assert float(run_lengths(NOISE).mass.sum()) == pytest.approx(1.0)


def test_the_density_of_a_single_value_agrees_with_brute_force() -> None:
    # With one value the only question is whether it begins a run: hazard against its complement.
    found = run_lengths(np.array([0.3]), hazard=0.25)
    assert found.length.tolist() == [1, 1]
    assert found.mass == pytest.approx([0.25, 0.75])


def test_its_cost_is_bounded() -> None:
    started_s = time.process_time()
    run_lengths(np.concatenate([NOISE] * 20))
    assert time.process_time() - started_s < 0.5
    assert int(run_lengths(np.zeros(2 * LENGTH_MAX)).length.max()) <= LENGTH_MAX


def test_cusum_is_pages_recursion() -> None:
    expected, total = [], 0.0
    for value in NOISE:
        total = max(0.0, total + value - 0.5)
        expected.append(total)
    assert cusum(NOISE, 0.5) == pytest.approx(expected, abs=1e-9)


def test_an_excursion_starts_after_the_last_zero() -> None:
    assert excursion_start(np.array([0.0, 1.0, 0.0, 2.0, 3.0])) == 3
    assert excursion_start(np.array([1.0, 2.0])) == 0


def test_a_running_median_forgets_a_lone_outlier() -> None:
    values = np.zeros(20)
    values[10] = 99.0
    assert smoothed(values, 5).tolist() == [0.0] * 16
