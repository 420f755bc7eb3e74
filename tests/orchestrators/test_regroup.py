"""Restarts that keep processes, in the launcher's state machine: which may stay, and what follows where that fails."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.state import Phase
from tests.orchestrators.test_machine import UNIX_S, Story, exclude, failed, restart

MEMBERS = ("n1", "n2", "n3")


def trains(*with_points: str, stepped: bool = True, **rules: Any) -> Story:
    """A job on n1, n2, n3 that keeps its steps in memory; n4 is the spare. These nodes' ranks have restart points."""
    story = Story(verdict_wait_s=10.0, **rules)
    story.where, story.newest = "memory:", 40
    story.running()
    if stepped:
        story.happens(on.StepSeen(1, 41, 41))
    story.happens(*(at_point(node) for node in with_points or MEMBERS))
    return story


def at_point(node: str, attempt: int = 1, *, waits: bool = False) -> on.RankReachedPoint:
    return on.RankReachedPoint(node, attempt, MEMBERS.index(node), waits, "Connection closed by peer" if waits else "")


def come(story: Story, *nodes: str) -> None:
    story.happens(*(at_point(node, waits=True) for node in nodes))


def loses_n2(story: Story) -> Story:
    story.happens(failed("n2"))
    story.happens(restart(scope="process_group"))
    return story


def widened(story: Story) -> list[tuple[str, str]]:
    said = [order for order in story.everything if isinstance(order, to.Say) and order.event == "widened"]
    return [(one.fields["from"], one.fields["to"]) for one in said]


def begun(story: Story) -> to.StartRanks:
    (order,) = story.ordered(to.StartRanks)
    return order


def test_after_a_crash_the_others_stay_and_go_on_once_they_wait_and_the_dead_ones_place_is_taken() -> None:
    story = loses_n2(trains())
    assert story.ordered(to.StopRanks) == [to.StopRanks(("n2",))]
    story.stopped("n2")
    come(story, "n1")
    assert story.ordered(to.StartRanks) == []
    come(story, "n3")
    assert begun(story) == to.StartRanks(2, MEMBERS, "memory:40", 40, frozenset({"n1", "n3"}))
    story.starts()
    story.happens(on.StepSeen(2, 41, 41))
    assert story.is_in(Phase.RUNNING)
    story.passes(1_000.0)
    assert story.state.attempt == 2
    assert widened(story) == []


def test_without_word_from_eagle_eye_the_launcher_keeps_the_living_as_well() -> None:
    story = trains()
    story.happens(failed("n2"))
    come(story, "n1", "n3")
    story.passes(10.0)
    story.stopped("n2")
    assert begun(story).kept == {"n1", "n3"}


def test_of_a_hang_the_culprit_is_ended_first_and_a_spare_takes_its_place() -> None:
    story = trains()
    story.happens(exclude("n2"), restart(scope="rank"))
    assert story.ordered(to.StopRanks) == [to.StopRanks(("n2",))]
    come(story, "n1", "n3")
    assert story.ordered(to.StartRanks) == []  # n2 has not confirmed
    story.stopped("n2")
    assert begun(story) == to.StartRanks(2, ("n1", "n4", "n3"), "memory:40", 40, frozenset({"n1", "n3"}))


@pytest.mark.parametrize(
    "story",
    [
        loses_n2(trains("n1")),
        loses_n2(trains(stepped=False)),
        loses_n2(trains(regroup_within_s=0.0)),
    ],
    ids=["a job without restart points", "before the first step", "told not to"],
)
def test_every_process_is_new_where_nobody_knows_that_they_can_stay(story: Story) -> None:
    assert story.ordered(to.StopRanks) == [to.StopRanks(MEMBERS)]
    story.stopped(*MEMBERS)
    assert begun(story).kept == frozenset()


def test_every_process_is_new_where_that_is_what_is_asked_for() -> None:
    story = trains()
    story.happens(failed("n2"))
    story.happens(restart())
    assert story.ordered(to.StopRanks) == [to.StopRanks(MEMBERS)]


