"""What a newcomer sees in a real browser: a server without nodes, and addresses that lead nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.page.conftest import Complaints
from tests.page.site import LaggingClock
from tests.server.builders import body, frame, running

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_the_empty_page_says_what_to_type_and_follows_the_first_node(
    tmp_path: Path, page: Page, axe: Callable[[Page], list[str]]
) -> None:
    clock = LaggingClock()
    with running(tmp_path, clock) as server:
        page.goto(server.url)
        page.get_by_role("heading", name="No node reports yet").wait_for()
        page.get_by_text(f"eagle-eye agent --simulate --node my-node --server {server.url}", exact=True).wait_for()
        page.locator(".health .badge").get_by_text("waiting for the first agent").wait_for()
        assert page.locator(".badge.bad, .trouble").count() == 0
        assert axe(page) == []
        server.send(body(frame(time_s=clock.now_s()), sent_s=clock.now_s()))
        page.get_by_role("heading", name="Running jobs").wait_for()
        assert page.get_by_role("heading", name="No node reports yet").count() == 0
        page.goto("about:blank")


def test_with_tokens_the_first_command_makes_one(tmp_path: Path, page: Page, complaints: Complaints) -> None:
    complaints.allowed.append("401")
    with running(tmp_path, LaggingClock()) as server:
        text, record = mint("read", None, LaggingClock().now_s(), None)
        server.dispatcher.services.store.commit(Change(tokens=(record,)))
        page.goto(server.url)
        page.get_by_label("Token").fill(text)
        page.get_by_role("button", name="Sign in").click()
        first = page.locator(".first-steps code").first
        assert first.inner_text() == "eagle-eye tokens create --scope agent --node my-node --out my-node.token"
        page.goto("about:blank")


@pytest.mark.parametrize(
    ("address", "heading"),
    [
        ("#/incidents/inc_9", "No incident inc_9"),
        ("#/jobs/llm%2F9", "No job llm/9"),
        ("#/nodes/<b>n9", "No node <b>n9"),
        ("#/nonsense", "No such page"),
        ("nodes/n1", "No such page"),
    ],
)
def test_an_address_that_leads_nowhere_says_so_and_where_to_go(
    address: str, heading: str, tmp_path: Path, page: Page, complaints: Complaints, axe: Callable[[Page], list[str]]
) -> None:
    complaints.allowed.append("404")
    with running(tmp_path, LaggingClock()) as server:
        page.goto(f"{server.url}/{address}")
        page.get_by_role("heading", level=1, name=heading, exact=True).wait_for()
        assert page.get_by_role("link", name="Fleet").count() >= 1
        assert axe(page) == []
        page.goto("about:blank")
