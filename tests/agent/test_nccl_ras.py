"""NCCL's RAS service, asked over a real connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.collectors import nccl_ras
from eagle_eye.agent.collectors.nccl_ras import (
    DEFAULT_PORT,
    EVERY_S,
    BadReply,
    Communicator,
    NcclRasCollector,
    NoAnswer,
    RasHost,
    RasMember,
    RasProblem,
    Reply,
    TooLong,
    ask_ras,
    own_addresses,
)
from eagle_eye.agent.processes.process_registry import TrainingProcess
from tests.agent.fakes import FakeClock
from tests.agent.nccl_fakes import FakeProc, process, published
from tests.loopback import free_port

DATA = Path(__file__).parent / "data/nccl"
JSON, TEXT = (DATA / "ras_2.28.9.json").read_bytes(), (DATA / "ras_verbose.txt").read_bytes()


class Service:
    """A RAS service on loopback; ``answers`` maps a command to its answer, None closes, ... says nothing."""

    def __init__(self, **changes: Any) -> None:
        self.heard: list[str] = []
        self.answers: dict[str, Any] = {
            "CLIENT PROTOCOL": b"SERVER PROTOCOL 2\n",
            "TIMEOUT": b"OK\n",
            "SET FORMAT": b"OK\n",
            "VERBOSE STATUS": JSON,
        } | {name.replace("_", " "): value for name, value in changes.items()}
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(connection)
            with contextlib.suppress(OSError):  # the client has gone
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            for raw in lines:
                line = raw.decode().strip()
                self.heard.append(line)
                answer = next(self.answers[name] for name in self.answers if line.startswith(name))
                if answer is None:
                    break
                if answer is not ...:
                    connection.sendall(answer)
                if line == "VERBOSE STATUS" and answer is not ...:
                    break
        connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._open:
            connection.close()
        self._thread.join(timeout=5.0)


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(**changes: Any) -> Service:
        services.append(Service(**changes))
        return services[-1]

    yield start
    for service in services:
        service.close()


def test_the_service_is_asked_in_its_own_words(serve: Callable[..., Service]) -> None:
    service = serve()
    assert ask_ras(service.port, 5.0).nccl_version == "2.28.9"
    assert service.heard == ["CLIENT PROTOCOL 2", "TIMEOUT 3", "SET FORMAT json", "VERBOSE STATUS"]


def test_a_service_that_knows_no_json_is_read_as_text(serve: Callable[..., Service]) -> None:
    service = serve(SET_FORMAT=b"ERROR: Unknown command SET FORMAT json\n", VERBOSE_STATUS=TEXT)
    assert ask_ras(service.port, 5.0).nccl_version == "2.27.3"


def test_text_is_asked_for_where_it_is_wanted(serve: Callable[..., Service]) -> None:
    service = serve(VERBOSE_STATUS=TEXT)
    ask_ras(service.port, 5.0, text=True)
    assert "SET FORMAT json" not in service.heard


def test_a_port_where_nobody_listens_is_refused() -> None:
    with pytest.raises(NoAnswer, match="nobody listens") as caught:
        ask_ras(free_port(), 5.0)
    assert caught.value.refused


def test_a_process_that_is_stopped_is_tried_again_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "HANDSHAKE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as stopped, pytest.raises(NoAnswer, match="no handshake within"):
        ask_ras(stopped.getsockname()[1], 5.0)


def test_a_status_that_does_not_come_ends_at_the_deadline(serve: Callable[..., Service]) -> None:
    with pytest.raises(NoAnswer, match="no status within"):
        ask_ras(serve(VERBOSE_STATUS=...).port, 0.2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"CLIENT_PROTOCOL": b"HTTP/1.1 400 Bad Request\n"}, "no RAS service: it says 'HTTP/1.1 400"),
        ({"CLIENT_PROTOCOL": b"x" * 9_000}, "a line of more than 4096 bytes"),
        ({"CLIENT_PROTOCOL": None}, "it closed the connection"),
        ({"TIMEOUT": None}, "it closed the connection"),
    ],
)
def test_what_is_no_ras_service_is_told_apart(serve: Callable[..., Service], changes: Any, why: str) -> None:
    with pytest.raises(NoAnswer, match=why):
        ask_ras(serve(**changes).port, 5.0)


def test_an_answer_without_a_status_is_bad(serve: Callable[..., Service]) -> None:
    with pytest.raises(BadReply):
        ask_ras(serve(VERBOSE_STATUS=b"").port, 5.0)


def test_an_answer_that_is_too_long_is_not_read_to_its_end(
    serve: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_ras, "REPLY_BYTES_MAX", 100)
    with pytest.raises(TooLong, match="more than 100 bytes"):
        ask_ras(serve().port, 5.0)


HERE, THERE = "10.0.0.1", "10.0.0.2"


def reply(*members: tuple[int, str, int, int], size: int = 2, **more: Any) -> Reply:
    found = Communicator("0xa", size, tuple(RasMember(*member) for member in members))
    return Reply("2.29.1", (found,), **more)


class Node:
    """A node whose RAS service answers as it was told."""

    def __init__(self, tmp_path: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.proc = FakeProc(tmp_path)
        self.drops = Drops()
        self.asked: list[tuple[int, bool]] = []
        self.answer: Reply | Exception = reply((0, HERE, 1000, 7), (1, HERE, 1001, 8))
        self.cpu_s = 0.0
        self.cost_s = 0.0

    def ask(self, port: int, deadline_s: float, *, text: bool = False) -> Reply:
        self.asked.append((port, text))
        self.cpu_s += self.cost_s
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def agent(
        self, *processes: TrainingProcess, environ: dict[str, str] | None = None, **more: Any
    ) -> NcclRasCollector:
        for one in processes:
            self.proc.runs(one.pid, environ)
        host = RasHost(
            proc=self.proc.path,
            addresses=lambda: frozenset({HERE}),
            asker=self.ask,
            monotonic_s=self.clock.monotonic_s,
            cpu_s=lambda: self.cpu_s,
        )
        return NcclRasCollector(published(*processes), self.drops, host=host, **more)


@pytest.fixture
def node(tmp_path: Path, clock: FakeClock) -> Node:
    return Node(tmp_path, clock)


def test_counts_of_a_job_that_is_all_here_become_rows(node: Node) -> None:
    agent = node.agent(process(0), process(1))
    assert agent.collect(0.0).devices == {0: {"nccl_sequence": 7.0}, 1: {"nccl_sequence": 8.0}}


def test_counts_of_some_ranks_of_a_job_are_in_no_row(node: Node) -> None:
    node.answer = reply((0, HERE, 1000, 7), (1, THERE, 1000, 8))
    assert node.agent(process(0)).collect(0.0).devices == {}


def test_where_every_node_asks_each_tells_of_its_own_ranks(node: Node) -> None:
    node.answer = reply((0, THERE, 1001, 7), (1, HERE, 1001, 8))
    agent = node.agent(process(1), every_node=True)
    assert agent.collect(0.0).devices == {1: {"nccl_sequence": 8.0}}


def test_a_count_comes_from_the_widest_communicator(node: Node) -> None:
    narrow = Communicator("0xb", 1, (RasMember(0, HERE, 1000, 900),))
    wide = Communicator("0xa", 2, (RasMember(0, HERE, 1000, 7), RasMember(1, HERE, 1001, 7)))
    node.answer = Reply("x", (narrow, wide))
    assert node.agent(process(0)).collect(0.0).devices == {0: {"nccl_sequence": 7.0}}


def test_a_device_of_which_another_source_tells_is_left_to_it(node: Node) -> None:
    agent = node.agent(process(0), process(1), taken=lambda device: device == 0)
    assert agent.collect(0.0).devices == {1: {"nccl_sequence": 8.0}}


def test_only_the_node_with_rank_0_asks(node: Node) -> None:
    assert node.agent(process(1)).collect(0.0).devices == {}
    assert node.asked == []


def test_it_is_asked_once_in_ten_seconds_and_never_more_often(node: Node) -> None:
    agent = node.agent(process(0), process(1), every_s=0.1)
    for _ in range(21):
        agent.collect(node.clock.now_s())
        node.clock.advance(1.0)
    assert len(node.asked) == 3
    assert EVERY_S == 10.0


def test_answers_that_are_costly_to_read_are_asked_for_less_often(node: Node) -> None:
    node.cost_s = 0.06  # a job of a thousand ranks
    agent = node.agent(process(0))
    agent.collect(0.0)
    node.clock.advance(59.0)
    agent.collect(0.0)
    assert len(node.asked) == 1
    node.clock.advance(2.0)
    agent.collect(0.0)
    assert len(node.asked) == 2


def test_what_is_wrong_is_said_until_it_is_asked_again(node: Node) -> None:
    node.answer = reply(troubles=(RasProblem("DEAD", "considered dead", "0xa", 1, THERE, 1000),))
    agent = node.agent(process(0))
    said = "NCCL RAS: DEAD: rank 1 on 10.0.0.2, process 1000"
    assert agent.collect(5.0).problem == said
    node.clock.advance(1.0)
    assert agent.collect(6.0).problem == said
    node.answer = reply()
    node.clock.advance(EVERY_S)
    assert agent.collect(15.0).problem == ""


def test_the_newest_answer_is_kept_for_whoever_gathers_evidence(node: Node) -> None:
    agent = node.agent(process(0))
    agent.collect(5.0)
    (answer,) = agent.answers()
    assert (answer.port, answer.time_s, answer.reply) == (DEFAULT_PORT, 5.0, node.answer)


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, [28_028]),
        ({"NCCL_RAS_ADDR": "localhost:29000"}, [29_000]),
        ({"NCCL_RAS_ADDR": "[::1]:29001"}, [29_001]),
        ({"NCCL_RAS_ENABLE": "0"}, []),
        ({"NCCL_RAS_ADDR": "10.9.9.9:22"}, []),
        ({"NCCL_RAS_ADDR": "localhost:99999"}, []),
    ],
)
def test_the_port_is_the_jobs_own_and_only_this_host_is_asked(
    node: Node, environ: dict[str, str], asked: list[int]
) -> None:
    observed = node.agent(process(0), environ=environ).collect(0.0)
    assert [port for port, _ in node.asked] == asked
    refused = "NCCL_RAS_ADDR" in environ and not asked
    assert ("only loopback is asked" in observed.problem) == refused


def test_a_service_that_never_answered_is_no_problem_and_one_that_stopped_is(node: Node) -> None:
    works, node.answer = node.answer, NoAnswer("port 28028: nobody listens", refused=True)
    agent = node.agent(process(0))
    assert agent.collect(0.0).problem == ""
    for answer, problem in ((works, ""), (NoAnswer("port 28028: nobody listens", refused=True), "nobody listens")):
        node.answer = answer
        node.clock.advance(EVERY_S)
        assert problem in agent.collect(0.0).problem
    assert node.drops.snapshot() == {"nccl_ras_refused": 2}


def test_no_answer_and_no_status_are_told_apart(node: Node) -> None:
    agent = node.agent(process(0))
    for error, problem in ((NoAnswer("port 1: no status"), "port 1: no status"), (BadReply("torn"), "torn")):
        node.answer = error
        assert problem in agent.collect(0.0).problem
        node.clock.advance(EVERY_S)
    assert node.drops.snapshot() == {"nccl_ras_unanswered": 1, "nccl_ras_malformed": 1}


def test_an_answer_too_long_in_json_is_asked_for_in_text(node: Node) -> None:
    node.answer = TooLong("port 28028: more than 16777216 bytes")
    agent = node.agent(process(0))
    assert "asked in text from now on" in agent.collect(0.0).problem
    node.clock.advance(EVERY_S)
    agent.collect(0.0)
    assert node.asked == [(DEFAULT_PORT, False), (DEFAULT_PORT, True)]


def test_the_number_of_ports_is_bounded(node: Node) -> None:
    node.agent(process(0), ports=range(1, 100)).collect(0.0)
    assert len(node.asked) == nccl_ras.PORTS_MAX


def test_loopback_is_an_address_of_this_node() -> None:
    assert "127.0.0.1" in own_addresses()
