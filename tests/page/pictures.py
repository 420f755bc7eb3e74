"""``python -m tests.page.pictures``: the documents' pictures of the page, taken in Chromium while a fault is on it.

A server has watched a simulated job up to that moment, with its real detectors and policy.
"""

from __future__ import annotations

import base64
import shutil
import sys
import tempfile
from pathlib import Path

from tests.page.piped_browser import PipedBrowser, piped_browser
from tests.page.site import replayed

ASSETS = Path(__file__).parents[2] / "docs/assets"
FAULT = "thermal_throttle"
WIDTH, HEIGHT, SCALE = 1180, 720, 1
SETTLED = "document.readyState === 'complete' && !document.querySelector('[aria-busy=\"true\"]')"


def take(folder: Path) -> list[Path]:
    """Write the pictures into the folder and return them. Raises AssertionError where a page does not come up."""
    program = shutil.which("chromium") or ""
    if not program:
        raise SystemExit("pictures: no chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as temporary, replayed(Path(temporary), FAULT, nodes=12) as server:
        items = server.client.get("/api/v1/incidents", params={"fault": FAULT}).json()["items"]
        assert items, f"no incident of {FAULT}"
        addresses = {"page-fleet.png": "/#/", "page-incident.png": f"/#/incidents/{items[0]['id']}"}
        with piped_browser(program, Path(temporary) / "profile") as browser:
            browser.call(
                "Emulation.setDeviceMetricsOverride",
                width=WIDTH, height=HEIGHT, deviceScaleFactor=SCALE, mobile=False,
            )  # fmt: skip
            return [_take(browser, server.url + address, folder / name) for name, address in addresses.items()]


def _take(browser: PipedBrowser, url: str, file: Path) -> Path:
    browser.call("Page.navigate", url=url)
    browser.until(f"location.href === {url!r} && document.body && document.body.innerText.includes('throttle')")
    browser.until(SETTLED)
    shown = browser.call("Page.captureScreenshot", format="png")
    file.write_bytes(base64.b64decode(shown["data"]))
    return file


def main() -> int:
    """Write the pictures into docs/assets."""
    for file in take(ASSETS):
        sys.stdout.write(f"{file}: {file.stat().st_size / 1e3:.0f} kB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
