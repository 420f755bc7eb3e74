"""How long runs beyond a line must be, beside those of healthy peers."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.signs.runs import ended_runs, longer_than_peers

ROWS, PEERS = 60, 12


def wandering(seed: int, correlation: float) -> np.ndarray:
    """Return standard normal readings that depend on the ones before, (ROWS, PEERS + 1)."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(ROWS, PEERS + 1))
    for row in range(1, ROWS):
        values[row] = correlation * values[row - 1] + np.sqrt(1 - correlation**2) * values[row]
    return values


def newest_run(high: np.ndarray) -> int:
    """Return how many True there are at the end."""
    ordinary = np.flatnonzero(~high)
    return len(high) - 1 - int(ordinary[-1]) if len(ordinary) else len(high)


@pytest.mark.parametrize(("correlation", "most"), [(0.0, 1), (0.5, 1), (0.9, 5)])
def test_of_2000_healthy_series_hardly_any_is_told_from_its_peers(correlation: float, most: int) -> None:
    told = 0
    for seed in range(2_000):
        high = wandering(seed, correlation) > 1.5
        told += longer_than_peers(newest_run(high[:, -1]), high[:, :-1], np.ones((ROWS, PEERS), dtype=bool))
    assert told <= most


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_a_series_that_stays_beyond_the_line_is_told_from_them(correlation: float) -> None:
    high = wandering(1, correlation)[:, :-1] > 1.5
    assert longer_than_peers(40, high, np.ones((ROWS, PEERS), dtype=bool))


def test_peers_that_are_as_ill_do_not_count() -> None:
    high = np.zeros((ROWS, PEERS), dtype=bool)
    high[:50, 0] = True
    high[-20:, 1] = True
    seen = np.ones_like(high)
    assert longer_than_peers(10, high, seen)
    assert not longer_than_peers(10, high, seen, ongoing=True)


def test_rows_without_a_reading_end_no_run() -> None:
    high = np.array([[1], [0], [0], [1], [0]], dtype=bool)
    seen = np.array([[1], [0], [0], [1], [1]], dtype=bool)
    runs, known = ended_runs(high, seen)
    assert (runs[:, 0].tolist(), known.tolist()) == ([True, True, False, False, False], [3])
