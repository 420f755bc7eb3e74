from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.agent.transport.servers import ENROL_EVERY_S, NodeToken, Servers, Trust
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.agent.fakes import FakeClock
from tests.server.builders import NOW, Running, body, frame, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("server")) as started:
        yield started


def join(server: Running, **rules: Any) -> str:
    text, record = mint("join", None, NOW, 3600.0, **rules)
    server.dispatcher.services.store.commit(Change(tokens=(record,)))
    return text


@pytest.fixture
def token_of(server: Running, tmp_path: Path, clock: FakeClock) -> Callable[..., NodeToken]:
    def make(node: str, join_text: str | None = None, url: str = "") -> NodeToken:
        join_file = None
        if join_text is not None:
            join_file = tmp_path / "join"
            join_file.write_text(join_text + "\n")
        file = tmp_path / "state" / "token"
        return NodeToken(Servers([url or server.url]), node, file, join_file, Trust(), 5.0, clock.monotonic_s)

    return make


def takes(server: Running, node: str, text: str) -> bool:
    return server.send(body(frame(node=node)), authorization=f"Bearer {text}").status_code == 200


def test_a_host_without_a_token_gets_one_that_the_server_takes(
    server: Running, token_of: Callable[..., NodeToken]
) -> None:
    assert takes(server, "a1", token_of("a1", join(server)).text())


def test_the_token_is_kept_for_the_next_start_where_its_owner_alone_can_read_it(
    server: Running, token_of: Callable[..., NodeToken], tmp_path: Path
) -> None:
    text = token_of("a2", join(server)).text()
    assert token_of("a2").text() == text
    file = tmp_path / "state" / "token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_a_token_that_is_refused_is_replaced_where_the_join_token_allows_it(
    server: Running, token_of: Callable[..., NodeToken], clock: FakeClock
) -> None:
    token = token_of("a3", join(server, replaces=True))
    old = token.text()
    clock.advance(ENROL_EVERY_S)
    assert token.refused()
    assert token.text() != old
    assert takes(server, "a3", token.text())
    assert not takes(server, "a3", old)


def test_a_token_that_somebody_put_into_the_file_is_tried_before_another_is_bought(
    server: Running, token_of: Callable[..., NodeToken], tmp_path: Path
) -> None:
    token = token_of("a4", join(server))
    token.text()
    (tmp_path / "state" / "token").write_text("ee_new\n")
    assert token.refused()
    assert token.text() == "ee_new"


def test_a_host_that_may_not_enrol_says_why_once_and_asks_again_only_after_a_while(
    server: Running,
    token_of: Callable[..., NodeToken],
    tmp_path: Path,
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = token_of("a5", join(server)), token_of("a5", join(server))
    first.text()
    (tmp_path / "state" / "token").unlink()  # the host was installed anew
    with caplog.at_level(logging.WARNING, "eagle_eye.agent"):
        for _ in range(3):
            assert second.text() == ""
    assert [record.getMessage() for record in caplog.records] == [
        "node a5 cannot be enrolled: the server answered 409: " + caplog.records[0].getMessage().partition("409: ")[2]
    ]
    assert "--replaces" in caplog.text
    asked = server.metric("http_refused_total", reason="enrolled")
    second.text()
    assert server.metric("http_refused_total", reason="enrolled") == asked
    clock.advance(ENROL_EVERY_S)
    second.text()
    assert server.metric("http_refused_total", reason="enrolled") == asked + 1


@pytest.mark.parametrize("held", ["two words", "\N{SNOWMAN}", "x" * 300, ""])
def test_a_file_that_holds_no_token_is_no_token(token_of: Callable[..., NodeToken], tmp_path: Path, held: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "token").write_text(held, encoding="utf-8")
    token = token_of("a6")
    assert token.text() == ""
    assert not token.refused()


def test_a_server_that_cannot_be_reached_leaves_the_host_without_a_token_and_without_a_half_written_file(
    token_of: Callable[..., NodeToken], tmp_path: Path
) -> None:
    assert token_of("a7", "ee_join", url="http://127.0.0.1:1").text() == ""
    assert list((tmp_path / "state").iterdir()) == []
