"""Who is signed in is said, and those who may only look are shown no buttons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from eagle_eye.server.store.store import Change
from tests.page.conftest import Complaints
from tests.page.site import LaggingClock
from tests.server.builders import Running, incident, running

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROXY = {
    "sign_in__proxy__user_header": "X-Forwarded-User",
    "sign_in__proxy__groups_header": "X-Forwarded-Groups",
    "sign_in__proxy__addresses": ("127.0.0.1",),
    "sign_in__read_groups": ("staff",),
    "sign_in__operate_groups": ("gpu-ops",),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, LaggingClock(), **PROXY) as found:
        found.dispatcher.services.store.commit(Change(incidents=(incident(),)))
        yield found


def opened(new_page: Callable[..., Page], server: Running, groups: str, view: str = "incidents/inc_1") -> Page:
    """Open the page as the proxy would show it to ada."""
    headers = {"X-Forwarded-User": "ada", "X-Forwarded-Groups": groups}
    page = new_page(extra_http_headers=headers)
    page.goto(f"{server.url}/#/{view}")
    return page


def test_who_may_only_look_sees_so_and_no_button_of_a_verb(new_page: Callable[..., Page], server: Running) -> None:
    page = opened(new_page, server, "staff")
    page.get_by_text("ada").wait_for()
    page.get_by_role("heading", level=1).wait_for()
    account = page.locator(".account")
    assert account.inner_text().split() == ["ada", "may", "look"]
    assert "sign_in.operate_groups" in (account.get_attribute("title") or "")
    assert page.get_by_role("button", name="Acknowledge").count() == 0


def test_who_may_act_acts_in_their_own_name(new_page: Callable[..., Page], server: Running) -> None:
    page = opened(new_page, server, "staff,gpu-ops")
    page.get_by_role("button", name="Acknowledge").click()
    page.get_by_text("Acknowledged.").wait_for()
    (entry,) = server.dispatcher.services.store.audit(verb="acknowledge").items
    assert entry.who == "user:ada"


def test_who_is_in_no_group_is_told_which_setting_says_so(
    new_page: Callable[..., Page], server: Running, complaints: Complaints
) -> None:
    complaints.allowed.append("403")
    page = opened(new_page, server, "guests", "")
    page.get_by_text("ada is signed in and in no group that may look here (sign_in.read_groups)").wait_for()
