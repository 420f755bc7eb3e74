"""The story of an incident and the audit trail: what the server did by itself, what people did, kept for good."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eagle_eye.cli.main import main
from eagle_eye.schema import action as schema
from eagle_eye.server.engine.ledger import report_action
from eagle_eye.server.engine.routing import FORGET_JOB_S
from eagle_eye.server.engine.settings import Maintenance, PolicySettings
from eagle_eye.server.model.records import Action, AuditEntry
from eagle_eye.server.monitor.announcements import closed
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import ACTIONS, EVENTS, INCIDENTS, Change
from tests.server.builders import NOW, Running, action, incident, running
from tests.server.test_watch import Site

POLICY = PolicySettings(mode="act", verdict_gone_s=10)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for name in [name for name in os.environ if name.startswith("EAGLE_EYE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    with running(tmp_path) as started:
        monkeypatch.setenv("EAGLE_EYE_SERVER", started.url)
        yield started


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all questions that change nothing."""
    entries = (
        entry("server", "open", time_s=NOW),
        entry("tok_1", "resolve", time_s=NOW + 10),
        entry("configuration", "reload", "configuration", time_s=NOW + 20),
    )
    states = ("suspected", "confirmed", "acting", "recovered", "closed", "false")
    with running(tmp_path_factory.mktemp("searched")) as started:
        made = tuple(incident(state, state=state) for state in states)
        started.dispatcher.services.store.commit(Change(incidents=made, audit=entries))
        yield started


def story(site: Site) -> list[tuple[str, str]]:
    return [(entry.who, entry.verb) for entry in reversed(site.store.audit(limit=1_000).items)]


def the_action(site: Site) -> Action:
    (found,) = site.store.all(ACTIONS)
    return found


def reported(site: Site, state: Any) -> None:
    updated = report_action(the_action(site), schema.Report(state), "launcher", site.clock.now_s())
    site.store.commit(Change(actions=(updated,)))


def events(site: Site, type_: str) -> list[dict[str, Any]]:
    return [event.data for event in site.store.all(EVENTS) if event.type == type_]


def entry(who: str = "tok_1", verb: str = "acknowledge", subject: str = "inc_1", time_s: float = NOW) -> AuditEntry:
    return AuditEntry(time_s=time_s, who=who, verb=verb, subject=subject)


def test_the_server_writes_down_what_it_did_by_itself(site: Site) -> None:
    site.hang()
    details = {(one.subject, one.verb): one.detail for one in site.store.audit().items if one.who == "server"}
    (record,) = site.store.all(INCIDENTS)
    asked = the_action(site)
    assert details[record.id, "open"].startswith("suspected, hang of n1, confidence 0.85: no step for")
    assert details[record.id, "confirm"] == "hang of n1, confidence 0.97, rank_silence, standstill"
    assert details[record.id, "act"] == f"exclude_node as {asked.id}"
    assert details[asked.id, "request"] == f"exclude_node of n1 for {record.id}"


def test_an_escalation_is_told_once_to_subscribers(site: Site) -> None:
    site.hang()
    reported(site, "failed")
    site.run(8)
    escalated = [data for data in events(site, schema.INCIDENT_UPDATED) if data["escalated"]]
    assert ["attempt 1 of 1" in data["escalation"] for data in escalated] == [True]
    assert [verb for who, verb in story(site) if who == "server"][-3:] == ["wait", "hold", "escalate"]
    assert site.watch.incident_counts().escalations == 1


def test_a_request_withdrawn_for_maintenance_says_why(site: Site) -> None:
    site.hang()
    now_s = site.clock.now_s()
    window = Maintenance(from_s=now_s, until_s=now_s + 60, reason="firmware")
    site.watch.use_policy(msgspec.structs.replace(POLICY, maintenance=[window]))
    site.run(2)
    (data,) = events(site, schema.ACTION_WITHDRAWN)
    assert data["reason"].startswith("firmware until")
    assert (data["action_id"], the_action(site).state) == (the_action(site).id, "withdrawn")


def test_what_waited_for_approval_is_taken_back_without_a_word(site: Site) -> None:
    site.watch.use_policy(msgspec.structs.replace(POLICY, mode="approve"))
    site.hang()
    now_s = site.clock.now_s()
    site.watch.use_policy(msgspec.structs.replace(POLICY, maintenance=[Maintenance(from_s=now_s, until_s=now_s + 60)]))
    site.run(2)
    assert the_action(site).state == "withdrawn"
    assert events(site, schema.ACTION_WITHDRAWN) == []


def test_an_incident_that_comes_back_is_announced_again_under_its_own_id(site: Site) -> None:
    site.hang()
    site.fleet.stopped, site.fleet.silent_s = False, {}
    site.run(20)
    site.fleet.stopped, site.fleet.silent_s = True, {"n1": 9.0}
    site.run(25)
    site.fleet.stopped, site.fleet.silent_s = False, {}
    site.run(20)
    (record,) = site.store.all(INCIDENTS)
    assert [data["flaps"] for data in events(site, schema.INCIDENT_OPENED)] == [0, 1]
    assert [data["flaps"] for data in events(site, schema.INCIDENT_RESOLVED)] == [0, 1]
    assert (record.state, record.flaps) == ("recovered", 1)


