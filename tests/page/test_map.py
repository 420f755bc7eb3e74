"""The node map in a real browser: a fleet of the planned size, drawn at once; by keyboard, and as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from eagle_eye.server.store.store import Change
from tests.page.site import LaggingClock, fleet_of, until
from tests.server.builders import Running, incident, running

if TYPE_CHECKING:
    from playwright.sync_api import Page

NODES = 12_500
DRAWN_MS = 1_000  # from the page's load until the map is drawn
TRIES = 5  # a neighbour on the machine may take some of them
DRAWN = "performance.getEntriesByName('eagle-eye-map-drawn').length > 0"
TOOK = """() => performance.getEntriesByName('eagle-eye-map-drawn')[0].startTime
                - performance.getEntriesByType('navigation')[0].loadEventEnd"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    clock = LaggingClock()
    with running(tmp_path_factory.mktemp("fleet"), clock) as server:
        fleet_of(server, NODES)
        since_s = clock.now_s() - 60.0
        bad = incident(job="llm-070", node="gpu090-17", nodes=["gpu090-17"], onset_s=since_s, detected_s=since_s)
        server.dispatcher.services.store.commit(Change(incidents=(bad,)))
        yield server


def test_12500_nodes_are_drawn_within_a_second_of_the_pages_load(fleet: Running, new_page: Callable[..., Page]) -> None:
    took: list[float] = []
    while len(took) < TRIES and not any(one < DRAWN_MS for one in took):
        page = new_page()
        page.goto(fleet.url)
        until(page, DRAWN)
        took.append(page.evaluate(TOOK))
    assert min(took) < DRAWN_MS, took


def test_a_reader_without_a_mouse_or_without_eyes_finds_the_accused_node(fleet: Running, page: Page) -> None:
    page.goto(fleet.url)
    page.get_by_role("button", name="1 accused").wait_for()
    canvas = page.get_by_role("application")
    # The job with the accused node comes first.
    canvas.focus()
    canvas.press("Home")
    said = page.locator("#map-said")
    assert "job llm-070" in said.inner_text()
    canvas.press("ArrowRight")
    canvas.press("Enter")
    page.wait_for_url("**/#/nodes/gpu089-61")
    page.go_back()
    page.get_by_role("button", name="1 accused").click()
    page.get_by_text("The same as a table").click()
    rows = page.get_by_role("region", name="1 nodes (table)").get_by_role("row")
    assert rows.nth(1).inner_text().split() == ["gpu090-17", "✕", "accused", "llm-070"]
