"""What a person says to an action in a real browser: taken back, asked for again, and whom it goes to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from eagle_eye.server.engine.policy import weigh
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import SubscriptionHealth
from eagle_eye.server.store.store import ACTIONS, Change
from tests.page.site import LaggingClock
from tests.server.builders import Running, action, incident, running, subscription
from tests.server.engine import situations

if TYPE_CHECKING:
    from playwright.sync_api import Page

APPROVE = PolicySettings(mode="approve")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, LaggingClock()) as server:
        server.watcher.policies = [APPROVE]
        yield server


def opened(page: Page, site: Running, state: str) -> None:
    """Open the page of an incident whose action is in this state."""
    now_s = site.dispatcher.services.clock.now_s()
    found = incident(state="confirmed" if state == "expired" else "acting", kinds=["standstill", "rank_silence"])
    asked = action(state=state, created_s=now_s - 700, expires_s=now_s + 600)
    seen = situations.situation(settings=APPROVE, actions=[asked], now_s=now_s)
    site.watcher.weighing = weigh(found, seen)
    site.dispatcher.services.store.commit(Change(incidents=(found,), actions=(asked,)))
    page.goto(f"{site.url}#/incidents/{found.id}")


def states(site: Running) -> list[str]:
    return [one.state for one in site.dispatcher.services.store.all(ACTIONS)]


def test_an_approval_that_nobody_took_up_is_taken_back_by_click(site: Running, page: Page) -> None:
    opened(page, site, "requested")
    page.get_by_role("button", name="Withdraw").click()
    dialog = page.get_by_role("dialog")
    assert "approval is asked for anew" in dialog.inner_text()
    dialog.get_by_role("button", name="Withdraw").click()
    page.get_by_text("Withdrawn: exclude node n1 and restart the job without it. withdrawn by local.").wait_for()
    assert states(site) == ["withdrawn"]
    page.goto("about:blank")


def test_what_policy_does_by_itself_is_not_taken_back(site: Running, page: Page) -> None:
    site.watcher.policies = [PolicySettings(mode="act")]
    opened(page, site, "requested")
    page.get_by_role("button", name="Resolve").wait_for()
    assert page.get_by_role("button", name="Withdraw").count() == 0
    page.goto("about:blank")


def test_what_expired_is_asked_for_again_by_click(site: Running, page: Page) -> None:
    opened(page, site, "expired")
    page.get_by_role("button", name="Ask again").click()
    page.get_by_role("button", name="Approve").wait_for()
    assert sorted(states(site)) == ["awaiting", "expired"]
    page.goto("about:blank")


def test_whoever_carries_it_out_is_named_with_what_is_wrong_there(site: Running, page: Page) -> None:
    now_s = site.dispatcher.services.clock.now_s()
    health = SubscriptionHealth(subscription_id="sub-1", failures=3, failing_since_s=now_s - 60, last_error="HTTP 500")
    site.dispatcher.services.store.commit(Change(subscriptions=(subscription(),), subscription_health=(health,)))
    opened(page, site, "awaiting")
    page.get_by_role("button", name="Approve").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("sub-1 (https://example.com/hook), failing since").wait_for()
    assert "HTTP 500" in dialog.inner_text()
    assert "nobody will" not in dialog.inner_text()
    page.goto("about:blank")


def test_an_incidents_times_have_date_and_zone(site: Running, page: Page) -> None:
    opened(page, site, "requested")
    head = page.locator(".incident-line")
    head.wait_for()
    assert re.search(r"Began \w{3} \d+, (\d{4}, )?\d\d:\d\d:\d\d \S+ \(", head.inner_text())
    assert page.locator("footer").inner_text().startswith("Times are in ")
    page.goto("about:blank")


def test_what_nobody_will_do_is_not_called_under_way(site: Running, page: Page) -> None:
    opened(page, site, "requested")
    page.get_by_text("Nobody will carry it out: no subscription takes this action.").wait_for()
    assert page.locator(".incident-head").get_by_text("action requested").count() == 1
    page.goto("about:blank")


def test_approval_is_not_recommended_while_policy_is_blind(site: Running, page: Page) -> None:
    site.dispatcher.services.store.commit(Change(subscriptions=(subscription(),)))
    opened(page, site, "awaiting")
    approve = page.locator(".outcome-verbs").get_by_role("button", name="Approve")
    approve.wait_for()
    assert approve.get_attribute("class") == "primary"
    blind = situations.situation(settings=APPROVE, blind="no frame arrives", now_s=situations.NOW_S)
    site.watcher.weighing = weigh(incident(), blind)
    page.reload()
    page.get_by_text("Policy would hold it now").wait_for()
    assert approve.get_attribute("class") != "primary"
    page.goto("about:blank")
