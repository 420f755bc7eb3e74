from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from eagle_eye.server.model.errors import Refusal, StoreUnavailable
from eagle_eye.server.model.records import Scope
from eagle_eye.server.security.auth import REMEMBERED_S, Credentials, Principals, Tokens, mint
from eagle_eye.server.store.sql_store import SqlStore, open_file
from eagle_eye.server.store.store import TOKENS, Change, Store
from tests.server.builders import NOW, FakeClock, Reached, body, frame, incident, running

SCOPES: tuple[Scope, ...] = ("agent", "read", "operate", "admin")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    made = open_file(tmp_path / "records.db")
    yield made
    made.close()


def token(store: Store, scope: Scope, node: str | None = None, lifetime_s: float | None = None) -> tuple[str, str]:
    """Return a new token's text and id."""
    text, record = mint(scope, node, NOW, lifetime_s)
    store.commit(Change(tokens=(record,)))
    return text, record.id


def asking(text: str = "", host: str = "127.0.0.1:8470", method: str = "GET", origin: str = "") -> Credentials:
    return Credentials(method, f"Bearer {text}" if text else "", host, origin)


def refused(tokens: Tokens, credentials: Credentials) -> tuple[int, str]:
    with pytest.raises(Refusal) as caught:
        tokens.authenticate(credentials)
    return caught.value.status, caught.value.reason


def test_without_tokens_loopback_is_open_and_anything_else_is_not(store: SqlStore) -> None:
    assert Tokens(store, FakeClock(), loopback=True).authenticate(asking()).who == "local"
    assert refused(Tokens(store, FakeClock(), loopback=False), asking()) == (401, "no_token")


def test_the_first_token_closes_the_door_and_revoking_it_does_not_open_it_again(store: SqlStore) -> None:
    tokens = Tokens(store, FakeClock(), loopback=True)
    text, record = mint("read", None, NOW, None)
    store.commit(Change(tokens=(record,)))
    assert refused(tokens, asking()) == (401, "no_token")
    assert tokens.authenticate(asking(text)).who == record.id
    store.commit(Change(tokens=(replace(record, revoked=True),)))
    assert refused(tokens, asking(text)) == (401, "token")
    assert refused(tokens, asking()) == (401, "no_token")


def test_a_token_ends_with_its_lifetime(store: SqlStore) -> None:
    clock = FakeClock()
    tokens = Tokens(store, clock, loopback=True)
    text, _ = token(store, "read", lifetime_s=60)
    assert tokens.authenticate(asking(text)).scope == "read"
    clock.advance(60)
    assert refused(tokens, asking(text)) == (401, "token")


@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer ", "Basic eA==", "Bearer " + "x" * 5000, "ee_x"])
def test_anything_else_is_no_token(store: SqlStore, header: str) -> None:
    token(store, "read")
    status, _ = refused(Tokens(store, FakeClock(), loopback=True), Credentials("GET", header, "127.0.0.1", ""))
    assert status == 401


def basic(text: str, user: str = "prometheus") -> str:
    return f"Basic {base64.b64encode(f'{user}:{text}'.encode()).decode()}"


def test_a_token_is_the_password_of_basic_credentials_only_where_no_browser_asks(store: SqlStore) -> None:
    tokens = Tokens(store, FakeClock(), loopback=True)
    text, id_ = token(store, "read")
    for user in ("prometheus", ""):
        credentials = Credentials("GET", basic(text, user), "", "", or_basic=True)
        assert tokens.authenticate(credentials).who == id_
        assert refused(tokens, credentials._replace(or_basic=False)) == (401, "token")


@pytest.mark.parametrize("header", [basic(""), basic("x" * 5000), "Basic ?", "Basic /w==", "Basic "])
def test_a_refusal_says_what_is_accepted_and_has_no_browser_ask_for_a_password(store: SqlStore, header: str) -> None:
    tokens = Tokens(store, FakeClock(), loopback=False)
    with pytest.raises(Refusal) as caught:
        tokens.authenticate(Credentials("POST", header, "", "", or_basic=True))
    assert (caught.value.status, caught.value.headers) == (401, {"WWW-Authenticate": "Bearer"})
    assert "or HTTP basic auth with the token as password" in caught.value.detail


