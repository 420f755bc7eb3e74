"""The lease: no two servers decide at a time, however late anything arrives and whatever their clocks show."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.schema.action import EPOCH_MAX
from eagle_eye.server.engine.settings import ModeRule, PolicySettings
from eagle_eye.server.model.errors import NotLeading, StoreUnavailable
from eagle_eye.server.monitor.readiness import replication_note
from eagle_eye.server.store.leadership import (
    HEARD_LEASES,
    LEAP,
    RISE_MAX,
    TERM_LEASES_MIN,
    YIELD_LEASES,
    Leadership,
    Lease,
    LeaseTerm,
    LeaseWatch,
    Renewed,
    Wish,
    gives_way,
    risen,
)
from eagle_eye.server.web.forwarding import UnreachedNodes

LEASE_S = 5.0
WITHIN_S = 20.0
NO_WISH = Wish(0, 0, "")
FREE, HELD = Lease(0, 0, "", 0), Lease(3, 7, "http://a", 42)

DELAYS = st.floats(0.0, 2 * LEASE_S)
# For each message: how long after the one before it is sent, how long it is on its way, and how long its answer is.
MESSAGES = st.lists(st.tuples(DELAYS, DELAYS, DELAYS), min_size=1, max_size=30)
OFFSETS = st.floats(-1e6, 1e6)  # of a host's clock


def sent_and_arrived(messages: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Return when each was sent, had its effect and was answered; the next is sent after the answer."""
    ends = accumulate(sum(one) for one in messages)
    return [(end - out - back, end - back, end) for end, (_, out, back) in zip(ends, messages, strict=True)]


@given(renewals=MESSAGES, looks=MESSAGES, leaders=OFFSETS, standbys=OFFSETS)
def test_a_standby_takes_over_only_once_the_leader_has_stopped_by_itself(
    renewals: list[tuple[float, float, float]],
    looks: list[tuple[float, float, float]],
    leaders: float,
    standbys: float,
) -> None:
    term, watch = LeaseTerm(1, LEASE_S, leaders), LeaseWatch(LEASE_S)
    renewed = sent_and_arrived(renewals)
    for asked_s, read_s, answered_s in sent_and_arrived(looks):
        done = [sent_s for sent_s, effect_s, _ in renewed if effect_s <= read_s]
        lease = Lease(1, len(done), "http://a", 0)
        if watch.take_over(lease, asked_s + standbys, answered_s + standbys):
            for sent_s in done:  # even if all answers reached the leader
                term.renewed(sent_s + leaders)
            # Clocks of a million seconds resolve a nanosecond.
            assert term.left_s(asked_s + leaders) <= 1e-6
            assert asked_s - max([0.0, *done]) >= LEASE_S - 1e-6
            return


@given(looks=MESSAGES)
def test_a_leader_that_renews_before_each_look_is_never_taken_over(looks: list[tuple[float, float, float]]) -> None:
    watch = LeaseWatch(LEASE_S)
    for number, (asked_s, _, answered_s) in enumerate(sent_and_arrived(looks)):
        assert not watch.take_over(HELD._replace(renewals=number), asked_s, answered_s)


def test_a_lease_that_nobody_holds_is_taken_at_once() -> None:
    assert LeaseWatch(LEASE_S).take_over(FREE, 0.0, 0.0)


def test_time_in_which_the_lease_could_not_be_read_does_not_count() -> None:
    watch = LeaseWatch(LEASE_S)
    watch.take_over(HELD, 0.0, 0.0)
    watch.missed()
    assert not watch.take_over(HELD, 60.0, 60.0)
    assert watch.take_over(HELD, 65.0, 65.0)


def test_a_leader_counts_from_before_it_sent_and_decides_for_half_a_lease() -> None:
    term = LeaseTerm(1, LEASE_S, 100.0)
    assert term.left_s(102.4) == pytest.approx(0.1)
    assert term.left_s(102.5) == 0.0
    term.renewed(101.0)
    assert term.left_s(102.5) == pytest.approx(1.0)


@given(epoch=st.integers(1, EPOCH_MAX), seen=st.integers(1, EPOCH_MAX))
def test_an_epoch_rises_above_what_was_seen_and_never_falls_or_leaps(epoch: int, seen: int) -> None:
    found = risen(epoch, seen)
    assert (found is None) == (seen - epoch > RISE_MAX)
    if found is not None:
        assert found >= epoch
        assert seen < found <= max(epoch, seen) + 1


