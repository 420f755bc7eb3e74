"""Trust in steps, in a real browser: what is on record of each fault, and the lines that set the next mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from eagle_eye.server.engine.settings import ModeRule, PolicySettings
from eagle_eye.server.model.records import Attempt, Ticket
from eagle_eye.server.store.store import Change
from tests.page.site import LaggingClock
from tests.server.builders import Running, action, incident, running

if TYPE_CHECKING:
    from playwright.sync_api import Page

DAY_S = 86_400.0
RULE = ModeRule(mode="act", jobs=["canary-*"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that would have been right about twelve lost GPUs and wrong about two hangs."""
    clock = LaggingClock()
    day_s = clock.now_s() - 5 * DAY_S
    with running(tmp_path_factory.mktemp("site"), clock) as server:
        server.watcher.use_policy(PolicySettings(modes=[RULE]))
        times = {"created_s": day_s, "detected_s": day_s, "onset_s": day_s - 10.0}
        lost = [
            action(f"act_{n}", "would_act", incident_id=f"inc_{n}", fault="gpu_lost", exclude=[f"n{n}"], **times)
            for n in range(12)
        ]
        repairs = [
            Ticket(id=f"T-{n}", node=f"n{n}", opened_s=day_s + 60.0, closed_s=None, text="GPU", imported_s=day_s)
            for n in range(12)
        ]
        hangs = [action(f"act_h{n}", "would_act", incident_id=f"inc_h{n}", **times) for n in range(2)]
        false = [incident(f"inc_h{n}", state="false", detected_s=day_s, onset_s=day_s - 10.0) for n in range(2)]
        going = Attempt(
            id="att", run="att", job="job", attempt=0, started_s=day_s - 600.0, seen_s=clock.now_s(), gpus=8
        )
        server.dispatcher.services.store.commit(
            Change(actions=(*lost, *hangs), incidents=tuple(false), tickets=tuple(repairs), attempts=(going,))
        )
        yield server


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_has_proved_itself_comes_first_with_the_lines_to_copy(
    scheme: str, site: Running, new_page: Callable[..., Page], axe: Callable[[Page], list[str]]
) -> None:
    page = new_page(color_scheme=scheme)
    page.goto(f"{site.url}/#/trust")
    first = page.get_by_role("region", name="With decisions on record").locator("tbody tr").first
    first.get_by_text("enough for approve").wait_for()
    cells = [" ".join(cell.split()) for cell in first.locator("td").all_inner_texts()]
    assert cells[:6] == ["gpu lost", "observe act: canary-*", "12", "0", "0", "100% (76%\N{EN DASH}100%)"]
    (item,) = [one for one in steps(site) if one["fault"] == "gpu_lost"]
    assert first.get_by_label("lines that set approve for gpu lost", exact=True).inner_text() == item["toml"]
    page.get_by_text("Enough for the next step: gpu lost (approve).").wait_for()
    assert axe(page) == []


def test_few_outcomes_are_called_too_few_and_their_lines_are_folded_away(site: Running, page: Page) -> None:
    page.goto(f"{site.url}/#/trust")
    row = page.get_by_role("region", name="With decisions on record").locator("tbody tr").nth(1)
    row.get_by_text("2 decisions with a known outcome, 10 needed").wait_for()
    assert not row.get_by_label("lines that set approve for hang", exact=True).is_visible()
    row.get_by_text("Set approve", exact=True).click()
    row.get_by_label("lines that set approve for hang", exact=True).wait_for()


def test_faults_without_a_decision_are_there_and_nobody_can_tell(site: Running, page: Page) -> None:
    page.goto(f"{site.url}/#/trust")
    page.get_by_text("without a decision on record: unknown").click()
    row = page.get_by_role("row").filter(has_text="straggler")
    assert "0 decisions with a known outcome, 10 needed" in row.inner_text()


def test_it_is_found_from_the_ledger(site: Running, page: Page) -> None:
    page.goto(f"{site.url}/#/ledger")
    page.get_by_role("main").get_by_role("link", name="trust in steps").click()
    page.get_by_role("heading", name="Trust in steps", level=1).wait_for()


def steps(site: Running) -> list[dict[str, str]]:
    items: list[dict[str, str]] = site.client.get("/api/v1/ledger/steps").json()["items"]
    return items