@pytest.mark.parametrize("host", ["evil.example:8470", "", "127.0.0.1.evil.example", "[", "10.0.0.1"])
def test_without_tokens_another_host_name_is_a_rebound_one(store: SqlStore, host: str) -> None:
    assert refused(Tokens(store, FakeClock(), loopback=True), asking(host=host)) == (403, "host")


def test_without_tokens_a_foreign_page_may_change_nothing(store: SqlStore) -> None:
    tokens = Tokens(store, FakeClock(), loopback=True)
    assert refused(tokens, asking(method="POST", origin="https://evil.example")) == (403, "origin")
    assert refused(tokens, asking(method="POST", origin="null")) == (403, "origin")
    assert tokens.authenticate(asking(method="POST", origin="http://localhost:8470")).who == "local"


def test_scopes_include_each_other_and_agent_sees_nothing(store: SqlStore) -> None:
    tokens = Tokens(store, FakeClock(), loopback=True)
    allowed: dict[str, list[str]] = {}
    for scope in SCOPES:
        text, _ = token(store, scope, "n1" if scope == "agent" else None)
        principal = tokens.authenticate(asking(text))
        allowed[scope] = []
        for needed in SCOPES[1:]:
            with contextlib.suppress(Refusal):
                tokens.authorise(principal, needed)
                allowed[scope].append(needed)
    assert allowed == {
        "agent": [],
        "read": ["read"],
        "operate": ["read", "operate"],
        "admin": ["read", "operate", "admin"],
    }


def test_an_agents_token_needs_a_node_and_no_other_may_have_one() -> None:
    with pytest.raises(ValueError, match="--node"):
        mint("agent", None, NOW, None)
    with pytest.raises(ValueError, match="only an agent"):
        mint("read", "n1", NOW, None)


def test_the_text_of_a_token_is_not_kept(tmp_path: Path, store: SqlStore) -> None:
    text, _ = token(store, "admin")
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert text.encode() not in kept


