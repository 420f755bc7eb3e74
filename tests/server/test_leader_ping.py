"""A server that begins to lead tells subscribers so before it judges, and waits for none of them for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagle_eye.server.delivery import outbox
from eagle_eye.server.delivery.outbox import REFUSED_FOR_EPOCH, LeaderPing
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import Delivery, DeliveryState
from eagle_eye.server.store.sql_store import SqlStore, open_file
from eagle_eye.server.store.store import DELIVERIES, Change, ChangeSignal
from eagle_eye.server.telemetry.counters import Telemetry
from tests.server.builders import NOW, FakeClock, running, subscription
from tests.server.own_process import wait_until

LEASE_S = 5.0


@dataclass
class Site:
    """A leader and its subscribers, of which each in ``fates`` answers after a second; a failure stays pending.

    Those in ``ahead`` refuse the first ping, since they have seen a higher epoch.
    """

    store: SqlStore
    fates: dict[str, DeliveryState] = field(default_factory=dict)
    ahead: set[str] = field(default_factory=set)
    clock: FakeClock = field(default_factory=FakeClock)
    telemetry: Telemetry = field(default_factory=Telemetry)

    def __post_init__(self) -> None:
        self.ping = LeaderPing(self.store, ChangeSignal(), self.clock, self.telemetry, LEASE_S, self._wait)

    async def _wait(self, _: asyncio.Event, left_s: float) -> bool:
        due = [one for one in self.deliveries() if not one.attempts or one.last_status == REFUSED_FOR_EPOCH]
        tried = [one for one in due if one.subscription_id in self.fates]
        self.clock.advance(1.0 if tried else left_s)
        self.store.commit(Change(deliveries=tuple(self._answered(one) for one in tried)))
        return bool(tried)

    def _answered(self, delivery: Delivery) -> Delivery:
        name = delivery.subscription_id
        if name in self.ahead:
            self.ahead.remove(name)
            return replace(delivery, attempts=1, last_status=REFUSED_FOR_EPOCH)
        return replace(delivery, state=self.fates[name], attempts=delivery.attempts + 1, last_status=200)

    def lead(self) -> float:
        """Begin to lead; return how long nothing was judged."""
        began_s = self.clock.now_s()
        asyncio.run(self.ping.sent())
        return self.clock.now_s() - began_s

    def deliveries(self) -> list[Delivery]:
        return self.store.page(DELIVERIES, {}, limit=100).items

    def counted(self, outcome: str) -> float | None:
        return self.telemetry.registry.get_sample_value("eagle_eye_leader_pings_total", {"outcome": outcome})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    store = open_file(tmp_path / "r.db")
    yield Site(store)
    store.close()


def test_each_subscription_whose_events_have_an_epoch_gets_one_ping(site: Site) -> None:
    others = subscription("paused", active=False), subscription("alerts", format="alertmanager_api")
    site.store.commit(Change(subscriptions=(subscription("a", types=["eagle_eye.heartbeat"]), *others)))
    site.lead()
    assert [(one.subscription_id, one.type) for one in site.deliveries()] == [("a", "eagle_eye.ping")]


def test_it_is_judged_once_all_have_answered(site: Site) -> None:
    site.store.commit(Change(subscriptions=(subscription("a"), subscription("b"))))
    site.fates = {"a": "delivered", "b": "delivered"}
    assert site.lead() == 1.0
    assert site.counted("answered") == 2.0


def test_who_does_not_answer_holds_judging_up_for_half_a_lease_and_is_counted_and_named(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.store.commit(Change(subscriptions=(subscription("mute"), subscription("b"))))
    site.fates = {"b": "delivered"}
    assert site.lead() == LEASE_S / 2
    assert (site.counted("answered"), site.counted("no_answer")) == (1.0, 1.0)
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert vars(said)["subscriptions"] == "mute"


def test_who_cannot_be_reached_is_not_waited_for(site: Site) -> None:
    site.store.commit(Change(subscriptions=(subscription("down"), subscription("gone"))))
    site.fates = {"down": "pending", "gone": "failed"}
    assert site.lead() == 1.0
    assert site.counted("failed") == 2.0


def test_a_ping_that_is_refused_for_its_epoch_is_repeated_before_it_is_judged(site: Site) -> None:
    site.store.commit(Change(subscriptions=(subscription("a"),)))
    site.fates, site.ahead = {"a": "delivered"}, {"a"}
    assert site.lead() == 2.0
    assert site.counted("answered") == 1.0


def test_without_subscriptions_it_is_judged_at_once(site: Site) -> None:
    assert site.lead() == 0.0


def test_a_part_that_starts_again_pings_nobody_again(site: Site) -> None:
    site.store.commit(Change(subscriptions=(subscription("a"),)))
    site.lead()
    assert site.lead() == 0.0
    assert len(site.deliveries()) == 1


def test_pings_wait_for_records_that_cannot_be_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.store.commit(Change(subscriptions=(subscription("a"),)))
    commit, tries = site.store.commit, iter([StoreUnavailable("the database is away")])

    def away_at_first(change: Change) -> None:
        for error in tries:
            raise error
        commit(change)

    monkeypatch.setattr(site.store, "commit", away_at_first)
    monkeypatch.setattr(outbox, "RECORDS_PAUSE_S", 0.0)
    site.lead()
    assert len(site.deliveries()) == 1


def test_a_server_alone_pings_nobody_when_it_starts(tmp_path: Path) -> None:
    store = open_file(tmp_path / "records.db")
    store.commit(Change(subscriptions=(subscription(created_s=NOW),)))
    store.close()
    with running(tmp_path, judging=True) as server:
        wait_until(lambda: server.client.get("/readyz").json()["checks"]["detection"] == "ok")
        assert server.client.get("/api/v1/deliveries").json()["items"] == []
