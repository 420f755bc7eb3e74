"""The page of a site with two cells, in a real browser: whose each thing is, and that a silent cell is told of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from eagle_eye.demo.two_servers import postgresql_programs
from tests.page.conftest import Complaints
from tests.server.postgresql_server import serving
from tests.server.test_cells import Site, Spread, claim, spread_over

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow  # servers in processes of their own, on a PostgreSQL of their own


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    bin_ = postgresql_programs()
    if bin_ is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql-15)")
    with serving(bin_) as postgresql:
        site = Site(postgresql.new_database(), tmp_path_factory.mktemp("cells"))
        with spread_over(site) as made:
            for job in ("one", "two"):
                claim(made, job, job)
            yield made


def names(page: Page, label: str) -> set[str]:
    """Return the first column of the table."""
    found: list[str] = (
        page.get_by_role("region", name=f"{label} (table)").locator("tbody td:nth-child(1)").all_inner_texts()
    )
    return {one.split()[0] for one in found}


@pytest.mark.parametrize(
    ("view", "label", "whole", "of_b"),
    [
        ("nodes", "Nodes", {"n1", "n2", "n3", "n4"}, {"n3", "n4"}),
        ("jobs", "Jobs", {"one", "two"}, {"two"}),
    ],
)
def test_a_list_has_whose_each_row_is_and_is_filtered_by_cell(
    view: str, label: str, whole: set[str], of_b: set[str], spread: Spread, page: Page, axe: Callable[[Page], list[str]]
) -> None:
    spread.until(lambda: True)
    page.goto(f"{spread.urls[0]}/#/{view}")
    page.get_by_role("button", name="Cell", exact=True).wait_for()
    assert names(page, label) == whole
    page.goto(f"{spread.urls[0]}/#/{view}?cell=b")
    page.get_by_role("link", name="Clear").wait_for()
    page.get_by_role("link", name=min(whole - of_b), exact=True).wait_for(state="detached")
    page.get_by_role("link", name=min(of_b), exact=True).wait_for()
    assert names(page, label) == of_b
    assert axe(page) == []


def test_shadow_decisions_say_whose_each_is_and_are_counted_by_cell(
    spread: Spread, page: Page, axe: Callable[[Page], list[str]]
) -> None:
    page.goto(f"{spread.urls[0]}/#/ledger")
    rows = page.get_by_role("region", name="Claims (table)").locator("tbody tr")
    page.get_by_role("button", name="Cell", exact=True).wait_for()
    assert rows.count() == 2
    page.get_by_label("Cell").fill("b")
    page.get_by_label("Cell").press("Enter")
    page.get_by_role("link", name="one", exact=True).wait_for(state="detached")
    page.get_by_role("link", name="two", exact=True).wait_for()
    assert rows.count() == 1
    assert page.url.endswith("#/ledger?cell=b")
    assert axe(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_cell_that_does_not_answer_is_named_and_its_jobs_are_not_shown_as_healthy(
    scheme: str,
    spread: Spread,
    new_page: Callable[..., Page],
    complaints: Complaints,
    axe: Callable[[Page], list[str]],
) -> None:
    complaints.allowed.append("ERR_")
    page = new_page(color_scheme=scheme)
    page.goto(spread.urls[0])
    page.get_by_text("live", exact=True).wait_for()
    notice = page.get_by_role("complementary", name="Cells")
    if spread.other.process.poll() is None:
        page.get_by_role("region", name="Running jobs (table)").get_by_role("link", name="two").wait_for()
        assert notice.count() == 0
        spread.other.process.kill()
        spread.other.process.wait()
    notice.wait_for(timeout=30_000)
    assert notice.inner_text() == "No answer of cell b: what it alone knows is missing here."
    jobs = page.get_by_role("region", name="Running jobs (table)")
    jobs.get_by_role("link", name="two").wait_for(state="detached")
    assert names(page, "Running jobs") == {"one"}
    page.get_by_text("those of cell b are unknown").wait_for()
    assert page.get_by_text("all reporting").count() == 0
    assert axe(page) == []
    if folder := os.environ.get("PICTURES_TO"):
        page.screenshot(path=Path(folder) / f"cells-{scheme}.png")
    page.goto("about:blank")
