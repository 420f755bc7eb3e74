"""The lists of incidents, jobs and nodes in a real browser: of the planned size, filtered, sorted, and addressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from eagle_eye.server.model.records import Job, Node
from eagle_eye.server.store.store import Change
from tests.page.site import LaggingClock, fleet_of
from tests.server.builders import Running, incident, running

if TYPE_CHECKING:
    from playwright.sync_api import Page

NODES, INCIDENTS, JOBS = 12_500, 10_000, 250
FAULTS = ("hang", "gpu_lost", "straggler")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    clock = LaggingClock()
    now_s = clock.now_s()
    with running(tmp_path_factory.mktemp("site"), clock) as server:
        fleet_of(server, NODES)
        reported = [
            incident(
                f"inc_{at}", fault=FAULTS[at % 3], state="closed", job=f"team/run-{at % 9}", detected_s=now_s - age
            )
            for at in range(INCIDENTS)
            for age in (600.0 * (INCIDENTS - at),)
        ]
        jobs = [
            Job(
                job=f"team/run-{at}",
                attempt=0,
                state="failed",
                ranks=[],
                restart_owner="",
                updated_s=now_s,
                owner="ada",
            )
            for at in range(JOBS)
        ]
        out = Node(node="gpu101-07", state="excluded", reason="<i>fan</i>", updated_s=now_s)
        for first in range(0, INCIDENTS, 1000):
            server.dispatcher.services.store.commit(Change(incidents=tuple(reported[first : first + 1000])))
        server.dispatcher.services.store.commit(Change(jobs=tuple(jobs), nodes=(out,)))
        yield server


def cells(page: Page, label: str, column: int) -> list[str]:
    """Return the texts of one column, counted from 1."""
    table = page.get_by_role("region", name=f"{label} (table)")
    found: list[str] = table.locator(f"tbody td:nth-child({column})").all_inner_texts()
    return found


def test_of_12500_nodes_one_is_found_by_a_part_of_its_name_and_the_address_says_so(site: Running, page: Page) -> None:
    page.goto(f"{site.url}/#/nodes")
    page.get_by_text("12,500 nodes").wait_for()
    first = page.get_by_role("region", name="Nodes (table)").get_by_role("row").nth(1).inner_text()
    assert first.split()[:3] == ["gpu101-07", "✕", "excluded"]
    assert "<i>fan</i>" in first
    page.get_by_label("Name").fill("GPU101-0")
    page.get_by_text("10 nodes of 12,500").wait_for()
    assert page.url.endswith("#/nodes?search=GPU101-0")
    page.reload()
    page.get_by_text("10 nodes of 12,500").wait_for()
    page.get_by_label("Standing").select_option("excluded")
    page.get_by_text("1 node of 12,500").wait_for()
    assert cells(page, "Nodes", 1) == ["gpu101-07"]


def test_nodes_are_sorted_and_paged_by_keyboard_and_the_address_keeps_both(site: Running, page: Page) -> None:
    page.goto(f"{site.url}/#/nodes")
    page.get_by_role("button", name="Node", exact=True).focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="gpu124-99").wait_for()
    page.get_by_role("link", name="Next").focus()
    page.keyboard.press("Enter")
    page.get_by_text("101 to 200 of 12,500").wait_for()
    assert cells(page, "Nodes", 1)[0] == "gpu123-99"
    assert page.url.endswith("#/nodes?sort=-Node&page=2")
    page.go_back()
    page.get_by_text("1 to 100 of 12,500").wait_for()


def test_of_10000_incidents_those_of_a_fault_a_job_and_a_time_are_shown_page_by_page(site: Running, page: Page) -> None:
    page.goto(f"{site.url}/#/incidents?fault=hang&since=30d")
    page.get_by_role("link", name="Older").wait_for()
    assert set(cells(page, "Incidents", 2)) == {"hang"}
    newest = page.get_by_role("row").nth(1).inner_text()
    page.get_by_role("link", name="Older").click()
    page.get_by_role("link", name="Newest").wait_for()
    assert page.get_by_role("row").nth(1).inner_text() != newest
    page.get_by_label("Job").fill("team/run-3")
    page.get_by_label("Job").press("Enter")
    page.get_by_role("link", name="Newest").wait_for(state="detached")
    # Until the answer comes, the rows are those before.
    page.get_by_role("row").nth(1).get_by_text("team/run-3").wait_for()
    assert {one.split()[0] for one in cells(page, "Incidents", 4)} == {"team/run-3"}
    page.get_by_label("State").select_option("live")
    page.get_by_text("No incident matches.").wait_for()
    page.get_by_role("link", name="Clear").click()
    page.get_by_role("link", name="straggler").first.wait_for()


def test_a_job_is_found_by_a_part_of_its_name_and_opened_though_that_has_a_slash(site: Running, page: Page) -> None:
    page.goto(f"{site.url}/#/jobs?state=failed")
    page.get_by_label("Name").fill("RUN-24")
    page.get_by_label("Name").press("Enter")
    page.get_by_role("link", name="team/run-249").click()
    page.get_by_role("heading", name="Job team/run-249").wait_for()
    page.get_by_text("ada", exact=True).wait_for()
    assert page.locator("main .trouble").count() == 0


def test_axe_finds_nothing_and_nothing_is_cut_off(
    site: Running, new_page: Callable[..., Page], axe: Callable[[Page], list[str]]
) -> None:
    for options in ({"color_scheme": "dark"}, {"viewport": {"width": 400, "height": 800}}):
        page = new_page(**options)
        for view in ("incidents", "jobs", "nodes"):
            page.goto(f"{site.url}/#/{view}")
            page.get_by_role("table").wait_for()
            assert axe(page) == []
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
