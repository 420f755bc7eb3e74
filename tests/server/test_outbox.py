from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from eagle_eye.server.changes import Signal
from eagle_eye.server.config import WebhookSettings
from eagle_eye.server.errors import IllegalTransition
from eagle_eye.server.notifiers.receipts import Outcome, Receipt
from eagle_eye.server.outbox import Outbox, after, again
from eagle_eye.server.records import Delivery, OutboundEvent, Subscription
from eagle_eye.server.sqlite_store import SqliteStore
from eagle_eye.server.store import DELIVERIES, SUBSCRIPTIONS, Change
from eagle_eye.server.telemetry import Telemetry
from tests.server.builders import NOW, FakeClock, action, event, subscription

OK = Receipt(Outcome.DELIVERED, 200)
BUSY = Receipt(Outcome.RETRY, 503, "the target answered 503")


@dataclass
class FakeNotifier:
    """Answers from a script, by subscription; keeps what it was given."""

    answers: dict[str, list[Receipt]] = field(default_factory=dict)
    got: list[tuple[str, str, float]] = field(default_factory=list)
    before: Callable[[Subscription], Awaitable[None]] | None = None

    async def deliver(
        self, subscription: Subscription, event: OutboundEvent, now_s: float, timeout_s: float
    ) -> Receipt:
        self.got.append((subscription.id, event.id, timeout_s))
        if self.before is not None:
            await self.before(subscription)
        script = self.answers.get(subscription.id, [])
        return script.pop(0) if script else OK


@dataclass
class Bench:
    store: SqliteStore
    clock: FakeClock
    notifier: FakeNotifier
    outbox: Outbox
    telemetry: Telemetry

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
    store, clock, notifier, telemetry = SqliteStore(tmp_path / "r.db"), FakeClock(), FakeNotifier(), Telemetry()
    settings = WebhookSettings(attempts_max=4, backoff_base_s=2.0, backoff_max_s=5.0, pending_max=5)
    outbox = Outbox(store, notifier, settings, clock, telemetry, Signal(), 3600.0, jitter=lambda: 0.5)
    yield Bench(store, clock, notifier, outbox, telemetry)
    store.close()


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


def test_a_final_failure_lets_the_incidents_next_event_go(bench: Bench) -> None:
    bench.store.commit(Change(subscriptions=(subscription(),)))
    bench.store.commit(Change(events=(event("a1"), event("a2"))))
    bench.notifier.answers["sub-1"] = [Receipt(Outcome.REJECTED, 404, "the target answered 404")]
    bench.serve()
    assert [bench.delivery(name).state for name in ("a1", "a2")] == ["failed", "delivered"]


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
    assert bench.delivery("a1").state == "expired"
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
    bench.notifier.answers["sub-1"] = [BUSY]

    async def story() -> None:
        signal = Signal()
        signal.attach()
        bench.store.listen(signal.notify)
        settings = WebhookSettings(backoff_base_s=0.05)
        from eagle_eye.server.clock import SystemClock

        outbox = Outbox(bench.store, bench.notifier, settings, SystemClock(), bench.telemetry, signal, 3e9)
        task = asyncio.create_task(outbox.run())
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
