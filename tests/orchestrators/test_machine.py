"""The launcher's state machine: stories first, then everything in any order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.attempt import DONE_ALONE_S, KILLED_MAX
from eagle_eye.orchestrators.launch.checkpoints import Span
from eagle_eye.orchestrators.launch.coordinator import LauncherMemory, remember, resume
from eagle_eye.orchestrators.launch.machine import step
from eagle_eye.orchestrators.launch.state import ENDED, UP, LauncherNodes, Phase, Rules, State, due_s
from eagle_eye.planning.plan import Plan
from eagle_eye.schema.action import RestartScope
from tests.planning.jobs import plan

OrderT = TypeVar("OrderT")
NODES = ("n1", "n2", "n3", "n4")
UNIX_S = 1_800_000_000.0
SCOPES: tuple[RestartScope, ...] = ("process_group", "rank", "job")
WRITTEN_S = UNIX_S - 60.0  # when the checkpoint was, from which attempts resume


class Story:
    """A launcher on a clock of its own; ``orders`` are those of the last thing that happened.

    A checkpoint is chosen as soon as one is asked for: that of step ``newest``.
    """

    def __init__(self, least: int = 3, wanted: int = 3, **rules: Any) -> None:
        self.rules = Rules(LauncherNodes(NODES, least, wanted), **rules)
        self.state = State()
        self.memory = LauncherMemory("j")
        self.newest: int | None = None
        self.where = "step_"
        self.now_s = 0.0
        self.orders: list[to.Order] = []
        self.everything: list[to.Order] = []
        self.happens(on.Opened())

    def happens(self, *events: on.LaunchEvent) -> None:
        self.orders = []
        for event in events:
            self._happens(event)
        self.everything += self.orders

    def _happens(self, event: on.LaunchEvent) -> None:
        moment = on.Moment(self.now_s, UNIX_S + self.now_s)
        self.state, orders = step(self.rules, self.state, event, moment)
        self.orders += orders
        if any(isinstance(order, to.Persist) for order in orders):
            self.memory = remember(self.memory, self.state)
        for order in orders:
            if isinstance(order, to.ChooseCheckpoint) and self.state.attempt == order.attempt:
                self._happens(on.CheckpointChosen(order.attempt, self.newest, f"{self.where}{self.newest}", WRITTEN_S))

    def is_killed_and_started_again(self, attempts_before: int = 0) -> None:
        self.state = resume(self.memory, self.rules.fleet, attempts_before)
        self.happens(on.Opened())

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.happens(on.Tick())

    def ordered(self, kind: type[OrderT]) -> list[OrderT]:
        return [order for order in self.orders if isinstance(order, kind)]

    def all_ready(self) -> Story:
        self.happens(*(on.RunnerReady(node) for node in NODES))
        return self

    def starts(self) -> Story:
        members = enumerate(self.state.members)
        self.happens(*(on.RanksStarted(node, self.state.attempt, (rank,)) for rank, node in members))
        return self

    def stopped(self, *nodes: str) -> None:
        self.happens(*(on.RanksStopped(node) for node in nodes))

    def is_in(self, phase: Phase) -> bool:
        return self.state.phase is phase

    def running(self) -> Story:
        return self.all_ready().starts()


def exclude(*nodes: str, request: int = 1, now: bool = True, waits: bool = False) -> on.ExcludeAsked:
    return on.ExcludeAsked(request, nodes, now, "hang", waits=waits)


def restart(over: int = 1, since_s: float | None = None, request: int = 2, **more: Any) -> on.RestartAsked:
    return on.RestartAsked(request, over, since_s, "hang", **more)


def broken_numbers(story: Story) -> list[to.Say]:
    """The numbers break, no node is to blame, and the next attempt starts; returns what is said of checkpoints."""
    story.happens(restart(story.state.attempt, UNIX_S + story.now_s, blames_nobody=True))
    said = [order for order in story.ordered(to.Say) if order.event == "checkpoint_suspected"]
    story.stopped("n1", "n2", "n3")
    story.starts()
    return said


def suspected(story: Story) -> tuple[float, ...]:
    return [order for order in story.everything if isinstance(order, to.ChooseCheckpoint)][-1].suspected


def failed(node: str, attempt: int = 1, **more: Any) -> on.RanksEnded:
    return on.RanksEnded(node, attempt, success=False, exits=((1, -9),), **more)


def test_it_starts_as_soon_as_the_first_nodes_are_ready_and_tells_the_server() -> None:
    story = Story()
    story.happens(on.RunnerReady("n1"), on.RunnerReady("n4"), on.RunnerReady("n3"))
    assert story.ordered(to.StartRanks) == []
    story.happens(on.RunnerReady("n2"))
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n2", "n3")
    assert story.ordered(to.TellServer) == [to.TellServer("running", 1, ("n1", "n2", "n3"))]
    story.starts()
    assert story.state.phase is Phase.VERIFYING
    assert story.ordered(to.Running)[0].attempt == 1


def test_a_node_that_never_gets_ready_is_replaced() -> None:
    story = Story(ready_within_s=60.0)
    story.happens(on.RunnerReady("n1"), on.RunnerReady("n4"), on.RunnerReady("n3"))
    story.passes(60.0)
    assert [order.node for order in story.ordered(to.Abandon)] == ["n2"]
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n4", "n3")


def test_all_succeed() -> None:
    story = Story().running()
    story.happens(*(on.RanksEnded(node, 1, success=True) for node in ("n1", "n2", "n3")))
    assert story.ordered(to.End)[0].exit_code == 0
    assert story.ordered(to.TellServer)[-1].state == "finished"


def test_an_exclusion_stops_tells_and_restarts_without_the_node() -> None:
    story = Story().running()
    story.happens(exclude("n2"))
    assert story.ordered(to.Answer) == [to.Answer(1, True, "n2 excluded")]
    assert story.ordered(to.StopRanks) == []
    story.happens(restart())
    # The server hears of the next attempt before the first rank of this one is killed.
    kinds = [type(order) for order in story.orders]
    assert kinds.index(to.TellServer) < kinds.index(to.StopRanks)
    assert story.ordered(to.StopRanks)[0].nodes == ("n1", "n2", "n3")
    assert story.ordered(to.TellServer)[0] == to.TellServer("running", 2, ("n1", "n4", "n3"))
    story.stopped("n1")
    assert story.ordered(to.StartRanks) == []
    # Not waiting for the excluded one, which may be unreachable.
    story.stopped("n3")
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n4", "n3")
    assert story.ordered(to.Answer) == []
    story.starts()
    assert story.ordered(to.Running) == [to.Running(2, ("n1", "n4", "n3"), (2,), ("n2",))]
    story.passes(10.0)
    assert [order.node for order in story.ordered(to.Abandon)] == ["n2"]
    assert story.state.phase in UP


def test_a_kept_node_that_does_not_stop_is_replaced_too() -> None:
    story = Story(least=2, stopped_within_s=5.0).running()
    story.happens(exclude("n2"), restart())
    story.stopped("n1")
    story.passes(5.0)
    assert {order.node for order in story.ordered(to.Abandon)} == {"n2", "n3"}
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n4")


def test_an_exclusion_without_a_spare_is_refused_and_changes_nothing() -> None:
    story = Story().running()
    story.happens(exclude("n2"), restart())
    story.stopped("n1", "n2", "n3")
    story.starts()
    before = story.state
    story.happens(exclude("n1", request=3))
    (answer,) = story.ordered(to.Answer)
    assert (answer.request, answer.success) == (3, False)
    assert "no spare" in answer.text
    assert story.state == before


def test_a_failed_attempt_waits_for_word_and_then_restarts_by_itself() -> None:
    story = Story(verdict_wait_s=30.0).running()
    story.passes(60.0)
    story.happens(failed("n2"), failed("n1"))
    assert story.state.phase is Phase.DECIDING
    assert story.ordered(to.StopRanks) == []
    story.passes(29.0)
    assert story.orders == []
    story.passes(1.0)
    assert story.ordered(to.StopRanks)
    story.stopped("n1", "n2", "n3")
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n2", "n3")
    assert story.state.restarts == 1


@pytest.mark.parametrize("up", [True, False])
def test_ranks_that_end_before_an_agent_can_see_them_wait_for_word_for_a_shorter_time(up: bool) -> None:
    story = Story(verdict_wait_s=30.0, backoff_s=0.0).all_ready()
    if up:
        story.starts()
    story.happens(failed("n2"))
    story.passes(5.5)
    assert story.ordered(to.StopRanks) == []
    story.passes(0.5)
    assert story.ordered(to.StopRanks)


def told(story: Story) -> list[to.TellServer]:
    """Return what the server heard of the attempt during the last event."""
    return [word for word in story.ordered(to.TellServer) if word.attempt == story.state.attempt]


@pytest.mark.parametrize("up", [True, False])
def test_the_server_is_reported_a_rank_that_a_signal_ended(up: bool) -> None:
    story = Story(verdict_wait_s=30.0).all_ready()
    if up:
        story.starts()
    story.happens(on.RanksEnded("n2", 1, success=False, exits=((1, -9), (4, 1))))
    assert told(story) == [to.TellServer("running", 1, ("n1", "n2", "n3"))]
    story.happens(on.RanksEnded("n3", 1, success=False, exits=((2, -11),)))
    assert len(told(story)) == 1
    assert story.state.killed == {1: -9, 2: -11}
    story.passes(30.0)
    assert story.state.killed == {}


@pytest.mark.parametrize("code", [1, -6, -15])
def test_the_server_is_not_reported_ends_that_follow_from_others(code: int) -> None:
    story = Story(verdict_wait_s=30.0).running()
    story.happens(on.RanksEnded("n2", 1, success=False, exits=((1, code),)))
    assert told(story) == []
    assert story.state.killed == {}


def test_of_a_job_that_was_killed_as_a_whole_the_server_is_told_a_bounded_number_of_times() -> None:
    story = Story(verdict_wait_s=30.0).running()
    killed = tuple((rank, -9) for rank in range(KILLED_MAX))
    story.happens(on.RanksEnded("n1", 1, success=False, exits=killed))
    assert len(told(story)) == 1
    story.happens(on.RanksEnded("n2", 1, success=False, exits=((KILLED_MAX, -9),)))
    assert told(story) == []


def test_word_during_the_wait_is_obeyed_at_once_and_is_not_the_launchers_own_restart() -> None:
    story = Story(verdict_wait_s=30.0).running()
    story.happens(failed("n2"), exclude("n2"), restart())
    story.stopped("n1", "n2", "n3")
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n4", "n3")
    assert story.state.restarts == 0
    story.passes(100.0)
    story.passes(0.0)
    assert story.state.attempt == 3  # the ranks of attempt 2 never started
    assert story.state.restarts == 1


def test_without_a_server_in_touch_nobody_is_waited_for() -> None:
    story = Story(verdict_wait_s=30.0).running()
    story.happens(failed("n2", in_touch=False))
    story.passes(0.0)
    assert story.ordered(to.StopRanks)


def test_the_budget_of_own_restarts_ends_the_job() -> None:
    story = Story(verdict_wait_s=1.0, restarts_max=1).running()
    story.happens(failed("n2"))
    story.passes(1.0)
    story.stopped("n1", "n2", "n3")
    story.starts()
    story.happens(failed("n2", 2))
    story.passes(1.0)
    assert story.ordered(to.End)[0].exit_code == 1
    assert story.ordered(to.TellServer)[-1].state == "failed"


def test_a_lost_runner_is_a_failure_and_its_node_is_replaced_unless_it_comes_back() -> None:
    story = Story(verdict_wait_s=1.0).running()
    story.happens(on.RunnerLost("n2", "gone", returning=True))
    story.passes(1.0)
    story.stopped("n1", "n3")
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n4", "n3")
    story.starts()
    story.happens(on.RunnerReady("n2"))
    story.happens(exclude("n4"), restart(2))
    story.stopped("n1", "n4", "n3")
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n2", "n3")


def test_too_few_nodes_wait_for_one_that_may_come_back() -> None:
    story = Story(verdict_wait_s=1.0).running()
    story.happens(on.RunnerLost("n4", "gone"), on.RunnerLost("n2", "gone", returning=True))
    story.passes(1.0)
    story.stopped("n1", "n3")
    assert story.state.phase is Phase.GATHERING
    story.happens(on.RunnerReady("n2"))
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n2", "n3")


def test_a_fault_that_spoils_checkpoints_distrusts_what_was_written_since() -> None:
    story = Story().running()
    story.now_s = 50.0
    story.happens(restart(since_s=UNIX_S + 20.0))
    story.now_s = 51.0
    story.stopped("n1", "n2", "n3")
    assert story.ordered(to.ChooseCheckpoint)[0].distrusted == (Span(UNIX_S + 20.0, UNIX_S + 51.0),)
    story.starts()
    story.happens(restart(over=2))
    story.stopped("n1", "n2", "n3")
    assert story.ordered(to.ChooseCheckpoint)[0].distrusted == (Span(UNIX_S + 20.0, UNIX_S + 51.0),)


def test_a_checkpoint_from_which_the_numbers_are_broken_at_once_is_suspected() -> None:
    story = Story()
    story.newest = 40
    story.running()
    (said,) = broken_numbers(story)
    assert said.fields == {"step": 40, "reason": "resumed from it, the numbers broke at once"}
    assert suspected(story) == (WRITTEN_S,)


def test_a_checkpoint_from_which_steps_were_made_is_suspected_the_second_time() -> None:
    story = Story()
    story.newest = 40
    story.running().happens(on.StepSeen(1, 41, 50))
    assert (broken_numbers(story), suspected(story)) == ([], ())
    story.happens(on.StepSeen(2, 41, 50))
    (said,) = broken_numbers(story)
    assert said.fields["reason"] == "resumed from it, the numbers broke once more before the next checkpoint"
    assert suspected(story) == (WRITTEN_S,)


def test_a_checkpoint_is_above_suspicion_once_the_attempt_has_written_the_next() -> None:
    story = Story()
    story.newest = 40
    story.running()
    for attempt in (1, 2, 3):
        story.happens(on.CheckpointWritten(attempt, 50))
        assert broken_numbers(story) == []
    assert suspected(story) == ()


@pytest.mark.parametrize(
    "wish",
    [
        restart(since_s=UNIX_S, blames_nobody=False),
        restart(since_s=None, blames_nobody=True),
        restart(over=0, since_s=UNIX_S, blames_nobody=True),
    ],
    ids=["a node is to blame", "the numbers are good", "of an earlier attempt"],
)
def test_other_restarts_leave_the_checkpoint_above_suspicion(wish: on.RestartAsked) -> None:
    story = Story()
    story.newest = 40
    story.running().happens(wish)
    story.stopped("n1", "n2", "n3")
    assert suspected(story) == ()


def test_a_suspicion_outlives_the_launcher() -> None:
    story = Story()
    story.newest = 40
    story.running()
    broken_numbers(story)
    story.is_killed_and_started_again()
    story.all_ready()
    assert suspected(story) == (WRITTEN_S,)


def test_what_an_exclusion_distrusts_outlives_a_launcher_killed_before_the_restart() -> None:
    story = Story().running()
    story.happens(on.ExcludeAsked(1, ("n2",), True, "nan", 1, UNIX_S + 3.0))
    story.now_s = 9.0
    story.is_killed_and_started_again(attempts_before=1)
    story.all_ready()
    assert story.state.distrusted == (Span(UNIX_S + 3.0, UNIX_S + 9.0),)
    # Asked again for the whole action: both are seen to.
    story.happens(on.ExcludeAsked(7, ("n2",), True, "nan", 1, UNIX_S + 3.0), restart(1, UNIX_S + 3.0, request=8))
    story.starts()
    assert story.ordered(to.Running)[0].requests == (8,)
    assert story.ordered(to.StopRanks) == []


def test_a_node_readmitted_by_a_later_launcher_is_called_and_not_waited_for() -> None:
    story = Story().running()
    story.happens(exclude("n2"))
    story.is_killed_and_started_again()
    story.happens(*(on.RunnerReady(node) for node in ("n1", "n3", "n4")))
    story.starts().happens(on.ReadmitAsked(7, ("n2",)))
    assert story.ordered(to.Revive) == [to.Revive("n2")]
    story.happens(exclude("n3", request=8), restart(over=2, request=9))
    story.stopped("n1", "n3", "n4")
    assert story.state.phase is Phase.GATHERING  # three are needed
    story.happens(on.RunnerReady("n2"))
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n4", "n2")


def test_a_ready_spare_goes_before_a_node_readmitted_by_a_later_launcher() -> None:
    story = Story(least=2)
    story.running().happens(exclude("n2"), restart())
    story.stopped("n1", "n2", "n3")
    story.starts()
    story.is_killed_and_started_again()
    story.happens(*(on.RunnerReady(node) for node in ("n1", "n3", "n4")))
    story.starts().happens(on.ReadmitAsked(7, ("n2",)), exclude("n3", request=8), restart(over=3, request=9))
    story.stopped("n1", "n3", "n4")
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n4")


def test_an_exclusion_that_is_refused_or_can_wait_distrusts_nothing() -> None:
    story = Story().running()
    story.happens(
        on.ExcludeAsked(1, ("n1", "n2"), True, "nan", 1, UNIX_S), on.ExcludeAsked(2, ("n3",), False, "", 1, UNIX_S)
    )
    assert [order.success for order in story.ordered(to.Answer)] == [False, True]
    assert story.state.distrust_since_s is None


def test_a_drained_node_is_dropped_at_the_next_restart() -> None:
    story = Story().running()
    story.happens(exclude("n1", now=False))
    assert story.ordered(to.Answer)[0].success
    assert story.ordered(to.StopRanks) == []
    story.happens(restart())
    story.stopped("n1", "n2", "n3")
    assert story.ordered(to.StartRanks)[0].nodes == ("n4", "n2", "n3")
    assert story.state.excluded == {"n1"}


def test_a_readmitted_node_is_a_spare_again() -> None:
    story = Story().running()
    story.happens(exclude("n4"), on.ReadmitAsked(5, ("n4", "stranger")))
    assert story.ordered(to.Answer)[-1] == to.Answer(5, True, "readmitted: n4")
    assert story.state.excluded == frozenset()


def test_a_restart_asked_of_an_attempt_that_is_over_is_not_done_twice() -> None:
    story = Story(verdict_wait_s=1.0).running()
    story.happens(failed("n2"))
    story.passes(1.0)
    story.stopped("n1", "n2", "n3")
    story.starts()
    story.happens(restart(over=1))
    assert story.ordered(to.StopRanks) == []
    assert story.ordered(to.Answer) == [to.Answer(2, True, "attempt 2 runs already")]


def test_cancelled_is_told_before_anything_dies() -> None:
    story = Story().running()
    story.happens(on.Cancelled("SIGTERM", 143))
    assert [type(order) for order in story.orders] == [to.Persist, to.TellServer, to.StopRanks, to.End]
    assert story.ordered(to.TellServer)[0].state == "cancelled"
    story.happens(restart())
    assert not story.ordered(to.Answer)[0].success


def test_an_attempt_that_fails_as_it_starts_answers_those_who_asked_for_it() -> None:
    story = Story().running()
    story.happens(restart())
    story.stopped("n1", "n2", "n3")
    story.happens(failed("n1", 2))
    assert story.ordered(to.Answer)[0].success is False


def test_an_attempt_that_goes_on_from_its_checkpoint_is_verified() -> None:
    story = Story()
    story.newest = 40
    story.running()
    story.happens(on.StepSeen(1, 43, 60))
    assert story.state.phase is Phase.RUNNING
    assert story.ordered(to.Say) == [to.Say("verified", {"resumed_step": 40, "first_step": 43})]


def test_an_attempt_that_started_over_or_from_something_later_is_reported() -> None:
    for step_seen, words in ((3, "did not resume from step 40"), (90, "from something else")):
        story = Story()
        story.newest = 40
        story.running()
        story.happens(on.StepSeen(1, step_seen, 60))
        (reported,) = story.ordered(to.Say)
        assert reported.event == "resumed_wrongly"
        assert words in reported.fields["detail"]
        assert story.state.phase is Phase.RUNNING


def test_a_checkpoint_of_an_earlier_step_shows_as_well_that_it_started_over() -> None:
    story = Story()
    story.newest = 40
    story.running()
    story.happens(on.CheckpointWritten(1, 10))
    assert [reported.event for reported in story.ordered(to.Say)] == ["resumed_wrongly"]


def test_an_attempt_of_which_nobody_tells_is_not_verified() -> None:
    story = Story(verified_within_s=60.0).running()
    story.passes(60.0)
    story.passes(5.0)
    assert [reported.event for reported in story.ordered(to.Say)] == ["unverified"]
    assert story.state.phase is Phase.RUNNING


def warm(**rules: Any) -> Story:
    """A job that has started from a checkpoint within 100 s, and whose next attempt on the same nodes is up."""
    story = Story(verified_within_s=1_800.0, warm_within_s=60.0, settled_after_s=5_000.0, **rules)
    story.newest = 40
    story.running()
    story.passes(100.0)
    story.happens(on.StepSeen(1, 41, 60), restart())
    story.stopped("n1", "n2", "n3")
    return story.starts()


def seen(
    story: Story,
    absent: Collection[str] = (),
    stopped: Collection[str] = (),
    unheard: Collection[str] = (),
    cut_off: Collection[str] = (),
    had_come: Collection[str] = (),
) -> None:
    """Each runner that is heard says where its one rank is; one that is cut off, that it does not reach the others.

    Its rank ``had_come`` before it was, or has not come.
    """
    for rank, node in enumerate(story.state.members):
        if node in unheard:
            continue
        mine, out = (rank,), node in absent or (node in cut_off and node not in had_come)
        sight = on.RanksSeen(
            node, story.state.attempt, not out, mine * out, mine * (node in stopped), cut_off=node in cut_off
        )
        story.happens(sight)


def goes_on_starting(story: Story, seconds: float, *out: Collection[str]) -> None:
    """Time passes, and each time that ranks are looked at their runners say where they are."""
    until_s = story.now_s + seconds
    while due_s(story.state) < until_s:
        story.passes(max(0.0, due_s(story.state) - story.now_s))
        if story.ordered(to.LookAtRanks):
            seen(story, *out)
    story.passes(until_s - story.now_s)


def test_a_start_longer_than_known_ones_is_looked_at_and_fails_for_a_rank_that_has_not_come() -> None:
    story = warm()
    goes_on_starting(story, 300.0, {"n2"})
    assert story.ordered(to.LookAtRanks) == [to.LookAtRanks(2, ("n1", "n2", "n3"))]
    seen(story, absent={"n2"})
    story.passes(5.0)
    assert story.ordered(to.TellServer) == [to.TellServer("running", 2, ("n1", "n2", "n3"), (1,))]
    (stuck, failed_) = story.ordered(to.Say)
    assert stuck.fields == {
        "nodes": ["n2"],
        "stopped": [],
        "absent": [1],
        "cut_off": [],
        "unheard": [],
        "waited_s": 305.0,
    }
    assert "ranks 1 have not come" in str(failed_.fields["reason"])
    assert story.state.phase is Phase.DECIDING
    story.passes(30.0)
    assert story.ordered(to.StopRanks)[0].nodes == ("n1", "n2", "n3")  # nobody is left out for a first time


def test_a_start_is_judged_as_soon_as_every_runner_has_said_where_its_ranks_are() -> None:
    story = warm()
    goes_on_starting(story, 300.0)
    seen(story, absent={"n2"})
    story.passes(0.0)
    assert [reported.event for reported in story.ordered(to.Say)] == ["start_stuck", "attempt_failed"]


def test_a_node_that_holds_two_starts_in_a_row_up_is_left_out() -> None:
    story = warm(verdict_wait_s=0.0, backoff_s=0.0)
    for _ in range(2):
        goes_on_starting(story, 300.0)
        seen(story, stopped={"n2"})
        story.passes(5.0)
        story.passes(0.0)
        story.stopped("n1", "n2", "n3")
        members = story.state.members
        story.starts()
    assert members == ("n1", "n4", "n3")


CANNOT_CONNECT = "rank 1: Traceback:\n  File\nRuntimeError: gloo/transport/tcp/socket.cc:142] connect: Invalid argument"
LOST_A_PEER = "rank 0: Traceback:\n  File\nRuntimeError: Connection closed by peer [10.0.0.2]:4711"


def start_fails(story: Story, *ends: tuple[str, str], absent: Collection[str] = ()) -> list[to.TellServer]:
    """Ranks end before a step, each node's with its words; returns what the server hears of who holds the start up."""
    attempt = story.state.attempt
    for node, words in ends:
        exits = ((story.state.members.index(node), 1),)
        story.happens(on.RanksEnded(node, attempt, success=False, exits=exits, detail=words))
    reported = story.ordered(to.TellServer)
    story.passes(2.0)
    asked = [node for order in story.ordered(to.LookAtRanks) for node in order.nodes]
    reported += story.ordered(to.TellServer)
    story.happens(*(on.RanksSeen(node, attempt, node not in absent, (0,) * (node in absent)) for node in asked))
    return [word for word in (*reported, *story.ordered(to.TellServer)) if word.held_up_by]