@dataclass
class FakeKeeper:
    """A lease in memory."""

    lease: Lease = FREE
    away: bool = False
    failed_over: bool = False
    wished: Wish = NO_WISH
    calls: list[str] = field(default_factory=list)

    def read(self) -> Lease:
        self._note("read")
        return self.lease

    def take_lease(self, seen: Lease, holder: str) -> int | None:
        self._note("take")
        if self.lease != seen:
            return None
        self.lease = Lease(seen.epoch + 1, 0, holder, 0)
        return self.lease.epoch

    def renew(self, epoch: int, holder: str) -> Renewed | None:
        self._note("renew")
        if (self.lease.epoch, self.lease.holder) != (epoch, holder):
            return None
        if self.failed_over:
            self.failed_over, self.lease = False, self.lease._replace(epoch=epoch + 1 + LEAP, renewals=0)
        else:
            self.lease = self.lease._replace(renewals=self.lease.renewals + 1)
        return Renewed(self.lease.epoch, self.wished)

    def wish(self, seen: Lease, holder: str, nodes: int) -> None:
        self._note("wish")
        self.wished = Wish(self.wished.number + 1, nodes, holder)

    def rise(self, epoch: int, holder: str, to: int) -> bool:
        self._note("rise")
        if (self.lease.epoch, self.lease.holder) != (epoch, holder):
            return False
        self.lease = self.lease._replace(epoch=to, renewals=0)
        return True

    def release(self, epoch: int, holder: str) -> None:
        self._note("release")
        if (self.lease.epoch, self.lease.holder) == (epoch, holder):
            self.lease = self.lease._replace(holder="")

    def replicas_behind(self) -> int:
        return 2

    def close(self) -> None:
        self.calls.append("close")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.away:
            raise StoreUnavailable("the database is away")


@dataclass
class SlowKeeper(FakeKeeper):
    """A lease in a database that answers a look only once it may."""

    asked: threading.Event = field(default_factory=threading.Event)
    answers: threading.Event = field(default_factory=threading.Event)

    def read(self) -> Lease:
        self.asked.set()
        assert self.answers.wait(WITHIN_S)
        return super().read()


@dataclass
class Host:
    """A clock of its own."""

    time_s: float = 0.0

    def now_s(self) -> float:
        return self.time_s


def server(keeper: FakeKeeper, url: str = "http://a") -> tuple[Leadership, Host]:
    host = Host()
    return Leadership(keeper, url, LEASE_S, host.now_s), host


def test_of_two_servers_the_second_stands_by_and_names_the_leader() -> None:
    keeper = FakeKeeper()
    (first, _), (second, _) = server(keeper), server(keeper, "http://b")
    first.step()
    second.step()
    assert (first.leads, first.epoch_to_decide()) == (True, 1)
    with pytest.raises(NotLeading, match="stands by and decides nothing; http://a leads"):
        second.epoch_to_decide()


def test_a_server_that_ends_while_the_database_is_slow_closes_its_connection_after_the_last_answer() -> None:
    keeper = SlowKeeper(HELD)
    keeper.answers.set()
    standby = Leadership(keeper, "http://b", 0.05)
    standby.start()
    keeper.answers.clear()
    keeper.asked.clear()
    assert keeper.asked.wait(WITHIN_S)
    standby.close()
    assert "close" not in keeper.calls
    keeper.answers.set()
    standby._thread.join(WITHIN_S)
    assert keeper.calls[-1] == "close"


def test_how_long_a_leader_has_been_seen_counts_from_when_it_and_its_epoch_were_first_read() -> None:
    keeper = FakeKeeper(Lease(3, 0, "http://a", 0))
    standby, host = server(keeper, "http://b")
    host.time_s = 10.0
    standby.step()
    host.time_s = 12.0
    keeper.renew(3, "http://a")
    standby.step()
    assert standby.seen_for_s() == 2.0
    keeper.lease = Lease(4, 0, "http://a", 0)
    standby.step()
    assert standby.seen_for_s() == 0.0


