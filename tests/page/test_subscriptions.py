"""Subscriptions and deliveries, and the ledger, in a real browser: what fails is seen, and put right by click."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from eagle_eye.server.model.records import Delivery, SubscriptionHealth
from eagle_eye.server.store.store import Change
from tests.page.site import LaggingClock
from tests.server.builders import Running, action, event, incident, running, subscription

if TYPE_CHECKING:
    from playwright.sync_api import Page

URL = "https://pager.example.com/hook"


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    clock = LaggingClock()
    with running(tmp_path_factory.mktemp("site"), clock) as server:
        now_s = clock.now_s()
        store = server.dispatcher.services.store
        # Before anybody subscribed: nothing is on its way to hosts that are not there.
        store.commit(Change(events=(event("evt-1", time_s=now_s - 60.0),)))
        store.commit(Change(subscriptions=(subscription("sub-1", URL), subscription("sub-2", "https://a.example.com"))))
        failed = Delivery(
            id="dlv-1",
            event_id="evt-1",
            subscription_id="sub-1",
            type="eagle_eye.incident.opened",
            state="failed",
            attempts=4,
            due_s=now_s,
            last_status=500,
            last_error="gave up after 4 attempts: HTTP 500",
            created_s=now_s - 60.0,
        )
        health = SubscriptionHealth(
            subscription_id="sub-1", failures=4, failing_since_s=now_s - 90.0, last_status=500, last_error="HTTP 500"
        )
        store.commit(Change(deliveries=(failed,), subscription_health=(health,)))
        yield server


def test_what_fails_comes_first_and_a_secret_is_rotated_by_click(
    site: Running, page: Page, axe: Callable[[Page], list[str]]
) -> None:
    page.goto(f"{site.url}/#/subscriptions")
    first = page.get_by_role("region", name="Where events go").get_by_role("listitem").first
    first.get_by_text("failing", exact=True).wait_for()
    assert URL in first.inner_text()
    assert "4 attempts: HTTP 500" in first.inner_text()
    first.get_by_role("button", name="Rotate secret").click()
    page.get_by_role("dialog").get_by_role("button", name="Rotate secret").click()
    shown = first.get_by_label("new secret", exact=True)
    shown.wait_for()
    assert shown.inner_text().startswith("whsec_")
    (kept,) = [one for one in site.client.get("/api/v1/subscriptions").json()["items"] if one["id"] == "sub-1"]
    assert kept["secrets"] == 2
    assert axe(page) == []


def test_a_delivery_that_failed_is_delivered_again_by_click(site: Running, page: Page) -> None:
    page.goto(f"{site.url}/#/subscriptions")
    row = page.get_by_role("region", name="Deliveries", exact=True).get_by_role("row").filter(has_text="HTTP 500")
    row.get_by_role("button", name="Redeliver").click()
    page.get_by_role("status").get_by_text("It is delivered again.").wait_for()
    (entry,) = site.client.get("/api/v1/audit", params={"verb": "redeliver"}).json()["items"]
    assert entry["subject"] == "dlv-1"


def test_the_ledger_says_how_often_it_would_have_been_right(site: Running, page: Page) -> None:
    now_s = site.dispatcher.services.clock.now_s()
    claim = action(state="would_act", created_s=now_s - 600.0, onset_s=now_s - 700.0, detected_s=now_s - 600.0)
    reported = incident(state="false", onset_s=now_s - 700.0, detected_s=now_s - 600.0)
    site.dispatcher.services.store.commit(Change(actions=(claim,), incidents=(reported,)))
    page.goto(f"{site.url}/#/ledger")
    page.get_by_text("0 of 1 right in hindsight: 0% (95% interval 0% to 79%).").wait_for()
    page.get_by_role("region", name="Claims", exact=True).get_by_text("wrong", exact=True).last.wait_for()
