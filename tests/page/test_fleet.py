"""The fleet in a real browser: what is wrong, what it costs, and an action approved; with a replayed fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from eagle_eye.server.store.store import Change
from tests.page.conftest import Complaints
from tests.page.site import LaggingClock, fleet_of, replayed
from tests.server.builders import Running, incident, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Running]:
    """A server that has just watched a GPU throttle, and asks a person before it acts."""
    assert browser.is_connected()  # first: while one starts, what was replayed grows old
    folder = tmp_path_factory.mktemp("site")
    with replayed(folder, "thermal_throttle", strength="strong", policy__mode="approve") as server:
        yield server


@pytest.fixture
def culprit(site: Running) -> str:
    (found,) = site.client.get("/api/v1/incidents", params={"fault": "thermal_throttle"}).json()["items"]
    node = found["node"]
    assert isinstance(node, str)
    return node


def test_the_fleet_says_who_is_to_blame_what_it_costs_and_what_is_asked_for(
    site: Running, page: Page, culprit: str
) -> None:
    page.goto(site.url)
    incidents = page.get_by_role("region", name="Incidents")
    incidents.get_by_role("link", name=culprit).first.wait_for()
    said = incidents.inner_text()
    assert "thermal throttle" in said
    assert f"Exclude {culprit} ! awaiting approval".replace(" ", "") in said.replace("\n", "").replace(" ", "")
    jobs = page.get_by_role("region", name="Running jobs", exact=True).first
    row = jobs.get_by_role("row").nth(1)
    row.get_by_text("each hour").wait_for()
    assert "6 nodes" in row.inner_text()


def test_an_action_is_approved_by_click(site: Running, page: Page, culprit: str) -> None:
    page.goto(site.url)
    page.get_by_role("button", name="Approve").click()
    dialog = page.get_by_role("dialog")
    assert f"Exclude node {culprit} and restart" in dialog.inner_text()
    dialog.get_by_role("button", name="Approve").click()
    page.get_by_role("status").get_by_text("Approved").wait_for()
    page.get_by_role("region", name="Incidents").get_by_text("requested", exact=True).wait_for()
    (asked,) = site.client.get("/api/v1/actions", params={"kind": "exclude_node"}).json()["items"]
    assert asked["state"] == "requested"


def test_what_comes_to_light_is_shown_at_once_and_as_text(site: Running, page: Page) -> None:
    page.goto(site.url)
    page.get_by_text("live", exact=True).wait_for()
    now_s = site.dispatcher.services.clock.now_s()
    name = "<script>alert(1)</script>"
    reported = incident(
        "inc_x", node=name, nodes=[name], summary=f"<img src=x onerror=alert(2)> {name}", detected_s=now_s
    )
    site.dispatcher.services.store.commit(Change(incidents=(reported,)))
    page.get_by_role("link", name=name).wait_for()
    assert "<img src=x onerror=alert(2)>" in page.get_by_role("region", name="Incidents").inner_text()
    assert page.locator("main script, main img").count() == 0
    site.dispatcher.services.store.commit(
        Change(incidents=(incident("inc_x", node=name, nodes=[name], state="closed"),))
    )
    page.get_by_role("link", name=name).wait_for(state="detached")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_fleet_is_accessible(
    site: Running, new_page: Callable[..., Page], axe: Callable[[Page], list[str]], scheme: str
) -> None:
    page = new_page(color_scheme=scheme)
    page.goto(site.url)
    page.get_by_role("application").wait_for()
    page.get_by_text("The same as a table").click()
    assert axe(page) == []


def test_on_a_narrow_screen_nothing_is_cut_off(site: Running, new_page: Callable[..., Page]) -> None:
    page = new_page(viewport={"width": 400, "height": 800})
    for view in ("", "ledger", "subscriptions"):
        page.goto(f"{site.url}/#/{view}")
        page.get_by_role("heading", level=1).wait_for()
        page.get_by_text("live", exact=True).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_job_of_which_no_node_is_heard_loses_what_is_not_known(tmp_path: Path, page: Page) -> None:
    with running(tmp_path, LaggingClock()) as server:
        fleet_of(server, 40, 20)
        first, second = server.watcher.course
        server.watcher.course = [first, second._replace(heard=0)]
        page.goto(server.url)
        page.get_by_text("unknown for 1 job").wait_for()
        page.goto("about:blank")


def test_nodes_of_no_known_job_are_not_said_to_be_judged(tmp_path: Path, page: Page) -> None:
    with running(tmp_path, LaggingClock()) as server:
        fleet_of(server, 4)
        server.watcher.course = []
        page.goto(server.url)
        page.locator(".health .badge").get_by_text("judging a part").wait_for()
        page.goto("about:blank")


def test_a_server_that_went_away_is_no_empty_fleet(tmp_path: Path, page: Page, complaints: Complaints) -> None:
    complaints.allowed += ["net::ERR", "Failed to fetch"]
    with running(tmp_path, LaggingClock()) as server:
        page.goto(server.url + "#/nodes")
        page.get_by_text("No agent has sent anything yet.").wait_for()
    page.get_by_text("Not known: the server does not answer.").wait_for()
