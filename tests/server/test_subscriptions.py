"""Subscriptions through the API: changed, paused, rotated, repaired; and who receives what."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import standardwebhooks

from eagle_eye.server.model.clock import SystemClock
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file
from eagle_eye.server.store.store import DELIVERIES, SUBSCRIPTIONS, Change
from tests.server.builders import NOW, FakeClock, Running, event, incident, running, subscription
from tests.server.receiver import receiver

NOWHERE = "http://127.0.0.1:1/hook"
WITHIN_S = 10.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server whose clock stands still; its subscriptions are told apart by job."""
    with running(tmp_path_factory.mktemp("server"), webhooks__allow_private=True) as started:
        yield started


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server whose clock runs; likewise."""
    with running(tmp_path_factory.mktemp("live"), SystemClock(), webhooks__allow_private=True) as started:
        yield started


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all requests that change nothing."""
    with running(tmp_path_factory.mktemp("refusing"), webhooks__allow_private=True) as started:
        commit(started, subscriptions=(subscription("sub-there", url=NOWHERE),))
        yield started


def commit(server: Running, **records: Any) -> None:
    server.dispatcher.services.store.commit(Change(**records))


def make(server: Running, **more: Any) -> dict[str, Any]:
    answer = server.client.post("/api/v1/subscriptions", json={"url": NOWHERE, **more})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def change(server: Running, name: str, **more: Any) -> httpx.Response:
    return server.client.patch(f"/api/v1/subscriptions/{name}", json=more)


def shown(server: Running, name: str) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get(f"/api/v1/subscriptions/{name}").json()
    return found


def verbs(server: Running, name: str) -> list[str]:
    entries = server.client.get("/api/v1/audit").json()["items"]
    return [entry["verb"] for entry in reversed(entries) if entry["subject"] == name]


def events_for(server: Running, name: str) -> list[str]:
    return [one.event_id for one in server.dispatcher.services.store.all(DELIVERIES) if one.subscription_id == name]


