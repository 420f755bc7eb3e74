"""Old frames and new ones: a backlog is delivered whole, and delays nothing."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.clock import SystemClock
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport import uplink as uplink_module
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import STREAM_FRAMES_MAX, Spool
from eagle_eye.agent.transport.uplink import Destination, Uplink
from eagle_eye.schema.frame import Frame
from tests.agent.fakes import REPOSITORY, FakeClock, script, until
from tests.agent.test_uplink import Agent, Reply, Server, frame, problem

OUTAGE = 6 * STREAM_FRAMES_MAX + 10


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def agent(server: Server, tmp_path: Path, clock: FakeClock) -> Iterator[Agent]:
    made = Agent(server.url, tmp_path, clock)
    yield made
    made.close()


class Behind:
    """A spool full of an outage's frames, and an uplink in real time."""

    def __init__(self, url: str, folder: Path) -> None:
        self.drops = Drops()
        self.spool = Spool(folder / "spool", "n1", self.drops)
        self.put(OUTAGE)
        self.uplink = Uplink(Destination(Servers([url]), backoff_s_max=0.2), self.spool, self.drops, SystemClock())

    def put(self, count: int = 1) -> None:
        for _ in range(count):
            self.spool.append(frame)

    def live_stream(self) -> str:
        return self.spool._live.name

    def close(self) -> None:
        self.uplink.stop(0.5)
        self.spool.close()


@pytest.fixture
def behind(server: Server, tmp_path: Path) -> Iterator[Behind]:
    made = Behind(server.url, tmp_path)
    yield made
    made.close()


def test_after_an_outage_the_newest_go_first_and_the_backlog_oldest_first(agent: Agent, server: Server) -> None:
    agent.put(OUTAGE)
    while agent.send() is not None:
        pass
    first = [each.sequence for each in server.frames]
    assert first == [*range(1, STREAM_FRAMES_MAX + 1), *range(1, 11)]
    while agent.uplink.backlog.send_once() is not None:
        pass
    order = list(dict.fromkeys(each.stream for each in server.frames))
    assert len(server.frames) == OUTAGE
    assert len(order) == 7
    assert agent.spool.waiting() == 0


def test_frames_of_one_stream_are_always_sent_in_order(agent: Agent, server: Server) -> None:
    agent.put(OUTAGE)
    for lane in (agent.uplink.live, agent.uplink.backlog, agent.uplink.live, agent.uplink.backlog):
        while lane.send_once() is not None:
            agent.put(20)
            if len(server.frames) > 1000:
                break
    newest: dict[str, int] = {}
    for each in server.frames:
        assert each.sequence == newest.get(each.stream, 0) + 1
        newest[each.stream] = each.sequence
    assert len(newest) > 1


def test_the_backlog_is_sent_at_a_bounded_pace(agent: Agent, server: Server) -> None:
    agent.put(OUTAGE)
    agent.uplink.backlog._jitter = lambda: 0.0
    assert agent.uplink.backlog.send_once() == pytest.approx(0.5)
    agent.uplink.backlog._jitter = lambda: 1.0
    assert agent.uplink.backlog.send_once() == pytest.approx(1.5)

    def slow(_frames: list[Frame], _headers: dict[str, str]) -> Reply | None:
        agent.clock.advance(2.0)
        return None

    server.refuse = slow
    assert agent.uplink.backlog.send_once() == pytest.approx(6.0)


def test_a_busy_server_stops_the_backlog_alone(agent: Agent, server: Server) -> None:
    agent.put(OUTAGE)
    live = {agent.spool._live.name, agent.spool._recent.name if agent.spool._recent else ""}
    server.refuse = lambda frames, _headers: None if frames[0].stream in live else problem(503, "busy")
    while agent.send():
        pass
    waits = [agent.uplink.backlog.send_once() for _ in range(11)]
    assert waits == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0])


def test_a_poisoned_frame_of_the_backlog_is_dropped_and_the_others_arrive(agent: Agent, server: Server) -> None:
    agent.put(OUTAGE)
    poisoned = agent.spool._backlog[0].name

    def refuse(frames: list[Frame], _headers: dict[str, str]) -> Reply | None:
        bad = any((each.stream, each.sequence) == (poisoned, 3) for each in frames)
        return problem(400, "metric") if bad else None

    server.refuse = refuse
    while agent.uplink.backlog.send_once() is not None:
        pass
    assert len(server.frames) == 5 * STREAM_FRAMES_MAX - 1
    assert agent.drops.snapshot() == {"rejected_metric": 1}


