"""What the figures of torchft's groups are made of, whom a storm strikes, and what the operator does."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torchft.figures import committed, costs, level, loss_back_s, ratio, span
from benchmarks.torchft.processes import SAMPLES, STEP_S, Group, Try
from benchmarks.torchft.sick import FROM_CHECKPOINT, Operator, is_right
from benchmarks.torchft.storm import Failure, Storm


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
    found = costs([Failure(last_s + 0.01, "b")], {"a": before + after, "b": before + after[10:]}, groups, 40.0)
    assert found["stall_s"] == {"p50": round(21.0 - last_s - STEP_S, 2), "max": round(21.0 - last_s - STEP_S, 2)}


def test_a_group_is_back_with_the_first_step_after_its_new_start(tmp_path: Path) -> None:
    group = Group("b", [], tmp_path, "")
    group.started_s = [0.0, 21.0]
    tries = [*steps(10.0, 20.5, 1, 2), *steps(22.0, 30.0, 100, 2)]
    found = costs([Failure(20.0, "b")], {"b": tries}, [group], 40.0)
    assert (found["back"], found["until_its_first_step_s"]["max"]) == (1, 2.0)


def test_a_group_that_never_came_back_is_not_counted_as_back(tmp_path: Path) -> None:
    group = Group("b", [], tmp_path, "")
    group.started_s = [0.0]
    found = costs([Failure(20.0, "b")], {"b": steps(10.0, 20.0, 1, 2)}, [group], 40.0)
    assert (found["count"], found["back"]) == (1, 0)


def test_a_failure_after_which_nobody_goes_on_stalls_until_the_end(tmp_path: Path) -> None:
    group = Group("b", [], tmp_path, "")
    group.started_s = [0.0]
    before = steps(10.0, 20.0, 1, 1)
    found = costs([Failure(20.0, "b")], {"b": before}, [group], 50.0)
    assert found["stall_s"]["max"] == round(50.0 - before[-1].at_s - STEP_S, 2)


def test_a_calm_without_a_step_has_no_ratio() -> None:
    assert ratio(span([], 0.0, 10.0), span([], 0.0, 10.0), "steps") is None


def test_steps_of_groups_at_the_same_moment_need_no_order() -> None:
    assert committed([Try(1.0, 1, 2, True, None), Try(1.0, 1, 2, True, 0.5)]) == {1: (1.0, 2)}


def losses(*values: float | None) -> list[Try]:
    return [Try(float(at_s), at_s, 1, True, loss) for at_s, loss in enumerate(values)]


def test_the_level_is_the_median_loss_of_steps_that_hold_the_groups_samples() -> None:
    assert level(losses(0.1, 0.3, None, 0.2, 9.0), 0.0, 4.0)["loss"] == 0.2


def test_a_level_says_that_the_loss_is_not_finite_or_that_there_is_none() -> None:
    assert level(losses(0.1, float("nan")), 0.0, 2.0)["loss"] == "not finite"
    assert level([], 0.0, 2.0)["loss"] is None


@pytest.mark.parametrize(
    ("course", "back_s"),
    [
        ((0.1, 0.11, 0.09), 1.0),  # never up since then
        ((0.1, 0.5, float("nan"), 0.1, 0.11), 3.0),
        ((0.1, 0.5, 0.1, 0.5), None),
        ((0.1, 0.5, float("nan")), None),
        ((0.1,), None),  # nobody says
    ],
)
def test_the_loss_is_back_when_it_stays_as_it_was(course: tuple[float, ...], back_s: float | None) -> None:
    assert loss_back_s(losses(*course), 1.0, 0.1) == back_s


class Dying(Group):
    """Told to end, it goes on for as long as the storm lasts."""

    def keep(self, excluded: set[str], taken: set[str]) -> bool:
        return False

    def takes_part(self) -> bool:
        return True


def test_a_group_is_struck_once_until_it_was_started_again(tmp_path: Path) -> None:
    group = Dying("b", [], tmp_path, "")
    group.started_s = [0.0]
    storm = Storm([group], lambda _: True)
    storm.run(time.time() + 0.5, random.Random(1), every_s=0.01)
    assert len(storm.failures) == 1
    group.started_s.append(time.time())
    storm.run(time.time() + 0.5, random.Random(1), every_s=0.01)
    assert len(storm.failures) == 2


def test_a_line_that_a_killed_group_left_half_written_is_no_try(tmp_path: Path) -> None:
    group = Group("b", [], tmp_path, "")
    (tmp_path / "b.steps").write_text("1.5 1 4 1 0.25\n2.5 2 4 1 -\n3.5 3")
    assert group.tries() == [Try(1.5, 1, 4, True, 0.25), Try(2.5, 2, 4, True, None)]


def test_only_what_the_lighthouse_was_told_to_end_counts_as_killed(tmp_path: Path) -> None:
    group = Group("b", [], tmp_path, "")
    assert group.kills() == 0
    (tmp_path / "b.log").write_text("got kill request: killed from dashboard\nTraceback: it fell over\n")
    assert group.kills() == 1


def test_a_group_without_a_host_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="group_0: all 2 hosts are excluded or taken"):
        Group("group_0", ["a", "b"], tmp_path, "").keep({"a"}, {"b"})


def failed(detail: str, onset_s: float) -> dict[str, Any]:
    onset = f"2026-01-01T00:00:{onset_s:06.3f}Z"
    return {"id": "act_1", "state": "failed", "onset": onset, "reports": [{"detail": detail}]}


def checkpoints(folder: Path, *written_s: float) -> Path:
    for number, second in enumerate(written_s):
        file = folder / f"{number}.pt"
        file.touch()
        os.utime(file, (NEW_YEAR_S + second, NEW_YEAR_S + second))
    return folder


NEW_YEAR_S = 1_767_225_600.0  # 2026


def test_the_operator_restarts_from_the_newest_checkpoint_before_the_fault_where_a_report_asks_for_it(
    tmp_path: Path,
) -> None:
    groups = [Group(name, [], tmp_path, "") for name in ("a", "b")]
    operator = Operator(
        lambda: [failed(f"no: {FROM_CHECKPOINT}", 20.0)], groups, checkpoints(tmp_path, 5.0, 15.0, 25.0)
    )
    operator.look()
    assert [group.resume_from for group in groups] == [tmp_path / "1.pt"] * 2


def test_the_operator_leaves_the_job_alone_where_no_report_asks_for_a_checkpoint(tmp_path: Path) -> None:
    group = Group("a", [], tmp_path, "")
    operator = Operator(lambda: [failed("b still takes part", 20.0)], [group], checkpoints(tmp_path, 5.0))
    operator.look()
    assert (group.resume_from, operator.restarted_s) == (None, None)


def test_no_checkpoint_before_the_fault_is_said(tmp_path: Path) -> None:
    operator = Operator(lambda: [failed(FROM_CHECKPOINT, 20.0)], [], checkpoints(tmp_path, 25.0))
    with pytest.raises(SystemExit, match="none of 1 checkpoints is older than the fault"):
        operator.look()


FOUND = {"host": "n2", "excluded": ["n2"], "named_after_s": 3.0, "replaced_after_s": 5.0, "loss_back_after_s": 0.0}


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"excluded": ["n1", "n2"]}, False),
        ({"excluded": []}, False),
        ({"named_after_s": None}, False),
        ({"replaced_after_s": None}, False),
        ({"loss_back_after_s": None}, False),
    ],
)
def test_with_eagle_eye_the_sick_host_and_no_other_must_be_replaced_and_the_loss_be_back(
    changes: dict[str, Any], right: bool
) -> None:
    assert is_right("eagle_eye", {**FOUND, **changes}) is right
