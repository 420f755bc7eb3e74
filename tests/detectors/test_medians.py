"""The fast medians agree with the plain ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from eagle_eye.detectors.signs.medians import median_of_others, median_over_rows, quantile_over_rows
from eagle_eye.detectors.signs.step_noise import StepNoise

cells = st.one_of(st.just(np.nan), st.integers(-50, 50).map(float))
tables = st.tuples(st.integers(1, 8), st.integers(1, 8)).flatmap(
    lambda shape: st.lists(cells, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
        lambda flat: np.array(flat).reshape(shape)
    )
)


@given(tables)
def test_median_over_rows(table: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_allclose(median_over_rows(table), np.nanmedian(table, axis=0))


@given(tables, st.integers(1, 3))
def test_median_of_others(table: np.ndarray, least: int) -> None:
    got = median_of_others(table, least)
    for row in range(table.shape[0]):
        for column in range(table.shape[1]):
            others = np.delete(table[row], column)
            others = others[np.isfinite(others)]
            seen = np.isfinite(table[row, column]) and len(others) >= least
            assert_allclose(got[row, column], np.median(others) if seen else np.nan)


def test_quantile_takes_the_lower_value() -> None:
    table = np.array([[1.0, np.nan], [2.0, np.nan], [3.0, np.nan], [4.0, np.nan]])
    assert quantile_over_rows(table, 0.25).tolist()[0] == 1.0
    assert np.isnan(quantile_over_rows(table, 0.25)[1])


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_are_no_trouble(rows: int) -> None:
    assert median_over_rows(np.ones((rows, 3))).tolist() == [1.0, 1.0, 1.0]


@given(tables)
def test_the_noise_of_all_ranks_but_one_is_that_of_a_table_without_it(table: np.ndarray) -> None:
    relative = 1 + np.abs(table) / 100
    columns, steps = np.arange(table.shape[1]), np.full(table.shape[1], 5)
    found = np.array(StepNoise(relative, columns).of_others(columns, steps))
    nobody = np.array([-1])
    for column in columns:
        others = np.delete(relative, column, axis=1)
        direct = StepNoise(others, np.arange(others.shape[1])).of_others(nobody, steps[:1])
        assert_allclose(found[:, column], np.ravel(direct), rtol=1e-9, atol=1e-12)


def test_noise_and_error_are_those_of_the_distribution() -> None:
    relative = np.random.default_rng(0).normal(1.0, 0.02, (400, 9))
    noise, error = StepNoise(relative, np.arange(9)).of_others(np.array([4]), np.array([400]))
    assert noise[0] == pytest.approx(0.02, rel=0.1)
    assert 0.004 <= error[0] <= 0.0062  # a timer's grain, for eight peers
