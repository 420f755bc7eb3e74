"""Whole plans: how much may be asked of the planner."""

from __future__ import annotations

import pytest

from eagle_eye.planning.planner import WORK_MAX, make_plan
from tests.planning.jobs import GIB, hardware, profile


def test_more_layers_and_nodes_than_can_be_planned_in_a_minute_are_refused() -> None:
    nodes = [f"n{number}" for number in range(1, WORK_MAX // 1_000 + 2)]
    with pytest.raises(ValueError, match=r"^nodes: 21 nodes times 1000 layers are more than 20000; join layers"):
        make_plan(profile(1_000), nodes, hardware(len(nodes)), 1, 64)


def test_a_plan_is_the_same_every_time() -> None:
    plans = [make_plan(profile(24), ["a", "b", "c", "d", "e"], hardware(5, 60 * GIB), 1, 64) for _ in range(2)]
    assert plans[0] == plans[1]
