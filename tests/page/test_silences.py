"""Silences in a real browser: made where the trouble is shown, seen wherever it is shown, ended by click."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.model.records import Node
from eagle_eye.server.store.store import Change
from tests.page.site import LaggingClock
from tests.server.builders import Running, incident, running, silence

if TYPE_CHECKING:
    from playwright.sync_api import Page

REASON = "its fan is being replaced"


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    clock = LaggingClock()
    with running(tmp_path_factory.mktemp("site"), clock) as server:
        now_s = clock.now_s()
        at: dict[str, Any] = {"onset_s": now_s - 90.0, "detected_s": now_s - 60.0, "updated_s": now_s}
        others = incident("inc_2", nodes=["n2"], node="n2", **at)
        node = Node(node="n1", state="in_service", reason="", updated_s=now_s)
        server.dispatcher.services.store.commit(Change(incidents=(incident(**at), others), nodes=(node,)))
        yield server


def silenced(site: Running, **more: Any) -> None:
    """Have somebody silence what the fields say, for an hour."""
    now_s = site.dispatcher.services.clock.now_s()
    made = silence(created_s=now_s, until_s=now_s + 3_600.0, reason=REASON, **more)
    site.dispatcher.services.store.commit(Change(silences=(made,)))


def test_an_incident_is_silenced_by_click_with_a_reason(
    site: Running, page: Page, axe: Callable[[Page], list[str]]
) -> None:
    page.goto(f"{site.url}/#/incidents/inc_1")
    page.get_by_role("button", name="Silence news").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("Actions go on").wait_for()
    assert "[[policy.maintenance]]" in dialog.inner_text()
    assert dialog.get_by_role("button", name="Silence news").is_disabled()
    assert axe(page) == []
    dialog.get_by_role("combobox").nth(1).select_option("1 day")
    dialog.get_by_label("Reason").fill(REASON)
    dialog.get_by_role("button", name="Silence news").click()
    page.get_by_text(f"{REASON}. Actions go on.").wait_for()
    (made,) = site.client.get("/api/v1/silences").json()["items"]
    assert (made["faults"], made["nodes"], made["jobs"], made["reason"]) == (["hang"], ["n1"], [], REASON)
    assert round(unix_seconds(made["until"]) - unix_seconds(made["created"])) == 86_400
    assert page.get_by_role("button", name="Silence news").count() == 0


def test_more_than_the_one_fault_may_be_silenced(site: Running, page: Page) -> None:
    page.goto(f"{site.url}/#/incidents/inc_1")
    page.get_by_role("button", name="Silence news").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("News of").select_option("job job, whatever the fault")
    dialog.get_by_label("Reason").fill(REASON)
    dialog.get_by_role("button", name="Silence news").click()
    page.get_by_text(f"{REASON}. Actions go on.").wait_for()
    (made,) = site.client.get("/api/v1/silences").json()["items"]
    assert (made["faults"], made["nodes"], made["jobs"]) == ([], [], ["job"])


def test_where_policy_asks_first_the_dialog_says_that_this_is_silenced_too(
    tmp_path_factory: pytest.TempPathFactory, page: Page
) -> None:
    with running(tmp_path_factory.mktemp("asking"), LaggingClock()) as server:
        policy = server.watcher.policy()
        server.watcher.use_policy(type(policy)(mode="approve"))
        server.dispatcher.services.store.commit(Change(incidents=(incident(),)))
        page.goto(f"{server.url}/#/incidents/inc_1")
        page.get_by_role("button", name="Silence news").click()
        page.get_by_role("dialog").get_by_text("that an action awaits approval is news, too").wait_for()


@pytest.mark.parametrize("view", ["#/", "#/incidents"])
def test_a_silenced_incident_is_marked_wherever_it_is_listed_and_others_are_not(
    site: Running, page: Page, view: str
) -> None:
    silenced(site)
    page.goto(f"{site.url}/{view}")
    page.get_by_text("silenced", exact=True).wait_for()
    assert page.get_by_text("silenced", exact=True).count() == 1
    row = page.locator("li.incident, tbody tr").filter(has_text="silenced")
    assert "n1" in row.inner_text()


def test_a_node_shows_the_silence_that_names_it_and_ends_it(site: Running, page: Page) -> None:
    silenced(site)
    page.goto(f"{site.url}/#/nodes/n1")
    page.get_by_text("News of node n1 is silenced by alice until").wait_for()
    page.get_by_role("button", name="End silence").click()
    page.get_by_role("button", name="End silence").wait_for(state="detached")
    (ended,) = site.client.get("/api/v1/silences").json()["items"]
    assert (ended["state"], ended["ended_by"]) == ("ended", "local")


def test_all_silences_are_listed_with_what_they_silence_now(
    site: Running, page: Page, axe: Callable[[Page], list[str]]
) -> None:
    silenced(site, nodes=[], faults=["hang"])
    page.goto(f"{site.url}/#/subscriptions")
    row = page.get_by_role("region", name="Silences in force").get_by_role("row").nth(1)
    row.get_by_role("link", name="inc_1").wait_for()
    assert row.get_by_role("link").count() == 2
    assert REASON in row.inner_text()
    assert axe(page) == []
    row.get_by_role("button", name="End silence").click()
    page.get_by_text("1 ended").wait_for()