def test_every_process_is_new_where_numbers_are_not_to_be_trusted() -> None:
    story = trains()
    story.happens(failed("n2"))
    story.happens(restart(since_s=UNIX_S, scope="process_group"))
    assert story.ordered(to.StopRanks) == [to.StopRanks(MEMBERS)]


def test_every_process_is_new_where_a_node_is_gone_whose_ranks_may_live() -> None:
    story = trains()
    story.happens(on.RunnerLost("n2", "gone"))
    story.happens(restart(scope="process_group"))
    assert story.ordered(to.StopRanks) == [to.StopRanks(("n1", "n3"))]


def test_nobody_stays_where_all_ranks_run_and_no_culprit_is_named() -> None:
    story = trains()
    story.happens(restart(scope="rank"))
    assert story.ordered(to.StopRanks) == [to.StopRanks(MEMBERS)]


def test_a_rank_that_waits_at_its_restart_point_has_failed_the_attempt() -> None:
    story = trains()
    come(story, "n1")
    assert story.is_in(Phase.DECIDING)
    story.passes(10.0)
    assert story.is_in(Phase.GATHERING)


def test_who_does_not_come_to_the_restart_point_in_time_is_ended_and_the_others_stay() -> None:
    story = loses_n2(trains())
    story.stopped("n2")
    come(story, "n1")
    story.passes(30.0)
    assert widened(story) == [("process_group", "rank")]
    assert story.ordered(to.StopRanks) == [to.StopRanks(("n3",))]
    story.stopped("n3")
    assert begun(story) == to.StartRanks(2, MEMBERS, "memory:40", 40, frozenset({"n1"}))


def test_where_nobody_comes_to_the_restart_point_every_process_is_new() -> None:
    story = loses_n2(trains())
    story.stopped("n2")
    story.passes(30.0)
    assert widened(story) == [("process_group", "job")]
    assert story.ordered(to.StopRanks) == [to.StopRanks(("n1", "n3"))]
    story.stopped("n1", "n3")
    assert begun(story) == to.StartRanks(2, MEMBERS, "memory:40", 40)


def test_who_waits_is_not_ended_because_a_node_that_joins_takes_longer() -> None:
    story = Story(verdict_wait_s=10.0)
    story.where, story.newest = "memory:", 40
    story.happens(*(on.RunnerReady(node) for node in MEMBERS))
    story.starts()
    story.happens(on.StepSeen(1, 41, 41), *(at_point(node) for node in MEMBERS))
    story.happens(exclude("n2"), restart(scope="rank"))
    story.stopped("n2")
    come(story, "n1", "n3")
    story.passes(100.0)
    story.happens(on.RunnerReady("n4"))
    assert begun(story).kept == {"n1", "n3"}
    story.starts()
    story.passes(29.0)
    assert widened(story) == []


def test_without_a_first_step_in_time_every_process_is_new() -> None:
    story = loses_n2(trains())
    story.stopped("n2")
    come(story, "n1", "n3")
    story.starts()
    story.passes(30.0)
    assert widened(story) == [("process_group", "job")]
    assert story.ordered(to.StopRanks) == [to.StopRanks(MEMBERS)]
    story.stopped(*MEMBERS)
    assert begun(story) == to.StartRanks(3, MEMBERS, "memory:40", 40)


@pytest.mark.parametrize(
    "second",
    [
        on.RunnerLost("n3", "gone"),
        on.RunnerLost("n2", "gone"),
        on.RanksStopped("n2", survivors=1),
        exclude("n3"),
    ],
    ids=["a node goes", "the culprit's node goes", "it cannot be killed", "excluded"],
)
def test_a_second_failure_meanwhile_renews_every_process(second: on.LaunchEvent) -> None:
    story = loses_n2(trains())
    come(story, "n1")
    story.happens(second)
    if isinstance(second, on.ExcludeAsked):
        story.happens(restart(request=3, scope="rank"))
    assert [to_scope for _, to_scope in widened(story)] == ["job"]
    assert story.state.kept == frozenset()
    assert story.state.attempt == 2


