from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.server.model.records import Node
from eagle_eye.server.store import sql_store
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, Running, action, event, incident, running

Message = tuple[int, str, dict[str, Any]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as started:
        yield started


@contextmanager
def reading(server: Running, last: int | None = None) -> Iterator[Iterator[Message]]:
    headers = {} if last is None else {"last-event-id": str(last)}
    with server.client.stream("GET", "/api/v1/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        if last is None:
            assert next(lines) == ": hello"
            assert re.fullmatch(r"id: \d+", next(lines))
        yield messages(lines)


def messages(lines: Iterator[str]) -> Iterator[Message]:
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        else:
            if "event" in fields:  # one with an id alone says where the reader is
                yield int(fields["id"]), fields["event"], json.loads(fields["data"])
            fields = {}


def commit(server: Running, **records: Any) -> None:
    server.dispatcher.services.store.commit(Change(**records))


def test_changes_are_told_as_they_happen(server: Running) -> None:
    commit(server, incidents=(incident("before"),))
    with reading(server) as reported:
        commit(server, incidents=(incident(),), actions=(action(),), events=(event(),))
        kinds = {}
        for _ in range(3):
            _, kind, record = next(reported)
            kinds[kind] = record["id"]
        assert kinds == {"incident": "inc_1", "action": "act_1", "event": "evt-1"}


def test_a_reader_resumes_where_it_stopped(server: Running) -> None:
    with reading(server) as reported:
        commit(server, incidents=(incident("a"),))
        last, _, _ = next(reported)
    commit(server, incidents=(incident("b"),))
    commit(server, nodes=(Node(node="n9", state="excluded", reason="", updated_s=NOW),))
    with reading(server, last) as reported:
        assert [
            (kind, record.get("id", record.get("node"))) for _, kind, record in (next(reported), next(reported))
        ] == [
            ("incident", "b"),
            ("node", "n9"),
        ]


def test_a_record_that_changed_often_is_told_once_as_it_is_now(server: Running) -> None:
    for number in range(5):
        commit(server, incidents=(incident("a", summary=str(number)),))
    commit(server, incidents=(incident("b"),))
    with reading(server, 0) as reported:
        assert next(reported)[2]["summary"] == "4"
        assert next(reported)[2]["id"] == "b"


@pytest.mark.parametrize("last", [0, 10_000])
def test_a_reader_who_was_away_too_long_is_told_to_read_anew(
    server: Running, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    monkeypatch.setattr(sql_store, "CHANGES_KEPT", 2)
    for number in range(5):
        commit(server, incidents=(incident(f"inc_{number}"),))
    server.dispatcher.services.store.prune(NOW, 1e9)
    with reading(server, last) as reported:
        assert next(reported) == (5, "reset", {})
        commit(server, incidents=(incident("new"),))
        assert next(reported)[2]["id"] == "new"


def test_a_reader_is_told_where_it_begins_before_anything_happens(server: Running) -> None:
    commit(server, incidents=(incident("a"), incident("b")))
    with server.client.stream("GET", "/api/v1/events") as answer:
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(3)] == [": hello", "id: 2", ""]


def test_an_id_of_something_else_is_refused(server: Running) -> None:
    answer = server.client.get("/api/v1/events", headers={"last-event-id": "abc"})
    assert (answer.status_code, answer.json()["reason"]) == (400, "cursor")


def test_readers_are_limited_and_those_who_left_make_room(tmp_path: Path) -> None:
    with running(tmp_path, streams_max=1) as server:
        with reading(server):
            answer = server.client.get("/api/v1/events")
            assert (answer.status_code, answer.json()["reason"]) == (503, "busy")
            assert answer.headers["retry-after"] == "10"
        for _ in range(100):
            if server.metric("event_streams") == 0:
                break
            server.client.get("/healthz")
        with reading(server):
            pass


def test_secrets_do_not_go_out_with_changes(server: Running) -> None:
    from tests.server.builders import SECRET, subscription

    commit(server, subscriptions=(subscription(),))
    with reading(server, 0) as reported:
        _, kind, record = next(reported)
    assert kind == "subscription"
    assert SECRET not in json.dumps(record)


def test_a_stopping_server_lets_its_readers_go(tmp_path: Path) -> None:
    with running(tmp_path) as server, reading(server) as reported:
        server.dispatcher.stop()
        with pytest.raises((StopIteration, httpx.RemoteProtocolError)):
            next(reported)
