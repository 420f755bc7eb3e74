"""Each view opens in a real browser and complains of nothing: what every run of the tests looks at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.server.model.records import Job, Node
from eagle_eye.server.store.store import Change
from tests.page.conftest import CHROMIUM
from tests.page.piped_browser import PipedBrowser, piped_browser
from tests.page.site import LaggingClock, fleet_of
from tests.server.builders import Running, incident, running

NAME = "team/<b>run"  # a slash, and what must not become markup
VIEWS = {
    "": "Fleet",
    "incidents": "Incidents",
    "incidents/inc_1": "Hang on rack/n1",
    "jobs": "Jobs",
    f"jobs/{NAME.replace('/', '%2F')}": f"Job {NAME}",
    "nodes": "Nodes",
    "nodes/rack%2Fn1": "Node rack/n1",
    "ledger": "Ledger",
    "trust": "Trust in steps",
    "subscriptions": "Subscriptions",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    clock = LaggingClock()
    now_s = clock.now_s()
    with running(tmp_path_factory.mktemp("site"), clock) as server:
        fleet_of(server, 40, 20)
        reported = incident(
            "inc_1", job=NAME, node="rack/n1", nodes=["rack/n1"], onset_s=now_s - 60, detected_s=now_s - 50
        )
        job = Job(
            job=NAME, attempt=0, state="running", ranks=[], nodes=["rack/n1"], restart_owner="", updated_s=now_s,
            owner="ada",
        )  # fmt: skip
        node = Node(node="rack/n1", state="excluded", reason="inc_1", updated_s=now_s)
        server.dispatcher.services.store.commit(Change(incidents=(reported,), jobs=(job,), nodes=(node,)))
        yield server


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[PipedBrowser]:
    program = shutil.which(CHROMIUM)
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium, or make test-full")
    with piped_browser(program, tmp_path) as found:
        yield found


def test_each_view_opens_and_nothing_complains(site: Running, browser: PipedBrowser) -> None:
    browser.call("Page.navigate", url=site.url)
    browser.until("document.querySelector('.health')?.innerText.includes('live') ?? false")
    for address, heading in VIEWS.items():
        browser.evaluate(f"location.hash = {json.dumps(f'#/{address}')}")
        browser.until(f"document.querySelector('h1')?.textContent === {json.dumps(heading)}")
        browser.until("document.querySelector('[aria-busy]') === null")
        assert browser.evaluate("document.querySelector('main .trouble')?.innerText ?? ''") == "", address
    assert browser.complaints == []
