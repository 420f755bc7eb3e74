"""A job's page in a real browser: its course with what happened on it, who took part, where its time went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from eagle_eye.server.model.records import Attempt, AttemptMembers, Job
from eagle_eye.server.store.store import Change
from tests.page.site import LaggingClock, replayed, until
from tests.server.builders import UNREAD_LOG, Running, incident, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NODES = 12_500


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Running]:
    assert browser.is_connected()  # first: while one starts, what was replayed grows old
    with replayed(tmp_path_factory.mktemp("hung"), "hang", nodes=4, gpus=2, minutes=4.0, seed=5) as server:
        # What the accounts write at their next look, in ten seconds.
        services = server.dispatcher.services
        services.bookkeeper.write_changes(services.outlook.courses(), services.clock.now_s())
        yield server


def opened(page: Page, server: Running) -> str:
    (found,) = server.dispatcher.services.store.open_incidents()
    page.goto(f"{server.url}#/jobs/{found.job}")
    page.locator(".lanes canvas").wait_for()
    until(page, "document.querySelectorAll('.view-job figure.chart .chart-more .said').length === 4")
    return found.job


def test_the_course_is_drawn_with_the_incident_on_it(hung: Running, page: Page) -> None:
    opened(page, hung)
    captions = page.locator(".view-job figure.chart figcaption").all_inner_texts()
    assert captions[:3] == ["Step time", "Throughput, all ranks, tokens/s", "Loss"]
    for at in range(3):
        chart = page.locator(".view-job figure.chart").nth(at)
        assert chart.locator("canvas").count() == 1
        assert "hang" in chart.locator(".chart-legend").inner_text()


def test_the_open_incident_leads_to_its_page(hung: Running, page: Page) -> None:
    opened(page, hung)
    page.locator("a.open-incident").click()
    page.get_by_role("heading", level=1, name="Hang on").wait_for()


def test_each_node_has_a_lane(hung: Running, page: Page) -> None:
    opened(page, hung)
    said = page.locator("#timeline .said").inner_text()
    assert said.startswith("1 attempt, ")
    assert "on 4 nodes." in said
    assert page.locator("#timeline tbody tr").count() == 1


def test_axe_finds_nothing(hung: Running, new_page: Callable[..., Page], axe: Callable[[Page], list[str]]) -> None:
    for options in ({"color_scheme": "dark"}, {"viewport": {"width": 400, "height": 800}}):
        page = new_page(**options)
        opened(page, hung)
        assert axe(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_of_12500_nodes_the_lanes_stay_few_and_the_accused_has_one(
    tmp_path_factory: pytest.TempPathFactory, page: Page
) -> None:
    clock = LaggingClock()
    now_s = clock.now_s()
    nodes = [f"n{at}" for at in range(NODES)]
    with running(tmp_path_factory.mktemp("large"), clock) as server:
        attempt = Attempt(id="att", run="att", job="large", attempt=0, started_s=now_s - 600, seen_s=now_s, nodes=NODES)
        bad = incident(job="large", node="n777", nodes=["n777"], onset_s=now_s - 60, detected_s=now_s - 50)
        job = Job(job="large", attempt=0, state="running", ranks=[], restart_owner="", updated_s=now_s)
        members = AttemptMembers(id="att", job="large", started_s=now_s - 600, nodes=nodes)
        server.dispatcher.services.store.commit(
            Change(attempts=(attempt,), memberships=(members,), incidents=(bad,), jobs=(job,))
        )
        page.goto(f"{server.url}#/jobs/large")
        page.locator(".lanes canvas").wait_for()
        said = page.locator("#timeline .said").inner_text()
        assert said == "1 attempt, none of them over, on 12,500 nodes. Incidents concern n777."
        assert page.locator(".lanes canvas").bounding_box()["height"] < 256 * 18 + 60


def test_the_newest_checkpoint_in_memory_is_said_in_words(tmp_path_factory: pytest.TempPathFactory, page: Page) -> None:
    with running(tmp_path_factory.mktemp("kept")) as server:
        server.client.put("/api/v1/jobs/job", json={"attempt": 0, "state": "running"})
        page.goto(f"{server.url}#/jobs/job")
        fact = page.locator(".facts > div", has_text="Memory checkpoint")
        fact.wait_for()
        assert fact.locator("dd").inner_text() == "step 6, 1 step ago, 2 of 4 copies; step 5 on storage"
        page.goto("about:blank")  # it asks again and again, and the server ends


def test_a_log_that_is_not_understood_is_said(tmp_path_factory: pytest.TempPathFactory, page: Page) -> None:
    with running(tmp_path_factory.mktemp("unread")) as server:
        server.client.put("/api/v1/jobs/job", json={"attempt": 0, "state": "running"})
        page.goto(f"{server.url}#/jobs/job")
        fact = page.locator(".facts > div", has_text="Its log")
        fact.wait_for()
        assert fact.locator("dd").inner_text() == UNREAD_LOG
        page.goto("about:blank")  # it asks again and again, and the server ends
