"""A launched job that follows a plan: which nodes take which places, and what becomes of one without a spare."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.orchestrators.launch import command
from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.attempt import pace_left_ratio
from eagle_eye.orchestrators.launch.command import LaunchOrchestrator
from eagle_eye.orchestrators.launch.state import Phase, lay_out
from eagle_eye.orchestrators.protocol import Cause, Exclusion
from eagle_eye.planning.plan import Plan, nodes_used
from eagle_eye.schema.configuration import ConfigurationError
from tests.orchestrators.test_machine import Story, exclude, failed, restart
from tests.planning.jobs import plan

SIX = plan(6)
IDLE = plan(6, layers=4, batch=2)  # two pipelines of a node each are the most that it runs


def laid_out(**rules: Any) -> Story:
    """Three nodes of four run a pipeline of three; two hold the model."""
    return Story(least=2, layouts=plan(3), **rules).running()


def without_a_spare(**rules: Any) -> Story:
    """The spare has taken the place of n2, which is out."""
    story = laid_out(**rules)
    story.happens(exclude("n2"), restart())
    story.stopped("n1", "n2", "n3")
    return story.starts()


def said(story: Story, event: str) -> list[str]:
    return [order.fields["reason"] for order in story.ordered(to.Say) if order.event == event]


def test_a_spare_takes_the_place_of_the_node_that_it_replaces() -> None:
    assert without_a_spare().state.members == ("n1", "n4", "n3")


def test_without_a_spare_the_job_goes_on_in_the_layout_for_fewer_nodes_and_says_what_that_costs() -> None:
    story = without_a_spare()
    story.happens(exclude("n3", request=3))
    ratio = plan(3).layout(3).step_s / plan(3).layout(2).step_s
    assert story.ordered(to.Answer) == [
        to.Answer(3, True, f"n3 excluded; no spare: 2 nodes by plan, {ratio:.0%} of the samples/s of 3")
    ]
    story.happens(restart(2, request=4))
    story.stopped("n1", "n4")
    assert story.ordered(to.StartRanks)[0].nodes == plan(3).lost(["n1", "n4", "n3"], "n3").nodes


def test_with_fewer_nodes_than_any_layout_it_waits_for_a_spare_and_says_so_once() -> None:
    story = without_a_spare(ready_within_s=60.0)
    story.happens(exclude("n1", "n3", request=3, waits=True), restart(2, request=4))
    reason = "1 node is usable, and the plan's layouts need 2: the job waits for a spare"
    assert said(story, "waiting") == [reason]
    assert to.Answer(4, False, reason) in story.orders
    story.stopped("n4", "n1", "n3")
    story.passes(1000.0)
    assert story.orders == []
    assert story.is_in(Phase.GATHERING)


def test_a_node_that_comes_back_ends_the_wait() -> None:
    story = without_a_spare()
    story.happens(exclude("n1", "n3", request=3, waits=True), restart(2, request=4))
    story.stopped("n4", "n1", "n3")
    story.happens(on.ReadmitAsked(5, ("n3",)))
    assert {*story.ordered(to.StartRanks)[0].nodes} == {"n3", "n4"}


def test_one_that_is_called_and_does_not_come_is_given_up_and_the_job_waits_on() -> None:
    story = without_a_spare(ready_within_s=60.0)
    story.happens(exclude("n1", "n3", request=3, waits=True), restart(2, request=4))
    story.stopped("n4", "n1", "n3")
    story.happens(on.RunnerLost("n3", "gone"), on.ReadmitAsked(5, ("n3",)))
    story.passes(60.0)
    assert [order.node for order in story.ordered(to.Abandon)] == ["n3"]
    assert len(said(story, "waiting")) == 1
    assert story.is_in(Phase.GATHERING)


def test_lost_nodes_end_no_job_that_is_laid_out() -> None:
    story = without_a_spare(verdict_wait_s=0.0)
    story.happens(on.RunnerLost("n1", "gone"), on.RunnerLost("n3", "gone"))
    story.passes(0.0)
    assert said(story, "waiting")
    assert story.ordered(to.End) == []
    story.stopped("n4")
    story.happens(on.RunnerReady("n1"))
    assert {*story.ordered(to.StartRanks)[0].nodes} == {"n1", "n4"}


def test_a_slow_node_that_the_job_cannot_do_without_stays_while_it_trains() -> None:
    story = without_a_spare()
    before = story.state
    story.happens(exclude("n1", "n3", request=3))
    (answer,) = story.ordered(to.Answer)
    assert (answer.success, answer.text) == (False, "no spare: 1 nodes would be left, the job needs 2")
    assert story.state == before


@pytest.mark.parametrize(("fault", "waits"), [("hang", True), ("straggler", False), ("", False)])
def test_only_what_keeps_a_job_from_training_may_make_it_wait(fault: str, waits: bool) -> None:
    asked: list[on.ExcludeAsked] = []

    class Coordinator:
        def request(self, make: Callable[[int], on.ExcludeAsked]) -> str:
            asked.append(make(1))
            return ""

    cause = Cause("inc-1", "act-1", fault, "as it was seen")
    LaunchOrchestrator(cast("Any", Coordinator()), "j").exclude(Exclusion("j", 1, ("n2",), True, cause))
    assert [wish.waits for wish in asked] == [waits]


def test_a_readmitted_node_is_taken_back_at_a_checkpoint_once_the_job_has_settled() -> None:
    story = without_a_spare(grow_at_checkpoint=True, settled_after_s=300.0)
    story.happens(exclude("n3", request=3), restart(2, request=4))
    story.stopped("n1", "n4", "n3")
    story.starts()
    story.happens(on.ReadmitAsked(5, ("n3",)), on.CheckpointWritten(3, 50))
    assert story.ordered(to.StopRanks) == []
    story.now_s += 300.0
    story.happens(on.CheckpointWritten(3, 60))
    story.stopped("n1", "n4")
    assert {*story.ordered(to.StartRanks)[0].nodes} == {"n1", "n3", "n4"}


def test_what_a_lost_node_costs_is_known_while_no_spare_is_ready() -> None:
    story = laid_out()
    assert pace_left_ratio(story.rules, story.state) is None
    story.happens(on.RunnerLost("n4", "gone"))
    left = pace_left_ratio(story.rules, story.state)
    assert left == plan(3).layout(3).step_s / plan(3).layout(2).step_s
    story.happens(failed("n2"))  # word on the failed attempt may exclude a node
    assert pace_left_ratio(story.rules, story.state) == left
    story.happens(on.RunnerReady("n4"))
    assert pace_left_ratio(story.rules, story.state) is None


def test_of_a_job_that_can_do_without_no_node_nothing_is_left() -> None:
    story = without_a_spare()
    story.happens(exclude("n3", request=3), restart(2, request=4))
    story.stopped("n1", "n4", "n3")
    story.starts()
    assert pace_left_ratio(story.rules, story.state) == 0.0


@pytest.mark.parametrize("planned", [SIX, IDLE], ids=["all train", "some are idle"])
@given(st.permutations(SIX.nodes), st.integers(2, 6), st.data())
def test_every_node_that_trains_has_one_place(
    planned: Plan, nodes: list[str], before: int, draw: st.DataObject
) -> None:
    current = tuple(nodes[:before])
    chosen = tuple(draw.draw(st.permutations(nodes))[: draw.draw(st.integers(2, 6))])
    places = lay_out(planned, current, chosen)
    assert len({*places}) == len(places) == nodes_used(planned, len(chosen))
    assert {*places} <= {*chosen}
    if {*current} == {*chosen}:
        assert places == current[: len(places)]


def arguments(folder: Path, *words: str, job: str = "") -> argparse.Namespace:
    """Return the flags of a launch with a plan for two to four nodes."""
    file = folder / "plan.json"
    file.write_bytes(msgspec.json.encode(plan(4, job=job)))
    parser = argparse.ArgumentParser()
    command.configure(parser)
    nodes = ("--nodes", "a,b,c,d,e", "--nnodes", "4")
    return parser.parse_args(["--job", "j", *nodes, "--layouts", str(file), *words, "--", "x.py"])


def test_a_job_with_layouts_may_shrink_as_far_as_they_go_and_grows_at_checkpoints(tmp_path: Path) -> None:
    rules = command.read_rules(arguments(tmp_path, job="j"))
    assert (rules.fleet.least, rules.fleet.wanted) == (2, 4)
    assert rules.grow_at_checkpoint
    assert not command.read_rules(arguments(tmp_path, "--grow", "restart")).grow_at_checkpoint
    assert command.read_rules(arguments(tmp_path, "--nnodes", "3:4")).fleet.least == 3


@pytest.mark.parametrize(
    ("words", "job", "reason"),
    [
        ((), "other", "is the plan of job 'other', not of 'j'; plan again"),
        (("--nproc-per-node", "8"), "", "is for other hardware: 1 GPUs of a node, and --nproc-per-node is 8"),
        (("--nnodes", "5"), "", "has layouts for 2 to 4 nodes, and --nnodes wants 5; plan again"),
        (("--layouts", "nowhere.json"), "", "--layouts: nowhere.json: No such file or directory"),
    ],
    ids=["another job", "other hardware", "more nodes", "no file"],
)
def test_a_plan_that_is_not_for_this_job_is_refused_in_a_line(
    words: tuple[str, ...], job: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        command.read_rules(arguments(tmp_path, *words, job=job))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
