"""The page on a phone, 390 px wide: nothing is cut, tables are cards, and what convinces is in view."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from eagle_eye.schema.action import EvidenceItem
from eagle_eye.server.model.records import Job
from eagle_eye.server.store.store import Change
from tests.page.site import LaggingClock, fleet_of, until
from tests.server.builders import Running, action, incident, running

if TYPE_CHECKING:
    from playwright.sync_api import Page

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
ADDRESSES = (
    "",
    "incidents",
    "incidents/inc_1",
    "jobs",
    "jobs/llm-000",
    "nodes",
    "nodes/gpu000-03",
    "ledger",
    "trust",
    "subscriptions",
)

NOTHING_SCROLLS = "[...document.querySelectorAll('main .scroll')].every((one) => one.scrollWidth <= one.clientWidth)"
TITLES = """[...document.querySelectorAll('#evidence tbody tr:first-child td')].map(
  (one) => getComputedStyle(one, '::before').content)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    clock = LaggingClock()
    now_s = clock.now_s()
    with running(tmp_path_factory.mktemp("phone"), clock) as server:
        fleet_of(server, 40, 20)
        clocked = EvidenceItem("gpu_sm_clock_hertz", "gpu000-03", 3, 1.2e9, 1.7e9, 1.6e9, "hertz")
        bits = EvidenceItem("gpu_throttle_reasons", "gpu000-03", 3, float(0x40), None, float(0x60), "bitmask")
        found = incident(
            job="llm-000", node="gpu000-03", nodes=["gpu000-03"], device=3, state="acting", evidence=[clocked, bits],
            onset_s=now_s - 60, detected_s=now_s - 50,
        )  # fmt: skip
        waiting = action(state="awaiting", job="llm-000", exclude=["gpu000-03"], created_s=now_s, expires_s=now_s + 600)
        job = Job(job="llm-000", attempt=0, state="running", ranks=[], restart_owner="", updated_s=now_s)
        server.dispatcher.services.store.commit(Change(incidents=(found,), actions=(waiting,), jobs=(job,)))
        yield server


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_view_is_wider_than_the_screen_and_axe_finds_nothing(
    address: str, site: Running, new_page: Callable[..., Page], axe: Callable[[Page], list[str]]
) -> None:
    page = new_page(**PHONE)
    page.goto(f"{site.url}#/{address}")
    page.get_by_text("live", exact=True).wait_for()
    until(page, "document.querySelector('main [aria-busy]') === null")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(NOTHING_SCROLLS)
    assert axe(page) == []


def test_every_view_can_be_reached_without_scrolling_the_navigation(
    site: Running, new_page: Callable[..., Page]
) -> None:
    page = new_page(**PHONE)
    page.goto(site.url)
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_role("button", name="Views: Fleet").click()
    links = page.get_by_role("navigation", name="Views").get_by_role("link")
    assert links.count() == 7
    for number in range(7):
        box = links.nth(number).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_value_peers_and_threshold_of_the_evidence_are_in_view_with_their_names(
    site: Running, new_page: Callable[..., Page]
) -> None:
    page = new_page(**PHONE)
    page.goto(f"{site.url}#/incidents/inc_1")
    row = page.locator("#evidence tbody tr").first
    row.wait_for()
    assert row.inner_text().splitlines() == ["SM clock", "gpu000-03 device 3", "1.2 GHz", "1.7 GHz", "1.6 GHz"]
    for cell in row.locator("td").all():
        box = cell.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 390
    assert page.evaluate(TITLES) == ["none", '"on"', '"value"', '"peers\' median"', '"threshold"']
    assert "hardware thermal slowdown" in page.locator("#evidence tbody tr").nth(1).inner_text()


def test_cards_are_sorted_by_a_list(site: Running, new_page: Callable[..., Page]) -> None:
    page = new_page(**PHONE)
    page.goto(f"{site.url}#/nodes")
    page.get_by_label("Sort Nodes by").select_option("Node")
    page.get_by_role("button", name="Ascending").click()
    page.get_by_role("button", name="Descending").wait_for()
    until(page, "document.querySelector('tbody tr')?.innerText.startsWith('gpu000-39')")