def test_the_server_hears_which_ranks_alone_could_not_reach_the_others() -> None:
    for ends in ([("n2", CANNOT_CONNECT)], [("n2", CANNOT_CONNECT), ("n1", LOST_A_PEER)]):
        story = Story().running()
        assert start_fails(story, *ends) == [to.TellServer("running", 1, ("n1", "n2", "n3"), (1,))]
        (stuck,) = story.ordered(to.Say)
        assert (stuck.event, stuck.fields["unreached"]) == ("start_stuck", [1])
        assert story.state.phase is Phase.DECIDING


def test_where_others_did_not_reach_anybody_either_or_have_not_come_it_hears_of_none() -> None:
    both = Story().running()
    assert start_fails(both, ("n2", CANNOT_CONNECT), ("n3", CANNOT_CONNECT)) == []
    other = Story().running()
    assert start_fails(other, ("n2", CANNOT_CONNECT), ("n3", "rank 2: KeyError: 3")) == []
    absent = Story().running()
    assert start_fails(absent, ("n2", CANNOT_CONNECT), absent={"n3"}) == []
    gone = Story().running()
    gone.happens(on.RunnerLost("n3", "ended with -9"))
    assert start_fails(gone, ("n2", CANNOT_CONNECT)) == []


def test_of_two_nodes_or_after_a_step_nobody_can_say_who_did_not_reach_whom() -> None:
    two = Story(least=2)
    two.happens(on.RunnerLost("n3", ""), on.RunnerLost("n4", ""), on.RunnerReady("n1"), on.RunnerReady("n2"))
    two.starts()
    assert two.state.members == ("n1", "n2")
    assert start_fails(two, ("n2", CANNOT_CONNECT)) == []
    later = Story().running()
    later.happens(on.StepSeen(1, 1, 60))
    assert start_fails(later, ("n2", CANNOT_CONNECT)) == []


