"""An incident's page in a real browser, after a simulated fault: what is drawn, what a click does, what cannot harm."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from eagle_eye.schema.action import EvidenceItem
from eagle_eye.server.model.records import EvidenceRequest, Incident
from eagle_eye.server.store.store import Change
from tests.page.conftest import Complaints
from tests.page.site import replayed, until
from tests.server.builders import Running, action, incident

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCRIPT = "<script>window.harmed = true</script><img src=x onerror='window.harmed = true'>"


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Running]:
    assert browser.is_connected()  # first: while one starts, what was replayed grows old
    with replayed(
        tmp_path_factory.mktemp("hung"), "hang", nodes=4, gpus=2, minutes=4.0, seed=5, policy__mode="approve"
    ) as server:
        yield server


def accused(server: Running) -> Incident:
    (found,) = server.dispatcher.services.store.open_incidents()
    return found


def opened(page: Page, server: Running, id_: str) -> None:
    page.goto(f"{server.url}#/incidents/{id_}")
    page.get_by_role("heading", name="Evidence", exact=True).wait_for()
    page.locator(".view-incident figure.chart").first.wait_for()
    until(page, "document.querySelectorAll('.view-incident [aria-busy]').length === 0")


def test_who_is_to_blame_why_and_what_awaits_approval_are_seen_at_once(hung: Running, page: Page) -> None:
    found = accused(hung)
    opened(page, hung, found.id)
    assert page.get_by_role("heading", level=1).inner_text() == f"Hang on {found.node}"
    assert page.locator(".incident-summary").inner_text() == found.summary
    page.get_by_text(f"Awaiting approval: exclude node {found.node} and restart the job without it.").wait_for()
    # Within the first screen, without scrolling.
    assert page.get_by_role("button", name="Approve").bounding_box()["y"] < 400


def test_the_evidence_is_drawn_and_told_in_words_and_numbers(hung: Running, page: Page) -> None:
    found = accused(hung)
    opened(page, hung, found.id)
    charts = page.locator(".view-incident figure.chart")
    assert charts.count() >= 2
    for number in range(charts.count()):  # each is drawn once its history has come
        charts.nth(number).locator("canvas").wait_for()
    captions = charts.locator("figcaption").all_inner_texts()
    assert captions[0] == "Last finished step"
    assert not charts.first.locator(".said p").is_visible()
    for number in range(charts.count()):
        charts.nth(number).get_by_text("In words").click()
    said = " ".join(charts.locator(".said").all_inner_texts())
    assert f"At the verdict {found.node}" in said
    assert "of the same attempt" in said
    charts.first.get_by_text("Numbers").click()
    charts.first.locator("tbody tr").nth(10).wait_for()


def test_all_charts_show_one_range_around_the_incident_and_zoom_together(hung: Running, page: Page) -> None:
    found = accused(hung)
    opened(page, hung, found.id)
    until(page, "document.querySelectorAll('.view-incident .u-over').length >= 2")
    assert page.get_by_label("Time range", exact=True).input_value() == ""
    first, second = (page.locator(".view-incident .u-over").nth(number) for number in range(2))
    box = first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 20, steps=4)
    pictures: list[str] = []
    page.on("request", lambda request: pictures.append(request.url) if "/picture?" in request.url else None)
    page.mouse.up()
    until(page, "location.hash.includes('since=') && location.hash.includes('until=')")
    charts = page.locator(".view-incident figure.chart").count()
    until(page, "document.querySelectorAll('.view-incident [aria-busy]').length === 0")
    page.wait_for_timeout(300)
    assert len({re.sub(r".*(start=.*)", r"\1", url) for url in pictures}) == 1
    assert len(pictures) == charts
    second.dblclick()
    until(page, "!location.hash.includes('since=')")


def test_axe_finds_nothing_in_either_theme_or_on_a_phone(
    hung: Running, new_page: Callable[..., Page], axe: Callable[[Page], list[str]]
) -> None:
    for options in (
        {"color_scheme": "light"},
        {"color_scheme": "dark", "viewport": {"width": 400, "height": 800}},
    ):
        page = new_page(**options)
        opened(page, hung, accused(hung).id)
        assert axe(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_incident_that_nobody_knows_is_reported_and_breaks_nothing(
    hung: Running, page: Page, complaints: Complaints
) -> None:
    complaints.allowed.append("404")
    page.goto(f"{hung.url}#/incidents/inc_9")
    page.get_by_role("alert").get_by_text("There is no incident called inc_9 here.").wait_for()


def test_markup_in_names_and_words_of_agents_stays_text(hung: Running, page: Page) -> None:
    now_s = hung.dispatcher.services.clock.now_s()
    item = EvidenceItem(SCRIPT, SCRIPT, 0, SCRIPT)
    bad = incident(
        "inc_script", job=SCRIPT, node=SCRIPT, nodes=[SCRIPT], summary=SCRIPT, evidence=[item], hold=SCRIPT,
        onset_s=now_s - 60, detected_s=now_s - 50, state="closed", ended_s=now_s,
    )  # fmt: skip
    asked = action("act_script", "failed", incident_id="inc_script", job=SCRIPT, exclude=[SCRIPT], created_s=now_s)
    reports = [{"state": "failed", "detail": SCRIPT, "who": SCRIPT, "time_s": now_s}]
    reported = type(asked)(**{**{name: getattr(asked, name) for name in asked.__struct_fields__}, "reports": reports})
    hung.dispatcher.services.store.commit(Change(incidents=(bad,), actions=(reported,)))
    opened(page, hung, "inc_script")
    assert page.locator(".incident-summary").inner_text() == SCRIPT
    assert page.evaluate("window.harmed") is None
    assert page.locator(".view-incident img, .view-incident script").count() == 0


def test_a_bundle_is_downloaded_by_click(hung: Running, page: Page) -> None:
    found = accused(hung)
    services = hung.dispatcher.services
    now_s = services.clock.now_s()
    bundle = EvidenceRequest(
        id="ev_1", incident_id=found.id, node=found.node or "", job=found.job, attempt=0, kind="evidence",
        state="received", within_seconds=3.0, asked_by="server", created_s=now_s, updated_s=now_s, expires_s=now_s,
        bytes=6,
    )  # fmt: skip
    services.evidence_requests.bundles.path("ev_1").parent.mkdir(parents=True, exist_ok=True)
    services.evidence_requests.bundles.path("ev_1").write_bytes(b"bundle")
    services.store.commit(Change(evidence=(bundle,)))
    opened(page, hung, found.id)
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Download").click()
    assert Path(downloading.value.path()).read_bytes() == b"bundle"
    assert downloading.value.suggested_filename == f"evidence-{found.node}-ev_1.tar.gz"


# The last ones change what the others look at.


def test_an_action_is_approved_by_click_and_the_page_follows(
    hung: Running, page: Page, axe: Callable[[Page], list[str]]
) -> None:
    found = accused(hung)
    opened(page, hung, found.id)
    page.get_by_role("button", name="Approve").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("with 8 GPUs on 4 nodes is restarted").wait_for()
    dialog.get_by_text("no subscriber: nobody will").wait_for()
    dialog.get_by_text(re.compile(r"\d+ of \d+ exclusions of the job within")).wait_for()
    dialog.get_by_text(f"{found.node} last reported").wait_for()
    dialog.get_by_text(re.compile(r"\d of 4 nodes of the job report")).wait_for()
    assert axe(page) == []
    dialog.get_by_role("button", name="Approve").click()
    page.get_by_text(re.compile("Requested: exclude node.*Nobody has taken it up yet")).wait_for()
    (asked,) = hung.dispatcher.services.store.actions_of(found.id)
    assert asked.state == "requested"
    page.locator(".story-person").get_by_text("approve exclude node").wait_for()
    assert page.get_by_role("button", name="Approve").count() == 0


def test_a_false_alarm_is_marked_by_click(hung: Running, page: Page) -> None:
    found = accused(hung)
    opened(page, hung, found.id)
    page.get_by_role("button", name="False alarm", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="False alarm", exact=True).click()
    page.get_by_text("A person called it a false alarm.").wait_for()
    record = hung.client.get(f"/api/v1/incidents/{found.id}").json()
    assert record["state"] == "false"
