"""The launcher's state machine: stories first, then everything in any order."""

from __future__ import annotations

from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eagle_eye.orchestrators.launch import happenings as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.checkpoints import Span
from eagle_eye.orchestrators.launch.machine import ENDED, Phase, Rules, State, due_s, step
from eagle_eye.orchestrators.launch.plan import Fleet

OrderT = TypeVar("OrderT")
NODES = ("n1", "n2", "n3", "n4")
UNIX_S = 1_800_000_000.0


class Story:
    """A launcher on a clock of its own; ``orders`` are those of the last thing that happened."""

    def __init__(self, least: int = 3, **rules: Any) -> None:
        self.rules = Rules(Fleet(NODES, least, 3), **rules)
        self.state = State()
        self.now_s = 0.0
        self.orders: list[to.Order] = []
        self.everything: list[to.Order] = []
        self.happens(on.Opened())

    def happens(self, *happenings: on.Happening) -> None:
        self.orders = []
        for happening in happenings:
            moment = on.Moment(self.now_s, UNIX_S + self.now_s)
            self.state, orders = step(self.rules, self.state, happening, moment)
            self.orders += orders
        self.everything += self.orders

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.happens(on.Tick())

    def ordered(self, kind: type[OrderT]) -> list[OrderT]:
        return [order for order in self.orders if isinstance(order, kind)]

    def all_ready(self) -> Story:
        self.happens(*(on.RunnerReady(node) for node in NODES))
        return self

    def starts(self) -> Story:
        self.happens(*(on.RanksStarted(node, self.state.attempt) for node in self.state.members))
        return self

    def stopped(self, *nodes: str) -> None:
        self.happens(*(on.RanksStopped(node) for node in nodes))

    def running(self) -> Story:
        return self.all_ready().starts()


def exclude(*nodes: str, request: int = 1, now: bool = True) -> on.ExcludeAsked:
    return on.ExcludeAsked(request, nodes, now, "hang")


def restart(over: int = 1, since_s: float | None = None, request: int = 2) -> on.RestartAsked:
    return on.RestartAsked(request, over, since_s, "hang")


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
    assert story.state.phase is Phase.RUNNING
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
    assert story.state.phase is Phase.RUNNING


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


def test_word_during_the_wait_is_obeyed_at_once_and_is_not_the_launchers_own_restart() -> None:
    story = Story(verdict_wait_s=30.0).running()
    story.happens(failed("n2"), exclude("n2"), restart())
    story.stopped("n1", "n2", "n3")
    assert story.ordered(to.StartRanks)[0].nodes == ("n1", "n4", "n3")
    assert story.state.restarts == 0
    story.passes(100.0)
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
    assert story.ordered(to.StartRanks)[0].distrusted == (Span(UNIX_S + 20.0, UNIX_S + 51.0),)
    story.starts()
    story.happens(restart(over=2))
    story.stopped("n1", "n2", "n3")
    assert story.ordered(to.StartRanks)[0].distrusted == (Span(UNIX_S + 20.0, UNIX_S + 51.0),)


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
    assert [type(order) for order in story.orders] == [to.TellServer, to.StopRanks, to.End]
    assert story.ordered(to.TellServer)[0].state == "cancelled"
    story.happens(restart())
    assert not story.ordered(to.Answer)[0].success


def test_an_attempt_that_fails_as_it_starts_answers_those_who_asked_for_it() -> None:
    story = Story().running()
    story.happens(restart())
    story.stopped("n1", "n2", "n3")
    story.happens(failed("n1", 2))
    assert story.ordered(to.Answer)[0].success is False


nodes = st.sampled_from(NODES)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.story = Story(least=2, verdict_wait_s=10.0)
        self.asked = 100
        self.unanswered: set[int] = set()

    def happens(self, happening: on.Happening) -> None:
        self.story.happens(happening)
        self.check()

    def check(self) -> None:
        for order in self.story.orders:
            match order:
                case to.StartRanks(_, members):
                    # Excluded before it, however long ago, and not readmitted.
                    assert not set(members) & self.story.state.unusable
                    assert self.story.state.ready.issuperset(members)
                    assert 2 <= len(members) <= 3
                case to.Answer(request):
                    self.unanswered.remove(request)
                case to.Running(_, _, requests):
                    self.unanswered -= set(requests)

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

    @rule(node=nodes, behind=st.integers(0, 1), success=st.booleans())
    def ended(self, node: str, behind: int, success: bool) -> None:
        self.happens(on.RanksEnded(node, self.story.state.attempt - behind, success))

    @rule(excluded=st.lists(nodes, min_size=1, max_size=2), now=st.booleans())
    def excludes(self, excluded: list[str], now: bool) -> None:
        self.happens(on.ExcludeAsked(self.request(), tuple(excluded), now, "because"))

    @rule(behind=st.integers(0, 1), since_s=st.none() | st.just(UNIX_S))
    def restarts(self, behind: int, since_s: float | None) -> None:
        over = self.story.state.attempt - behind
        self.happens(on.RestartAsked(self.request(), over, since_s, "because"))

    @rule(node=nodes)
    def readmits(self, node: str) -> None:
        self.happens(on.ReadmitAsked(self.request(), (node,)))

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
        # Running jobs end by themselves; in every other phase something is due.
        if self.story.state.phase not in ENDED and self.story.state.phase is not Phase.RUNNING:
            assert due_s(self.story.state) < float("inf")

    @invariant()
    def attempts_only_grow_and_dues_are_dealt_with(self) -> None:
        attempts = [order.attempt for order in self.story.everything if isinstance(order, to.StartRanks)]
        assert attempts == sorted(set(attempts))
        for _ in range(10):
            if due_s(self.story.state) > self.story.now_s:
                break
            self.story.happens(on.Tick())
            self.check()
        assert due_s(self.story.state) > self.story.now_s


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