def test_without_a_word_from_eagle_eye_the_node_that_fails_two_starts_alone_is_left_out() -> None:
    story = Story(verdict_wait_s=5.0, backoff_s=0.0).running()
    for _ in range(2):
        assert start_fails(story, ("n2", CANNOT_CONNECT))
        story.passes(5.0)
        story.stopped("n1", "n2", "n3")
        members = story.state.members
        story.starts()
    assert members == ("n1", "n4", "n3")


def test_starts_in_a_row_that_fail_at_different_nodes_accuse_none() -> None:
    story = Story(verdict_wait_s=5.0, backoff_s=0.0, restarts_max=9).running()
    reported = []
    for node in ("n2", "n3", "n2", "n3"):
        reported += start_fails(story, (node, CANNOT_CONNECT))
        story.passes(60.0)
        story.stopped("n1", "n2", "n3")
        story.starts()
    assert [word.attempt for word in reported] == [1]
    assert story.state.members == ("n1", "n2", "n3")


def test_a_slow_start_in_which_nobody_stands_out_is_left_alone() -> None:
    story = warm()
    goes_on_starting(story, 300.0)
    seen(story)
    story.passes(5.0)
    assert (story.state.phase, story.ordered(to.Say)) == (Phase.VERIFYING, [])
    story.passes(900.0)
    assert story.orders == []
    story.happens(on.StepSeen(2, 41, 60))
    assert story.state.phase is Phase.RUNNING