def test_a_leader_that_cannot_renew_decides_nothing_until_it_can() -> None:
    keeper = FakeKeeper()
    leader, host = server(keeper)
    leader.step()
    keeper.away = True
    host.time_s = LEASE_S
    leader.step()
    with pytest.raises(NotLeading, match="the database is away"):
        leader.epoch_to_decide()
    keeper.away = False
    leader.step()
    assert leader.epoch_to_decide() == 1


def test_a_leader_that_was_taken_over_decides_nothing_more_and_takes_nothing_back_unasked() -> None:
    keeper = FakeKeeper()
    leader, host = server(keeper)
    leader.step()
    keeper.lease = Lease(2, 0, "http://b", 0)
    leader.step()
    assert not leader.leads
    keeper.lease = Lease(2, 0, "", 0)
    leader.step()
    assert not leader.leads
    leader.stand_by()
    leader.step()
    assert (leader.epoch_to_decide(), leader.takeovers, host.time_s) == (3, 2, 0.0)


def test_an_epoch_that_was_raised_by_hand_is_led_under_a_higher_one() -> None:
    keeper = FakeKeeper()
    leader, host = server(keeper)
    leader.step()
    keeper.lease = keeper.lease._replace(epoch=1_001)
    leader.step()
    assert not leader.leads
    leader.stand_by()
    leader.step()
    host.time_s = LEASE_S
    leader.step()
    assert leader.epoch_to_decide() == 1_002


def test_a_leader_whose_event_loop_stands_still_renews_no_more() -> None:
    keeper = FakeKeeper()
    leader, host = server(keeper)
    leader.step()
    host.time_s = LEASE_S  # not serving yet: the start of a large site takes its time
    leader.step()
    leader.alive()
    assert leader.epoch_to_decide() == 1
    host.time_s = 2 * LEASE_S
    leader.step()
    assert keeper.lease.renewals == 1
    leader.alive()
    leader.step()
    assert leader.epoch_to_decide() == 1


def test_a_hand_over_decides_nothing_from_then_on_and_gives_the_lease_back() -> None:
    keeper = FakeKeeper()
    leader, _ = server(keeper)
    leader.step()
    leader.hand_over()
    assert leader.problem() != ""
    leader.step()
    assert keeper.lease == Lease(1, 0, "", 0)


def test_a_database_that_is_away_for_long_is_no_silence_of_the_leader() -> None:
    keeper = FakeKeeper()
    (leader, _), (standby, host) = server(keeper), server(keeper, "http://b")
    leader.step()
    standby.step()
    keeper.away = True
    standby.step()
    keeper.away = False
    host.time_s = 60.0
    standby.step()
    assert not standby.leads


def test_a_leader_rises_above_the_epoch_that_a_subscriber_has_seen() -> None:
    keeper = FakeKeeper(Lease(2, 0, "", 0))
    leader, host = server(keeper)
    leader.step()
    host.time_s = 1.0
    assert leader.rise_above(7) == 8
    assert (leader.epoch_to_decide(), leader.epoch, keeper.lease.epoch, leader.rises) == (8, 8, 8, 1)
    assert leader.left_s() == LEASE_S / 2  # it was a renewal, too
    leader.step()
    assert (leader.epoch_to_decide(), keeper.lease) == (8, Lease(8, 1, "http://a", 0))


@pytest.mark.parametrize("seen", [1, 3], ids=["lower", "its own"])
def test_a_leader_whose_epoch_is_as_high_does_not_rise(seen: int) -> None:
    keeper = FakeKeeper(Lease(2, 0, "", 0))
    leader, _ = server(keeper)
    leader.step()
    assert leader.rise_above(seen) is None
    assert (leader.epoch_to_decide(), leader.rises) == (3, 0)


def test_a_leader_does_not_rise_to_what_cannot_have_been_seen_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    leader, _ = server(FakeKeeper())
    leader.step()
    assert leader.rise_above(2 + RISE_MAX) is None
    assert leader.epoch_to_decide() == 1
    assert f"more than {RISE_MAX} above" in caplog.text


def test_a_leader_that_was_taken_over_raises_nothing() -> None:
    keeper = FakeKeeper()
    leader, _ = server(keeper)
    leader.step()
    keeper.lease = Lease(2, 5, "http://b", 0)
    assert leader.rise_above(9) is None
    assert (keeper.lease, leader.rises) == (Lease(2, 5, "http://b", 0), 0)


