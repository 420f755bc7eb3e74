"""Rows into steps: what belongs to which step, whatever the clocks and the interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.engine.grid import StepGrid

ROLES = np.zeros(4, dtype=np.intp)


def fed(rows: Sequence[tuple[Sequence[float], list[float]]], roles: np.ndarray = ROLES) -> StepGrid:
    """Return a grid that was given rows of (train_step of each rank, compute time of each rank), a second apart."""
    grid = StepGrid()
    for second, (steps, compute) in enumerate(rows):
        row = {"train_step": np.array(steps), "train_compute_seconds": np.array(compute)}
        grid.add_row(float(second), row, roles)
    return grid


def test_a_step_is_one_line_although_ranks_report_it_in_different_rows() -> None:
    rows = [([k, k, k, k - 1], [1.0, 1.0, 1.0, 2.0]) for k in range(10)]
    steps = fed(rows).steps()
    assert np.array_equal(np.diff(steps.number), np.ones(len(steps.number) - 1))
    assert np.allclose(steps.values["train_compute_seconds"][2], [1, 1, 1, 2])


def test_relative_compute_is_over_the_other_ranks_of_the_role() -> None:
    steps = fed([([k] * 4, [1.0, 1.0, 1.0, 3.0]) for k in range(6)]).steps()
    assert np.allclose(steps.relative_compute, [1, 1, 1, 3])


def test_a_role_of_two_has_no_relative_compute() -> None:
    steps = fed([([k] * 4, [1.0, 1.0, 1.0, 3.0]) for k in range(6)], np.array([0, 0, 1, 1])).steps()
    assert np.isnan(steps.relative_compute).all()


def test_a_row_in_which_no_step_finished_adds_nothing() -> None:
    rows = [([k // 5] * 4, [1.0] * 4) for k in range(40)]
    assert list(fed(rows).steps().number) == list(range(8))


def test_steps_shorter_than_the_interval_share_a_line() -> None:
    rows = [([30 * k + offset for offset in range(4)], [1.0, 1.0, 1.0, 1.5]) for k in range(10)]
    steps = fed(rows).steps()
    assert len(steps.number) == pytest.approx(10, abs=1)
    assert np.allclose(steps.relative_compute[-3:, 3], 1.5)


def test_work_explains_what_it_explains() -> None:
    grid = StepGrid()
    rng = np.random.default_rng(0)
    for k in range(10):
        work = rng.uniform(1, 3, 4)
        row = {"train_step": np.full(4, k), "train_compute_seconds": 0.5 * work, "train_work_units": work}
        grid.add_row(float(k), row, ROLES)
    assert np.allclose(grid.steps().relative_compute, 1.0)


def test_a_restart_that_nobody_announced_begins_anew() -> None:
    rows = [([100 + k] * 4, [1.0] * 4) for k in range(10)] + [([50 + k] * 4, [2.0] * 4) for k in range(6)]
    assert fed(rows).steps().number.max() < 100


def test_the_curve_outlives_the_lines() -> None:
    grid = fed([([k] * 4, [1.0] * 4) for k in range(600)])
    assert len(grid.steps().number) < 300
    assert len(grid.curve().number) >= 598


def test_ranks_may_join_later() -> None:
    grid = fed([([k] * 4, [1.0] * 4) for k in range(6)])
    for k in range(6, 12):
        row = {"train_step": np.full(6, k), "train_compute_seconds": np.full(6, 1.0)}
        grid.add_row(float(k), row, np.zeros(6, dtype=np.intp))
    assert grid.steps().relative_compute.shape[1] == 6
    assert np.allclose(grid.steps().relative_compute[-1], 1.0)


@given(
    st.lists(
        st.lists(
            st.one_of(st.integers(0, 2**40), st.just(float("nan")), st.just(float("inf"))), min_size=4, max_size=4
        ),
        max_size=40,
    )
)
def test_takes_any_step_numbers(rows: list[list[float]]) -> None:
    grid = fed([(steps, [1.0] * 4) for steps in rows])
    steps = grid.steps()
    assert len(steps.number) == len(steps.times_s) == len(steps.relative_compute)
    assert (np.diff(steps.number) > 0).all()


@pytest.mark.parametrize(("before", "later"), [(0, 90), (1, 90), (2, 90), (90, 0), (90, 30), (300, 30)])
def test_a_limit_leaves_the_newest_steps_and_what_comes_later(before: int, later: int) -> None:
    rows = [([float(k)] * 4, [1.0, 1.0, 1.0, 1.0 + k / 100]) for k in range(before + later)]
    whole, limited = fed(rows), StepGrid()
    for second, (steps, compute) in enumerate(rows):
        if second == before:
            limited.limit(40, 0)
        limited.add_row(
            float(second), {"train_step": np.array(steps), "train_compute_seconds": np.array(compute)}, ROLES
        )
    limited.limit(40, 0)
    kept, known = limited.steps(), whole.steps()
    assert len(kept.number) == 40
    assert np.array_equal(kept.number, known.number[-40:])
    assert np.array_equal(kept.relative_compute, known.relative_compute[-40:], equal_nan=True)
    assert np.array_equal(limited.curve().number, whole.curve().number)


def test_a_limited_grid_takes_no_more_memory_than_its_lines() -> None:
    grid = StepGrid()
    grid.limit(64, 0)
    for k in range(400):
        grid.add_row(float(k), {"train_step": np.full(4, float(k)), "train_loss": np.ones(4)}, ROLES)
    assert len(grid.steps().number) == 64
    assert grid.bytes_per_line == 4 * (4 + 4)  # losses, and what is relative to peers
