"""What approving an action would do, asking again for what expired, and taking an approval back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.action import MemberRank
from eagle_eye.server.api.actions import asked_again
from eagle_eye.server.engine.policy import weigh
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import Action, RuleWord, SubscriptionHealth
from eagle_eye.server.monitor.watcher import JobProgress
from eagle_eye.server.store.store import ACTIONS, EVENTS, INCIDENTS, Change
from tests.server.builders import NOW, Running, action, body, frame, incident, running, subscription
from tests.server.engine import situations

RANKS = [MemberRank(rank, f"n{rank // 2 + 1}", rank % 2) for rank in range(6)]
APPROVE = PolicySettings(mode="approve")
HUNG = situations.incident()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as started:
        yield started


def commit(server: Running, **change: Any) -> None:
    server.dispatcher.services.store.commit(Change(**change))


def preview(server: Running) -> Any:
    return server.client.get("/api/v1/actions/act_1/preview").json()


def test_it_says_whom_it_affects_and_how_fresh_the_data_is(server: Running) -> None:
    server.send(body(frame()))
    server.watcher.course = [
        JobProgress("job", 0, "running", True, NOW - 60, 1.0, 7.0, NOW - 9, 1.5, ("n1", "n2", "n3"), 6, heard=2)
    ]
    commit(server, actions=(action(state="awaiting", ranks=RANKS, exclude=["n1", "n9"]),))
    found = preview(server)
    assert (found["gpus"], found["job_gpus"], found["job_nodes"], found["restart"]) == (2, 6, 3, True)
    assert [one["heard"] is None for one in found["heard"]] == [False, True]
    assert (found["job_nodes_heard"], found["job_nodes_known"]) == (2, 3)
    assert found["progressed"] == "2023-11-14T22:13:11.000Z"


def test_a_job_whose_ranks_nobody_knows_has_no_number_of_gpus(server: Running) -> None:
    commit(server, actions=(action(state="awaiting"),))
    found = preview(server)
    assert (found["gpus"], found["job_gpus"], found["job_nodes"], found["job_nodes_heard"]) == (None,) * 4


def test_without_a_subscriber_that_wants_it_nobody_carries_it_out(server: Running) -> None:
    deaf = subscription("sub-deaf", jobs=["another"])
    ended = subscription("sub-ended", active=False)
    commit(server, actions=(action(state="awaiting"),), subscriptions=(deaf, ended))
    assert preview(server)["carriers"] == []


def test_an_incident_says_who_will_carry_its_action_out_and_what_policy_holds_now(server: Running) -> None:
    waiting = action(state="requested")
    commit(server, incidents=(incident(state="acting"),), actions=(waiting,))
    server.watcher.weighing = weigh(HUNG, situations.situation(settings=APPROVE, blind="no frame arrives"))
    dossier = server.client.get("/api/v1/incidents/inc_1/dossier").json()
    assert dossier["carriers"] == []
    assert "no frame arrives" in dossier["hold_now"]
    commit(server, subscriptions=(subscription(),))
    dossier = server.client.get("/api/v1/incidents/inc_1/dossier").json()
    assert [one["subscription_id"] for one in dossier["carriers"]] == ["sub-1"]


@pytest.mark.parametrize("state", ["would_act", "running", "done", "expired"])
def test_nobody_is_awaited_for_an_action_that_does_not_wait(server: Running, state: str) -> None:
    commit(server, incidents=(incident(state="acting"),), actions=(action(state=state),))
    dossier = server.client.get("/api/v1/incidents/inc_1/dossier").json()
    assert (dossier["carriers"], dossier["hold_now"]) == (None, "")


def test_a_subscriber_that_fails_is_shown_to_fail(server: Running) -> None:
    health = SubscriptionHealth(subscription_id="sub-1", failures=3, failing_since_s=NOW - 60, last_error="HTTP 500")
    commit(server, actions=(action(state="awaiting"),), subscriptions=(subscription(),), subscription_health=(health,))
    (carrier,) = preview(server)["carriers"]
    assert (carrier["subscription_id"], carrier["last_error"]) == ("sub-1", "HTTP 500")
    assert carrier["failing_since"] == "2023-11-14T22:12:20.000Z"


def test_what_budgets_have_left_is_after_the_action_however_it_was_counted(server: Running) -> None:
    then: dict[str, float | str | None] = {"excluded": 1, "exclusions_per_job": 2, "window_s": 3600.0}
    words = [RuleWord("job_exclusions", "pass", "", then)]
    commit(server, incidents=(incident(),), actions=(action(state="awaiting", policy=words),))
    assert preview(server)["budgets"] == [
        {"what": "exclusions", "of": "job", "left": 0, "limit": 2, "window_seconds": 3600.0}
    ]
    mine = situations.past(incident_id="inc", attempt=1, job="j", exclude=["n1"], state="awaiting")
    server.watcher.weighing = weigh(HUNG, situations.situation(settings=APPROVE, actions=[mine]))
    now = {(one["what"], one["of"]): one for one in preview(server)["budgets"]}
    of_job = now["exclusions", "job"]
    assert of_job["left"] == of_job["limit"] - 1


def expired(**changes: Any) -> Action:
    """Return the action that policy wants for HUNG, expired."""
    fields = {"state": "expired", "exclude": ["n1"], "attempt": 1, "incident_id": "inc", "job": "j"}
    return situations.past(**{**fields, **changes})


def renewed(old: Action, **changes: Any) -> Action:
    seen = situations.situation(**{"settings": APPROVE, "actions": [old], **changes})
    return asked_again(old, HUNG, weigh(HUNG, seen), situations.NOW_S, 600.0)


def test_what_expired_is_asked_for_again_and_awaits_approval() -> None:
    new = renewed(expired())
    assert (new.id, new.state, new.exclude) == ("", "awaiting", ["n1"])
    assert (new.created_s, new.expires_s) == (situations.NOW_S, situations.NOW_S + 600.0)


@pytest.mark.parametrize("state", ["rejected", "failed", "withdrawn", "done", "awaiting"])
def test_nothing_but_what_expired_is_asked_for_again(state: str) -> None:
    with pytest.raises(IllegalTransition, match=f"is {state}"):
        renewed(expired(state=state))


def test_what_policy_holds_by_now_is_not_asked_for_again() -> None:
    with pytest.raises(IllegalTransition, match=r"policy holds it now \(blind\)"):
        renewed(expired(), blind="dark")


def test_what_policy_only_observes_by_now_is_not_asked_for_again() -> None:
    with pytest.raises(IllegalTransition, match="only observes"):
        renewed(expired(), settings=PolicySettings(mode="observe"))


def test_what_policy_would_not_ask_for_by_now_is_not_asked_for_again() -> None:
    with pytest.raises(IllegalTransition, match="something else now: exclude_node n1"):
        renewed(expired(exclude=["n2"]))


def test_an_attempt_that_is_not_judged_any_more_is_not_acted_on() -> None:
    with pytest.raises(IllegalTransition, match="not judged any more"):
        asked_again(expired(), HUNG, None, situations.NOW_S, 600.0)
    with pytest.raises(IllegalTransition, match="not judged any more"):
        renewed(expired(attempt=0))


def test_it_is_asked_for_again_once(server: Running) -> None:
    old = expired(id="act_1", created_s=NOW - 700)
    commit(server, incidents=(situations.incident(),), actions=(old,))
    server.watcher.weighing = weigh(HUNG, situations.situation(settings=APPROVE, actions=[old]))
    new = server.client.post("/api/v1/actions/act_1/renew").json()
    assert (new["state"], new["incident_id"]) == ("awaiting", "inc")
    again = server.client.post("/api/v1/actions/act_1/renew")
    assert (again.status_code, again.json()["detail"]) == (
        409,
        f"action {new['id']} was asked for since; it is awaiting",
    )
    assert len(server.dispatcher.services.store.all(ACTIONS)) == 2
    assert server.client.get("/api/v1/audit", params={"verb": "renew"}).json()["items"][0]["detail"] == "after act_1"


def test_an_approval_that_nobody_took_up_is_taken_back_and_subscribers_are_told(server: Running) -> None:
    server.watcher.policies = [APPROVE]
    commit(server, incidents=(incident(state="acting"),), actions=(action(),))
    taken = server.client.post("/api/v1/actions/act_1/withdraw").json()
    assert (taken["state"], taken["reason"]) == ("withdrawn", "withdrawn by local")
    store = server.dispatcher.services.store
    assert [(one.type, one.data["reason"]) for one in store.all(EVENTS)] == [
        ("eagle_eye.action.withdrawn", "withdrawn by local")
    ]
    (waiting,) = store.all(INCIDENTS)
    assert (waiting.state, waiting.hold) == ("confirmed", "action act_1 was withdrawn by local")
    server.client.post("/api/v1/actions/act_1/withdraw")
    assert len(store.all(EVENTS)) == 1


@pytest.mark.parametrize(
    ("state", "mode", "why"),
    [
        ("accepted", "approve", "only awaiting or requested can become withdrawn"),
        ("awaiting", "approve", "reject it"),
        ("requested", "act", "policy acts by itself"),
    ],
)
def test_what_was_taken_up_or_not_approved_by_a_person_is_not_taken_back(
    state: str, mode: Any, why: str, server: Running
) -> None:
    server.watcher.policies = [PolicySettings(mode=mode)]
    commit(server, actions=(action(state=state),))
    refused = server.client.post("/api/v1/actions/act_1/withdraw")
    assert refused.status_code == 409
    assert why in refused.json()["detail"]