def test_a_leader_whose_database_failed_over_leads_on_under_the_epoch_that_has_risen() -> None:
    keeper = FakeKeeper()
    leader, host = server(keeper)
    leader.step()
    keeper.failed_over, host.time_s = True, 1.0
    leader.step()
    assert (leader.epoch_to_decide(), leader.epoch, leader.rises) == (2 + LEAP, 2 + LEAP, 1)
    assert leader.left_s() == LEASE_S / 2
    leader.step()
    assert (leader.epoch_to_decide(), keeper.lease) == (2 + LEAP, Lease(2 + LEAP, 1, "http://a", 0))


@pytest.mark.parametrize(
    ("policy", "async_ok", "noted"),
    [
        (PolicySettings(mode="act"), False, True),
        (PolicySettings(modes=[ModeRule(mode="act", jobs=["j"])]), False, True),
        (PolicySettings(mode="act"), True, False),
        (PolicySettings(mode="approve"), False, False),
    ],
    ids=["acts", "acts for a job", "it is meant", "does not act"],
)
def test_replicas_that_lag_behind_are_noted_where_it_is_acted(
    policy: PolicySettings, async_ok: bool, noted: bool
) -> None:
    leader, _ = server(FakeKeeper())
    leader.step()
    leader.step()
    note = replication_note(leader, policy, async_ok=async_ok)
    assert note.startswith("2 of the database's replicas may lack the last commits") is noted


def test_a_standby_raises_nothing() -> None:
    keeper = FakeKeeper(HELD)
    standby, _ = server(keeper, "http://b")
    standby.step()
    assert standby.rise_above(9) is None
    assert keeper.lease == HELD


def test_a_standby_waits_for_a_whole_lease_after_the_epoch_rose() -> None:
    keeper = FakeKeeper()
    (leader, _), (standby, host) = server(keeper), server(keeper, "http://b")
    leader.step()
    standby.step()
    host.time_s = LEASE_S - 0.1
    leader.rise_above(7)
    standby.step()
    host.time_s = 2 * LEASE_S - 0.2
    standby.step()
    assert not standby.leads
    host.time_s = 2 * LEASE_S
    standby.step()
    assert standby.epoch_to_decide() == 9


LONG_S = TERM_LEASES_MIN * LEASE_S


@pytest.mark.parametrize(
    ("wished", "heard", "led_s", "expected"),
    [
        (1, 0, LONG_S, True),
        (9, 4, LONG_S, True),
        (8, 4, LONG_S, False),  # not clearly more
        (4, 9, LONG_S, False),
        (0, 0, LONG_S, False),
        (9, 0, LONG_S - 0.1, False),  # not yet
    ],
)
def test_a_leader_gives_way_to_a_standby_that_clearly_more_nodes_reach_and_not_soon_after_it_began(
    wished: int, heard: int, led_s: float, expected: bool
) -> None:
    assert gives_way(wished, heard, led_s, LEASE_S) is expected


@given(nodes=st.integers(0, 20_000), others=st.integers(0, 20_000), led_s=st.floats(0.0, 1e6))
def test_of_two_servers_that_count_the_same_nodes_one_at_most_gives_way(nodes: int, others: int, led_s: float) -> None:
    assert not (gives_way(nodes, others, led_s, LEASE_S) and gives_way(others, nodes, led_s, LEASE_S))


@dataclass
class Divided:
    """A leader and a standby, of which each hears some of the nodes; the standby does not reach the leader."""

    heard: int
    in_vain: int
    keeper: FakeKeeper = field(default_factory=FakeKeeper)

    def __post_init__(self) -> None:
        (self.leader, self._leaders), (self.standby, self._standbys) = (
            server(self.keeper),
            server(self.keeper, "http://b"),
        )
        self.leader.step()
        self.leader.count_nodes(lambda: self.heard)
        self.standby.count_nodes(lambda: self.in_vain)

    def run(self, leases: float) -> None:
        """Let time pass, with five steps of each server in a lease."""
        for _ in range(round(5 * leases)):
            for host in (self._leaders, self._standbys):
                host.time_s += LEASE_S / 5
            self.leader.step()
            self.standby.step()


