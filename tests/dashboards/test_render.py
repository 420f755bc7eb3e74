"""The dashboards as people see them, drawn by Grafana's own libraries, of a replayed fault; and that this can fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.dashboards.boards import NAMES, panels, read
from tests.dashboards.rendered import PACKAGES, Drawn, drawn, studio
from tests.dashboards.site import watched
from tests.page.conftest import browser  # noqa: F401  a fixture

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = "EAGLE_EYE_TEST_DASHBOARD_PICTURES"  # where the pictures go

pytestmark = pytest.mark.slow
Draws = Callable[[dict[str, Any]], Drawn]


@pytest.fixture(scope="module")
def draws(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Draws]:
    """A function that draws a dashboard."""
    if FOLDER not in os.environ:
        pytest.skip("needs npm and its registry: make check-dashboards runs it")
    for program, package in (("npm", "npm"), ("prometheus", "prometheus")):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install {package}")
    if not PACKAGES.is_dir():
        pytest.skip("Grafana's libraries are not installed: make check-dashboards installs them")
    chromium: Browser = request.getfixturevalue("browser")
    with studio(tmp_path_factory.mktemp("page")) as at, watched(tmp_path_factory.mktemp("site")) as site:
        yield lambda board: drawn(chromium, at, site, board)


@pytest.mark.parametrize("name", NAMES)
def test_each_panel_is_drawn_and_the_browser_complains_of_nothing(draws: Draws, name: str) -> None:
    found = draws(read(name))
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(found.picture)
    assert found.faults == []


def broken(expr: str) -> tuple[dict[str, Any], str]:
    """Return a dashboard whose first panel asks for something else, and that panel's title."""
    board = read("fleet")
    first = next(panels(board))
    first["targets"][0]["expr"] = expr
    return board, f"{first['title']} ({first['type']})"


def test_a_panel_without_data_is_seen(draws: Draws) -> None:
    board, title = broken("eagle_eye_of_which_there_is_none")
    assert draws(board).faults == [f"{title}: no data"]


def test_a_query_that_prometheus_refuses_is_seen(draws: Draws) -> None:
    board, title = broken("max(")
    assert any(fault.startswith(f"{title}: ") and "parse error" in fault for fault in draws(board).faults)
