"""``python -m tests.page.pictures [NAME...]``: the documents' pictures, made anew by real runs.

- ``page``: the web page in Chromium while a fault is on it. A server has watched a simulated job up to that moment,
  with its real detectors and policy.
- ``loop``: the README's strip of the loop, of a run of the demo. It shows times: on a machine that does nothing else.
- ``plot``: the last figure of the documents' notebook, of a run of its cells.
"""

from __future__ import annotations

import base64
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl

from tests.docs import notebook
from tests.page import loop_strip
from tests.page.piped_browser import PipedBrowser, piped_browser
from tests.page.site import replayed

ASSETS = Path(__file__).parents[2] / "docs/assets"
FAULT = "thermal_throttle"
WIDTH, SCALE = 1280, 1
HEIGHTS = {"page-fleet.png": 725, "page-incident.png": 1142}  # the whole overview; an incident down to its first chart
SETTLED = (
    "document.readyState === 'complete' && !document.querySelector('[aria-busy=\"true\"]')"
    " && ['live', 'judging'].every((word) => document.querySelector('header.bar').innerText.includes(word))"
)


def page(folder: Path) -> list[Path]:
    """Write the pictures of the page into the folder and return them. AssertionError where a page does not come up."""
    with tempfile.TemporaryDirectory() as temporary, replayed(Path(temporary), FAULT, nodes=12) as server:
        items = server.client.get("/api/v1/incidents", params={"fault": FAULT}).json()["items"]
        assert items, f"no incident of {FAULT}"
        addresses = {"page-fleet.png": "/#/", "page-incident.png": f"/#/incidents/{items[0]['id']}"}
        with chromium(Path(temporary) / "profile") as browser:
            browser.call("Emulation.setScrollbarsHidden", hidden=True)
            found = []
            for name, address in addresses.items():
                _size(browser, WIDTH, HEIGHTS[name], SCALE)
                found.append(_take(browser, server.url + address, folder / name))
            return found


def loop(folder: Path) -> list[Path]:
    """Write the strip of a run of the demo into the folder and return both. Raises StageFailed."""
    with tempfile.TemporaryDirectory() as temporary:
        return strips(loop_strip.run(Path(temporary) / "demo"), folder)


def strips(run: loop_strip.LoopRun, folder: Path) -> list[Path]:
    """Write the strip of a run for light and dark into the folder and return both."""
    found = []
    with tempfile.TemporaryDirectory() as temporary, chromium(Path(temporary) / "profile") as browser:
        file = Path(temporary) / "strip.html"
        file.write_text(loop_strip.page(run), encoding="utf-8")
        _size(browser, loop_strip.WIDTH, 600, 2)
        browser.call("Page.navigate", url=file.as_uri())
        browser.until("document.readyState === 'complete' && !!document.querySelector('svg')")
        height = browser.evaluate("document.body.getBoundingClientRect().height")
        _size(browser, loop_strip.WIDTH, height, 2)
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.call("Emulation.setEmulatedMedia", features=[feature])
            found.append(_shot(browser, folder / f"loop-{scheme}.png"))
    return found


def plot(folder: Path) -> list[Path]:
    """Write the notebook's last figure into the folder and return it."""
    file = folder / "incident-plot.png"
    with (
        tempfile.TemporaryDirectory() as temporary,
        notebook.incident_on_a_server(Path(temporary)) as incident,
        mpl.rc_context({"backend": "Agg"}),
    ):
        notebook.run_plainly(incident)["figure"].savefig(file, dpi=90, metadata={"Software": None})
    return [file]


PICTURES = {"page": page, "loop": loop, "plot": plot}


@contextmanager
def chromium(profile: Path) -> Iterator[PipedBrowser]:
    """Run Chromium. Raises SystemExit where there is none."""
    program = shutil.which("chromium") or ""
    if not program:
        raise SystemExit("pictures: no chromium: apt-get install chromium")
    with piped_browser(program, profile) as browser:
        yield browser


def _size(browser: PipedBrowser, width: float, height: float, scale: int) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=math.ceil(height), deviceScaleFactor=scale, mobile=False,
    )  # fmt: skip


def _take(browser: PipedBrowser, url: str, file: Path) -> Path:
    browser.call("Page.navigate", url=url)
    browser.until(f"location.href === {url!r} && document.body && document.body.innerText.includes('throttle')")
    browser.until(SETTLED)
    return _shot(browser, file)


def _shot(browser: PipedBrowser, file: Path) -> Path:
    shown = browser.call("Page.captureScreenshot", format="png")
    file.write_bytes(base64.b64decode(shown["data"]))
    return file


def main() -> int:
    """Write the pictures that the arguments name, or all, into docs/assets."""
    names = sys.argv[1:] or list(PICTURES)
    if unknown := set(names) - PICTURES.keys():
        raise SystemExit(f"pictures: there is no {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for file in (file for name in names for file in PICTURES[name](ASSETS)):
        sys.stdout.write(f"{file}: {file.stat().st_size / 1e3:.0f} kB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
