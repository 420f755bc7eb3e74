from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.server.delivery.attempts import ACTION_PLACES, Message, Outcome, Receipt, WebhookSettings, after, again
from eagle_eye.server.delivery.events import ping
from eagle_eye.server.delivery.message_formats import AlertmanagerApi
from eagle_eye.server.delivery.outbox import AlertRefresh, Outbox, Senders
from eagle_eye.server.delivery.webhook import Targets
from eagle_eye.server.model.clock import Clock, SystemClock
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import Delivery, OutboundEvent, Retiring, Subscription, SubscriptionHealth
from eagle_eye.server.store.sql_store import SqlStore, open_file
from eagle_eye.server.store.store import DELIVERIES, SUBSCRIPTION_HEALTH, SUBSCRIPTIONS, Change, ChangeSignal
from eagle_eye.server.telemetry.counters import Telemetry
from tests.server.builders import NOW, FakeClock, action, event, incident, subscription

OK = Receipt(Outcome.DELIVERED, 200)
BUSY = Receipt(Outcome.RETRY, 503, "the target answered 503")


@dataclass
class FakeNotifier:
    """Answers from a script, by subscription; keeps what it was given."""

    answers: dict[str, list[Receipt]] = field(default_factory=dict)
    got: list[tuple[str, str, float]] = field(default_factory=list)
    posted: list[tuple[str, list[Any]]] = field(default_factory=list)
    before: Callable[[Subscription], Awaitable[None]] | None = None
    hangs: Callable[[str], bool] = lambda _: False  # by the event's id, or "refresh": unanswered until ``release``
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def deliver(
        self, subscription: Subscription, event: OutboundEvent, now_s: float, timeout_s: float
    ) -> Receipt:
        self.got.append((subscription.id, event.id, timeout_s))
        if self.before is not None:
            await self.before(subscription)
        if self.hangs(event.id):
            await self.release.wait()
        return self.answer(subscription)

    async def post(self, subscription: Subscription, message: Message, now_s: float, timeout_s: float) -> Receipt:
        if self.hangs("refresh"):
            await self.release.wait()
        self.posted.append((subscription.id, json.loads(message.body)))
        return self.answer(subscription)

    def answer(self, subscription: Subscription) -> Receipt:
        script = self.answers.get(subscription.id, [])
        return script.pop(0) if script else OK


@dataclass
class Bench:
    store: SqlStore
    clock: Any
    notifier: FakeNotifier
    outbox: Outbox
    refresh: AlertRefresh
    telemetry: Telemetry
    signal: ChangeSignal

    def serve(self, *names: str) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(self.outbox.serve(name) for name in names or ("sub-1",)))

        asyncio.run(all_of_them())

    def delivery(self, event_id: str = "evt-1", name: str = "sub-1") -> Delivery:
        found = self.store.page(DELIVERIES, {"event_id": event_id, "subscription_id": name}).items
        assert len(found) == 1
        return found[0]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    store = open_file(tmp_path / "r.db")
    settings = WebhookSettings(
        attempts_max=4, backoff_base_s=2.0, backoff_max_s=5.0, pending_max=5, disable_after_s=7_200.0
    )
    yield bench_of(store, settings, FakeClock())
    store.close()


def bench_of(
    store: SqlStore, settings: WebhookSettings, clock: Clock, rise_above: Callable[[int], int | None] = lambda _: None
) -> Bench:
    notifier, telemetry, signal = FakeNotifier(), Telemetry(), ChangeSignal()
    targets = Targets(settings, clock)
    form = AlertmanagerApi("http://eagle.example", "", settings.alert_refresh_s)
    refresh = AlertRefresh(store, notifier, form, targets, settings, clock, telemetry, jitter=lambda: 0.5)
    senders = Senders(notifier, targets, refresh, rise_above)
    outbox = Outbox(store, senders, settings, clock, telemetry, signal, 3600.0, jitter=lambda: 0.5)
    return Bench(store, clock, notifier, outbox, refresh, telemetry, signal)


