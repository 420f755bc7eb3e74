"""People sign in and out; who is signed in is said, and those who may only look are shown no buttons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from eagle_eye.schema.frame import Rank
from eagle_eye.server.model.records import Job, Node
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.page.conftest import Complaints
from tests.page.site import LaggingClock
from tests.server.builders import NOW, Running, body, frame, incident, running
from tests.server.openid_provider import providing
from tests.server.test_openid_sign_in import provider_keys

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROXY: dict[str, Any] = {
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
    page.get_by_role("heading", level=1).wait_for()
    page.locator(".account summary").get_by_text("ada").click()
    page.locator(".account").get_by_text("ada is in no group that may act here (sign_in.operate_groups).").wait_for()
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
    why = "ada is signed in but in none of the groups that have access (sign_in.read_groups)"
    page.locator(".sign-in").get_by_text(why).wait_for()


def test_a_person_signs_in_at_the_provider_comes_back_to_where_they_were_and_signs_out(
    tmp_path: Path, page: Page, complaints: Complaints
) -> None:
    complaints.allowed.append("401")
    clock = LaggingClock()
    with (
        providing(clock.now_s) as provider,
        running(tmp_path / "data", clock, **provider_keys(tmp_path, provider)) as server,
    ):
        provider.asks = True
        server.dispatcher.services.store.commit(Change(incidents=(incident(),)))
        page.goto(f"{server.url}/#/incidents/inc_1")
        page.get_by_role("link", name="Sign in with your site's account").click()
        page.get_by_role("link", name="I am ada").click()
        page.locator(".account summary").get_by_text("ada").wait_for()
        assert page.url == f"{server.url}/#/incidents/inc_1"
        (session,) = [one for one in page.context.cookies() if "session" in one.get("name", "")]
        assert (session.get("httpOnly"), session.get("secure"), session.get("sameSite")) == (True, True, "Strict")
        page.locator(".account summary").click()
        page.get_by_role("button", name="Sign out", exact=True).click()
        page.get_by_role("link", name="Sign in with your site's account").wait_for()
        assert [one for one in page.context.cookies() if "session" in one.get("name", "")] == []


def test_who_signs_out_everywhere_is_signed_out_in_another_browser_and_told_why(
    tmp_path: Path, new_page: Callable[..., Page], complaints: Complaints
) -> None:
    complaints.allowed += ["401", "ERR_"]
    clock = LaggingClock()
    with (
        providing(clock.now_s) as provider,
        running(tmp_path / "data", clock, **provider_keys(tmp_path, provider)) as server,
    ):
        pages = [new_page(), new_page()]
        for page in pages:
            page.goto(server.url)
            page.get_by_role("link", name="Sign in with your site's account").click()
            page.locator(".account summary").get_by_text("ada").wait_for()
        pages[0].locator(".account summary").click()
        pages[0].get_by_role("button", name="Sign out everywhere").click()
        pages[0].get_by_role("link", name="Sign in with your site's account").wait_for()
        pages[1].reload()
        pages[1].get_by_text("you ended the sessions of ada at").first.wait_for()
        pages[1].get_by_role("link", name="Sign in with your site's account").wait_for()
        for page in pages:
            page.goto("about:blank")


def test_people_who_see_their_own_jobs_alone_have_a_page_of_these(
    tmp_path: Path, new_page: Callable[..., Page]
) -> None:
    with running(tmp_path / "data", LaggingClock(), sign_in__jobs_visible="owners", **PROXY) as server:
        mine = Job(job="job", attempt=0, state="running", ranks=[], restart_owner="", updated_s=NOW, owner="ada")
        node = Node(node="n1", state="in_service", reason="", updated_s=NOW)
        theirs = incident("inc_2", job="secret-run", summary="secret")
        server.dispatcher.services.store.commit(Change(jobs=(mine,), nodes=(node,), incidents=(incident(), theirs)))
        page = opened(new_page, server, "staff")
        for view in ("", "incidents", "jobs", "jobs/job", "nodes", "nodes/n1", "incidents/inc_1"):
            page.goto(f"{server.url}/#/{view}")
            page.get_by_role("heading", level=1).first.wait_for()
            page.wait_for_timeout(700)  # what it reads beside the lists
            assert "secret" not in page.locator("body").inner_text(), view
        assert page.get_by_role("link", name="Subscriptions").count() == 0


def test_a_nodes_metrics_are_shown_to_the_owner_of_the_job_that_runs_on_it(
    tmp_path: Path, new_page: Callable[..., Page]
) -> None:
    clock = LaggingClock()
    with running(tmp_path / "data", clock, sign_in__jobs_visible="owners", **PROXY) as server:
        owned = Job(job="job", attempt=0, state="running", ranks=[], restart_owner="", updated_s=NOW, owner="ada")
        text, agent = mint("agent", "n1", clock.now_s(), None)
        server.dispatcher.services.store.commit(Change(jobs=(owned,), tokens=(agent,)))
        sent = body(frame(time_s=clock.now_s(), job="job", ranks=[Rank("job", 0, 1, 0)]), sent_s=clock.now_s())
        assert server.send(sent, authorization=f"Bearer {text}").status_code == 200
        page = opened(new_page, server, "staff", "nodes/n1")
        page.get_by_text("Its metrics are shown for the time in which it works for job.").wait_for()
        page.get_by_role("heading", name="Metrics", exact=True).wait_for()
        page.locator("figure.chart").get_by_text("GPU power").first.wait_for()
        assert page.locator("main .trouble").count() == 0
        headers = {"X-Forwarded-User": "bob", "X-Forwarded-Groups": "staff"}
        other = new_page(extra_http_headers=headers)
        other.goto(f"{server.url}/#/nodes/n1")
        other.get_by_text("Its metrics are shown while a job of yours runs on it").wait_for()
        assert other.get_by_role("heading", name="Metrics", exact=True).count() == 0
