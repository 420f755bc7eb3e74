"""A node that does not reach the launcher's store: the next attempt does without it where it can."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.runner import reaches
from eagle_eye.orchestrators.launch.state import Phase
from tests.orchestrators.test_machine import Story, failed, restart
from tests.planning.jobs import plan


def three(**rules: Any) -> Story:
    """Three nodes, no spare, and a layout for two."""
    story = Story(**{"least": 2, "layouts": plan(3), "verdict_wait_s": 10.0, "backoff_s": 0.0, **rules})
    story.happens(on.RunnerLost("n4", "gone"), *(on.RunnerReady(node) for node in ("n1", "n2", "n3")))
    return story.starts()


def answers(story: Story, *nodes: str, reaches_it: bool = False, times: int = 2) -> None:
    for _ in range(times):
        story.happens(*(on.NodeReached(node, reaches_it) for node in nodes))


def restarted(story: Story) -> list[to.StartRanks]:
    story.happens(restart(story.state.attempt))
    story.stopped(*story.state.members)
    return story.ordered(to.StartRanks)


def test_the_nodes_of_a_failed_attempt_are_asked_whether_they_reach_the_store() -> None:
    story = three()
    story.happens(failed("n3"))
    assert story.ordered(to.AskReach) == [to.AskReach(("n1", "n2", "n3"))]


def test_the_job_restarts_without_a_node_that_has_said_twice_that_it_does_not() -> None:
    story = three()
    story.happens(failed("n3"))
    answers(story, "n2")
    (start,) = restarted(story)
    assert set(start.nodes) == {"n1", "n3"}
    assert story.state.excluded == frozenset()


def test_a_spare_takes_its_place() -> None:
    story = three()
    story.happens(on.RunnerReady("n4"), failed("n3"))
    answers(story, "n2")
    assert restarted(story)[0].nodes == ("n1", "n4", "n3")


def test_one_answer_is_asked_for_again_and_names_nobody() -> None:
    story = three()
    story.happens(failed("n3"))
    answers(story, "n2", times=1)
    assert story.ordered(to.AskReach) == [to.AskReach(("n2",))]
    answers(story, "n2", times=1, reaches_it=True)
    answers(story, "n2", times=1)
    answers(story, "n2", times=1, reaches_it=True)
    assert restarted(story)[0].nodes == ("n1", "n2", "n3")


def test_no_answer_says_nothing() -> None:
    story = three()
    story.happens(failed("n3"))
    answers(story, "n2", times=1)
    story.passes(2.0)
    assert restarted(story)[0].nodes == ("n1", "n2", "n3")


@pytest.mark.parametrize("away", [("n2",), ("n1", "n2")])
def test_where_no_layout_fits_the_others_or_most_do_not_reach_it_nobody_is_left_out(away: tuple[str, ...]) -> None:
    story = three(least=3 if len(away) == 1 else 1, layouts=None)
    story.happens(failed("n3"))
    answers(story, *away)
    assert restarted(story)[0].nodes == ("n1", "n2", "n3")


def test_one_node_goes_on_alone_where_it_says_that_it_reaches_the_store() -> None:
    for says in (True, False):
        story = three(least=1, layouts=None)
        story.happens(failed("n3"))
        answers(story, "n2", "n3")
        if says:
            answers(story, "n1", reaches_it=True, times=1)
        story.happens(restart(1))
        answers(story, "n1", reaches_it=True, times=says)
        story.stopped("n1", "n2", "n3")
        assert story.ordered(to.StartRanks)[0].nodes == (("n1",) if says else ("n1", "n2", "n3"))


def test_a_second_node_is_left_out_like_the_first() -> None:
    story = three()
    story.happens(on.RunnerReady("n4"), failed("n3"))
    answers(story, "n2")
    restarted(story)
    story.starts()
    story.happens(failed("n1", story.state.attempt))
    answers(story, "n3")
    assert set(restarted(story)[0].nodes) == {"n1", "n4"}


def test_the_second_answer_is_awaited_before_a_start() -> None:
    story = three()
    story.happens(failed("n3"))
    answers(story, "n2", times=1)
    assert restarted(story) == []
    answers(story, "n2", times=1)
    assert set(story.ordered(to.StartRanks)[0].nodes) == {"n1", "n3"}


def test_a_start_that_such_a_node_holds_up_is_given_up_for_one_without_it() -> None:
    story = three()
    restarted(story)
    story.happens(on.RanksStarted("n1", 2, (0,)), on.RanksStarted("n3", 2, (2,)))
    story.passes(2.0)
    assert story.ordered(to.AskReach) == [to.AskReach(("n2",))]
    answers(story, "n2")
    assert story.is_in(Phase.GATHERING)
    story.stopped("n1", "n2", "n3")
    assert set(story.ordered(to.StartRanks)[0].nodes) == {"n1", "n3"}
    assert story.state.restarts == 0


def test_it_is_asked_until_it_reaches_the_store_and_then_joins_at_a_checkpoint() -> None:
    story = three(grow_at_checkpoint=True, settled_after_s=0.0)
    story.happens(failed("n3"))
    answers(story, "n2")
    restarted(story)
    story.starts()
    attempt = story.state.attempt
    story.happens(on.CheckpointWritten(attempt, 5))
    assert story.state.attempt == attempt
    story.passes(2.0)
    assert story.ordered(to.AskReach) == [to.AskReach(("n2",))]
    answers(story, "n2", times=1, reaches_it=True)
    story.happens(on.CheckpointWritten(attempt, 6))
    story.stopped(*story.state.members)
    assert set(story.ordered(to.StartRanks)[0].nodes) == {"n1", "n2", "n3"}


def test_a_port_that_nobody_listens_on_is_not_reached() -> None:
    assert not reaches("127.0.0.1", 1)
