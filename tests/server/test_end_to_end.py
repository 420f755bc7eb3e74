"""The whole path on real sockets and real time: a change is committed, a subscriber has it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import standardwebhooks

from eagle_eye.server.model.clock import SystemClock
from eagle_eye.server.store.store import Change
from tests.server.builders import Running, action, event, running
from tests.server.receiver import Receiver, receiver

WITHIN_S = 10.0
AT_ONCE = 24


def eventually(claim: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not claim():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def subscribe(server: Running, target: Receiver) -> str:
    answer = server.client.post("/api/v1/subscriptions", json={"url": target.url})
    secret: str = answer.json()["secret"]
    return secret


def state(server: Running) -> list[str]:
    return [item["state"] for item in server.client.get("/api/v1/deliveries").json()["items"]]


def test_an_approved_action_reaches_a_subscriber_who_reports_on_it(tmp_path: Path) -> None:
    clock = SystemClock()
    with receiver() as target, running(tmp_path, clock, webhooks__allow_private=True) as server:
        secret = subscribe(server, target)
        waiting = action(state="awaiting", expires_s=clock.now_s() + 60)
        server.dispatcher.services.store.commit(Change(actions=(waiting,)))
        server.client.post("/api/v1/actions/act_1/approve")
        eventually(lambda: len(target.got) == 1)
        headers, content = target.got[0]
        standardwebhooks.Webhook(secret).verify(content, headers)
        event = json.loads(content)
        assert (event["type"], event["data"]["kind"]) == ("eagle_eye.action.requested", "exclude_node")
        reported = server.client.post(event["data"]["report_to"], json={"state": "done", "detail": "excluded n1"})
        assert reported.json()["state"] == "done"
        eventually(lambda: state(server) == ["delivered"])


def test_however_many_approve_an_action_at_once_it_is_asked_for_once(tmp_path: Path) -> None:
    clock = SystemClock()
    with receiver() as target, running(tmp_path, clock, webhooks__allow_private=True) as server:
        subscribe(server, target)
        waiting = action(state="awaiting", expires_s=clock.now_s() + 60)
        server.dispatcher.services.store.commit(Change(actions=(waiting,)))
        ready = threading.Barrier(AT_ONCE)

        def approve() -> int:
            ready.wait()
            return server.client.post("/api/v1/actions/act_1/approve").status_code

        with ThreadPoolExecutor(AT_ONCE) as people:
            answers = [people.submit(approve) for _ in range(AT_ONCE)]
        assert {one.result() for one in answers} == {200}
        eventually(lambda: state(server) == ["delivered"])
        events = [json.loads(content) for _, content in target.got]
        assert [(one["type"], one["data"]["action_id"]) for one in events] == [("eagle_eye.action.requested", "act_1")]
        approved = [one for one in server.client.get("/api/v1/audit").json()["items"] if one["verb"] == "approve"]
        assert len(approved) == 1


def test_what_could_not_be_delivered_is_delivered_by_the_next_server(tmp_path: Path) -> None:
    clock = SystemClock()
    with receiver() as target:
        target.status = 503
        with running(tmp_path, clock, webhooks__allow_private=True) as server:
            subscribe(server, target)
            server.dispatcher.services.store.commit(Change(events=(event("a", time_s=clock.now_s()), event("b"))))
            eventually(lambda: len(target.got) == 1)
        target.status = 200
        with running(tmp_path, clock, webhooks__allow_private=True) as server:
            eventually(lambda: state(server) == ["delivered", "delivered"])
    ids = [headers["webhook-id"] for headers, _ in target.got]
    assert ids[0] == "a"
    assert ids[-2:] == ["a", "b"]