def test_a_rank_that_ends_and_was_to_stay_is_new_and_the_others_stay() -> None:
    story = loses_n2(trains())
    come(story, "n1")
    story.happens(failed("n3"))
    assert widened(story) == [("process_group", "rank")]
    assert story.ordered(to.StopRanks) == [to.StopRanks(("n3",))]
    story.stopped("n2", "n3")
    assert begun(story) == to.StartRanks(2, MEMBERS, "memory:40", 40, frozenset({"n1"}))


def test_without_eagle_eye_the_end_that_a_rank_waits_for_is_waited_for_and_no_longer() -> None:
    story = trains()
    story.happens(on.RankReachedPoint("n1", 1, 0, waits=True, reason="Connection closed by peer", in_touch=False))
    story.passes(2.0)
    assert story.is_in(Phase.DECIDING)
    story.happens(failed("n2", in_touch=False))
    story.passes(0.0)
    assert story.state.kept == {"n1", "n3"}


def test_a_first_step_may_take_as_long_as_a_start_of_the_job_took() -> None:
    story = trains(stepped=False)
    story.passes(50.0)
    story.happens(on.StepSeen(1, 41, 41))
    loses_n2(story)
    story.stopped("n2")
    come(story, "n1", "n3")
    story.starts()
    story.passes(49.0)
    assert widened(story) == []
    story.passes(1.0)
    assert widened(story) == [("process_group", "job")]


def test_an_attempt_of_which_nobody_can_tell_a_step_is_left_to_run() -> None:
    story = loses_n2(trains(verified_within_s=4.0))
    story.stopped("n2")
    come(story, "n1", "n3")
    story.starts()
    for _ in range(60):
        story.passes(1.0)
    assert story.is_in(Phase.RUNNING)
    assert story.state.attempt == 2


def test_who_asks_for_new_processes_is_not_answered_with_those_that_went_on() -> None:
    story = loses_n2(trains())
    story.stopped("n2")
    come(story, "n1", "n3")
    story.starts()
    story.happens(on.StepSeen(2, 41, 41), restart(over=1, request=3))
    assert story.ordered(to.StopRanks) == [to.StopRanks(MEMBERS)]
    story.stopped(*MEMBERS)
    story.starts()
    story.happens(restart(over=2, request=4))
    assert [order.request for order in story.ordered(to.Answer)] == [4]  # attempt 3 is what it asks for


def test_a_node_whose_ranks_are_to_go_on_is_not_checked_meanwhile() -> None:
    story = trains(check=True)
    story.happens(exclude("n4"), exclude("n1", request=5, now=False))
    loses_n2(story)
    assert story.state.kept == {"n1", "n3"}
    story.happens(on.ReadmitAsked(6, ("n1",)))
    assert story.ordered(to.CheckAgain) == []
    assert story.state.kept == {"n1", "n3"}


def test_what_ends_before_the_first_step_is_no_reason_to_keep_anybody_again() -> None:
    story = loses_n2(trains())
    story.stopped("n2")
    come(story, "n1", "n3")
    story.starts()
    story.happens(failed("n3", attempt=2))
    story.happens(restart(over=2, request=3, scope="process_group"))
    assert story.ordered(to.StopRanks) == [to.StopRanks(MEMBERS)]


def test_processes_do_not_go_on_from_a_step_on_storage() -> None:
    story = trains()
    story.where = "step_"
    loses_n2(story)
    story.stopped("n2")
    come(story, "n1", "n3")
    assert story.ordered(to.StartRanks) == []
    assert story.ordered(to.StopRanks) == [to.StopRanks(MEMBERS)]


def test_word_of_a_rank_that_was_not_to_stay_is_word_of_an_attempt_that_is_over() -> None:
    story = loses_n2(trains())
    come(story, "n1", "n3")
    story.happens(at_point("n2", waits=True))
    assert story.state.waiting.keys() == {"n1", "n3"}