def test_most_that_have_not_come_or_all_that_are_stopped_are_nobodys_fault() -> None:
    for absent, stopped in (({"n1", "n2"}, ()), ((), {"n1", "n2", "n3"})):
        story = warm()
        goes_on_starting(story, 300.0, absent, stopped)
        seen(story, absent, stopped)
        story.passes(5.0)
        assert story.state.phase is Phase.VERIFYING


def test_a_rank_that_stays_stopped_holds_a_start_up_long_before_it_is_longer_than_known_ones() -> None:
    story = warm()
    goes_on_starting(story, 3.0, (), {"n2"})
    assert story.is_in(Phase.VERIFYING)  # it may be so for a moment
    goes_on_starting(story, 2.0, (), {"n2"})
    assert story.everything.count(to.TellServer("running", 2, ("n1", "n2", "n3"), (1,))) == 1
    assert story.is_in(Phase.DECIDING)


@pytest.mark.parametrize("had_come", [(), {"n2"}])
def test_so_does_a_node_that_does_not_reach_the_rendezvous_once_all_others_have_come_to_it(
    had_come: Collection[str],
) -> None:
    story = warm()
    goes_on_starting(story, 3.0, (), (), (), {"n2"}, had_come)
    assert story.is_in(Phase.VERIFYING)
    goes_on_starting(story, 2.0, (), (), (), {"n2"}, had_come)
    assert story.everything.count(to.TellServer("running", 2, ("n1", "n2", "n3"), (1,))) == 1
    (stuck,) = (said for said in story.everything if isinstance(said, to.Say) and said.event == "start_stuck")
    assert (stuck.fields["nodes"], stuck.fields["cut_off"], stuck.fields["absent"]) == (["n2"], [1], [])


