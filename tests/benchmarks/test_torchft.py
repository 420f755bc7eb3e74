"""What the storm's figures are made of: the groups' logs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.torchft.figures import committed, costs, span
from benchmarks.torchft.processes import SAMPLES, STEP_S, Group, Try
from benchmarks.torchft.storm import Failure


def steps(from_s: float, until_s: float, first: int, groups: int) -> list[Try]:
    count = round((until_s - from_s) / STEP_S)
    return [Try(from_s + index * STEP_S, first + index, groups, True) for index in range(count)]


def test_a_step_counts_once_however_many_groups_say_it() -> None:
    tries = [Try(1.0, 1, 4, True), Try(1.1, 1, 4, True), Try(2.0, 2, 4, True)]
    assert span(tries, 0.0, 10.0)["steps"] == 2


def test_a_try_that_was_not_committed_has_no_samples() -> None:
    found = span([Try(1.0, 1, 4, True), Try(2.0, 1, 4, False)], 0.0, 10.0)
    assert (found["samples"], found["tries_not_committed"]) == (4 * SAMPLES, 1)


def test_samples_are_those_of_the_groups_that_took_part() -> None:
    found = span([Try(1.0, 1, 4, True), Try(2.0, 2, 3, True)], 0.0, 10.0)
    assert found["samples"] == 7 * SAMPLES


def test_a_step_was_committed_when_the_first_group_said_so() -> None:
    assert committed([Try(2.0, 1, 3, True), Try(1.0, 1, 4, True)]) == {1: (1.0, 4)}


def test_a_stall_is_the_time_without_a_step_beyond_a_steps_length(tmp_path: Path) -> None:
    groups = [Group(name, [], tmp_path, "") for name in ("a", "b")]
    groups[1].started_s = [0.0, 20.0]
    before, after = steps(10.0, 20.0, 1, 2), steps(21.0, 40.0, 100, 2)
    last_s = before[-1].at_s
    found = costs([Failure(last_s + 0.01, "b")], {"a": before + after, "b": before + after[10:]}, groups)
    assert found["stall_s"] == {"p50": round(21.0 - last_s - STEP_S, 2), "max": round(21.0 - last_s - STEP_S, 2)}


def test_a_group_is_back_with_the_first_step_after_its_new_start(tmp_path: Path) -> None:
    group = Group("b", [], tmp_path, "")
    group.started_s = [0.0, 21.0]
    tries = [*steps(10.0, 20.5, 1, 2), *steps(22.0, 30.0, 100, 2)]
    found = costs([Failure(20.0, "b")], {"b": tries}, [group])
    assert (found["back"], found["until_its_first_step_s"]["max"]) == (1, 2.0)


def test_a_group_that_never_came_back_is_not_counted_as_back(tmp_path: Path) -> None:
    group = Group("b", [], tmp_path, "")
    group.started_s = [0.0]
    found = costs([Failure(20.0, "b")], {"b": steps(10.0, 20.0, 1, 2)}, [group])
    assert (found["count"], found["back"]) == (1, 0)
