"""Tidy and wide say the same: of any points, and with none where nothing was observed."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.client.frames import Key, SeriesTable
from eagle_eye.client.ranges import RangeSteps

NODES = st.text("abn1é. ", min_size=1, max_size=3)
VALUES = st.floats(allow_nan=False)
COUNT = 9


def tables(keys: st.SearchStrategy[Key]) -> st.SearchStrategy[dict[tuple[Key, int], float]]:
    return st.dictionaries(st.tuples(keys, st.integers(0, COUNT - 1)), VALUES, max_size=40)


POINTS = st.one_of(
    tables(st.tuples(NODES, st.integers(-1, 1_023))),
    tables(st.tuples(NODES, st.text("ethmlx5_0", min_size=1, max_size=4))),
)
GRIDS = st.tuples(st.floats(1e9, 2e9), st.sampled_from([0.01, 0.1, 1.0, 7.0, 60.0, 86_400.0]))


def table_of(points: dict[tuple[Key, int], float]) -> SeriesTable:
    keys = list(dict.fromkeys(key for key, _ in points))
    series = np.array([keys.index(key) for key, _ in points], np.int64)
    steps = np.array([step for _, step in points], np.int64)
    return SeriesTable(keys, series, steps, np.array(list(points.values()), np.float64))


@given(POINTS, GRIDS)
def test_tidy_and_wide_have_the_same_points_and_no_others(
    points: dict[tuple[Key, int], float], grid: tuple[float, float]
) -> None:
    start_s, step_s = grid
    of = RangeSteps(math.floor(start_s / step_s) * step_s, step_s, COUNT, start_s + COUNT * step_s)
    name = "link" if any(isinstance(key[1], str) for key, _ in points) else "device"
    tidy, wide = table_of(points).tidy(of, name), table_of(points).wide(of, name)
    times = list(wide.index)
    assert len(times) == len(set(times)) == COUNT
    assert {((row.node, getattr(row, name)), times.index(row.time)): row.value for row in tidy.itertuples()} == points
    assert len(tidy) == len(points)
    assert list(wide.columns) == sorted({key for key, _ in points})
    seen = {(key, at): wide[key].iloc[at] for key in wide.columns for at in range(COUNT)}
    assert {where: value for where, value in seen.items() if not math.isnan(value)} == points


@given(POINTS)
def test_a_tidy_frame_is_in_order_of_series_and_time(points: dict[tuple[Key, int], float]) -> None:
    name = "link" if any(isinstance(key[1], str) for key, _ in points) else "device"
    tidy = table_of(points).tidy(RangeSteps(1e9, 1.0, COUNT, 1e9 + COUNT), name)
    rows = [(row.node, getattr(row, name), row.time) for row in tidy.itertuples()]
    assert rows == sorted(rows)
    assert str(tidy["time"].dt.tz) == "UTC"
    assert isinstance(tidy, pd.DataFrame)