def test_where_others_have_not_come_or_most_are_cut_off_it_does_not() -> None:
    for absent, cut_off in (({"n3"}, {"n2"}), ((), {"n2", "n3"})):
        story = warm()
        goes_on_starting(story, 60.0, absent, (), (), cut_off)
        assert story.is_in(Phase.VERIFYING)


def test_so_does_a_node_that_answers_no_more_once_all_others_have_come_and_known_starts_took_less() -> None:
    for absent, ended in (((), Phase.DECIDING), ({"n3"}, Phase.VERIFYING)):
        story = warm()
        goes_on_starting(story, 149.0, absent, (), {"n2"})
        assert story.is_in(Phase.VERIFYING)
        goes_on_starting(story, 8.0, absent, (), {"n2"})
        assert story.is_in(ended)
        held_up_by = [reported.held_up_by for reported in story.everything if isinstance(reported, to.TellServer)]
        assert ((1,) in held_up_by) is (ended is Phase.DECIDING)


def test_a_start_that_is_held_up_waits_for_word_only_as_long_as_the_server_needs() -> None:
    story = warm(verdict_wait_s=30.0)
    goes_on_starting(story, 300.0, {"n2"})
    seen(story, absent={"n2"})
    story.passes(5.0)
    assert story.is_in(Phase.DECIDING)
    story.passes(9.9)
    assert story.ordered(to.StopRanks) == []
    story.passes(0.1)
    assert story.ordered(to.StopRanks)


def test_one_that_goes_on_in_between_or_that_has_only_not_come_yet_does_not() -> None:
    story = warm()
    for cut_off in ({"n2"}, set(), {"n2"}, set()):
        story.passes(due_s(story.state) - story.now_s)
        assert story.ordered(to.LookAtRanks)
        seen(story, cut_off=cut_off)
        story.passes(0.0)
    for stopped in ({"n2"}, set(), {"n2"}, set()):
        story.passes(due_s(story.state) - story.now_s)
        assert story.ordered(to.LookAtRanks)
        seen(story, absent={"n3"}, stopped=stopped)
        story.passes(0.0)
        assert (story.state.phase, story.ordered(to.Say)) == (Phase.VERIFYING, [])


def test_a_start_on_a_node_that_is_new_to_the_job_or_of_another_kind_has_the_whole_time() -> None:
    story = warm()
    story.happens(exclude("n2"), restart(2, request=3))
    story.stopped("n1", "n2", "n3")
    story.starts()
    assert story.state.members == ("n1", "n4", "n3")
    goes_on_starting(story, 1_799.0, {"n4"})
    assert story.is_in(Phase.VERIFYING)
    goes_on_starting(story, 10.0, {"n4"})
    assert story.is_in(Phase.DECIDING)
    began = Story(verified_within_s=1_800.0, warm_within_s=60.0, settled_after_s=5_000.0).running()
    began.passes(10.0)
    began.happens(on.StepSeen(1, 1, 60), restart())
    began.newest = 40  # from a checkpoint for the first time
    began.stopped("n1", "n2", "n3")
    began.starts()
    goes_on_starting(began, 700.0, {"n2"})
    assert began.is_in(Phase.VERIFYING)


