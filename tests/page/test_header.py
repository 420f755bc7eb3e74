"""The page's header: one line on every screen, with nothing cut and every view within reach."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.page.site import LaggingClock, fleet_of, until
from tests.page.test_sign_in import PROXY
from tests.server.builders import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTHS = (1920, 1520, 1280, 1199, 1024, 768, 720, 390)
COLLAPSED_BELOW = 1200
LINE_PX = 48  # one line of text, buttons and space around them
MEASURE = """(() => {
  const bar = document.querySelector("header.bar");
  const parts = bar.querySelectorAll(".brand, .views a, .views-button, .badge, .person, .theme");
  const seen = [...parts].map((one) => one.getBoundingClientRect()).filter((one) => one.width > 0);
  const middles = seen.map((one) => (one.top + one.bottom) / 2);
  const apart = (one, other) => one.right - 1 <= other.left || other.right - 1 <= one.left;
  const cut = (one) => {
    const words = document.createRange();
    words.selectNodeContents(one.lastElementChild);
    if (getComputedStyle(one.lastElementChild).clipPath !== "none") return false;  // for screen readers alone
    return words.getBoundingClientRect().right > one.getBoundingClientRect().right;
  };
  return {
    height: bar.getBoundingClientRect().height,
    wide: document.documentElement.scrollWidth - innerWidth,
    apart: Math.max(...middles) - Math.min(...middles),
    outside: seen.filter((one) => one.left < 0 || one.right > innerWidth).length,
    cut: [...bar.querySelectorAll(".health .badge")].filter(cut).length,
    over: seen.filter((one, at) => !seen.slice(at + 1).every((other) => apart(one, other))).length,
  };
})()"""
SIGNED_IN = {"X-Forwarded-User": "augusta.lovelace@example.com", "X-Forwarded-Groups": "staff"}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, Running]]:
    """Two servers with a fleet: one that asks nobody who they are, one behind a proxy that signs people in."""
    with (
        running(tmp_path_factory.mktemp("open"), LaggingClock()) as free,
        running(tmp_path_factory.mktemp("proxied"), LaggingClock(), **PROXY) as proxied,
    ):
        for one in (free, proxied):
            fleet_of(one, 40, 20)
        yield {False: free, True: proxied}


def opened(new_page: Callable[..., Page], sites: dict[bool, Running], signed_in: bool, **options: Any) -> Page:
    headers = {"extra_http_headers": SIGNED_IN} if signed_in else {}
    page = new_page(**headers, **options)
    page.goto(sites[signed_in].url)
    page.get_by_text("live", exact=True).wait_for()
    until(page, "document.querySelector('.health-details') !== null")
    return page


@pytest.mark.parametrize("signed_in", [False, True], ids=["open", "signed_in"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_header_is_one_line_at_every_width(
    scheme: str,
    signed_in: bool,
    sites: dict[bool, Running],
    new_page: Callable[..., Page],
    axe: Callable[[Page], list[str]],
) -> None:
    page = opened(new_page, sites, signed_in, color_scheme=scheme)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 844})
        if folder := os.environ.get("PICTURES_TO"):
            page.screenshot(path=Path(folder) / f"header-{scheme}-{signed_in}-{width}.png")
        until(page, f"{MEASURE}.height <= {LINE_PX}")
        found = page.evaluate(MEASURE)
        assert found["apart"] <= 3, (width, found)
        assert (found["wide"], found["outside"], found["over"], found["cut"]) == (0, 0, 0, 0), (width, found)
        assert axe(page) == [], width


def test_the_longest_words_of_the_servers_health_do_not_break_the_line(
    tmp_path: Path, new_page: Callable[..., Page]
) -> None:
    page = new_page(extra_http_headers=SIGNED_IN)
    with running(tmp_path, LaggingClock(), **PROXY) as server:
        page.goto(server.url)
        page.get_by_text("waiting for the first agent").wait_for()
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 844})
            until(page, f"{MEASURE}.height <= {LINE_PX}")  # the page hears of its width a moment later
            found = page.evaluate(MEASURE)
            assert (found["wide"], found["outside"], found["over"]) == (0, 0, 0), (width, found)
        page.goto("about:blank")


@pytest.mark.parametrize("width", [1024, 390])
def test_on_a_narrow_screen_the_views_are_behind_a_button_that_says_which_is_shown(
    width: int, sites: dict[bool, Running], new_page: Callable[..., Page], axe: Callable[[Page], list[str]]
) -> None:
    page = opened(new_page, sites, True, viewport={"width": width, "height": 844})
    button = page.get_by_role("button", name="Views: Fleet")
    link = page.get_by_role("link", name="Jobs", exact=True)
    assert not link.is_visible()
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    if folder := os.environ.get("PICTURES_TO"):
        page.screenshot(path=Path(folder) / f"menu-{width}.png")
    assert axe(page) == []
    page.keyboard.press("Escape")
    until(page, "document.activeElement.classList.contains('views-button')")
    assert not link.is_visible()
    button.click()
    link.click()
    page.get_by_role("heading", name="Jobs", level=1).wait_for()
    link.wait_for(state="hidden")
    page.get_by_role("button", name="Views: Jobs").wait_for()


def test_on_a_wide_screen_the_views_are_links(sites: dict[bool, Running], new_page: Callable[..., Page]) -> None:
    page = opened(new_page, sites, True, viewport={"width": COLLAPSED_BELOW, "height": 844})
    assert page.get_by_role("navigation", name="Views").get_by_role("link", name="Subscriptions").is_visible()
    assert page.get_by_role("button", name="Views: Fleet").count() == 0


def test_what_a_person_may_do_closes_when_they_click_elsewhere(
    sites: dict[bool, Running], new_page: Callable[..., Page], axe: Callable[[Page], list[str]]
) -> None:
    page = opened(new_page, sites, True)
    box = page.locator(".account .bar-box")
    assert not box.is_visible()
    page.locator(".account summary").click()
    box.get_by_text("may only look").wait_for()
    if folder := os.environ.get("PICTURES_TO"):
        page.screenshot(path=Path(folder) / "account.png")
    assert axe(page) == []
    page.get_by_role("heading", name="Running jobs").click()
    box.wait_for(state="hidden")