def test_frames_are_taken_from_the_nodes_own_agent_only(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        store = server.dispatcher.services.store
        agent, agent_id = token(store, "agent", "n1")
        others = {scope: token(store, scope)[0] for scope in SCOPES[1:]}
        for text, status, reason in (
            ("", 401, "no_token"),
            ("ee_wrong", 401, "token"),
            (others["read"], 403, "scope"),
            (others["operate"], 403, "scope"),
        ):
            answer = server.send(body(frame()), **({"authorization": f"Bearer {text}"} if text else {}))
            assert (answer.status_code, answer.json()["reason"]) == (status, reason)
            assert answer.headers["content-type"] == "application/problem+json"
        answer = server.send(body(frame(node="n2")), authorization=f"Bearer {agent}")
        assert (answer.status_code, answer.json()["reason"]) == (403, "node")
        assert server.watcher.frames == []
        assert server.send(body(frame()), authorization=f"Bearer {agent}").status_code == 200
        assert server.send(body(frame(node="n2")), authorization=f"Bearer {others['admin']}").status_code == 200
        record = store.get(TOKENS, agent_id)
        assert record is not None
        store.commit(Change(tokens=(replace(record, revoked=True),)))
        assert server.send(body(frame(2)), authorization=f"Bearer {agent}").status_code == 401


READ = ["/api/v1/jobs", "/api/v1/nodes", "/api/v1/incidents/inc_1", "/metrics", "/api/v1/subscriptions"]
OPERATE = ["/api/v1/incidents/inc_1/acknowledge", "/api/v1/nodes/n1/drain", "/api/v1/actions/a/approve"]


def test_every_endpoint_asks_for_its_scope(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        store = server.dispatcher.services.store
        store.commit(Change(incidents=(incident(),)))
        texts: dict[str, str] = {scope: token(store, scope, "n1" if scope == "agent" else None)[0] for scope in SCOPES}

        def status(method: str, path: str, scope: str) -> int:
            headers = {"authorization": f"Bearer {texts[scope]}"} if scope else {}
            return server.client.request(method, path, headers=headers).status_code

        for path in READ:
            assert [status("GET", path, scope) for scope in ("", *SCOPES)] == [401, 403, 200, 200, 200], path
        for path in OPERATE:
            assert [status("POST", path, scope) for scope in ("", "agent", "read")] == [401, 403, 403], path
            assert status("POST", path, "operate") in (200, 404)
        assert [status("GET", "/api/v1/audit", scope) for scope in SCOPES] == [403, 403, 403, 200]
        for path in ("/", "/app/main.js", "/healthz", "/openapi.json"):
            assert status("GET", path, "") == 200
        assert status("GET", "/readyz", "") in (200, 503)


def test_only_the_documented_endpoints_are_open(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        token(server.dispatcher.services.store, "admin")
        paths = server.client.get("/openapi.json").json()["paths"]
        open_paths = set()
        for path, methods in paths.items():
            for method in methods:
                answer = server.client.request(method.upper(), path.replace("{", "").replace("}", ""))
                if answer.status_code != 401:
                    open_paths.add(path)
        assert open_paths == {"/healthz", "/leadz", "/readyz"}


def away(store: SqlStore) -> tuple[Reached, Any]:
    """The records, which can be away, and the same for those who want a store."""
    records = Reached(store)
    return records, records


def test_while_the_records_are_away_tokens_that_were_read_are_believed_for_a_time_and_no_others(
    store: SqlStore,
) -> None:
    records, as_store = away(store)
    clock = FakeClock()
    tokens = Tokens(as_store, clock, loopback=True)
    (known, id_), (unknown, _) = token(store, "read"), token(store, "read")
    tokens.authenticate(asking(known))
    records.away = True
    clock.advance(REMEMBERED_S - 1.0)
    assert tokens.authenticate(asking(known)).who == id_
    with pytest.raises(StoreUnavailable):
        tokens.authenticate(asking(unknown))
    clock.advance(1.0)
    with pytest.raises(StoreUnavailable):
        tokens.authenticate(asking(known))


def test_while_the_records_are_away_an_open_server_stays_open_and_one_with_tokens_closed(store: SqlStore) -> None:
    records, as_store = away(store)
    opened = Tokens(as_store, FakeClock(), loopback=True)
    opened.authenticate(asking())
    token(store, "read")
    closed = Tokens(as_store, FakeClock(), loopback=True)
    assert refused(closed, asking()) == (401, "no_token")
    records.away = True
    assert opened.authenticate(asking()).who == "local"
    assert refused(closed, asking()) == (401, "no_token")


def test_a_token_that_was_revoked_before_the_records_went_away_is_not_believed(store: SqlStore) -> None:
    records, as_store = away(store)
    clock = FakeClock()
    tokens = Tokens(as_store, clock, loopback=True)
    principals = Principals(tokens, as_store, clock)
    text, record = mint("agent", "n1", NOW, None)
    store.commit(Change(tokens=(record,)))
    assert principals.authenticate(asking(text)).principal.node == "n1"
    other, _ = token(store, "agent", "n2")
    store.commit(Change(tokens=(replace(record, revoked=True),)))
    principals.authenticate(asking(other))  # this looks whether tokens have changed
    records.away = True
    with pytest.raises(StoreUnavailable):
        tokens.authenticate(asking(text))


def test_frames_of_known_agents_are_taken_while_the_records_are_away(store: SqlStore) -> None:
    records, as_store = away(store)
    clock = FakeClock()
    principals = Principals(Tokens(as_store, clock, loopback=True), as_store, clock)
    text, _ = token(store, "agent", "n1")
    principals.authenticate(asking(text))
    clock.advance(10 * REMEMBERED_S)
    principals.authenticate(asking(text))  # looks whether tokens have changed, and reads none
    records.away = True
    clock.advance(REMEMBERED_S - 1.0)
    assert principals.authenticate(asking(text)).principal.node == "n1"
    clock.advance(1.0)
    with pytest.raises(StoreUnavailable):
        principals.authenticate(asking(text))
