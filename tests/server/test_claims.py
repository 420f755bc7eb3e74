"""Subscribers claim an action before they change anything: one gets it, none once it is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import httpx
import pytest

from eagle_eye.schema.action import ActionClaim, Report
from eagle_eye.server.delivery.events import claimed_action
from eagle_eye.server.engine import ledger
from eagle_eye.server.model.clock import rfc3339
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import ActionState
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, Running, action, running

MINE, OTHER = ActionClaim("accepted", claim="a", epoch=3), ActionClaim("accepted", claim="b", epoch=3)
CLAIMABLE = ("requested", "accepted")


@pytest.mark.parametrize("state", CLAIMABLE)
def test_what_was_asked_for_is_claimed(state: ActionState) -> None:
    got = claimed_action(action(state=state), MINE, "token", NOW)
    assert (got.state, got.reports[-1]["claim"], got.reports[-1]["epoch"]) == ("accepted", "a", 3)


@pytest.mark.parametrize("state", [state for state in get_args(ActionState) if state not in CLAIMABLE])
def test_what_is_over_withdrawn_or_not_asked_for_is_not(state: ActionState) -> None:
    with pytest.raises(IllegalTransition, match=f"is {state}"):
        claimed_action(action(state=state), MINE, "token", NOW)


def test_what_another_has_claimed_is_not() -> None:
    with pytest.raises(IllegalTransition, match="claimed by a"):
        claimed_action(claimed_action(action(), MINE, "token", NOW), OTHER, "token", NOW)


@pytest.mark.parametrize("state", ["accepted", "running"])
def test_a_repeated_claim_changes_nothing(state: ActionState) -> None:
    got = claimed_action(action(), MINE, "token", NOW)
    if state == "running":
        got = ledger.report_action(got, Report("running"), "token", NOW)
    assert claimed_action(got, MINE, "token", NOW + 1) is got


def test_what_a_subscriber_without_claims_has_begun_is_not_claimed() -> None:
    begun = ledger.report_action(action(), Report("running"), "token", NOW)
    with pytest.raises(IllegalTransition, match="is running"):
        claimed_action(begun, MINE, "token", NOW)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as started:
        started.dispatcher.services.store.commit(Change(actions=(action(),)))
        yield started


def say(server: Running, **report: object) -> httpx.Response:
    return server.client.post("/api/v1/actions/act_1/reports", json=report)


def test_a_claim_is_answered_with_the_action_and_the_second_with_409(server: Running) -> None:
    granted = say(server, state="accepted", detail="about to begin", claim="a", epoch=3)
    assert granted.status_code == 200
    said = {
        "state": "accepted",
        "detail": "about to begin",
        "who": "local",
        "time": rfc3339(NOW),
        "claim": "a",
        "epoch": 3,
    }
    assert granted.json()["reports"] == [said]
    assert say(server, state="accepted", claim="b", epoch=3).status_code == 409
    assert say(server, state="accepted", claim="a", epoch=3).status_code == 200
    trail = server.client.get("/api/v1/audit", params={"subject": "act_1"}).json()["items"]
    assert [(entry["verb"], entry["detail"]) for entry in trail] == [("claim", "a (epoch 3)")]


def test_a_subscriber_that_claims_nothing_is_heard_as_ever(server: Running) -> None:
    for state in ("accepted", "running", "done"):
        assert say(server, state=state).status_code == 200


def test_who_reports_after_his_claim_is_heard(server: Running) -> None:
    say(server, state="accepted", claim="a")
    assert say(server, state="accepted").status_code == 200
    assert [say(server, state=state).status_code for state in ("running", "done")] == [200, 200]


@pytest.mark.parametrize(
    "wrong", [{"state": "running", "claim": "a"}, {"state": "accepted", "claim": "a", "epoch": -1}], ids=str
)
def test_what_cannot_be_claimed_is_400(server: Running, wrong: dict[str, object]) -> None:
    assert say(server, **wrong).status_code == 400


def test_who_hears_late_that_an_action_was_withdrawn_accepts_it_no_more_but_says_what_he_has_begun(
    server: Running,
) -> None:
    server.dispatcher.services.store.commit(Change(actions=(action(state="withdrawn"),)))
    assert say(server, state="accepted").status_code == 409
    assert say(server, state="accepted", claim="a").status_code == 409
    assert say(server, state="running").status_code == 200
