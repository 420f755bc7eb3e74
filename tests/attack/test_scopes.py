"""Every path and method with every scope of token, none, a wrong, an ended and a revoked one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from eagle_eye.schema.frame import CONTENT_TYPE
from eagle_eye.server.api.visibility import SHOWN
from eagle_eye.server.model.records import Job, Scope, Token
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, Running, body, frame, running
from tests.server.test_openapi import KNOWN, one_of_each
from tests.server.test_visibility import LOOK

DAY_S = 86_400.0
RANK: dict[Scope, int] = {"agent": 0, "remote_write": 0, "join": 0, "read": 1, "operate": 2, "admin": 3}
OPEN = {"/healthz", "/leadz", "/readyz"}
# Whoever may ask beside those whose rank is enough; nobody else may.
OWN: dict[tuple[str, str], set[Scope]] = {
    ("post", "/api/v1/frames"): {"agent", "admin"},
    ("post", "/api/v1/write"): {"remote_write", "admin"},
    ("post", "/api/v1/enrol"): {"join", "admin"},
    ("put", "/api/v1/evidence/{evidence}"): {"agent", "admin"},
    ("put", "/api/v1/node-checks/{check}"): {"agent", "admin"},
    ("get", "/api/v1/me"): {"agent", "remote_write", "join", "read", "operate", "admin"},
    ("post", "/api/v1/sessions/end"): {"admin"},  # people end their own, too
}
# A launcher that can only read says where its logs are.
READING = {("post", "/api/v1/nvrx/logs"), ("post", "/api/v1/nvrx/{job}/logs")}
# What people may do about themselves, whatever they see.
OF_ONESELF = {("get", "/api/v1/me"), ("post", "/api/v1/sessions/end")}
# Of these the body says for whom is asked, so it is read before the scope is judged.
BODIES = {
    "/api/v1/frames": (CONTENT_TYPE, body(frame())),
    "/api/v1/enrol": ("application/json", b'{"node":"n9"}'),
}
LIMITS: dict[str, Any] = {
    "limits__address_burst": 1_000_000,
    "limits__agent_burst": 1_000_000,
    "limits__token_burst": 1_000_000,
    "limits__bad_burst": 1_000_000,
}


def made(scope: Scope) -> tuple[str, Token]:
    node = "n1" if scope == "agent" else None
    nodes = ("*",) if scope == "remote_write" else ()
    return mint(scope, node, NOW, DAY_S, nodes)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data"), **LIMITS) as started:
        started.send(body(frame()))
        one_of_each(started)
        yield started


@pytest.fixture(scope="module")
def tokens(server: Running) -> dict[str, str]:
    found = {scope: made(scope) for scope in RANK}
    ended, revoked = made("admin"), made("admin")
    records = [record for _, record in found.values()]
    records += [replace(ended[1], expires_s=NOW - 1), replace(revoked[1], revoked=True)]
    server.dispatcher.services.store.commit(Change(tokens=tuple(records)))
    texts: dict[str, str] = {scope: text for scope, (text, _) in found.items()}
    return {**texts, "ended": ended[0], "revoked": revoked[0], "wrong": "ee_wrong", "none": ""}


def may(method: str, path: str, scope: Scope) -> bool:
    if own := OWN.get((method, path)):
        return scope in own
    reads = method == "get" or (method, path) in READING
    least: Scope = "admin" if path == "/api/v1/audit" else "read" if reads else "operate"
    return RANK[scope] >= RANK[least]


def asked(server: Running, method: str, path: str, token: str) -> int:
    kind, content = BODIES.get(path, ("", b""))
    headers = {**({"authorization": f"Bearer {token}"} if token else {}), **({"content-type": kind} if kind else {})}
    with server.client.stream(method.upper(), path.format(**KNOWN), headers=headers, content=content) as answer:
        return answer.status_code  # a stream of events has no end to wait for


def test_every_scope_may_do_what_is_its_own_and_nothing_else(server: Running, tokens: dict[str, str]) -> None:
    document: dict[str, Any] = server.client.get("/openapi.json").json()
    wrong: list[tuple[str, str, str, int]] = []
    for path, methods in document["paths"].items():
        for method in methods:
            for scope in RANK:
                status = asked(server, method, path, tokens[scope])
                allowed = path in OPEN or may(method, path, scope)
                if (status not in (401, 403)) != allowed:
                    wrong.append((method, path, scope, status))
                assert status < 500 or (path == "/readyz" and status == 503), (method, path, scope, status)
            for name in ("none", "wrong", "ended", "revoked"):
                status = asked(server, method, path, tokens[name])
                if (status == 401) != (path not in OPEN):
                    wrong.append((method, path, name, status))
    assert wrong == []


def test_head_asks_for_as_much_as_get(server: Running, tokens: dict[str, str]) -> None:
    document: dict[str, Any] = server.client.get("/openapi.json").json()
    paths = [path for path, methods in document["paths"].items() if "get" in methods]
    assert paths
    for path in paths:
        for name in (*RANK, "none", "wrong"):
            assert asked(server, "head", path, tokens[name]) == asked(server, "get", path, tokens[name]), (path, name)


def test_an_agent_speaks_for_its_own_node_alone(server: Running, tokens: dict[str, str]) -> None:
    authorization = f"Bearer {tokens['agent']}"
    assert server.send(body(frame(2, node="n1")), authorization=authorization).status_code == 200
    refused = server.send(body(frame(1, node="n2")), authorization=authorization)
    assert (refused.status_code, refused.json()["reason"]) == (403, "node")


def as_person(server: Running, method: str, path: str, who: str) -> int:
    """Ask as the site's proxy would for somebody who may only look."""
    kind, content = BODIES.get(path, ("application/json", b""))
    headers = {"X-User": who, "X-Groups": "staff", "Eagle-Eye-Request": "1", "content-type": kind}
    target = f"{path.format(**KNOWN)}?job={KNOWN['job']}"
    with server.client.stream(method.upper(), target, headers=headers, content=content) as answer:
        return answer.status_code


def test_owners_read_what_is_of_their_jobs_and_others_what_is_of_none(tmp_path: Path) -> None:
    with running(tmp_path, sign_in__jobs_visible="owners", **LOOK, **LIMITS) as server:
        one_of_each(server)
        owned = Job(
            job=KNOWN["job"], attempt=0, state="running", ranks=[], restart_owner="", updated_s=NOW, owner="ada"
        )
        server.dispatcher.services.store.commit(Change(jobs=(owned,)))
        document: dict[str, Any] = server.client.get("/openapi.json").json()
        wrong: list[tuple[str, str, str, int]] = []
        for path, methods in document["paths"].items():
            for method in methods:
                shown = SHOWN.get(path) if method == "get" else None
                for who in ("ada", "bob"):
                    status = as_person(server, method, path, who)
                    if path in OPEN or (method, path) in OF_ONESELF:
                        right = status not in (401, 403)
                    elif shown is None:
                        right = status in (401, 403)
                    elif who == "bob" and (shown.record or shown.needs_job):
                        right = status == 404
                    else:
                        right = status not in (401, 403)
                    if not right:
                        wrong.append((method, path, who, status))
        assert wrong == []
