"""The page of a server that stands by, in a real browser: who leads, and where what is shown comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from eagle_eye.demo.two_servers import postgresql_programs
from tests.page.conftest import Complaints
from tests.server.own_process import OwnProcess
from tests.server.postgresql_server import serving
from tests.server.test_two_servers import LEASE_S, LONG_LEASE_S, Site, pair

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow  # pairs of servers on a PostgreSQL of their own


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[OwnProcess, OwnProcess]]:
    """A leader, and a standby that does not take over while the test runs."""
    bin_ = postgresql_programs()
    if bin_ is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql-15)")
    with serving(bin_) as postgresql, pair(Site(postgresql.new_database(), tmp_path), LONG_LEASE_S) as servers:
        yield servers


def test_a_standbys_page_says_who_leads_and_that_the_leader_answers(
    both: tuple[OwnProcess, OwnProcess], page: Page, axe: Callable[[Page], list[str]]
) -> None:
    leader, standby = both
    page.goto(f"http://{standby.listen}")
    banner = page.get_by_role("complementary", name="Standby")
    said = banner.inner_text()
    assert said.startswith(f"This server stands by: http://{leader.listen} leads (epoch 1, seen since ")
    assert said.endswith("What is shown comes from the leader, and what you do here is done there.")
    assert axe(page) == []
    page.goto(f"http://{leader.listen}")
    page.get_by_text("live", exact=True).wait_for()
    assert banner.count() == 0
    page.goto("about:blank")


def test_a_standbys_page_says_that_it_shows_the_records_while_the_leader_does_not_answer(
    both: tuple[OwnProcess, OwnProcess], page: Page, complaints: Complaints, axe: Callable[[Page], list[str]]
) -> None:
    leader, standby = both
    complaints.allowed += ["ERR_INCOMPLETE_CHUNKED", "ERR_CONNECTION", "503"]
    page.goto(f"http://{standby.listen}")
    page.get_by_text("What is shown comes from the leader").wait_for()
    leader.process.kill()
    shown = page.get_by_text("This is what the records hold")
    shown.wait_for(timeout=20_000)
    assert f"http://{leader.listen} leads and cannot be reached" in shown.inner_text()
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_text("jobs and nodes: only the leader hears agents").wait_for()
    assert page.get_by_text("all reporting").count() == 0
    assert axe(page) == []
    page.goto("about:blank")


def test_a_leaders_page_says_why_nothing_is_decided_while_the_database_is_away(
    tmp_path: Path, page: Page, complaints: Complaints, axe: Callable[[Page], list[str]]
) -> None:
    bin_ = postgresql_programs()
    if bin_ is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql-15)")
    complaints.allowed += ["503"]
    with serving(bin_) as postgresql, pair(Site(postgresql.new_database(), tmp_path), LEASE_S) as (leader, _):
        page.goto(f"http://{leader.listen}")
        page.get_by_text("live", exact=True).wait_for()
        banner = page.get_by_role("complementary", name="Standby")
        assert banner.count() == 0
        postgresql.control("stop", "--wait", "--mode=fast")
        banner.wait_for(timeout=30_000)
        said = banner.inner_text()
        assert said.startswith("Nothing is decided at present: the lease could not be renewed")
        assert "PostgreSQL must run and be reachable at records.url" in said
        assert said.endswith("what they show is decided once this is over.")
        assert axe(page) == []
        postgresql.control("start", "--wait")
        banner.get_by_text("Nothing is decided").wait_for(state="detached", timeout=30_000)
        page.goto("about:blank")
