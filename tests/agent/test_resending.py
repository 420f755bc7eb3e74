"""What another server acknowledged goes to the next one beside new frames, at its pace and never before them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.transport import spool as spool_module
from eagle_eye.agent.transport.uplink import journal_of
from eagle_eye.schema.frame import KEPT_HEADER, Frame
from tests.agent.fakes import FakeClock
from tests.agent.test_uplink import Agent, Reply, Server, problem

KEPT = KEPT_HEADER.lower()


@pytest.fixture(autouse=True)
def _for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame waits for the server before it is written."""
    monkeypatch.setattr(spool_module, "ANSWER_WAIT_S", 0.0)


class Journals(Server):
    """A server that names its journal, and how often it wants kept frames."""

    def __init__(self) -> None:
        super().__init__()
        self.journal: object = "a1"
        self.every_s = 0.0

    def take(self, frames: list[Frame]) -> Reply:
        status, headers, answer = super().take(frames)
        assert isinstance(answer, dict)
        return status, headers, {**answer, "journal": self.journal, "resend_seconds": self.every_s}


@pytest.fixture
def server() -> Iterator[Journals]:
    made = Journals()
    yield made
    made.close()


@pytest.fixture
def agent(server: Journals, tmp_path: Path, clock: FakeClock) -> Iterator[Agent]:
    made = Agent(server.url, tmp_path, clock)
    yield made
    made.close()


def live(agent: Agent, count: int) -> None:
    for _ in range(count):
        agent.put()
        while agent.send() is not None:
            pass


def resend(agent: Agent) -> list[float]:
    """Send again until nothing is left; return how long was waited before each call."""
    waited: list[float] = []
    while (wait_s := agent.uplink.resend_once()) is not None:
        waited.append(wait_s)
        agent.clock.advance(wait_s)
        assert len(waited) < 1000
    return waited


def told(server: Server) -> list[int]:
    """Return what was said to follow, request by request."""
    return [int(each[KEPT]) for each in server.requests if KEPT in each]


def test_a_server_with_another_journal_gets_what_the_one_before_acknowledged(agent: Agent, server: Journals) -> None:
    live(agent, 150)
    server.journal = "b2"
    server.frames.clear()
    live(agent, 1)
    resend(agent)
    assert [each.sequence for each in server.frames] == [151, *range(129, 151), *range(65, 129), *range(1, 65)]
    assert told(server) == [128, 64, 0]
    assert agent.spool.waiting() == 0


def test_a_server_with_the_same_journal_gets_nothing_again(agent: Agent, server: Journals) -> None:
    live(agent, 150)
    assert agent.uplink.resend_once() is None
    assert told(server) == []


@pytest.mark.parametrize("journal", [None, "", 7, "../../etc", "a" * 65, "ü"])
def test_a_server_that_names_no_journal_gets_nothing_again(agent: Agent, server: Journals, journal: object) -> None:
    assert journal_of({"journal": journal}) == ""
    live(agent, 10)
    server.journal = journal
    live(agent, 1)
    assert agent.uplink.resend_once() is None
    assert told(server) == []


def test_a_fleet_begins_at_random_and_keeps_the_servers_pace(agent: Agent, server: Journals) -> None:
    live(agent, 150)
    server.journal, server.every_s = "b2", 50.0
    live(agent, 1)
    agent.uplink._jitter = lambda: 0.5
    began_s = agent.clock.passed_s
    at_s: list[float] = []
    while (wait_s := agent.uplink.resend_once()) is not None:
        if len(told(server)) > len(at_s):
            at_s.append(agent.clock.passed_s - began_s)
        agent.clock.advance(wait_s)
    assert at_s == pytest.approx([25.0, 75.0, 125.0], abs=2.0)


def test_a_busy_server_is_asked_ever_less_often_and_gets_all_in_the_end(agent: Agent, server: Journals) -> None:
    live(agent, 70)
    server.journal = "b2"
    live(agent, 1)
    server.refuse = lambda _frames, headers: problem(503, "busy") if KEPT in headers else None
    waits = []
    for _ in range(6):
        assert agent.uplink.resend_once() == 0.0
        assert agent.uplink._resend_at_s is not None
        waits.append(agent.uplink._resend_at_s - agent.clock.passed_s)
        agent.clock.advance(waits[-1])
    assert waits == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    server.refuse = lambda _frames, _headers: None
    resend(agent)
    assert agent.spool.lacking_count("b2") == 0


def test_what_the_next_server_refuses_is_dropped_and_the_rest_sent(agent: Agent, server: Journals) -> None:
    live(agent, 20)
    server.journal = "b2"
    live(agent, 1)
    server.frames.clear()
    server.refuse = lambda frames, _headers: (
        problem(400, "metric") if any(each.sequence == 7 for each in frames) else None
    )
    resend(agent)
    assert sorted(each.sequence for each in server.frames) == [*range(1, 7), *range(8, 21)]
    assert agent.drops.snapshot() == {"rejected_metric": 1}


def test_a_third_server_during_it_gets_what_it_lacks(agent: Agent, server: Journals) -> None:
    live(agent, 150)
    server.journal = "b2"
    live(agent, 1)
    agent.uplink.resend_once()
    server.journal = "c3"
    live(agent, 1)
    server.frames.clear()
    resend(agent)
    assert sorted(each.sequence for each in server.frames) == list(range(1, 152))
