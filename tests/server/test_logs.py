from __future__ import annotations

import base64
import io
import json
import logging
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.security import auth
from eagle_eye.server.store.store import Change
from eagle_eye.server.telemetry import logs
from eagle_eye.server.telemetry.settings import LogSettings
from eagle_eye.server.transport import connections as guarded_protocol
from tests.server.builders import NOW, SECRET, Running, body, frame, logging_put_back, running
from tests.server.test_end_to_end import eventually

TOKEN = "ee_" + secrets.token_urlsafe(32)
LINE_SEPARATOR = "\u2028"

log = logging.getLogger("eagle_eye.server.tested")


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """Return what is logged; the process logs as before afterwards."""
    with logging_put_back():
        yield io.StringIO()


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_line_of_json_with_what_it_is_about(logged: io.StringIO) -> None:
    logs.configure(LogSettings(format="json"), logged)
    log.warning("a node left", extra={"node": "n1\nforged", "age_s": 2.5})
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    first, second = events(logged)
    assert first.pop("timestamp").endswith("Z")
    assert first == {
        "event": "a node left",
        "level": "warning",
        "logger": "eagle_eye.server.tested",
        "node": "n1\nforged",
        "age_s": 2.5,
    }
    assert (second["event"], second["logger"]) == ("Invalid HTTP request received.", "uvicorn.error")


def test_nothing_from_outside_can_begin_a_line_of_its_own(logged: io.StringIO) -> None:
    logs.configure(LogSettings(), logged)
    forged = f"x\n2026-01-01T00:00:00Z [info] forged\r\x1b[2K{LINE_SEPARATOR}y"
    log.warning(forged, extra={"node": forged})
    log.error("it failed", exc_info=ValueError(forged))
    lines = logged.getvalue().splitlines()
    assert [line.startswith("  ") for line in lines[2:]] == [True] * (len(lines) - 2)
    assert "forged" in lines[0]
    assert "it failed" in lines[1]
    assert "\x1b" not in logged.getvalue()


def test_what_nobody_caught_is_an_event_too(logged: io.StringIO) -> None:
    logs.configure(LogSettings(format="json"), logged)
    thread = threading.Thread(target=lambda: 1 / 0, name="worker")
    thread.start()
    thread.join()
    (event,) = events(logged)
    assert (event["level"], event["where"]) == ("critical", "worker")
    assert "ZeroDivisionError" in event["exception"]


def test_a_level_can_change_while_it_runs(logged: io.StringIO) -> None:
    logs.configure(LogSettings(format="json", level="error"), logged)
    log.warning("not now")
    logs.set_level("debug")
    log.debug("now")
    assert [event["event"] for event in events(logged)] == ["now"]


def test_a_long_value_is_cut(logged: io.StringIO) -> None:
    logs.configure(LogSettings(format="json"), logged)
    log.warning("long", extra={"value": "x" * 1_000_000})
    assert len(logged.getvalue()) < 2 * logs.VALUE_CHARS_MAX


@pytest.mark.parametrize(
    "text",
    [
        f"token {TOKEN} is refused",
        f"{{'authorization': 'Bearer {TOKEN}'}}",
        f"Authorization: bearer {TOKEN[3:]}",
        f"Authorization: Basic {base64.b64encode(TOKEN.encode()).decode()}",
        f"signed with {SECRET}",
        f"https://user:{TOKEN[3:]}@example.com",
        f"https://hooks.example.com/services/T0/{TOKEN[3:]} answered 500",
        f"https://example.com?key={TOKEN[3:]}",
    ],
    ids=["token", "header", "bearer", "basic", "signing", "password", "path", "query"],
)
def test_secrets_are_masked(text: str) -> None:
    said = logs.redacted(text)
    assert logs.MASK in said
    for secret in (TOKEN[3:], SECRET[6:], base64.b64encode(TOKEN.encode()).decode()):
        assert secret not in said


def test_what_is_no_secret_stays() -> None:
    for text in (
        "serving http://127.0.0.1:8470",
        "node n1 has 3 of 4 GPUs",
        "tok-05d6009f1003 is bearer of scope read",
    ):
        assert logs.redacted(text) == text


@given(st.text(), st.text())
def test_a_token_is_masked_whatever_stands_around_it(before: str, after: str) -> None:
    assert TOKEN[3:] not in logs.redacted(f"{before} {TOKEN}{after}")


def test_a_whole_session_logs_none_of_its_secrets(
    tmp_path: Path, logged: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_protocol._log, "filters", [guarded_protocol.Seldom()])  # nothing was said lately
    credential = secrets.token_urlsafe(16)
    hook = f"http://127.0.0.1:9/services/{credential}"
    tokens = {scope: auth.mint(scope, None, NOW, None) for scope in ("admin", "read")}
    flags: dict[str, Any] = {
        "webhooks__allow_private": True,
        "limits__token_burst": 9,
        "log__format": "json",
        "log__level": "debug",
    }
    failing = ConfigurationError(f"public_url: https://user:{credential}@example.com is not understood")
    with running(tmp_path, reread=lambda: raising(failing), **flags) as server:
        logs.configure(server.dispatcher.services.config.log, logged)
        server.dispatcher.services.store.commit(Change(tokens=tuple(token for _, token in tokens.values())))
        used = [credential, *(text for text, _ in tokens.values()), *session(server, tokens["admin"][0], hook)]
        for _ in range(10):
            server.client.get("/api/v1/nodes", headers={"authorization": f"Bearer {tokens['read'][0]}"})
        server.dispatcher.reload()
        with socket.create_connection(("127.0.0.1", server.client.base_url.port or 0)) as raw:
            raw.sendall(f"nonsense\r\nauthorization: Bearer {used[1]}\r\n\r\n".encode())
            raw.recv(1 << 16)
        eventually(lambda: "is refused, the one before stays" in logged.getvalue())
    said = {event["event"] for event in events(logged)}
    assert said >= {
        "Invalid HTTP request received.",
        "requests come too often and are refused",
        "a request failed for a reason that was not foreseen",
        "the configuration is refused, the one before stays",
    }
    assert [secret for secret in used if secret in logged.getvalue()] == []


def session(server: Running, token: str, hook: str) -> list[str]:
    """Do what operators, agents and strangers do; return every secret that was used."""
    client, bearer = server.client, {"authorization": f"Bearer {token}"}
    subscribed = client.post("/api/v1/subscriptions", json={"url": hook}, headers=bearer).json()
    path = f"/api/v1/subscriptions/{subscribed['id']}"
    client.post(f"{path}/ping", headers=bearer)
    rotated = client.post(f"{path}/rotate", headers=bearer).json()
    server.send(body(frame()), **bearer)
    wrong = "ee_" + secrets.token_urlsafe(32)
    client.get("/api/v1/nodes", headers={"authorization": f"Bearer {wrong}"})
    # A bug whose message repeats what the request said, as messages of libraries do.
    store = server.dispatcher.services.store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "get", lambda *_: raising(RuntimeError(f"{bearer} with {rotated['secret']} to {hook}")))
        assert client.get(f"/api/v1/nodes/{token}", headers=bearer).status_code == 500
    return [wrong, subscribed["secret"], rotated["secret"]]


def raising(error: Exception) -> Any:
    raise error
