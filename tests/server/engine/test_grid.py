"""The grid keeps the newest rows, in order, whatever order they came in."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.grid import Grid


def put(grid: Grid, time_s: float, value: float, column: int = 0) -> bool:
    line = grid.line(time_s)
    if line is None:
        return False
    grid.write(line, ["train_loss"], slice(column, column + 1), np.array([[value]]))
    return True


def test_rows_that_end_together_share_a_line() -> None:
    grid = Grid(Scope.DEVICE, 1.0, 16)
    grid.add_columns(2)
    put(grid, 10.0, 1.0, 0)
    put(grid, 10.3, 2.0, 1)
    assert grid.view("train_loss").tolist() == [[1.0, 2.0]]


def test_a_late_row_finds_its_place() -> None:
    grid = Grid(Scope.DEVICE, 1.0, 16)
    grid.add_columns(1)
    for time_s in (10.0, 12.0, 11.0):
        put(grid, time_s, time_s)
    assert grid.view("train_loss")[:, 0].tolist() == [10.0, 11.0, 12.0]


def test_a_row_too_old_is_counted() -> None:
    grid = Grid(Scope.DEVICE, 1.0, 16)
    grid.add_columns(1)
    for time_s in range(100):
        put(grid, float(time_s), 0.0)
    assert not put(grid, 1.0, 0.0)
    assert grid.late_total == 1


def test_counters_keep_every_bit() -> None:
    grid = Grid(Scope.DEVICE, 1.0, 16)
    grid.add_columns(1)
    line = grid.line(1.0)
    assert line is not None
    grid.write(line, ["train_step"], slice(0, 1), np.array([[2.0**24 + 1]]))
    assert grid.latest("train_step").tolist() == [2.0**24 + 1]


def test_views_are_read_only() -> None:
    grid = Grid(Scope.DEVICE, 1.0, 16)
    grid.add_columns(1)
    put(grid, 1.0, 1.0)
    assert not grid.view("train_loss").flags.writeable


@given(st.lists(st.integers(0, 60), min_size=1, max_size=200))
def test_holds_the_newest_lines_in_order(times: list[int]) -> None:
    grid = Grid(Scope.DEVICE, 1.0, 16)
    grid.add_columns(1)
    for time_s in times:
        put(grid, float(time_s), float(time_s))
    kept = grid.times()
    assert kept.tolist() == sorted(kept.tolist())
    assert kept[-1] == max(times)
    assert len(kept) <= 16
    assert grid.view("train_loss")[:, 0].tolist() == kept.tolist()