def test_a_leader_that_few_nodes_reach_steps_down_and_the_standby_leads_at_once() -> None:
    site = Divided(heard=1, in_vain=7)
    site.run(TERM_LEASES_MIN - 1)
    assert (site.leader.leads, site.standby.state()) == (
        True,
        "http://a leads (epoch 1); it is asked to step down: 7 of the nodes that ask here do not reach it",
    )
    site.run(2)
    assert (site.leader.leads, site.leader.step_downs, site.standby.epoch_to_decide()) == (False, 1, 2)
    assert site.standby.followed == "http://a: 7 of the nodes that asked http://b did not reach it"


def test_a_leader_that_most_nodes_reach_leads_on() -> None:
    site = Divided(heard=7, in_vain=7)
    site.run(2 * TERM_LEASES_MIN)
    assert (site.leader.leads, site.leader.step_downs) == (True, 0)


def test_a_wish_from_before_the_term_and_one_that_is_not_repeated_do_not_count() -> None:
    site = Divided(heard=0, in_vain=0)
    site.keeper.wished = Wish(5, 7, "http://c")
    site.run(2 * TERM_LEASES_MIN)
    assert site.leader.leads


def test_who_stepped_down_leaves_a_free_lease_to_others_for_a_while() -> None:
    site = Divided(heard=1, in_vain=7)
    site.standby.step()
    site.run(TERM_LEASES_MIN + 1)
    site.standby.hand_over()
    site.standby.step()
    site.leader.stand_by()
    site.leader.step()
    assert not site.leader.leads
    site.run(YIELD_LEASES)
    assert site.leader.epoch_to_decide() == 3


def test_what_a_server_heard_as_a_leader_is_no_wish_of_the_standby_that_it_becomes() -> None:
    site = Divided(heard=1, in_vain=7)
    site.run(TERM_LEASES_MIN + 1)
    site.heard = 50
    site.leader.stand_by()
    site.leader.step()
    assert site.leader.nodes_in_vain() == 0


def test_a_node_that_asked_in_vain_counts_once_and_for_as_long_as_one_that_was_heard() -> None:
    host = Host()
    nodes = UnreachedNodes(HEARD_LEASES * LEASE_S, host.now_s)
    for node in ("n1", "n2", "n1"):
        nodes.record_node(node)
    assert nodes.count() == 2
    host.time_s = 10.0
    nodes.record_node("n2")
    host.time_s = HEARD_LEASES * LEASE_S + 1.0
    assert nodes.count() == 1


EVENTS = st.sampled_from(
    [(what, who) for what in ("step", "step", "step", "rise", "rise", "hand over", "stand by") for who in (0, 1)]
    + [("pass", leases) for leases in (0.1, 0.4, 1.0, 1.0)]
    + [("away", 0), ("back", 0), ("back", 0), ("fail over", 0)]
)


@settings(max_examples=300)
@given(events=st.lists(EVENTS, min_size=20, max_size=60), clocks=st.tuples(OFFSETS, OFFSETS))
def test_whatever_is_seen_raised_and_lost_one_server_at_most_decides_and_under_the_epoch_that_is_kept(
    events: list[tuple[str, Any]], clocks: tuple[float, float]
) -> None:
    keeper, hosts = FakeKeeper(), [Host(clock) for clock in clocks]
    made = [Leadership(keeper, f"http://{number}", LEASE_S, host.now_s) for number, host in enumerate(hosts)]
    holders: dict[int, str] = {}
    for what, value in events:
        before = keeper.lease.epoch
        match what:
            case "step":
                made[value].step()
            case "rise":
                with contextlib.suppress(StoreUnavailable):
                    made[value].rise_above(before + 1)
            case "hand over":
                made[value].hand_over()
            case "stand by":
                made[value].stand_by()
            case "fail over":
                keeper.failed_over = True
            case "pass":
                for host in hosts:
                    host.time_s += value * LEASE_S
            case _:
                keeper.away = what == "away"
        assert keeper.lease.epoch >= before
        if keeper.lease.holder:
            assert holders.setdefault(keeper.lease.epoch, keeper.lease.holder) == keeper.lease.holder
        deciding = [(one.url, one.epoch_to_decide()) for one in made if not one.problem()]
        assert deciding in ([], [(keeper.lease.holder, keeper.lease.epoch)])
