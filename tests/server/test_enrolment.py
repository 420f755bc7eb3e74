from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import TOKENS, Change
from tests.server.builders import NOW, FakeClock, Running, body, frame, running

DAY_S = 86_400.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(tmp_path: Path, clock: FakeClock) -> Iterator[Running]:
    with running(tmp_path, clock, ingest__nodes=["n*", "other"], ingest__nodes_max=3) as started:
        yield started


def join(server: Running, lifetime_s: float = DAY_S, **rules: Any) -> str:
    text, record = mint("join", None, NOW, lifetime_s, **rules)
    server.dispatcher.services.store.commit(Change(tokens=(record,)))
    return text


def enrol(server: Running, text: str, node: Any = "n1") -> tuple[int, dict[str, Any]]:
    answer = server.client.post("/api/v1/enrol", json={"node": node}, headers={"authorization": f"Bearer {text}"})
    return answer.status_code, answer.json()


def refused(server: Running, text: str, node: Any = "n1") -> tuple[int, str]:
    status, document = enrol(server, text, node)
    return status, document["reason"]


def test_a_join_token_buys_a_token_with_which_that_node_alone_may_send(server: Running) -> None:
    status, made = enrol(server, join(server))
    assert (status, made["node"]) == (201, "n1")
    authorization = f"Bearer {made['token']}"
    assert server.send(body(frame(node="n1")), authorization=authorization).status_code == 200
    assert server.send(body(frame(node="n2")), authorization=authorization).json()["reason"] == "node"


def test_a_join_token_can_do_nothing_else(server: Running) -> None:
    headers = {"authorization": f"Bearer {join(server)}"}
    assert server.client.get("/api/v1/nodes", headers=headers).status_code == 403
    assert server.send(body(frame(node="n1")), **headers).status_code == 403


def test_who_finds_the_join_token_cannot_speak_for_a_node_that_has_enrolled(server: Running) -> None:
    text = join(server)
    _, first = enrol(server, text)
    assert refused(server, text) == (409, "enrolled")
    sent = server.send(body(frame(node="n1")), authorization=f"Bearer {first['token']}")
    assert sent.status_code == 200


@pytest.mark.parametrize("node", ["N1", "n1.hpc.example.org"])
def test_another_spelling_of_a_reporting_nodes_name_is_refused(tmp_path: Path, node: str) -> None:
    with running(tmp_path) as server:
        text = join(server, replaces=True)
        _, made = enrol(server, text)
        server.send(body(frame(node="n1")), authorization=f"Bearer {made['token']}")
        assert refused(server, text, node) == (409, "enrolled")


def test_a_node_installed_anew_enrols_with_a_token_that_replaces_and_its_old_one_ends(server: Running) -> None:
    _, first = enrol(server, join(server))
    status, second = enrol(server, join(server, replaces=True))
    assert status == 201
    for made, expected in ((first, 401), (second, 200)):
        sent = server.send(body(frame(node="n1")), authorization=f"Bearer {made['token']}")
        assert sent.status_code == expected


def test_a_node_whose_token_was_revoked_may_enrol_again(server: Running) -> None:
    text = join(server)
    _, first = enrol(server, text)
    store = server.dispatcher.services.store
    record = store.get(TOKENS, first["id"])
    assert record is not None
    store.commit(Change(tokens=(replace(record, revoked=True),)))
    assert enrol(server, text)[0] == 201


def test_a_join_token_ends(server: Running, clock: FakeClock) -> None:
    text = join(server, lifetime_s=60.0)
    clock.advance(60.0)
    assert refused(server, text) == (401, "token")


@pytest.mark.parametrize(
    ("node", "status", "reason"),
    [("x1", 403, "node"), ("other", 403, "node"), ("", 400, "name"), ("n\n", 400, "name"), (3, 400, "body")],
)
def test_names_that_the_token_or_the_site_do_not_allow_are_refused(
    server: Running, node: Any, status: int, reason: str
) -> None:
    assert refused(server, join(server, nodes=["n*"]), node) == (status, reason)


def test_a_fleet_that_is_full_enrols_nobody_new(server: Running) -> None:
    for name in ("n7", "n8", "n9"):
        server.dispatcher.services.fleet.know(name)
    assert refused(server, join(server)) == (403, "too_many_nodes")


@pytest.mark.parametrize("scope", ["read", "operate"])
def test_other_tokens_enrol_nobody(server: Running, scope: Any) -> None:
    text, record = mint(scope, None, NOW, None)
    server.dispatcher.services.store.commit(Change(tokens=(record,)))
    assert refused(server, text) == (403, "scope")


def test_where_no_token_is_needed_none_is_made_that_would_shut_others_out(server: Running) -> None:
    answer = server.client.post("/api/v1/enrol", json={"node": "n1"})
    assert (answer.status_code, answer.json()["reason"]) == (409, "open")
    assert server.client.get("/api/v1/nodes").status_code == 200


def test_enrolments_are_in_the_audit_trail(server: Running) -> None:
    enrol(server, join(server))
    text, record = mint("admin", None, NOW, None)
    server.dispatcher.services.store.commit(Change(tokens=(record,)))
    entries = server.client.get("/api/v1/audit", headers={"authorization": f"Bearer {text}"}).json()["items"]
    assert [(entry["verb"], entry["subject"]) for entry in entries] == [("enrol", "n1")]


def test_a_join_token_must_end_soon() -> None:
    for lifetime_s in (None, 31 * DAY_S):
        with pytest.raises(ValueError, match="--expires-days"):
            mint("join", None, NOW, lifetime_s)


def test_the_wires_document_names_what_enrolling_may_be_answered(server: Running) -> None:
    page = (ROOT / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")
    section = page.partition("\n## Enrolment\n")[2].partition("\n## ")[0]
    text, store = join(server), server.dispatcher.services.store
    reader, record = mint("read", None, NOW, None)
    store.commit(Change(tokens=(record,)))
    enrol(server, text)
    answers = [
        refused(server, text),
        refused(server, "ee_none"),
        refused(server, reader, "n2"),
        refused(server, text, 3),
    ]
    answers += [refused(server, text, ""), refused(server, text, "x1")]
    for node in ("n2", "n3"):
        server.send(body(frame(node=node)), authorization=f"Bearer {enrol(server, text, node)[1]['token']}")
    server.send(
        body(frame(node="n1")), authorization=f"Bearer {enrol(server, join(server, replaces=True))[1]['token']}"
    )
    answers.append(refused(server, text, "n4"))
    assert {reason for _, reason in answers} == {"enrolled", "token", "scope", "body", "name", "node", "too_many_nodes"}
    for status, reason in answers:
        assert re.search(rf"^\| {status} \| [^|]*`{reason}`", section, re.MULTILINE), (status, reason)
