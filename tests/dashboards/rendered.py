"""The dashboards drawn by Grafana's own libraries in a real browser, against a real Prometheus."""

from __future__ import annotations

import functools
import http.server
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.dashboards.boards import panels
from tests.dashboards.site import Site

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Route

HERE = Path(__file__).parent / "grafana_render"
PACKAGES = HERE / "node_modules"
ICONS = PACKAGES / "@grafana/ui/dist/public/img/icons"
NO_ICON = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"></svg>'
RANGE_S = 40.0  # how much is drawn, up to the moment that the site names
WITHIN_S = 180.0  # a busy machine takes its time
WIDTH = 1600
ROW_PX = 38  # of Grafana's grid
# What must be there of a panel of each kind, once it is drawn.
DRAWN = {
    "timeseries": ".uplot canvas",
    "stat": "[title]",
    "bargauge": "[data-testid='data-testid Bar gauge value']",
    "table": "[role=grid] [role=gridcell]",
}
PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title><link rel="stylesheet" href="page.css">
<link rel="icon" href="data:,">
<script>
  window.__grafana_public_path__ = "public/";
  window.grafanaBootData = {{settings: {{}}, user: {{}}, navTree: []}};
  window.RENDER = {asked};
</script>
<style>body {{margin: 0}} #root {{padding: 12px}}</style>
<body><div id="root"></div><script src="page.js"></script>"""


@dataclass
class Drawn:
    """What came of drawing a dashboard: ``faults``, one line each, of its panels and of the browser; none is good."""

    faults: list[str] = field(default_factory=list)
    picture: bytes = b""


@dataclass(frozen=True)
class Studio:
    """A folder with the page that draws, and where it is served."""

    folder: Path
    url: str


@contextmanager
def studio(folder: Path) -> Iterator[Studio]:
    """Bundle the page that draws into the folder, and serve it while the context lasts."""
    done = subprocess.run(
        ["npm", "run", "--silent", "build"],
        cwd=HERE,
        env={**os.environ, "OUT": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    with served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield Studio(folder, f"http://127.0.0.1:{served.server_port}")
        served.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of what is fetched."""


def drawn(browser: Browser, at: Studio, site: Site, board: dict[str, Any]) -> Drawn:
    """Return what a browser drew of the dashboard, as of the moment that the site names."""
    found = Drawn()
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    context = browser.new_context(viewport={"width": WIDTH, "height": lines * ROW_PX + 120}, timezone_id="UTC")
    try:
        page = context.new_page()
        page.set_default_timeout(1000 * WITHIN_S)

        def heard(message: ConsoleMessage) -> None:
            if message.type == "error":
                found.faults.append(f"console: {message.text} ({message.location.get('url')})")

        page.on("console", heard)
        page.on("pageerror", lambda error: found.faults.append(f"page: {error}"))
        # Grafana's typefaces are in none of its packages: the browser takes its own.
        page.route("**/public/fonts/**", lambda route: route.fulfill(body=b"", content_type="font/woff2"))
        page.route("**/public/build/img/icons/**", _serve_icon)
        (at.folder / "index.html").write_text(_html(site, board), encoding="utf-8")
        page.goto(f"{at.url}/index.html")
        reported = _settled(page, sum(1 for _ in panels(board)))
        for panel in panels(board):
            found.faults += _faults(page, panel, reported[panel["id"]])
        found.picture = page.screenshot(full_page=True)
    finally:
        context.close()
    return found


def _html(site: Site, board: dict[str, Any]) -> str:
    end_s = site.at_s or time.time()
    asked = {
        "board": board,
        "prometheus": site.prometheus,
        "values": {"job": site.job, "node": site.node},
        "from": datetime.fromtimestamp(end_s - RANGE_S, UTC).isoformat(),
        "to": datetime.fromtimestamp(end_s, UTC).isoformat(),
    }
    return PAGE.format(title=board["title"], asked=json.dumps(asked).replace("<", "\\u003c"))


def _serve_icon(route: Route) -> None:
    """Answer with an icon of Grafana's library, or an empty one: the package has not all that it asks for."""
    path = ICONS / route.request.url.partition("/img/icons/")[2]
    body = path.read_text(encoding="utf-8") if path.is_file() else NO_ICON
    route.fulfill(body=body, content_type="image/svg+xml")


def _settled(page: Page, count: int) -> dict[int, Any]:
    """Return what each panel tells of itself, once none of them still loads."""
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        reported = page.evaluate("window.told ? window.told() : []")
        if len(reported) == count and all(one["state"] in ("Done", "Error") for one in reported):
            page.wait_for_load_state("networkidle")
            return {one["id"]: one for one in reported}
        assert time.monotonic() < deadline_s, reported
        time.sleep(0.1)


def _faults(page: Page, panel: dict[str, Any], reported: dict[str, Any]) -> list[str]:
    name = f"{panel['title']} ({panel['type']})"
    if reported["trouble"] or reported["state"] != "Done":
        return [f"{name}: {reported['trouble'] or reported['state']}"]
    if reported["values"] == 0:
        return [f"{name}: no data"]
    place = page.locator(f"[data-viz-panel-key='panel-{panel['id']}']")
    if place.locator(DRAWN[panel["type"]]).count() == 0:
        return [f"{name}: has data and draws nothing"]
    return []
