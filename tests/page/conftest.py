"""A real browser on the page. Where there is none these tests are skipped, and say how to get one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUM = "chromium"
# Rules of WCAG 2.2 up to level AA, and what is good practice beside them.
AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@dataclass
class Complaints:
    """What the browser complained of: script errors, violations of the policy, failed requests.

    ``allowed`` are parts of complaints that a test expects, what a network interface does that comes or goes, and that
    a server is gone: at a test's end it may go before the page.
    """

    heard: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=lambda: ["ERR_NETWORK_CHANGED", "ERR_CONNECTION_REFUSED"])

    def unexpected(self) -> list[str]:
        return [text for text in self.heard if not any(part in text for part in self.allowed)]


@pytest.fixture(scope="module")  # Playwright's event loop runs in this thread until then: no asyncio.run beside it
def browser() -> Iterator[Browser]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install --no-deps -r tests/full.lock, or make test-full"
    )
    program = shutil.which(CHROMIUM)
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium, or make test-full")
    with api.sync_playwright() as playwright:
        # Chromium's own sandbox wants rights that containers and root do not have; it looks at our own server alone.
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def complaints() -> Complaints:
    return Complaints()


@pytest.fixture
def new_page(browser: Browser, complaints: Complaints) -> Iterator[Callable[..., Page]]:
    """Open pages, each as a browser that was never here; at the end nobody may have complained."""
    contexts = []

    def open_page(**options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)  # how long a busy machine may take; no claim

        def heard(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                complaints.heard.append(f"{message.text} ({message.location.get('url')})")

        page.on("console", heard)
        page.on("pageerror", lambda error: complaints.heard.append(str(error)))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints.unexpected() == []


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    return new_page()


@pytest.fixture(scope="session")
def axe() -> Callable[[Page], list[str]]:
    """Return what finds the page's faults of accessibility, one line each."""
    package = pytest.importorskip(
        "axe_playwright_python", reason="needs axe: pip install --no-deps -r tests/full.lock, or make test-full"
    )
    source = (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")

    def run(page: Page) -> list[str]:
        page.evaluate(source)
        options = json.dumps({"runOnly": AXE_TAGS, "resultTypes": ["violations"]})
        found = page.evaluate(f"axe.run(document, {options})")
        return [
            f"{one['id']}: {one['help']}: {node['html'][:200]}" for one in found["violations"] for node in one["nodes"]
        ]

    return run