def test_what_has_recovered_and_stays_away_is_closed(site: Site) -> None:
    site.watch.use_policy(msgspec.structs.replace(POLICY, reopen_s=30.0))
    site.hang()
    site.fleet.stopped, site.fleet.silent_s = False, {}
    site.run(110)
    (record,) = site.store.all(INCIDENTS)
    assert record.state == "closed"
    assert len(events(site, schema.INCIDENT_RESOLVED)) == 1
    assert story(site)[-1] == ("server", "close")


def test_an_incident_of_a_job_that_nobody_speaks_of_any_more_is_closed_and_announced(tmp_path: Path) -> None:
    store = open_file(tmp_path / "records.db")
    store.commit(Change(incidents=(incident(), incident("inc_2", job="alive"))))
    change = closed(store, POLICY, {"alive"}, NOW + FORGET_JOB_S + 1)
    store.close()
    assert [(i.id, i.state) for i in change.incidents] == [("inc_1", "closed")]
    assert [event.type for event in change.events] == [schema.INCIDENT_RESOLVED]
    assert "24 hours" in change.audit[0].detail


def test_an_incident_shows_its_history_with_that_of_its_actions(server: Running) -> None:
    entries = (entry("server", "open"), entry("server", "request", "act_1"), entry("server", "open", "inc_other"))
    server.dispatcher.services.store.commit(Change(incidents=(incident(),), actions=(action(),), audit=entries))
    server.client.post("/api/v1/incidents/inc_1/resolve").raise_for_status()
    shown = server.client.get("/api/v1/incidents/inc_1").json()
    assert [(one["who"], one["verb"], one["subject"]) for one in shown["history"]] == [
        ("server", "open", "inc_1"),
        ("server", "request", "act_1"),
        ("local", "resolve", "inc_1"),
        ("local", "withdraw", "act_1"),
    ]
    assert (shown["escalated"], shown["flapping"], "families" in shown) == (False, False, False)


def test_open_means_suspected_or_confirmed(searched: Running) -> None:
    listed = searched.client.get("/api/v1/incidents", params={"state": "open"}).json()["items"]
    assert [one["id"] for one in listed] == ["confirmed", "suspected"]


@pytest.mark.parametrize(
    ("query", "verbs"),
    [
        ({"subject": "inc_1"}, ["resolve", "open"]),
        ({"who": "server"}, ["open"]),
        ({"verb": "reload"}, ["reload"]),
        ({"since": "2023-11-14T22:13:25Z"}, ["reload", "resolve"]),
        ({"subject": "inc_1", "who": "nobody"}, []),
    ],
)
def test_the_trail_is_searched_by_subject_person_verb_and_time(
    searched: Running, query: dict[str, str], verbs: list[str]
) -> None:
    assert [one["verb"] for one in searched.client.get("/api/v1/audit", params=query).json()["items"]] == verbs


def test_the_trail_is_the_administrators(server: Running) -> None:
    text, token = mint("operate", None, NOW, None)
    server.dispatcher.services.store.commit(Change(tokens=(token,)))
    answer = server.client.get("/api/v1/audit", headers={"authorization": f"Bearer {text}"})
    assert answer.status_code == 403


def test_a_time_that_is_none_is_refused(searched: Running) -> None:
    answer = searched.client.get("/api/v1/audit", params={"since": "yesterday"})
    assert (answer.status_code, answer.json()["reason"]) == (400, "time")


def test_the_trail_is_read_from_the_command_line(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    server.dispatcher.services.store.commit(Change(audit=(entry(), entry("server", "open"))))
    assert main(["audit", "--who", "server", "--json"]) == 0
    assert [one["verb"] for one in json.loads(capsys.readouterr().out)] == ["open"]
    assert main(["audit", "--limit", "1"]) == 0
    output = capsys.readouterr()
    assert "inc_1" in output.out
    assert "more than 1" in output.err


def test_no_entry_can_be_changed_or_taken_out(tmp_path: Path) -> None:
    store = open_file(tmp_path / "records.db")
    store.commit(Change(audit=(entry(),)))
    store.close()
    other = sqlite3.connect(tmp_path / "records.db")
    for statement in ("DELETE FROM audit", "UPDATE audit SET record = '{}'"):
        with pytest.raises(sqlite3.Error, match="append-only"):
            other.execute(statement)
    other.close()


def test_metrics_tell_what_is_open_escalated_and_kept_back(server: Running) -> None:
    made = (
        incident("a", state="suspected", flapping=True),
        incident("b", escalation="look", escalated_s=NOW),
        incident("c", state="recovered", escalation="look"),
    )
    server.dispatcher.services.store.commit(Change(incidents=made))
    assert server.metric("incidents", state="suspected") == 1
    assert (server.metric("incidents_escalated"), server.metric("incidents_flapping")) == (1, 1)
    assert server.metric("incident_events_suppressed_total") == 2
    assert server.metric("incident_escalations_total") == 1