def eventually(claim: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not claim():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_subscription_has_what_it_was_made_with(server: Running) -> None:
    filters = {"types": ["eagle_eye.incident.opened"], "jobs": ["llm-*"], "faults": ["*hang"]}
    made = make(server, format="alertmanager", matchers=["severity=critical"], **filters)
    found = shown(server, made["id"])
    assert {name: found[name] for name in filters} == filters
    assert (found["format"], found["matchers"]) == ("alertmanager", ["severity=critical"])
    assert found["health"] == {
        "delivered": None,
        "failures": 0,
        "failing_since": None,
        "last_status": None,
        "last_error": "",
        "pending": 0,
    }


def test_making_one_again_with_the_same_secret_answers_the_first(server: Running) -> None:
    own = "whsec_" + "B" * 43 + "="
    first = make(server, secret=own, jobs=["a"])
    assert make(server, secret=own, jobs=["a"])["id"] == first["id"]
    assert make(server, secret=own, jobs=["b"])["id"] != first["id"]
    assert verbs(server, first["id"]) == ["subscribe"]


@pytest.mark.parametrize(
    ("more", "reason", "said"),
    [
        ({"matchers": ["severty=critical"]}, "matchers", "expected one of job, fault, node"),
        ({"matchers": ["job=~x"]}, "matchers", "write a glob"),
        ({"matchers": ["job=x"] * 21}, "matchers", "20"),
        ({"matchers": ["job=" + "x" * 500]}, "matchers", "500 characters"),
        ({"faults": [""]}, "faults", "1 to"),
        ({"faults": ["x"] * 1_001}, "faults", "1000"),
        ({"types": ["eagle_eye.action.requested"], "format": "alertmanager_api"}, "types", "format alertmanager_api"),
        ({"url": "http://127.0.0.1:25/"}, "target", "HTTP"),
        ({"url": "http://169.254.169.254/latest"}, "target", "metadata address"),
        ({"url": "http://127.0.0.1:99999/"}, "target", "expected 1 to 65535"),
        ({"url": "http://127.0.0.1/a b"}, "target", "write it as %20"),
        ({"url": "http://127.0.0.1/\n"}, "target", "write it as %0A"),
        ({"url": "http:///"}, "target", "no host"),
        ({"url": "http://me:secret@127.0.0.1/"}, "target", "user name or password"),
        ({"url": "ftp://127.0.0.1/"}, "target", "expected https"),
        ({"url": "http://127.0.0.1/" + "x" * 2_048}, "target", "at most 2048"),
    ],
)
def test_a_bad_subscription_is_refused_by_name(refusing: Running, more: dict[str, Any], reason: str, said: str) -> None:
    answers = [refusing.client.post("/api/v1/subscriptions", json={"url": NOWHERE, **more})]
    if "format" not in more:
        answers.append(change(refusing, "sub-there", **more))
    for answer in answers:
        assert (answer.status_code, answer.json()["reason"]) == (400, reason)
        assert said in answer.json()["detail"]
    assert refusing.dispatcher.services.store.all(SUBSCRIPTIONS) == [subscription("sub-there", url=NOWHERE)]


def test_a_change_keeps_what_it_does_not_name_and_is_written_down_once(server: Running) -> None:
    name = make(server, jobs=["a"], faults=["hang"])["id"]
    for _ in range(2):
        changed = change(server, name, faults=[], url="http://127.0.0.1:1/other").json()
    assert (changed["jobs"], changed["faults"], changed["url"]) == (["a"], [], "http://127.0.0.1:1/other")
    assert verbs(server, name) == ["subscribe", "change subscription"]
    assert change(server, name, format="alertmanager").status_code == 400
    assert change(server, "none").status_code == 404


def test_what_waits_goes_to_the_new_url(live: Running) -> None:
    server = live
    with receiver() as target:
        name = make(server, jobs=["waits"])["id"]
        pinged = server.client.post(f"/api/v1/subscriptions/{name}/ping").json()["event_id"]
        eventually(lambda: shown(server, name)["health"]["failures"] > 0)
        assert shown(server, name)["health"]["last_error"] == "ConnectError"
        change(server, name, url=target.url)
        eventually(lambda: shown(server, name)["health"]["failures"] == 0)
        assert [json.loads(content)["id"] for _, content in target.got] == [pinged]
        assert shown(server, name)["health"]["delivered"] is not None


def test_a_paused_subscription_gets_nothing_until_it_goes_on(server: Running) -> None:
    name = make(server, jobs=["paused"])["id"]
    for _ in range(2):
        assert change(server, name, active=False).json()["ended_reason"] == "paused"
    commit(server, events=(event("e1", job="paused"),))
    assert server.client.post(f"/api/v1/subscriptions/{name}/ping").status_code == 409
    for _ in range(2):
        again = change(server, name, active=True).json()
    assert (again["active"], again["ended_reason"]) == (True, "")
    commit(server, events=(event("e2", job="paused"),))
    assert events_for(server, name) == ["e2"]
    assert verbs(server, name) == ["subscribe", "change subscription", "change subscription"]


def test_a_deleted_subscription_stays_deleted(server: Running) -> None:
    name = make(server)["id"]
    server.client.delete(f"/api/v1/subscriptions/{name}")
    answer = change(server, name, active=True)
    assert (answer.status_code, answer.json()["reason"]) == (409, "state")


def test_going_on_needs_room(tmp_path: Path) -> None:
    with running(tmp_path, webhooks__allow_private=True, webhooks__subscriptions_max=1) as server:
        first = make(server)["id"]
        change(server, first, active=False)
        make(server)
        assert change(server, first, active=True).json()["reason"] == "limit"


def rotate(server: Running, name: str, **more: Any) -> httpx.Response:
    return server.client.post(f"/api/v1/subscriptions/{name}/rotate", json=more)


def test_a_replaced_secret_signs_until_its_time_is_over(server: Running) -> None:
    made = make(server)
    second = rotate(server, made["id"]).json()
    assert (second["secrets"], second["retiring"]) == (2, ["2023-11-15T22:13:20.000Z"])
    assert second["secret"] != made["secret"]
    third = rotate(server, made["id"], overlap_seconds=60).json()
    assert (third["secrets"], third["retiring"][0]) == (3, "2023-11-14T22:14:20.000Z")
    for secret in (made["secret"], second["secret"], third["secret"]):
        assert secret not in server.client.get("/api/v1/subscriptions").text


def test_a_secret_that_leaked_signs_no_more_at_once(live: Running) -> None:
    server = live
    with receiver() as target:
        made = make(server, url=target.url, jobs=["leaked"])
        leaked = rotate(server, made["id"], overlap_seconds=0).json()
        assert leaked["secrets"] == 1
        rotated = rotate(server, made["id"]).json()
        server.client.post(f"/api/v1/subscriptions/{made['id']}/ping")
        eventually(lambda: len(target.got) == 1)
        headers, content = target.got[0]
        for secret in (leaked["secret"], rotated["secret"]):
            standardwebhooks.Webhook(secret).verify(content, headers)
        with pytest.raises(standardwebhooks.WebhookVerificationError):
            standardwebhooks.Webhook(made["secret"]).verify(content, headers)


def test_a_rotation_to_a_known_secret_may_be_repeated(server: Running) -> None:
    name, own = make(server)["id"], "whsec_" + "B" * 43 + "="
    answers = [rotate(server, name, secret=own).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0]["secret"] == own
    assert verbs(server, name) == ["subscribe", "rotate"]


def test_only_so_many_secrets_sign_at_a_time(server: Running) -> None:
    name = make(server)["id"]
    assert [rotate(server, name).status_code for _ in range(5)] == [200] * 4 + [409]
    assert rotate(server, name, overlap_seconds=-1).json()["reason"] == "overlap"
    assert rotate(server, name, secret="abc").json()["reason"] == "secret"


def test_what_failed_since_a_time_is_delivered_again_at_once(live: Running) -> None:
    server = live
    with receiver() as target:
        name = make(server, url=target.url, jobs=["failed"])["id"]
        target.status = 404
        now_s = time.time()
        moments = {"old": now_s - 7_200, "a": now_s - 60, "b": now_s - 50, "stale": now_s - 40}
        for key, time_s in moments.items():
            expires_s = now_s + 1.0 if key == "stale" else None
            commit(server, events=(event(key, job="failed", group=key, time_s=time_s, expires_s=expires_s),))
        failed = {"subscription": name, "state": "failed"}
        eventually(lambda: len(server.client.get("/api/v1/deliveries", params=failed).json()["items"]) == 4)
        listed = server.client.get("/api/v1/deliveries", params=failed).json()["items"]
        assert {(one["reason"], one["last_status"]) for one in listed} == {("rejected", 404)}
        assert server.metric("webhook_failures_total", reason="rejected") == 4
        target.status = 200
        time.sleep(max(0.0, now_s + 1.05 - time.time()))
        path = f"/api/v1/subscriptions/{name}/redeliver"
        again = server.client.post(path, json={"since": str(now_s - 3_600)}).json()
        assert again == {"redelivered": 2, "more": False}
        eventually(lambda: len(target.got) == 6)
        assert {json.loads(content)["id"] for _, content in target.got[4:]} == {"a", "b"}
        assert server.client.post(path, json={"since": "yesterday"}).json()["reason"] == "time"
        assert server.client.post(path, json={}).json()["reason"] == "body"


def test_a_slow_target_delays_nobody_else(live: Running) -> None:
    # Ten subscriptions to a server that takes its time, made first, and one to a server that does not.
    with receiver() as slow, receiver() as fast:
        slow.delay_s = 1.0
        for url in (*[slow.url] * 10, fast.url):
            make(live, url=url, jobs=["slow"])
        began_s = time.monotonic()
        moment_s = time.time()
        commit(live, events=tuple(event(f"s{n}", job="slow", group=f"g{n}", time_s=moment_s) for n in range(20)))
        eventually(lambda: len(fast.got) == 20)
        took_s, slows = time.monotonic() - began_s, len(slow.got)
        # webhooks.target_concurrency at a time, for all ten together.
        assert 0 < slows <= 32 * (1 + took_s // slow.delay_s)
        for one in live.client.get("/api/v1/subscriptions").json()["items"]:
            if one["jobs"] == ["slow"]:
                live.client.delete(f"/api/v1/subscriptions/{one['id']}")
        assert slows < 200  # of those that were to get there


def test_metrics_tell_what_waits_and_fails_by_subscription(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock, jitter=lambda: 1.0, webhooks__allow_private=True) as server:
        name = make(server)["id"]
        commit(server, events=(event("e1"), event("e2", time_s=NOW - 30)))
        eventually(lambda: shown(server, name)["health"]["failures"] == 1)
        clock.advance(0.5)
        assert server.metric("webhook_pending", subscription=name) == 2
        assert server.metric("webhook_oldest_pending_seconds", subscription=name) == 30.5
        assert server.metric("webhook_failing_seconds", subscription=name) == 0.5
        server.client.delete(f"/api/v1/subscriptions/{name}")
        assert f'subscription="{name}"' not in server.client.get("/metrics").text


def test_who_was_reported_an_incident_hears_of_its_end(server: Running) -> None:
    name = make(server, jobs=["told"], matchers=["severity=critical"])["id"]
    critical, mild = {"action": "exclude_node"}, {"action": "notify"}
    for number in (1, 2):
        of = {"job": "told", "group": f"inc_{number}", "subject": f"inc_{number}"}
        commit(server, events=(event(f"o{number}", data=mild, **of),))
        if number == 1:
            commit(server, events=(event("u1", type="eagle_eye.incident.updated", data=critical, **of),))
        commit(server, events=(event(f"r{number}", type="eagle_eye.incident.resolved", data=mild, **of),))
    assert events_for(server, name) == ["u1", "r1"]


def test_a_server_that_starts_tells_alertmanagers_what_goes_on_and_repeats_it(tmp_path: Path) -> None:
    with receiver() as target:
        before = open_file(tmp_path / RECORDS_FILE)
        alertmanager = subscription(url=target.url.partition("/hook")[0], format="alertmanager_api")
        before.commit(Change(incidents=(incident(onset_s=time.time() - 5),), subscriptions=(alertmanager,)))
        before.close()
        with running(tmp_path, SystemClock(), webhooks__allow_private=True, webhooks__alert_refresh_s=1.0):
            eventually(lambda: len(target.got) >= 2)
        reported = [json.loads(content) for _, content in target.got]
        assert [[alert["labels"]["incident_id"] for alert in alerts] for alerts in reported[:2]] == [["inc_1"]] * 2
        assert reported[1][0]["endsAt"] > reported[0][0]["endsAt"]


def test_an_alertmanager_that_goes_away_and_comes_back_shows_in_the_api_and_the_metrics(tmp_path: Path) -> None:
    with receiver() as target:
        before = open_file(tmp_path / RECORDS_FILE)
        alertmanager = subscription(url=target.url.partition("/hook")[0], format="alertmanager_api")
        before.commit(Change(incidents=(incident(onset_s=time.time() - 5),), subscriptions=(alertmanager,)))
        before.close()
        with running(
            tmp_path,
            SystemClock(),
            webhooks__allow_private=True,
            webhooks__alert_refresh_s=1.0,
            webhooks__backoff_base_s=0.1,
        ) as server:
            eventually(lambda: shown(server, "sub-1")["health"]["delivered"] is not None)
            target.status = 503
            eventually(lambda: shown(server, "sub-1")["health"]["failures"] >= 2)
            health = shown(server, "sub-1")["health"]
            assert (health["last_status"], health["last_error"]) == (503, "the target answered 503")
            assert health["failing_since"] > health["delivered"]
            assert server.metric("webhook_failing_seconds", subscription="sub-1") > 0.0
            target.status = 200
            eventually(lambda: shown(server, "sub-1")["health"]["failures"] == 0)
            assert server.metric("webhook_failing_seconds", subscription="sub-1") == 0.0
