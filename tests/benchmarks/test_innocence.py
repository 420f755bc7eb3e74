"""The innocence storm in its quick form: nothing is asked of anybody, and the controls are found."""

from __future__ import annotations

import pytest

from benchmarks.innocence.examine import examine
from benchmarks.innocence.situations import CONTROLS, SITUATIONS, Situation
from benchmarks.innocence.world import QUICK


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda one: one.name)
def test_nothing_is_asked_of_anybody(situation: Situation) -> None:
    found = examine(situation, QUICK)
    assert (found.problem, found.actions) == ("", [])


@pytest.mark.parametrize("situation", CONTROLS, ids=lambda one: one.name)
def test_a_fault_in_the_same_world_is_acted_on(situation: Situation) -> None:
    assert examine(situation, QUICK).problem == ""