def test_a_delivered_event_is_recorded_as_delivered(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(Change(events=(event(),)))
    bench.serve()
    assert bench.notifier.got == [("sub-1", "evt-1", 10.0)]
    delivery = bench.delivery()
    assert (delivery.state, delivery.attempts, delivery.last_status) == ("delivered", 1, 200)
    assert bench.telemetry.registry.get_sample_value("eagle_eye_webhook_deliveries_total", {"state": "delivered"}) == 1


def test_a_busy_target_is_tried_again_with_growing_delays_and_then_given_up(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(Change(events=(event(),)))
    bench.notifier.answers["sub-1"] = [BUSY] * 4
    delays = []
    for _ in range(3):
        bench.serve()
        delivery = bench.delivery()
        assert delivery.state == "pending"
        delays.append(delivery.due_s - bench.clock.now_s())
        bench.serve()  # not due: nothing happens
        bench.clock.time_s = delivery.due_s
    assert delays == [1.0, 2.0, 2.5]
    bench.serve()
    delivery = bench.delivery()
    assert (delivery.state, delivery.attempts) == ("failed", 4)
    assert delivery.last_error == "gave up after 4 attempts: the target answered 503"
    assert len(bench.notifier.got) == 4


def test_retry_after_is_waited_for(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(Change(events=(event(),)))
    bench.notifier.answers["sub-1"] = [BUSY._replace(retry_after_s=300.0)]
    bench.serve()
    assert bench.delivery().due_s == NOW + 300


def test_events_of_one_incident_keep_their_order_and_others_pass(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(
        Change(events=(event("a1"), event("a2"), event("b1", group="inc_2"), event("ping", group=""), event("a3")))
    )
    bench.notifier.answers["sub-1"] = [BUSY]
    bench.serve()
    assert bench.notifier.got[0][1] == "a1"
    assert {got[1] for got in bench.notifier.got} == {"a1", "b1", "ping"}
    bench.clock.advance(60)
    bench.serve()
    assert [got[1] for got in bench.notifier.got[-3:]] == ["a1", "a2", "a3"]


@pytest.mark.parametrize("to", [8, None], ids=["raised", "another leads"])
def test_a_refusal_for_a_lower_epoch_raises_it_and_the_delivery_is_repeated(tmp_path: Path, to: int | None) -> None:
    raised: list[int] = []

    def rise_above(seen: int) -> int | None:
        raised.append(seen)
        return to

    store = open_file(tmp_path / "r.db")
    bench = bench_of(store, WebhookSettings(), FakeClock(), rise_above)
    store.commit(Change(subscriptions=(subscription(),)))
    store.commit(Change(events=(event(),)))
    bench.notifier.answers["sub-1"] = [Receipt(Outcome.RETRY, 409, "the target has seen epoch 7", epoch_seen=7)]
    bench.serve()
    bench.clock.advance(1.0)
    bench.serve()
    assert (raised, bench.delivery().state) == ([7], "delivered")
    said = [(entry.verb, entry.subject, entry.detail) for entry in store.audit().items]
    assert said == ([("raise epoch", "sub-1", "to 8: the subscription had seen 7")] if to else [])
    store.close()


def test_a_final_failure_lets_the_incidents_next_event_go(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(Change(events=(event("a1"), event("a2"))))
    bench.notifier.answers["sub-1"] = [Receipt(Outcome.REJECTED, 404, "the target answered 404")]
    bench.serve()
    assert [bench.delivery(name).state for name in ("a1", "a2")] == ["failed", "delivered"]


def test_a_ping_goes_out_however_many_others_hang(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    others = tuple(event(f"a{number}", group=f"inc_{number}") for number in range(20))
    bench.store.commit(Change(events=(*others, ping(subscription(), "1", NOW))))

    async def until_it_is_out() -> None:
        out = asyncio.Event()

        def hangs(event_id: str) -> bool:
            if event_id == "ping-1":
                out.set()
            return event_id != "ping-1"

        bench.notifier.hangs = hangs
        serving = asyncio.create_task(bench.outbox.serve("sub-1"))
        await asyncio.wait_for(out.wait(), 10.0)
        bench.notifier.release.set()
        await serving

    asyncio.run(until_it_is_out())


def test_a_slow_target_delays_nobody_else(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription("slow"), subscription("fast"))))
    bench.store.commit(Change(events=(event("a1"), event("a2"))))

    async def both() -> None:
        release = asyncio.Event()

        async def before(target: Subscription) -> None:
            if target.id == "slow":
                await release.wait()

        bench.notifier.before = before
        slow = asyncio.create_task(bench.outbox.serve("slow"))
        await asyncio.wait_for(bench.outbox.serve("fast"), 5.0)
        assert [bench.delivery(name, "fast").state for name in ("a1", "a2")] == ["delivered", "delivered"]
        assert bench.delivery("a1", "slow").state == "pending"
        release.set()
        await asyncio.wait_for(slow, 5.0)

    asyncio.run(both())
    assert bench.delivery("a2", "slow").state == "delivered"


def test_gone_ends_the_subscription_and_what_waited_for_it(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(Change(events=(event("a1"), event("a2"))))
    bench.notifier.answers["sub-1"] = [Receipt(Outcome.GONE, 410, "the target answered 410 Gone")]
    bench.serve()
    ended = bench.store.get(SUBSCRIPTIONS, "sub-1")
    assert ended is not None
    assert (ended.active, ended.ended_reason) == (False, "the target answered 410 Gone")
    assert [bench.delivery(name).state for name in ("a1", "a2")] == ["failed", "failed"]
    bench.store.commit(Change(events=(event("a3"),)))
    assert bench.store.page(DELIVERIES, {"event_id": "a3"}).items == []


def test_nothing_is_delivered_after_its_expiry(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(Change(events=(event(expires_s=NOW + 30),)))
    bench.clock.advance(30)
    bench.serve()
    assert bench.notifier.got == []
    assert bench.delivery().state == "expired"


def test_an_attempt_ends_with_the_events_expiry(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(Change(events=(event(expires_s=NOW + 3),)))
    bench.serve()
    assert bench.notifier.got == [("sub-1", "evt-1", 3.0)]


def test_a_retry_that_would_come_too_late_is_voided_in_time_for_its_successors(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(Change(events=(event("a1", expires_s=NOW + 20), event("a2"))))
    bench.notifier.answers["sub-1"] = [BUSY._replace(retry_after_s=3600.0)]
    bench.serve()
    assert bench.delivery("a1").due_s == NOW + 20
    bench.clock.advance(20)
    bench.outbox.housekeeping()
    assert (bench.delivery("a1").state, bench.delivery("a1").reason) == ("expired", "expired")
    bench.clock.advance(3600)
    bench.serve()
    assert bench.delivery("a2").state == "delivered"


@pytest.mark.parametrize("state", ["withdrawn", "expired", "rejected", "done", "failed", "refused"])
def test_a_request_whose_action_is_over_is_not_delivered(bench: Bench, state: str) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),), actions=(action(state=state),)))
    bench.store.commit(Change(events=(event(type="eagle_eye.action.requested", subject="act_1"),)))
    bench.serve()
    assert bench.notifier.got == []
    assert (bench.delivery().state, bench.delivery().last_error) == ("expired", f"the action is {state}")


def test_a_backlog_is_bounded_and_loses_its_oldest(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(Change(events=tuple(event(f"e{number}") for number in range(8))))
    bench.outbox.housekeeping()
    states = [bench.delivery(f"e{number}").state for number in range(8)]
    assert states == ["failed"] * 3 + ["pending"] * 5
    assert "pending_max" in bench.delivery("e0").last_error


def test_redelivery_starts_over_unless_the_event_is_stale(bench: Bench) -> None:
    failed = Delivery(
        id="d", event_id="e", subscription_id="s", type="t", state="failed", attempts=4, due_s=NOW, last_error="x"
    )
    anew = again(failed, NOW + 5)
    assert (anew.state, anew.attempts, anew.due_s, anew.last_error) == ("pending", 0, NOW + 5, "")
    stale = Delivery(
        id="d", event_id="e", subscription_id="s", type="t", state="failed", attempts=4, due_s=NOW, expires_s=NOW
    )
    with pytest.raises(IllegalTransition, match="past its expiry"):
        again(stale, NOW)


def test_delays_stay_finite_after_many_attempts() -> None:
    settings = WebhookSettings(attempts_max=100_000)
    tired = Delivery(id="d", event_id="e", subscription_id="s", type="t", state="pending", attempts=5_000, due_s=NOW)
    assert after(tired, BUSY, NOW, settings, 1.0).due_s == NOW + settings.backoff_max_s


def test_the_running_outbox_delivers_what_is_committed_and_comes_back_for_retries(bench: Bench) -> None:
    bench = bench_of(bench.store, WebhookSettings(backoff_base_s=0.05), SystemClock())
    bench.notifier.answers["sub-1"] = [BUSY]

    async def story() -> None:
        bench.signal.attach()
        bench.store.listen(bench.signal.notify)
        task = asyncio.create_task(bench.outbox.run())
        bench.store.commit(Change(subscriptions=(subscription(),)))
        bench.store.commit(Change(events=(event(),)))
        for _ in range(200):
            await asyncio.sleep(0.02)
            if bench.delivery().state == "delivered":
                break
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(story())
    assert [got[1] for got in bench.notifier.got] == ["evt-1", "evt-1"]
    assert bench.delivery().attempts == 2


def test_a_target_that_asks_for_rest_gets_it_from_all_incidents_and_other_urls_do_not(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(), subscription("sub-2"))))
    bench.store.commit(Change(events=(event("a1"),)))
    bench.notifier.answers["sub-1"] = [BUSY._replace(retry_after_s=300.0)]
    bench.serve("sub-1", "sub-2")
    bench.store.commit(Change(events=(event("b1", group="inc_2"),)))
    bench.serve("sub-1", "sub-2")
    assert [got[:2] for got in bench.notifier.got if got[0] == "sub-1"] == [("sub-1", "a1")]
    assert bench.delivery("b1", "sub-2").state == "delivered"
    bench.clock.advance(300)
    bench.serve("sub-1")
    assert {bench.delivery(name).state for name in ("a1", "b1")} == {"delivered"}


def test_health_tells_since_when_nothing_arrives_and_forgets_it_when_something_does(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(Change(events=(event("a1"), event("b1", group="inc_2"))))
    bench.notifier.answers["sub-1"] = [BUSY, BUSY]
    bench.serve()
    sick = bench.store.get(SUBSCRIPTION_HEALTH, "sub-1")
    assert sick is not None
    assert (sick.failures, sick.failing_since_s, sick.delivered_s) == (2, NOW, None)
    assert (sick.last_status, sick.last_error) == (503, "the target answered 503")
    bench.clock.advance(60)
    bench.serve()
    well = bench.store.get(SUBSCRIPTION_HEALTH, "sub-1")
    assert well is not None
    assert (well.failures, well.failing_since_s, well.delivered_s, well.last_error) == (0, None, NOW + 60, "")


def test_a_subscription_of_which_nothing_arrives_for_long_ends(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.notifier.answers["sub-1"] = [Receipt(Outcome.REJECTED, 404, "the target answered 404")] * 3

    def fail(name: str) -> Subscription:
        bench.store.commit(Change(events=(event(name, group=name, time_s=bench.clock.now_s()),)))
        bench.serve()
        assert (bench.delivery(name).state, bench.delivery(name).reason) == ("failed", "rejected")
        found = bench.store.get(SUBSCRIPTIONS, "sub-1")
        assert found is not None
        return found

    assert fail("e1").active
    bench.clock.advance(7_199)
    bench.outbox.housekeeping()
    assert fail("e2").active
    bench.clock.advance(1)
    ended = fail("e3")
    assert not ended.active
    assert "webhooks.disable_after_s" in ended.ended_reason
    assert [entry.verb for entry in bench.store.audit().items] == ["unsubscribe"]


def test_replaced_secrets_end_in_time_and_for_good(bench: Bench) -> None:
    old = Retiring("whsec_" + "B" * 43 + "=", NOW + 100)
    legacy = subscription("sub-2", secrets=["whsec_" + "C" * 43 + "=", "whsec_" + "D" * 43 + "="])
    bench.store.commit(Change(subscriptions=(subscription(retiring=[old]), legacy)))
    bench.outbox.housekeeping()

    def kept(name: str) -> tuple[int, list[float]]:
        found = bench.store.get(SUBSCRIPTIONS, name)
        assert found is not None
        return len(found.secrets), [retiring.until_s for retiring in found.retiring]

    assert kept("sub-1") == (1, [NOW + 100])
    assert kept("sub-2") == (1, [NOW + 86_400])
    bench.clock.advance(100)
    bench.outbox.housekeeping()
    assert kept("sub-1") == (1, [])
    bench.clock.advance(86_400)
    bench.outbox.housekeeping()
    assert kept("sub-2") == (1, [])


def test_an_alert_of_an_incident_that_is_over_is_not_raised_by_a_late_delivery(bench: Bench) -> None:
    bench.store.commit(
        Change(subscriptions=(subscription(format="alertmanager_api"),), incidents=(incident(ended_s=NOW + 1),))
    )
    bench.store.commit(Change(events=(event("a1"), event("a2", type="eagle_eye.incident.resolved"))))
    bench.serve()
    assert bench.delivery("a1").state == "expired"
    assert [got[1] for got in bench.notifier.got] == ["a2"]


def refreshing(bench: Bench, **more: Any) -> None:
    bench.store.commit(Change(subscriptions=(subscription(format="alertmanager_api", **more),)))
    bench.refresh.know(bench.outbox.housekeeping())


def reported(bench: Bench) -> list[list[str]]:
    return [[alert["labels"]["incident_id"] for alert in alerts] for _, alerts in bench.notifier.posted]


def test_an_alertmanager_is_told_again_what_fires_and_of_nothing_that_is_over(bench: Bench) -> None:
    refreshing(bench)
    bench.store.commit(Change(incidents=(incident(), incident("inc_2", ended_s=NOW, state="recovered"))))
    bench.serve()
    bench.serve()
    assert reported(bench) == [["inc_1"]]
    assert bench.notifier.posted[0][1][0]["endsAt"] == "2023-11-14T22:17:20.000Z"  # in four refreshes
    bench.clock.advance(60)
    bench.serve()
    assert reported(bench) == [["inc_1"]] * 2
    bench.store.commit(Change(incidents=(incident(ended_s=NOW + 61, state="closed"),)))
    bench.clock.advance(60)
    bench.serve()
    assert reported(bench) == [["inc_1"]] * 2 + [[]]  # whether it is there is known before something is to be told


def test_many_alerts_are_told_in_requests_of_a_hundred(bench: Bench) -> None:
    refreshing(bench)
    bench.store.commit(Change(incidents=tuple(incident(f"inc_{number}") for number in range(201))))
    bench.serve()
    assert [len(names) for names in reported(bench)] == [100, 100, 1]


def test_a_refresh_obeys_filters_and_what_was_told_before(bench: Bench) -> None:
    refreshing(bench, matchers=["severity=critical"])
    bench.store.commit(Change(incidents=(incident(), incident("inc_2", action="notify"))))
    bench.serve()
    assert reported(bench) == [["inc_1"]]
    bench.store.commit(Change(events=(event(data={"fault": "hang", "action": "exclude_node"}),)))
    bench.store.commit(Change(incidents=(incident(action="notify"),)))
    bench.clock.advance(60)
    bench.serve()
    assert reported(bench) == [["inc_1"]] * 2


def test_an_end_is_never_undone_by_a_refresh_that_was_under_way(bench: Bench) -> None:
    refreshing(bench)
    bench.store.commit(Change(incidents=(incident(),)))

    async def story() -> None:
        release, begun = asyncio.Event(), asyncio.Event()
        order: list[str] = []
        post, deliver = bench.notifier.post, bench.notifier.deliver

        async def slow_post(*args: Any) -> Receipt:
            begun.set()
            await release.wait()
            order.append("refresh")
            return await post(*args)

        async def noted(*args: Any) -> Receipt:
            order.append("resolved")
            return await deliver(*args)

        bench.notifier.post = slow_post  # type: ignore[assignment, method-assign]
        bench.notifier.deliver = noted  # type: ignore[assignment, method-assign]
        bench.signal.attach()
        bench.store.listen(bench.signal.notify)
        task = asyncio.create_task(bench.outbox.run())
        await asyncio.wait_for(begun.wait(), 5.0)
        resolved = event("a2", type="eagle_eye.incident.resolved")
        await asyncio.to_thread(bench.store.commit, Change(incidents=(incident(ended_s=NOW),), events=(resolved,)))
        release.set()
        for _ in range(200):
            await asyncio.sleep(0.01)
            if "resolved" in order:
                break
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert order == ["refresh", "resolved"]

    asyncio.run(story())


async def until(claim: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if claim():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it never came true")


def beside(bench: Bench, hangs: Callable[[str], bool], claim: Callable[[], bool]) -> None:
    """Serve while the answers to some requests hang; return once the claim holds, and all has been let go."""

    async def story() -> None:
        bench.notifier.hangs = hangs
        serving = asyncio.create_task(bench.outbox.serve("sub-1"))
        await until(claim)
        bench.notifier.release.set()
        await asyncio.wait_for(serving, 10.0)

    asyncio.run(story())


def arrived(bench: Bench, *event_ids: str) -> bool:
    return all(bench.delivery(event_id).state == "delivered" for event_id in event_ids)


def test_an_answer_that_hangs_holds_up_its_own_incident_and_no_other(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    others = [event(f"{name}{number}", group=name) for name in "bcdef" for number in range(3)]
    bench.store.commit(Change(events=(event("a1"), event("a2"), *others)))
    beside(bench, lambda id_: id_ == "a1", lambda: arrived(bench, *(one.id for one in others)))
    got = [id_ for _, id_, _ in bench.notifier.got]
    assert got.index("a1") < len(got) - 1 == got.index("a2")
    assert arrived(bench, "a1", "a2")


def test_incidents_that_hang_leave_places_to_an_incident_that_an_action_is_asked_for(bench: Bench) -> None:
    bench = bench_of(bench.store, WebhookSettings(concurrency_per_subscription=2), FakeClock())
    bench.store.commit(Change(subscriptions=(subscription(),)))
    many = [event(f"hangs{number}", group=f"inc_h{number}") for number in range(20)]
    bench.store.commit(Change(events=(*many, event("opened", group="inc_a"), event("plain", group="inc_b"))))
    asked = event("asked", type="eagle_eye.action.requested", subject="act_1", group="inc_a")
    bench.store.commit(Change(events=(asked,)))
    beside(bench, lambda id_: id_.startswith("hangs"), lambda: arrived(bench, "opened", "asked"))
    before = [id_ for _, id_, _ in bench.notifier.got][:4]
    assert before.index("opened") < before.index("asked")
    assert sum(id_.startswith("hangs") for id_ in before) == 2


def test_actions_that_hang_leave_places_to_what_is_not_urgent(bench: Bench) -> None:
    bench = bench_of(bench.store, WebhookSettings(concurrency_per_subscription=2), FakeClock())
    bench.store.commit(Change(subscriptions=(subscription(),)))
    asked = [event(f"asked{n}", type="eagle_eye.action.requested", group=f"inc_{n}") for n in range(4)]
    bench.store.commit(Change(events=(*asked, *(event(f"e{n}", group=f"g{n}") for n in range(9)))))
    beside(bench, lambda id_: id_.startswith("asked"), lambda: arrived(bench, *(f"e{n}" for n in range(9))))


def test_a_retry_that_comes_due_beside_an_answer_that_hangs_is_made_then(bench: Bench) -> None:
    bench = bench_of(bench.store, WebhookSettings(backoff_base_s=0.05), SystemClock())
    bench.notifier.answers["sub-1"] = [BUSY]

    async def story() -> None:
        bench.signal.attach()
        bench.store.listen(bench.signal.notify)
        task = asyncio.create_task(bench.outbox.run())
        bench.notifier.hangs = lambda id_: id_ == "hangs"
        bench.store.commit(Change(subscriptions=(subscription(),)))
        bench.store.commit(Change(events=(event("hangs"), event("busy", group="inc_2"))))
        await until(lambda: arrived(bench, "busy"))
        assert bench.delivery("hangs").state == "pending"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(story())
    assert [id_ for _, id_, _ in bench.notifier.got].count("busy") == 2


def test_an_error_that_nobody_foresaw_is_its_subscriptions_and_pauses_no_other(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription("odd"), subscription())))
    bench.store.commit(Change(events=(event(),)))

    async def fail(target: Subscription) -> None:
        if target.id == "odd":
            raise OverflowError("port must be 0-65535")

    bench.notifier.before = fail
    bench.serve("odd")
    bench.serve("sub-1")
    assert (bench.delivery(name="odd").state, bench.delivery(name="odd").last_error) == ("pending", "OverflowError")
    assert bench.delivery().state == "delivered"
    assert bench.telemetry.registry.get_sample_value("eagle_eye_internal_errors_total", {"place": "outbox"}) == 1


_STEPS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["opened", "action"]), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=24,
)


@settings(max_examples=15, deadline=None)
@given(steps=_STEPS, usual=st.integers(1, 3))
def test_whatever_fails_and_lingers_each_incident_is_told_in_order_one_at_a_time(
    steps: list[tuple[str, str, int, bool]], usual: int
) -> None:
    """Each step is an event of an incident: what kind, how often it fails first, whether its answer lingers."""
    events = [
        event(f"{number}", group=group, type=f"eagle_eye.{'incident.opened' if kind == 'opened' else 'action.expired'}")
        for number, (group, kind, _, _) in enumerate(steps)
    ]
    with TemporaryDirectory() as folder:
        store = open_file(Path(folder) / "r.db")
        webhooks = WebhookSettings(concurrency_per_subscription=usual, attempts_max=9)
        bench = bench_of(store, webhooks, FakeClock())
        store.commit(Change(subscriptions=(subscription(),)))
        store.commit(Change(events=tuple(events)))
        left = {str(number): failures for number, (_, _, failures, _) in enumerate(steps)}
        under_way: list[str] = []
        arrived_in: dict[str, list[int]] = {}

        async def deliver(_target: Subscription, what: OutboundEvent, _now_s: float, _timeout_s: float) -> Receipt:
            under_way.append(what.group)
            assert under_way.count(what.group) == 1, "two events of one incident are under way"
            assert len(under_way) <= usual + ACTION_PLACES
            for _ in range(7 if steps[int(what.id)][3] else 0):
                await asyncio.sleep(0)
            under_way.remove(what.group)
            left[what.id] -= 1
            if left[what.id] >= 0:
                return BUSY
            arrived_in.setdefault(what.group, []).append(int(what.id))
            return OK

        bench.notifier.deliver = deliver  # type: ignore[assignment, method-assign]
        for _ in range(200):
            bench.serve()
            if not store.backlog():
                break
            bench.clock.advance(300.0)
        store.close()
    for group in {step[0] for step in steps}:
        assert arrived_in[group] == [number for number, step in enumerate(steps) if step[0] == group]


def health(bench: Bench) -> SubscriptionHealth:
    found = bench.store.get(SUBSCRIPTION_HEALTH, "sub-1")
    assert found is not None
    return found


def test_an_alertmanager_that_is_down_shows_within_one_refresh_and_when_it_is_back(bench: Bench) -> None:
    refreshing(bench)
    bench.store.commit(Change(incidents=(incident(),)))
    bench.serve()
    assert (health(bench).delivered_s, health(bench).failures, health(bench).last_status) == (NOW, 0, 200)
    bench.notifier.answers["sub-1"] = [Receipt(Outcome.RETRY, error="ConnectError")] * 2
    bench.clock.advance(60)
    bench.serve()
    down = health(bench)
    assert (down.failures, down.failing_since_s, down.last_status) == (1, NOW + 60, None)
    assert (down.last_error, down.delivered_s) == ("ConnectError", NOW)
    assert bench.refresh.waits_s() == {"sub-1": 1.0}  # the backoff's base, halved by the jitter
    bench.clock.advance(1)
    bench.serve()
    assert (health(bench).failures, bench.refresh.waits_s()) == (2, {"sub-1": 2.0})
    bench.clock.advance(2)
    bench.serve()
    back = health(bench)
    assert (back.failures, back.failing_since_s, back.last_error, back.last_status) == (0, None, "", 200)
    assert (back.delivered_s, bench.refresh.waits_s()) == (NOW + 63, {"sub-1": 60.0})


def test_an_alertmanager_with_nothing_to_hear_is_known_to_be_down_all_the_same(bench: Bench) -> None:
    refreshing(bench)
    bench.notifier.answers["sub-1"] = [BUSY]
    bench.serve()
    assert (reported(bench), health(bench).failures) == ([[]], 1)


def test_a_refresh_that_fails_waits_no_longer_than_one_that_succeeds(bench: Bench) -> None:
    refreshing(bench)
    bench.notifier.answers["sub-1"] = [BUSY] * 30
    waited = []
    for _ in range(30):
        bench.serve()
        waited.append(bench.refresh.waits_s()["sub-1"])
        bench.clock.advance(waited[-1])
    assert waited[:4] == [1.0, 2.0, 4.0, 8.0]
    assert set(waited[5:]) == {30.0}


def test_an_alertmanager_that_is_gone_for_good_ends_its_subscription(bench: Bench) -> None:
    refreshing(bench)
    bench.notifier.answers["sub-1"] = [Receipt(Outcome.GONE, 410, "the target answered 410 Gone")]
    bench.serve()
    ended = bench.store.get(SUBSCRIPTIONS, "sub-1")
    assert ended is not None
    assert (ended.active, ended.ended_reason) == (False, "the target answered 410 Gone")


def test_a_refresh_that_hangs_holds_up_the_incidents_that_it_tells_of_and_no_new_one(bench: Bench) -> None:
    refreshing(bench)
    bench.store.commit(Change(incidents=(incident(),)))
    bench.store.commit(Change(events=(event("a2", type="eagle_eye.incident.resolved"), event("b1", group="inc_2"))))
    beside(bench, lambda id_: id_ == "refresh", lambda: arrived(bench, "b1"))
    assert [id_ for _, id_, _ in bench.notifier.got] == ["b1", "a2"]


def test_a_refresh_leaves_out_an_incident_that_is_being_reported(bench: Bench) -> None:
    refreshing(bench)
    bench.serve()
    bench.store.commit(Change(incidents=(incident(),), events=(event("a1"),)))

    async def story() -> None:
        bench.notifier.hangs = lambda id_: id_ == "a1"
        serving = asyncio.create_task(bench.outbox.serve("sub-1"))
        await until(lambda: bool(bench.notifier.got))
        bench.clock.advance(60)
        bench.store.commit(Change(incidents=(incident("inc_2"),)))
        bench.outbox.wake("sub-1")
        await until(lambda: len(bench.notifier.posted) == 2)
        bench.notifier.release.set()
        await asyncio.wait_for(serving, 10.0)

    asyncio.run(story())
    assert reported(bench) == [[], ["inc_2"]]