def test_a_job_of_which_no_start_was_ever_seen_to_end_is_only_reported() -> None:
    story = Story(verified_within_s=60.0).running()
    story.passes(60.0)
    seen(story, absent={"n2"})
    story.passes(5.0)
    (reported,) = story.ordered(to.Say)
    assert reported.event == "unverified"
    assert "ranks 1 have not come" in str(reported.fields["detail"])
    assert story.state.phase is Phase.RUNNING


def test_known_starts_outlive_a_killed_launcher() -> None:
    story = warm()
    story.is_killed_and_started_again()
    story.running()
    goes_on_starting(story, 308.0, {"n2"})
    assert story.state.phase is Phase.DECIDING


def test_own_restarts_wait_longer_each_time_and_are_forgotten_after_lasting_progress() -> None:
    story = Story(verdict_wait_s=0.0, backoff_s=10.0, settled_after_s=300.0, checkpoints=True).running()
    waits = []
    for attempt in (1, 2, 3):
        story.happens(failed("n2", attempt, in_touch=False))
        (reported,) = [one for one in story.ordered(to.Say) if one.event == "attempt_failed"]
        waits.append(reported.fields["waits_s"])
        story.passes(reported.fields["waits_s"])
        story.stopped("n1", "n2", "n3")
        story.starts()
    assert waits == [0.0, 10.0, 20.0]
    story.passes(300.0)
    assert story.state.restarts == 3  # it has run for long, and nobody has seen it get anywhere
    story.happens(on.CheckpointWritten(4, 50))
    assert story.state.restarts == 0
    assert "settled" in [reported.event for reported in story.ordered(to.Say)]


def test_a_slow_node_and_a_mute_one_and_a_crashed_one_are_told_apart() -> None:
    story = Story(least=1, ready_within_s=60.0, silent_within_s=20.0)
    story.happens(on.RunnerBusy("n1", "importing torch"), on.RunnerBusy("n2", "importing torch"))
    story.happens(on.RunnerSilent("n2", 12.0))
    assert story.orders == []
    story.happens(on.RunnerSilent("n2", 21.0))
    assert [order.node for order in story.ordered(to.Abandon)] == ["n2"]
    assert "it spoke, and then not for 21 s" in story.ordered(to.Abandon)[0].reason
    story.happens(on.RunnerReady("n4"))
    story.passes(60.0)
    why = {order.node: order.reason for order in story.ordered(to.Abandon)}
    assert why["n1"] == "slow: it answers, and was still importing torch after 60 s"
    assert why["n3"] == "has not answered within 60 s of being called"


def test_a_working_node_that_is_silent_is_given_the_lease_after_which_its_ranks_are_dead() -> None:
    story = Story(silent_within_s=20.0, lease_s=30.0).running()
    story.happens(on.RunnerSilent("n2", 39.0))
    assert story.orders == []
    story.happens(on.RunnerSilent("n2", 41.0, returning=True))
    assert story.state.phase is Phase.DECIDING
    assert "ended with its lease" in story.ordered(to.Abandon)[0].reason


def test_a_node_that_fails_its_check_is_left_out_until_it_is_readmitted() -> None:
    story = Story(check=True)
    story.happens(on.RunnerReady("n1"), on.RunnerReady("n3"), on.RunnerReady("n4"))
    story.happens(on.NodeUnfit("n2", "gemm: gpu 3: 17 numbers differ"))
    assert story.ordered(to.Say)[0].fields == {"node": "n2", "reasons": "gemm: gpu 3: 17 numbers differ"}
    assert story.ordered(to.TellUnfit) == [to.TellUnfit("n2", "gemm: gpu 3: 17 numbers differ")]
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n4", "n3")
    story.starts()
    story.happens(on.ReadmitAsked(5, ("n2",)))
    assert story.ordered(to.CheckAgain) == [to.CheckAgain("n2")]
    assert "n2" in story.state.unusable
    story.happens(on.RunnerReady("n2", "healthy"))
    assert "n2" not in story.state.unusable


def test_a_job_that_shrank_takes_a_node_back_at_the_next_restart() -> None:
    story = shrunk()
    story.happens(on.CheckpointWritten(2, 50))
    assert story.ordered(to.StopRanks) == []
    story.happens(restart(2))
    story.stopped("n1", "n2")
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n2", "n3")


def test_a_job_that_may_grow_at_a_checkpoint_does_so_once_it_has_settled() -> None:
    story = shrunk(grow_at_checkpoint=True, settled_after_s=300.0)
    story.happens(on.CheckpointWritten(2, 50))
    assert story.ordered(to.StopRanks) == []
    story.now_s += 300.0
    story.newest = 60
    story.happens(on.CheckpointWritten(2, 60))
    assert [reported.fields["reason"] for reported in story.ordered(to.Say) if reported.event == "stopping"] == [
        "grows from 2 to 3 nodes at the checkpoint of step 60"
    ]
    story.stopped("n1", "n2")
    (start,) = story.ordered(to.StartRanks)
    assert (start.nodes, start.step) == (("n1", "n2", "n3"), 60)
    assert story.state.restarts == 0


def shrunk(**rules: Any) -> Story:
    """Two nodes run attempt 2, and a third is ready again."""
    story = Story(least=2, **rules).running()
    story.happens(exclude("n3", "n4"), restart())
    story.stopped("n1", "n2", "n3")
    story.starts()
    assert story.state.members == ("n1", "n2")
    story.happens(on.ReadmitAsked(9, ("n3",)))
    return story


def test_a_rank_that_is_done_while_others_go_on_is_named() -> None:
    story = Story().running()
    story.happens(on.RanksEnded("n2", 1, success=True))
    assert story.ordered(to.Say) == []
    story.passes(DONE_ALONE_S)
    (said,) = story.ordered(to.Say)
    assert (said.event, said.fields["ranks"], said.fields["nodes"], said.fields["going_on"]) == (
        "ranks_done", [1], ["n2"], 2,
    )  # fmt: skip
    assert story.state.done_told == {1}
    assert story.ordered(to.TellServer)


def test_a_rank_that_is_done_beside_others_of_its_node_is_named() -> None:
    story = Story().all_ready()
    story.happens(*(on.RanksStarted(node, 1, (2 * at, 2 * at + 1)) for at, node in enumerate(("n1", "n2", "n3"))))
    story.happens(on.RankFinished("n1", 1, 1))
    story.passes(DONE_ALONE_S)
    assert [said.fields["ranks"] for said in story.ordered(to.Say)] == [[1]]


def test_a_job_whose_ranks_end_one_after_another_says_nothing_of_it() -> None:
    story = Story().running()
    for node in ("n1", "n2", "n3"):
        story.happens(on.RanksEnded(node, 1, success=True))
        story.passes(DONE_ALONE_S / 4)
    assert story.state.phase == "finished"
    assert [said for said in story.everything if isinstance(said, to.Say) and said.event == "ranks_done"] == []


