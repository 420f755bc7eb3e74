"""The link from the charts to Grafana, in a real browser: the dashboards there are, their variables, the same range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from eagle_eye.schema.action import EvidenceItem
from eagle_eye.server.model.records import Job
from eagle_eye.server.store.store import Change
from tests.dashboards import boards
from tests.page.site import LaggingClock, fleet_of
from tests.server.builders import Running, incident, running

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

BASE = "https://grafana.example.com/sub"
OWN = "since=1767225600&until=1767229200"
MOMENTS = {"from": "1767225600000", "to": "1767229200000"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    clock = LaggingClock()
    now_s = clock.now_s()
    with running(tmp_path_factory.mktemp("site"), clock, grafana_url=f"{BASE}/") as server:
        fleet_of(server, 40, 20)
        observed = EvidenceItem("gpu_sm_clock_hertz", "gpu000-03", 3, 1.2e9, 1.7e9, 1.6e9, "hertz")
        found = incident(
            job="llm-000", node="gpu000-03", nodes=["gpu000-03"], evidence=[observed], onset_s=now_s - 60,
            detected_s=now_s - 50,
        )  # fmt: skip
        job = Job(job="llm-000", attempt=0, state="running", ranks=[], restart_owner="", updated_s=now_s)
        server.dispatcher.services.store.commit(Change(incidents=(found,), jobs=(job,)))
        yield server


@pytest.mark.parametrize(
    ("address", "board", "asked"),
    [
        (f"nodes/gpu000-03?{OWN}", "node", {"var-node": "gpu000-03", **MOMENTS}),
        (f"jobs/llm-000?{OWN}", "job", {"var-job": "llm-000", **MOMENTS}),
        (f"incidents/inc_1?{OWN}", "node", {"var-job": "llm-000", "var-node": "gpu000-03", **MOMENTS}),
        ("nodes/gpu000-03?since=6h", "node", {"var-node": "gpu000-03", "from": "now-6h", "to": "now"}),
    ],
)
def test_the_charts_lead_to_the_same_range_of_a_dashboard_that_there_is(
    address: str, board: str, asked: dict[str, str], site: Running, page: Page
) -> None:
    page.goto(f"{site.url}/#/{address}")
    link = page.get_by_role("link", name="Open in Grafana")
    link.wait_for()
    found = urlsplit(link.get_attribute("href") or "")
    dashboard = boards.read(board)
    assert f"{found.scheme}://{found.netloc}{found.path}" == f"{BASE}/d/{dashboard['uid']}"
    query = {name: value for name, [value] in parse_qs(found.query).items()}
    assert query == {**asked, "var-page": site.url}
    variables = {f"var-{one['name']}" for one in dashboard["templating"]["list"]}
    assert {name for name in query if name.startswith("var-")} <= variables


def test_without_an_address_of_grafana_there_is_no_link(tmp_path: Path, page: Page) -> None:
    with running(tmp_path, LaggingClock()) as server:
        fleet_of(server, 2, 2)
        page.goto(f"{server.url}/#/nodes/gpu000-01")
        page.get_by_role("group", name="Time range of the charts").wait_for()
        page.get_by_text("live", exact=True).wait_for()
        assert page.get_by_role("link", name="Open in Grafana").count() == 0