def test_a_live_frame_does_not_wait_for_a_slow_answer_to_old_ones(
    behind: Behind, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(frames: list[Frame], _headers: dict[str, str]) -> Reply | None:
        if frames[0].stream == oldest:
            asked.set()
            answer.wait(10.0)
        return None

    oldest = behind.spool._backlog[0].name
    server.refuse = slow
    behind.uplink.start()
    behind.uplink.notify()
    assert asked.wait(5.0)
    live = behind.live_stream()
    begin_s = time.monotonic()
    behind.put()
    behind.uplink.notify()
    until(lambda: any((each.stream, each.sequence) == (live, 11) for each in server.frames))
    assert time.monotonic() - begin_s < 1.0
    answer.set()


def test_live_frames_arrive_within_a_second_while_an_hour_of_old_ones_waits(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink_module, "BACKLOG_EVERY_S", 0.05)
    behind = Behind(server.url, tmp_path)
    behind.put(3600 - OUTAGE)
    behind.uplink.start()
    until(lambda: behind.uplink.is_well is True)
    worst_s = 0.0
    for _ in range(20):
        behind.put()
        stream, sequence = behind.live_stream(), behind.spool._live.last
        begin_s = time.monotonic()
        behind.uplink.notify()
        until(lambda: any((e.stream, e.sequence) == (stream, sequence) for e in server.frames[-300:]))  # noqa: B023
        worst_s = max(worst_s, time.monotonic() - begin_s)
    assert behind.spool.has_backlog()  # else nothing was measured
    assert worst_s < 1.0
    until(lambda: behind.spool.waiting() == 0, timeout_s=60.0)
    assert len({(each.stream, each.sequence) for each in server.frames}) == len(server.frames) == 3620
    behind.close()


def test_while_the_live_lane_fails_no_old_frame_is_sent(behind: Behind, server: Server) -> None:
    server.refuse = lambda _frames, _headers: problem(503, "busy")
    behind.uplink.start()
    until(lambda: len(server.requests) > 5)
    assert behind.uplink.backlog.delivered == 0
    assert behind.uplink.backlog._backoff.failures == 0
    server.refuse = lambda _frames, _headers: None
    until(lambda: behind.uplink.backlog.delivered > 0)


def test_nothing_old_comes_after_the_goodbye(behind: Behind, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    behind.uplink.start()
    until(lambda: behind.uplink.backlog.delivered > 0)
    behind.put()
    live = behind.live_stream()
    behind.uplink.stop(2.0)
    assert server.frames[-1].stream == live
    assert behind.spool.has_backlog()


APPENDER = """
    import sys, pathlib
    from eagle_eye.agent.clock import SystemClock
    from eagle_eye.agent.collector import Drops
    from eagle_eye.agent.transport.servers import Servers
    from eagle_eye.agent.transport.spool import Spool
    from eagle_eye.agent.transport.uplink import Destination, Uplink
    from tests.agent.test_uplink import frame
    spool = Spool(pathlib.Path(sys.argv[2]), "n1", Drops())
    uplink = Uplink(Destination(Servers([sys.argv[1]]), backoff_s_max=0.2), spool, Drops(), SystemClock())
    uplink.start()
    while True:
        made = []
        sequence = spool.append(lambda stream, sequence: made.append(stream) or frame(stream, sequence))
        uplink.notify()
        print(made[0], sequence, flush=True)
"""


@pytest.mark.parametrize("fails", ["never", "always", "now and then"])
def test_after_a_kill_every_frame_is_at_the_server_or_in_the_spool(server: Server, tmp_path: Path, fails: str) -> None:
    requests = itertools.count()

    def refuse(_frames: list[Frame], _headers: dict[str, str]) -> Reply | None:
        if fails == "never" or (fails == "now and then" and next(requests) % 3):
            return None
        return problem(503, "busy")

    server.refuse = refuse
    with script(APPENDER, server.url, str(tmp_path / "spool"), PYTHONPATH=str(REPOSITORY)) as program:
        assert program.stdout is not None
        said = [program.stdout.readline() for _ in range(300)]
        program.send_signal(signal.SIGKILL)
        said += program.stdout.read().splitlines()
        program.wait()
    kept = {(each.stream, each.sequence) for each in server.frames}
    spool = Spool(tmp_path / "spool", "n1", Drops())
    for source in (spool.newest, spool.backlog):
        while (batch := source(1000, 1 << 30)) is not None:
            kept |= {(batch.stream, sequence) for sequence, _ in batch.frames}
            spool.acknowledge(batch.stream, batch.frames[-1][0])
    spool.close()
    promised = {(line.split()[0], int(line.split()[1])) for line in said if len(line.split()) == 2}
    assert len(promised) >= 300
    assert promised <= kept


def test_a_backlog_of_an_earlier_agent_is_delivered(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink_module, "BACKLOG_EVERY_S", 0.05)
    first = Behind("http://127.0.0.1:1", tmp_path)
    first.close()
    second = Behind(server.url, tmp_path)
    second.uplink.start()
    until(lambda: len(server.frames) == 2 * OUTAGE, timeout_s=60.0)
    second.close()