def test_what_was_done_in_an_attempt_before_is_forgotten() -> None:
    story = Story().running()
    story.happens(on.RanksEnded("n2", 1, success=True), restart())
    story.passes(DONE_ALONE_S)
    assert (story.state.done, story.state.done_told) == (frozenset(), frozenset())


def test_checkpoints_that_cannot_be_looked_through_blame_no_node() -> None:
    story = Story(verdict_wait_s=0.0)
    story.state = State()
    moment = on.Moment(0.0, UNIX_S)
    all_ready: list[on.LaunchEvent] = [on.RunnerReady(node) for node in NODES]
    for event in (on.Opened(), *all_ready):
        story.state, _ = step(story.rules, story.state, event, moment)
    assert story.state.phase is Phase.STARTING
    story.passes(60.0)
    assert story.ordered(to.Abandon) == []
    (reported,) = story.ordered(to.Say)
    assert "checkpoints could not be looked through" in reported.fields["reason"]


def test_a_launcher_that_is_killed_in_a_recovery_goes_on_with_it() -> None:
    story = Story(verdict_wait_s=0.0).running()
    story.happens(failed("n1"))
    story.passes(0.0)
    story.stopped("n1", "n2", "n3")
    story.starts()
    story.happens(exclude("n2"), restart(2, since_s=UNIX_S - 5.0))
    story.now_s = 7.0
    story.is_killed_and_started_again(attempts_before=3)
    assert (story.state.attempt, story.state.restarts) == (4, 1)
    story.all_ready()
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n4", "n3")
    assert story.state.distrusted == (Span(UNIX_S - 5.0, UNIX_S + 7.0),)
    # Asked again for what it was in the midst of: that is seen to.
    story.happens(exclude("n2", request=7), restart(2, since_s=UNIX_S - 5.0, request=8))
    assert story.ordered(to.Answer) == [to.Answer(7, True, "n2: excluded already")]
    story.starts()
    assert story.ordered(to.Running)[0].requests == (8,)
    assert story.ordered(to.StopRanks) == []


def test_what_the_server_knows_of_attempts_counts_where_the_state_folder_is_lost() -> None:
    assert resume(LauncherMemory("j"), LauncherNodes(NODES, 2, 3), attempts_before=7).attempt == 8
    assert resume(LauncherMemory("j", attempt=9), LauncherNodes(NODES, 2, 3), attempts_before=7).attempt == 10


def test_a_launcher_that_had_given_up_begins_with_a_full_budget() -> None:
    story = Story(verdict_wait_s=0.0, restarts_max=0).running()
    story.happens(failed("n1"))
    story.passes(0.0)
    assert story.state.phase is Phase.FAILED
    story.is_killed_and_started_again()
    assert (story.state.phase, story.state.restarts, story.state.attempt) == (Phase.GATHERING, 0, 2)


nodes = st.sampled_from(NODES)


