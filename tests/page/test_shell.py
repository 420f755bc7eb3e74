"""What surrounds every view, in a real browser: the connection, the sign-in, the theme, the keyboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.loopback import free_port
from tests.page.conftest import Complaints
from tests.page.site import LaggingClock, until
from tests.server.builders import incident, running

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_after_a_restart_of_the_server_the_page_goes_on_and_has_missed_nothing(
    tmp_path: Path, page: Page, complaints: Complaints
) -> None:
    complaints.allowed += [
        "ERR_CONNECTION_REFUSED",
        "ERR_INCOMPLETE_CHUNKED",
        "ERR_EMPTY_RESPONSE",
        "ERR_CONNECTION_RESET",
    ]
    port = free_port()
    with running(tmp_path, LaggingClock(), port=port) as server:
        page.goto(server.url)
        page.get_by_text("live", exact=True).wait_for()
    page.get_by_text("connection lost").wait_for()
    page.get_by_text("old", exact=False).first.wait_for()
    with running(tmp_path, LaggingClock(), port=port) as server:
        server.dispatcher.services.store.commit(Change(incidents=(incident(node="n7", nodes=["n7"]),)))
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_role("link", name="n7").wait_for()
        page.goto("about:blank")


def test_while_the_server_is_away_nothing_can_be_clicked(tmp_path: Path, page: Page, complaints: Complaints) -> None:
    complaints.allowed += ["ERR_"]
    with running(tmp_path, LaggingClock()) as server:
        server.dispatcher.services.store.commit(Change(incidents=(incident(node="n7", nodes=["n7"]),)))
        page.goto(server.url)
        button = page.get_by_role("button", name="Acknowledge")
        button.wait_for()
        until(page, "!document.querySelector('.verbs button').disabled")
    page.get_by_text("connection lost").wait_for()
    assert button.is_disabled()
    assert "does not answer" in (button.get_attribute("title") or "")


def test_a_server_with_tokens_asks_for_one_and_keeps_it_in_the_tab_alone(
    tmp_path: Path, page: Page, complaints: Complaints
) -> None:
    complaints.allowed.append("401")
    with running(tmp_path, LaggingClock()) as server:
        text, record = mint("read", None, LaggingClock().now_s(), None)
        server.dispatcher.services.store.commit(Change(tokens=(record,)))
        page.goto(server.url)
        page.get_by_label("Token").fill("ee_nonsense")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("alert").wait_for()
        page.get_by_label("Token").fill(text)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_text("live", exact=True).wait_for()
        page.reload()
        page.get_by_text("live", exact=True).wait_for()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        page.goto("about:blank")


def test_by_keyboard_one_gets_past_the_navigation_and_a_new_view_has_the_focus(
    tmp_path: Path, page: Page, axe: Callable[[Page], list[str]]
) -> None:
    with running(tmp_path, LaggingClock()) as server:
        page.goto(server.url)
        page.get_by_text("live", exact=True).wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.get_by_role("link", name="Subscriptions").focus()
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Subscriptions", level=1).wait_for()
        until(page, "document.activeElement.id === 'main'")
        assert page.title() == "Subscriptions · Eagle Eye"
        assert axe(page) == []
        page.goto(f"{server.url}/#/ledger")
        page.get_by_text("Nothing to judge yet.").wait_for()
        assert axe(page) == []
        page.goto("about:blank")


def test_who_chose_a_theme_has_it_next_time_before_anything_is_painted(tmp_path: Path, page: Page) -> None:
    with running(tmp_path, LaggingClock()) as server:
        page.goto(server.url)
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.get_by_role("button", name="Theme: system").click()
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark != light
        page.reload(wait_until="commit")
        page.get_by_role("button", name="Theme: dark").wait_for()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
        page.goto("about:blank")


def test_a_page_of_which_a_part_did_not_come_loads_itself_again(
    tmp_path: Path, page: Page, complaints: Complaints
) -> None:
    complaints.allowed += ["ERR_"]
    page.route("**/views/trust.js", lambda route: route.abort("connectionreset"), times=2)
    with running(tmp_path, LaggingClock()) as server:
        page.goto(server.url)
        page.get_by_role("heading", name="No node reports yet").wait_for()
        page.goto("about:blank")


def test_a_page_that_cannot_be_loaded_says_so(tmp_path: Path, page: Page, complaints: Complaints) -> None:
    complaints.allowed += ["ERR_"]
    page.route("**/app/states.js", lambda route: route.abort("connectionreset"))
    with running(tmp_path, LaggingClock()) as server:
        page.goto(server.url)
        page.get_by_role("alert").get_by_text("The page cannot be loaded").wait_for()
        page.goto("about:blank")
