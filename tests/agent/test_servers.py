"""An agent with several servers sends to one that takes frames, and finds it by itself."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from eagle_eye.agent.clock import SystemClock
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.evidence.requests import Upload, UploadTarget
from eagle_eye.agent.transport.servers import SYSTEMS, TRUST_AGAIN_S, NodeToken, Servers
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.agent.transport.uplink import Destination, Uplink
from tests.agent.fakes import FakeClock, until
from tests.agent.test_uplink import Reply, Server, frame, problem

NOBODY = "http://127.0.0.1:1"
ELSEWHERE = "http://elsewhere.example:8470"


class Agent:
    """A spool and its uplink to several servers."""

    def __init__(self, folder: Path, clock: FakeClock, *urls: str, **options: float) -> None:
        self.spool = Spool(folder / "spool", "n1", Drops())
        self.servers = Servers(urls, clock.monotonic_s)
        self.uplink = Uplink(Destination(self.servers, **options), self.spool, Drops(), clock, jitter=lambda: 1.0)  # type: ignore[arg-type]

    def send(self, frames: int = 1) -> float | None:
        for _ in range(frames):
            self.spool.append(frame)
        return self.uplink.live.send_once()

    def close(self) -> None:
        self.uplink.stop(0.0)
        self.spool.close()


@pytest.fixture
def three() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Server())) for _ in range(3)]


@pytest.fixture
def agent_of(tmp_path: Path, clock: FakeClock) -> Iterator[Callable[..., Agent]]:
    with ExitStack() as stack:
        yield lambda *urls, **options: stack.enter_context(closing(Agent(tmp_path, clock, *urls, **options)))


@pytest.fixture(autouse=True)
def everything_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eagle_eye.agent")


def standby(leader: str) -> Reply:
    """What a standby answers that does not reach the leader."""
    return problem(503, "standby", **{"Retry-After": "1", "Eagle-Eye-Leader": leader})


def passes_on(server: Server, leader: str) -> None:
    """Have the server answer as a standby that passes frames on."""

    def answer(frames: list[object], _headers: object) -> Reply:
        return 200, {"Eagle-Eye-Leader": leader}, server.take(frames)[2]  # type: ignore[arg-type]

    server.refuse = answer  # type: ignore[assignment]


def sequences(*servers: Server) -> list[int]:
    return [each.sequence for server in servers for each in server.frames]


def test_frames_go_to_the_first_while_it_takes_them(three: list[Server], agent_of: Callable[..., Agent]) -> None:
    agent = agent_of(*(server.url for server in three))
    for _ in range(3):
        agent.send()
    assert [len(server.requests) for server in three] == [3, 0, 0]
    assert agent.servers.changes == 0


def test_when_the_leader_dies_its_frames_go_to_the_other_at_once_and_in_order(
    three: list[Server], agent_of: Callable[..., Agent]
) -> None:
    leader, other, _ = three
    agent = agent_of(leader.url, other.url)
    agent.send(2)
    leader.http.server_close()
    leader.hang_up()
    assert agent.send(2) == 0.0  # no wait
    assert agent.send() == 0.0
    assert (sequences(leader), sequences(other)) == ([1, 2], [3, 4, 5])
    assert agent.spool.waiting() == 0


def test_a_server_that_hangs_is_left_when_its_time_is_up(three: list[Server], agent_of: Callable[..., Agent]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        agent = agent_of(f"http://127.0.0.1:{hanging.getsockname()[1]}", three[0].url, answer_s=0.1)
        assert [agent.send(), agent.send()] == [0.0, 0.0]
    assert sequences(three[0]) == [1, 2]


def test_a_change_is_one_line_with_its_reason_and_is_counted(
    three: list[Server], agent_of: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    agent = agent_of(NOBODY, three[0].url)
    for _ in range(4):
        agent.send()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"frames go to server {three[0].url} now: server {NOBODY} cannot be reached: ConnectionRef")
    assert agent.servers.changes == 1


def test_only_after_all_have_refused_in_a_row_is_there_a_wait_and_nothing_is_lost(
    three: list[Server], agent_of: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    first, second, _ = three
    agent = agent_of(first.url, second.url)
    for server in (first, second):
        server.close()
    waits = [agent.send() for _ in range(8)]
    assert waits == pytest.approx([0.0, 0.1, 0.0, 0.2, 0.0, 0.4, 0.0, 0.8])
    (line,) = [record.getMessage() for record in caplog.records]  # not one each time
    assert f"server {first.url} cannot be reached" in line
    assert f"; server {second.url} cannot be reached" in line
    with closing(Server(int(second.url.rpartition(":")[2]))) as back:
        until(lambda: agent.send(0) is None)
        assert sequences(back) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert agent.servers.changes == 1


def test_each_of_three_is_tried_before_the_wait_whomever_they_name(
    three: list[Server], agent_of: Callable[..., Agent]
) -> None:
    agent = agent_of(*(server.url for server in three))
    first, _, third = three
    for server in three:
        server.refuse = lambda _frames, _headers: standby(third.url)
    third.refuse = lambda _frames, _headers: standby(first.url)
    assert [agent.send(), agent.send(), agent.send()] == [0.0, 0.0, 1.5]
    assert [len(server.requests) for server in three] == [1, 1, 1]


def test_a_standby_that_cannot_pass_frames_on_says_who_leads(
    three: list[Server], agent_of: Callable[..., Agent]
) -> None:
    first, second, third = three
    first.refuse = lambda _frames, _headers: standby(third.url + "/")  # the same server, however it is written
    agent = agent_of(*(server.url for server in three))
    assert [agent.send(), agent.send()] == [0.0, 0.0]
    assert sequences(third) == [1, 2]
    assert second.requests == []


def test_a_standby_that_passes_frames_on_says_who_leads_and_the_next_go_there(
    three: list[Server], agent_of: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    first, _, third = three
    passes_on(first, third.url)
    agent = agent_of(*(server.url for server in three))
    for _ in range(3):
        agent.send()
    assert (sequences(first), sequences(third)) == ([1], [2, 3])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(f"stands by, and says that {third.url} leads")


@pytest.mark.parametrize("leader", [ELSEWHERE, "", "no URL", "http://[", "http://x:99999"])
def test_no_server_is_followed_but_those_configured(
    three: list[Server], agent_of: Callable[..., Agent], leader: str
) -> None:
    first, second, _ = three
    passes_on(first, leader)
    agent = agent_of(first.url, second.url)
    for _ in range(3):
        agent.send()
    assert sequences(first) == [1, 2, 3]


def test_a_leader_that_other_servers_reach_and_this_host_does_not_is_not_tried_with_each_frame(
    three: list[Server], agent_of: Callable[..., Agent], clock: FakeClock
) -> None:
    passes_on(three[0], NOBODY)
    agent = agent_of(three[0].url, NOBODY)
    waits = [agent.send() for _ in range(6)]
    assert sequences(three[0]) == [1, 2, 3, 4, 5, 6]
    assert waits == [0.0] * 6
    assert agent.servers.current == three[0].url
    clock.advance(TRUST_AGAIN_S)
    agent.send()
    assert agent.servers.current == NOBODY
    assert agent.servers.changes == 0  # it took nothing


@pytest.mark.parametrize(("status", "reason"), [(503, "busy"), (503, "storage"), (429, "busy"), (500, "x"), (401, "")])
def test_a_leader_in_trouble_is_not_left(
    three: list[Server], agent_of: Callable[..., Agent], status: int, reason: str
) -> None:
    leader, other, _ = three
    leader.refuse = lambda _frames, _headers: problem(status, reason)
    agent = agent_of(leader.url, other.url)
    assert [agent.send(), agent.send()] == pytest.approx([0.1, 0.2])
    assert other.requests == []


@pytest.mark.parametrize("status", [502, 504])
def test_a_proxy_without_its_server_is_left(three: list[Server], agent_of: Callable[..., Agent], status: int) -> None:
    three[0].refuse = lambda _frames, _headers: (status, {}, b"<html>")
    agent = agent_of(three[0].url, three[1].url)
    assert [agent.send(), agent.send()] == [0.0, 0.0]
    assert sequences(three[1]) == [1, 2]


def test_a_list_of_one_backs_off_from_a_standby(three: list[Server], agent_of: Callable[..., Agent]) -> None:
    three[0].refuse = lambda _frames, _headers: standby(ELSEWHERE)
    agent = agent_of(three[0].url)
    assert [agent.send(), agent.send()] == [1.5, 1.5]
    assert agent.spool.waiting() == 2


def test_both_lanes_follow_and_every_frame_arrives_once_acknowledged(three: list[Server], tmp_path: Path) -> None:
    leader, other, _ = three
    spool, clock = Spool(tmp_path / "spool", "n1", Drops()), SystemClock()
    servers = Servers([leader.url, other.url])
    uplink = Uplink(Destination(servers, backoff_s_max=0.2), spool, Drops(), clock)
    for _ in range(200):  # more than one stream: the older ones are the backlog's
        spool.append(frame)
    leader.refuse = lambda _frames, _headers: problem(500, "x")
    uplink.start()
    until(lambda: bool(leader.requests))
    leader.http.server_close()
    leader.hang_up()
    until(lambda: spool.waiting() == 0)
    uplink.stop(1.0)
    spool.close()
    assert len({(each.stream, each.sequence) for each in other.frames}) == 200
    assert servers.changes == 1


def test_an_upload_goes_to_the_server_that_takes_frames(
    three: list[Server], agent_of: Callable[..., Agent], clock: FakeClock
) -> None:
    agent = agent_of(NOBODY, three[0].url)
    upload = Upload(UploadTarget(agent.servers, lambda: ""), clock, lambda: 0.5)
    assert "cannot be reached" in upload.send("ev_1", b"", "application/gzip", 0.1, threading.Event())
    agent.send()
    said = upload.send("ev_1", b"", "application/gzip", 0.1, threading.Event())
    assert said == "the server answered 501"  # this one knows no PUT


def test_a_node_is_enrolled_by_the_next_server_without_a_minute_s_wait(
    three: list[Server], agent_of: Callable[..., Agent], tmp_path: Path, clock: FakeClock
) -> None:
    agent = agent_of(NOBODY, three[0].url)
    three[0].read = lambda body, headers: []  # type: ignore[method-assign]
    three[0].refuse = lambda _frames, _headers: (201, {}, {"token": "ee_new"})
    join = tmp_path / "join"
    join.write_text("ee_join\n")
    token = NodeToken(agent.servers, "n1", tmp_path / "token", join, SYSTEMS, 5.0, clock.monotonic_s)
    assert token.text() == ""
    agent.servers.refused("cannot be reached")
    assert token.text() == "ee_new"
