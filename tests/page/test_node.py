"""A node's page in a real browser: its standing, its last hour, its past, and what a person may do with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from eagle_eye.schema.frame import Frame, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.accounts.node_records import compared
from eagle_eye.server.model.records import CheckOutcome, Comparison, DriverError, Figure, Gpu, Node, NodeCheck
from eagle_eye.server.store.store import Change
from tests.page.conftest import Complaints
from tests.page.site import LaggingClock, until
from tests.server.builders import Running, body, frame, incident, running

if TYPE_CHECKING:
    from playwright.sync_api import Page

SCRIPT = "<img src=x onerror='window.harmed = true'><script>"

# The lines of eight devices of which one is accused, and of twenty of which none is.
COLUMNS = """(() => {
  const [from, at] = [1767225600, "2026-01-01T00:00:00Z"];
  const one = (_, device) => ({ node: "n1", device, points: [[at, device]] });
  const series = (count) => Array.from({ length: count }, one);
  const answer = (count) => ({ unit: "watts", step_seconds: 1, series: series(count) });
  import("/views/node_charts.js").then(({ columnsOf }) => {
    const lines = (count, accused) => columnsOf(answer(count), from, from + 9, new Set(accused)).lines;
    window.drawn = [lines(8, [3]), lines(20, [])];
  });
})()"""


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    clock = LaggingClock()
    now_s = clock.now_s()
    with running(tmp_path_factory.mktemp("node"), clock) as started:
        for name in ("n1", SCRIPT):
            started.send(body(*(sample(name, at, now_s - 120 + at) for at in range(1, 120)), sent_s=now_s))
        times: dict[str, Any] = {"created_s": now_s - 90, "updated_s": now_s - 80, "expires_s": now_s}
        check = NodeCheck(
            id="chk_1", node="n1", purpose="look", fault="", state="sick", asked_by="local", reason="", checks=[],
            deadline_seconds=600.0, detail="GPU 3 is slow", **times,
            outcomes=[CheckOutcome("gemm", "sick", "GPU 3 is slow", values=[Figure("rate", 310.0, "1", "3", 600.0)])],
        )  # fmt: skip
        figures = [
            figure
            for place in range(8)
            for figure in (
                Figure("wrong_numbers", 2.0 if place == 6 else 0.0, "1", f"GPU-{place - 5}", 0.0),
                Figure("operations", 90_112.0, "1", f"GPU-{place - 5}"),
                Figure("compared_seconds", 45.0, "s", f"GPU-{place - 5}"),
            )
        ]
        search = NodeCheck(
            id="chk_2", node="n1", purpose="idle", fault="silent_data_corruption", state="sick", asked_by="server",
            reason="", checks=[], deadline_seconds=180.0, detail="wrong numbers", **times, sdc_seconds=60.0,
            outcomes=[CheckOutcome("sdc_gemm", "sick", "wrong numbers", values=figures)],
        )  # fmt: skip
        gpu = Gpu(
            uuid="GPU-1", node="n1", device=3, model="H100", since_s=now_s - 900, first_seen_s=now_s - 900,
            seen_s=now_s, pci_address="0000:1b:00.0", serial="16520",
        )  # fmt: skip
        error = DriverError(
            id="e",
            node="n1",
            device=3,
            uuid="GPU-1",
            kind="xid",
            code=79,
            count=2,
            first_s=now_s - 70,
            last_s=now_s - 60,
        )
        bad = incident(
            node="n1", nodes=["n1", SCRIPT], summary=f"n1 is slow {SCRIPT}", onset_s=now_s - 60, detected_s=now_s - 50
        )
        out = Node(node="n1", state="excluded", reason="new cable", updated_s=now_s - 40, by="tok_1")
        found = compared(None, "GPU-1", Comparison("chk_0", "n7", now_s - 900, 45.0, 4_000.0, 2.0))
        started.dispatcher.services.store.commit(
            Change(
                nodes=(out,),
                incidents=(bad,),
                gpus=(gpu,),
                gpu_checks=(found,),
                driver_errors=(error,),
                node_checks=(check, search),
            )
        )
        yield started


def sample(node: str, number: int, time_s: float) -> Frame:
    values = {"gpu_power_watts": 300.0 + number, "gpu_temperature_celsius": 60.0}
    return frame(number, node=node, time_s=time_s, blocks=[block(Scope.DEVICE, {0: values, 3: values})])


def opened(page: Page, server: Running, name: str) -> None:
    page.goto(server.url)
    page.evaluate("name => { location.hash = `#/nodes/${encodeURIComponent(name)}`; }", name)
    page.get_by_role("heading", level=1, name=f"Node {name}").wait_for()
    page.locator(".view-node #history li").first.wait_for()
    page.locator(".view-node #metrics figcaption").first.wait_for()
    until(page, "document.querySelectorAll('.view-node [aria-busy]').length === 0")


def test_standing_gpus_checks_and_past_are_there(server: Running, page: Page, axe: Callable[[Page], list[str]]) -> None:
    opened(page, server, "n1")
    assert page.locator(".incident-summary").inner_text() == "new cable"
    assert "0000:1b:00.0" in page.locator("#gpus").inner_text()
    assert "2 wrong numbers in 4,000 products" in page.locator("#gpus").inner_text()
    assert "GPU 3 is slow" in page.locator("#checks").inner_text()
    history = page.locator("#history").inner_text()
    assert "XID 79 of GPU 3, 2 since" in history
    assert page.locator("#metrics figure.chart canvas").count() == 2
    assert axe(page) == []


def test_metrics_are_titled_for_people_and_begin_around_the_incident(server: Running, page: Page) -> None:
    opened(page, server, "n1")
    captions = page.locator("#metrics figcaption").all_inner_texts()
    assert captions[2:5] == ["GPU power", "GPU temperature", "SM clock"]
    assert page.get_by_label("Time range", exact=True).locator("option:checked").inner_text() == "around the incident"
    page.get_by_label("Time range", exact=True).select_option("6h")
    until(page, "location.hash.endsWith('?since=6h')")
    page.get_by_role("button", name="Zoom in").click()
    until(page, "location.hash.includes('until=')")
    page.get_by_role("button", name="Reset").click()
    until(page, "location.hash.endsWith('#/nodes/n1')")


def test_the_accused_device_is_drawn_above_the_others_which_recede(server: Running, page: Page) -> None:
    page.goto(server.url)
    page.evaluate(COLUMNS)
    until(page, "window.drawn !== undefined")
    accused, equal = page.evaluate("window.drawn")
    assert [line["label"] for line in accused] == [f"device {at}" for at in (0, 1, 2, 4, 5, 6, 7, 3)]
    assert {(line["colour"], line["width"]) for line in accused[:-1]} == {("--edge", 1)}
    assert (accused[-1]["colour"], accused[-1]["width"]) == ("--bad", 3)
    assert len({(line["colour"], str(line.get("dash"))) for line in equal}) == 20


def test_of_many_figures_those_that_should_be_0_and_are_not_come_first(server: Running, page: Page) -> None:
    opened(page, server, "n1")
    row = page.locator("#checks li").filter(has_text="silent data corruption")
    row.locator("summary").click()
    figures = row.locator("td").filter(has_text="and 18 more").inner_text().splitlines()
    assert figures[0] == "wrong numbers GPU 3: 2 (limit 0)"  # the device of GPU-1
    assert len(figures) == 7


def test_a_node_returns_by_click_and_a_refusal_is_told(server: Running, page: Page, complaints: Complaints) -> None:
    complaints.allowed.append("409")
    opened(page, server, "n1")
    page.get_by_role("button", name="Readmit", exact=True).click()
    page.get_by_role("dialog").get_by_label("Reason").fill("cable replaced")
    page.get_by_role("dialog").get_by_role("button", name="Readmit").click()
    page.get_by_role("status").get_by_text("Readmit:").wait_for()
    assert server.client.get("/api/v1/nodes/n1").json()["state"] == "excluded"
    page.get_by_role("button", name="Readmit by force").click()
    page.get_by_role("dialog").get_by_label("Reason").fill("cable replaced")
    page.get_by_role("dialog").get_by_role("button", name="Readmit by force").click()
    page.get_by_role("button", name="Exclude").wait_for()
    node = server.client.get("/api/v1/nodes/n1").json()
    assert node["state"] == "in_service"
    assert node["reason"] == "cable replaced; readmitted without a check: forced by local"


def test_a_node_that_is_called_script_is_a_name(server: Running, page: Page, axe: Callable[[Page], list[str]]) -> None:
    opened(page, server, SCRIPT)
    assert page.get_by_role("heading", level=1).inner_text() == f"Node {SCRIPT}"
    assert page.evaluate("window.harmed") is None
    page.goto(f"{server.url}#/nodes")
    page.get_by_role("link", name=SCRIPT).wait_for()
    assert page.evaluate("window.harmed") is None
    assert axe(page) == []