def launch_events(state: State, request: Callable[[], int]) -> st.SearchStrategy[on.LaunchEvent]:
    """What may happen while the launcher is killed."""
    everyone = state.members or NODES
    return st.one_of(
        st.builds(lambda: on.RestartAsked(request(), state.attempt, UNIX_S, "because")),
        st.builds(lambda node: on.ExcludeAsked(request(), (node,), True, "because"), nodes),
        st.builds(on.RunnerReady, nodes),
        st.builds(on.RanksStarted, st.sampled_from(everyone), st.just(state.attempt)),
        st.builds(on.RanksStopped, nodes),
        st.builds(on.RanksSeen, nodes, st.just(state.attempt), st.integers(0, 1), st.sampled_from([(), (1,)])),
        st.builds(on.RanksEnded, st.sampled_from(everyone), st.just(state.attempt), st.booleans()),
        st.just(on.Tick()),
    )


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    layouts: Plan | None = None
    where = "step_"

    def __init__(self) -> None:
        super().__init__()
        self.story = Story(
            least=2, verdict_wait_s=10.0, checkpoints=True, grow_at_checkpoint=True, check=True, layouts=self.layouts
        )
        self.story.where = self.where
        self.asked = 100
        self.unanswered: set[int] = set()
        self.attempts: list[int] = []
        self.out: set[str] = set()  # of whose exclusion somebody was told
        self.spoilt_s = float("inf")  # since when checkpoints are spoilt, for an attempt that was ended for it

    def happens(self, event: on.LaunchEvent) -> None:
        self.story.happens(event)
        self.check()

    def check(self) -> None:
        for order in self.story.orders:
            match order:
                case to.StartRanks(attempt, members, _, _, kept):
                    assert kept <= set(members)
                    # Whatever does not go on has ended before anybody does.
                    assert not kept or not self.story.state.awaiting
                    # Excluded before it, however long ago, and not readmitted.
                    assert not set(members) & (self.story.state.unusable | self.out)
                    assert self.story.state.ready.issuperset(members)
                    assert 2 <= len(members) <= 3
                    self.attempts.append(attempt)
                case to.ChooseCheckpoint(_, spans) if self.spoilt_s < float("inf"):
                    assert any(span.covers(self.spoilt_s) for span in spans)
                    assert max(span.until_s for span in spans) >= self.spoilt_s
                case to.Answer(request):
                    self.unanswered.remove(request)
                case to.Running(_, _, requests):
                    self.unanswered -= set(requests)
                case to.Say("excluded", fields):
                    self.out |= set(fields["nodes"])
                case to.Say("readmitted", fields):
                    self.out -= set(fields["nodes"])

    def request(self) -> int:
        self.asked += 1
        self.unanswered.add(self.asked)
        return self.asked

    @rule(node=nodes)
    def ready(self, node: str) -> None:
        self.happens(on.RunnerReady(node))

    @rule(node=nodes, returning=st.booleans())
    def lost(self, node: str, returning: bool) -> None:
        self.happens(on.RunnerLost(node, "gone", returning))

    @rule(node=nodes, behind=st.integers(0, 1))
    def started(self, node: str, behind: int) -> None:
        self.happens(on.RanksStarted(node, self.story.state.attempt - behind))

    @rule(node=nodes, reaches=st.booleans())
    def reached(self, node: str, reaches: bool) -> None:
        self.happens(on.NodeReached(node, reaches))

    @precondition(lambda self: self.story.state.phase is Phase.STARTING)
    @rule()
    def all_started(self) -> None:
        for node in self.story.state.members:
            self.happens(on.RanksStarted(node, self.story.state.attempt))

    @precondition(lambda self: self.story.state.awaiting)
    @rule()
    def all_stopped(self) -> None:
        for node in sorted(self.story.state.awaiting):
            self.happens(on.RanksStopped(node))

    @rule(node=nodes, survivors=st.integers(0, 1))
    def stopped(self, node: str, survivors: int) -> None:
        self.happens(on.RanksStopped(node, survivors))

    @precondition(lambda self: self.story.state.looking)
    @rule(node=nodes, joined=st.integers(0, 1), stopped=st.sampled_from([(), (1,)]), cut_off=st.booleans())
    def seen(self, node: str, joined: int, stopped: tuple[int, ...], cut_off: bool) -> None:
        absent = () if joined else (1,)
        sight = on.RanksSeen(node, self.story.state.attempt, joined, absent, stopped, cut_off)
        self.happens(sight)

    @rule(node=nodes, behind=st.integers(0, 1), success=st.booleans())
    def ended(self, node: str, behind: int, success: bool) -> None:
        self.happens(on.RanksEnded(node, self.story.state.attempt - behind, success))

    @rule(excluded=st.lists(nodes, min_size=1, max_size=2), now=st.booleans(), waits=st.booleans())
    def excludes(self, excluded: list[str], now: bool, waits: bool) -> None:
        self.happens(on.ExcludeAsked(self.request(), tuple(excluded), now, "because", waits=waits))

    @rule(behind=st.integers(0, 1), since_s=st.none() | st.just(UNIX_S), scope=st.sampled_from(SCOPES))
    def restarts(self, behind: int, since_s: float | None, scope: RestartScope) -> None:
        over = self.story.state.attempt - behind
        self.happens(on.RestartAsked(self.request(), over, since_s, "because", scope=scope))

    @rule(node=nodes, behind=st.integers(0, 1), waits=st.booleans())
    def is_at_its_restart_point(self, node: str, behind: int, waits: bool) -> None:
        self.happens(on.RankReachedPoint(node, self.story.state.attempt - behind, 0, waits, "closed"))

    @precondition(lambda self: self.story.state.phase in UP)
    @rule(scope=st.sampled_from(SCOPES), failing=st.integers(0, 2))
    def loses_a_rank_of_a_job_with_restart_points(self, scope: RestartScope, failing: int) -> None:
        state = self.story.state
        victim = state.members[failing % len(state.members)]
        self.happens(on.StepSeen(state.attempt, 25, 25))
        for rank, node in enumerate(state.members):
            self.happens(on.RanksStarted(node, state.attempt, (rank,)))
            self.happens(on.RankReachedPoint(node, state.attempt, rank))
        self.happens(on.RanksEnded(victim, state.attempt, success=False, exits=((0, -9),)))
        self.happens(on.RestartAsked(self.request(), state.attempt, None, "because", scope=scope))
        for rank, node in enumerate(state.members):
            if node != victim:
                self.happens(on.RankReachedPoint(node, state.attempt, rank, waits=True))

    @rule(node=nodes)
    def readmits(self, node: str) -> None:
        self.happens(on.ReadmitAsked(self.request(), (node,)))

    @rule(node=nodes, for_s=st.sampled_from([10.0, 25.0, 50.0]), returning=st.booleans())
    def silent(self, node: str, for_s: float, returning: bool) -> None:
        self.happens(on.RunnerSilent(node, for_s, returning))

    @rule(node=nodes)
    def unfit(self, node: str) -> None:
        self.happens(on.NodeUnfit(node, "sick"))

    @rule(node=nodes)
    def busy(self, node: str) -> None:
        self.happens(on.RunnerBusy(node, "importing torch"))

    @rule(behind=st.integers(0, 1), number=st.integers(0, 30))
    def writes_a_checkpoint(self, behind: int, number: int) -> None:
        self.story.newest = number
        self.happens(on.CheckpointWritten(self.story.state.attempt - behind, number))

    @rule(number=st.integers(0, 30))
    def makes_a_step(self, number: int) -> None:
        self.happens(on.StepSeen(self.story.state.attempt, number, 25))

    @rule(word=st.data(), carried_out=st.integers(0, 6))
    def the_launcher_is_killed(self, word: st.DataObject, carried_out: int) -> None:
        """In the midst of what it does about something, then started again with what was on disk by then."""
        story, before = self.story, self.story.state
        event = word.draw(launch_events(before, self.request))
        moment = on.Moment(story.now_s, UNIX_S + story.now_s)
        after, orders = step(story.rules, before, event, moment)
        story.state = after
        story.orders = orders[:carried_out]
        self.check()
        if any(isinstance(order, to.Persist) for order in story.orders):
            story.memory = remember(story.memory, after)
        stopped = any(isinstance(order, to.StopRanks) for order in story.orders)
        if isinstance(event, on.RestartAsked) and event.distrust_since_s and stopped:
            self.spoilt_s = min(self.spoilt_s, event.distrust_since_s)
        self.unanswered.clear()  # who asked went with the launcher
        spent = 0 if after.phase in ENDED else min(before.restarts, after.restarts)
        known_to_server = max([0, *(order.attempt for order in story.orders if isinstance(order, to.TellServer))])
        story.is_killed_and_started_again(known_to_server)
        assert story.state.restarts >= spent
        assert self.out <= story.state.excluded
        self.check()

    @rule(seconds=st.sampled_from([0.1, 6.0, 11.0, 200.0]))
    def passes(self, seconds: float) -> None:
        self.story.passes(seconds)
        self.check()

    @rule()
    def the_launcher_fails(self) -> None:
        self.happens(on.StartImpossible(self.story.state.attempt, "no port"))

    @invariant()
    def nobody_who_asked_is_forgotten(self) -> None:
        assert self.unanswered == set(self.story.state.requests)

    @invariant()
    def it_never_waits_for_nothing(self) -> None:
        # Running jobs end by themselves; in every other phase something is due, but where only a spare can help.
        state = self.story.state
        if state.phase not in ENDED and state.phase is not Phase.RUNNING:
            wants_spare = self.layouts is not None and len({*NODES} - state.hopeless) < 2
            assert due_s(state) < float("inf") or (state.phase is Phase.GATHERING and wants_spare)

    @invariant()
    def attempts_only_grow_and_dues_are_dealt_with(self) -> None:
        assert self.attempts == sorted(set(self.attempts))
        for _ in range(10):
            if due_s(self.story.state) > self.story.now_s:
                break
            self.story.happens(on.Tick())
            self.check()
        assert due_s(self.story.state) > self.story.now_s


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)


class AnyOrderInMemory(AnyOrder):
    """The same for a job that keeps its steps in the nodes' memory."""

    where = "memory:"


TestAnyOrderInMemory = AnyOrderInMemory.TestCase
TestAnyOrderInMemory.settings = settings(max_examples=60, stateful_step_count=40)


class AnyOrderLaidOut(AnyOrder):
    """The same for a job that has a layout for two nodes and for three."""

    layouts = plan(3)


TestAnyOrderLaidOut = AnyOrderLaidOut.TestCase
TestAnyOrderLaidOut.settings = settings(max_examples=40, stateful_step_count=40)
