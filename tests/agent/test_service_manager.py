from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.collector import CollectorStanding, Observed, TickFrame
from eagle_eye.agent.loop import STATUS_CHARS_MAX, STATUS_EVERY_S, ServiceManager, status_of
from tests.agent.fakes import REPOSITORY, FakeClock
from tests.agent.test_loop import Scripted, Station, node_row

UNIT = REPOSITORY / "packaging/systemd/eagle-eye-agent.service"


class Systemd:
    """The other end of the notification socket."""

    def __init__(self, address: str | bytes, name: str, clock: FakeClock) -> None:
        self.clock = clock
        self.environ = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000000"}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def manager(self, **environ: str) -> ServiceManager:
        return ServiceManager(self.environ | environ, self.clock.monotonic_s, pid=77)

    def heard(self) -> list[list[str]]:
        """Return the lines of each message that has come."""
        messages: list[list[str]] = []
        try:
            while True:
                messages.append(self._socket.recv(4096).decode().split("\n"))
        except BlockingIOError:
            return messages

    def lines(self) -> list[str]:
        return [line for message in self.heard() for line in message]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path, clock: FakeClock) -> Iterator[Systemd]:
    path = str(tmp_path / "notify")
    made = Systemd(path, path, clock)
    yield made
    made.close()


def tick(*standings: CollectorStanding) -> TickFrame:
    return TickFrame(1_000_000.0, 1.0, Observed(), (), standings, 1)


OK = CollectorStanding("host", "ok", 0.0, 0)
BAD = CollectorStanding("nvml", "failed: gpu 3: lost\nREADY=1", 0.0, 1)
NONE = CollectorStanding("fabric", "unsupported: no port", 0.0, 0)


def test_the_first_frame_makes_the_service_ready_once(systemd: Systemd) -> None:
    manager = systemd.manager()
    manager.alive()
    assert not any(line == "READY=1" for line in systemd.lines())
    manager.ticked(tick(OK))
    assert systemd.lines()[:2] == ["READY=1", "STATUS=1 of 1 collectors ok"]
    manager.ticked(tick(OK))
    assert "READY=1" not in systemd.lines()


def test_a_start_that_takes_long_asks_for_more_time(systemd: Systemd) -> None:
    manager = systemd.manager(WATCHDOG_USEC="")
    for _ in range(60):
        systemd.clock.advance(1.0)
        manager.alive()
    lines = systemd.lines()
    assert set(lines) == {"EXTEND_TIMEOUT_USEC=60000000"}
    assert 6 <= len(lines) <= 7


def test_signs_of_life_come_three_times_as_often_as_they_must(systemd: Systemd) -> None:
    manager = systemd.manager()
    manager.ticked(tick(OK))
    systemd.heard()
    assert manager.every_s == 10.0
    for _ in range(120):
        systemd.clock.advance(0.5)
        manager.alive()
    assert 6 <= systemd.lines().count("WATCHDOG=1") <= 7


@pytest.mark.parametrize(
    "environ",
    [{"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_PID": "78"}],
)
def test_a_watchdog_that_is_not_for_us_is_not_fed(systemd: Systemd, environ: dict[str, str]) -> None:
    manager = systemd.manager(**environ)
    manager.ticked(tick(OK))
    assert manager.every_s == math.inf
    assert "WATCHDOG=1" not in systemd.lines()
    assert systemd.manager(WATCHDOG_PID="77").every_s == 10.0


def test_the_status_is_told_when_it_changes_and_not_too_often(systemd: Systemd) -> None:
    manager = systemd.manager()
    manager.ticked(tick(OK))
    manager.ticked(tick(OK, BAD))
    assert [line for line in systemd.lines() if line.startswith("STATUS=")] == ["STATUS=1 of 1 collectors ok"]
    for _ in range(5):
        systemd.clock.advance(STATUS_EVERY_S)
        manager.ticked(tick(OK, BAD))
    (said,) = [line for line in systemd.lines() if line.startswith("STATUS=")]
    assert said == "STATUS=1 of 2 collectors ok; nvml failed: gpu 3: lost READY=1"


def test_the_status_is_one_short_line_without_what_the_host_cannot_have() -> None:
    assert status_of(tick(OK, NONE)) == "1 of 1 collectors ok"
    long = CollectorStanding("nvml", "failed: " + "x" * 5_000, 0.0, 1)
    assert len(status_of(tick(long))) == STATUS_CHARS_MAX


def test_an_abstract_address_is_spoken_to(clock: FakeClock) -> None:
    name = f"eagle-eye-test-{os.getpid()}"
    systemd = Systemd(b"\0" + name.encode(), f"@{name}", clock)
    systemd.manager().stopping("SIGTERM")
    assert systemd.lines() == ["STOPPING=1", "STATUS=stopping: SIGTERM"]
    systemd.close()


@pytest.mark.parametrize("name", ["", "relative", "vsock:2:1", "/" + "x" * 200])
def test_without_an_address_nothing_is_said_and_nothing_waited_for(clock: FakeClock, name: str) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000000"}, clock.monotonic_s)
    manager.ticked(tick(OK))
    manager.stopping("SIGTERM")
    assert manager.every_s == math.inf


def test_a_manager_that_has_gone_is_one_warning(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")}, clock.monotonic_s)
    for _ in range(5):
        clock.advance(100.0)
        manager.alive()
    assert caplog.text.count("cannot be notified") == 1


def test_a_manager_that_does_not_read_is_not_waited_for(systemd: Systemd) -> None:
    manager = systemd.manager()
    for _ in range(2_000):  # more than the socket takes
        manager.stopping("SIGTERM")
    manager.ticked(tick(OK))
    assert "READY=1" not in systemd.lines()
    manager.ticked(tick(OK))  # what did not reach it is said again
    assert systemd.lines() == ["READY=1", "STATUS=1 of 1 collectors ok", "WATCHDOG=1"]


def test_the_loop_is_ready_with_its_first_frame_and_alive_between_rare_ones(systemd: Systemd) -> None:
    station = Station(systemd.clock, Scripted("host", node_row), interval_s=60.0, service=systemd.manager())
    station.run(2)
    messages = systemd.heard()
    first = next(index for index, lines in enumerate(messages) if "READY=1" in lines)
    assert messages[:first] == [["EXTEND_TIMEOUT_USEC=60000000", "WATCHDOG=1"]] * first
    after = [line for lines in messages[first + 1 :] for line in lines]
    assert after.count("WATCHDOG=1") >= 6
    assert after[-2:] == ["STOPPING=1", "STATUS=stopping: SIGTERM"]


def test_a_loop_that_hangs_gives_no_sign_of_life(systemd: Systemd) -> None:
    station = Station(systemd.clock, Scripted("host", node_row), service=systemd.manager())
    heard: list[str] = []

    def hang() -> None:
        if len(station.frames) == 2:
            systemd.heard()
            systemd.clock.advance(3600.0)  # the disk does not answer
            heard.extend(systemd.lines())
            station.loop.stop("SIGTERM")

    station.on_frame = hang
    station.loop.run()
    assert heard == []


def test_systemd_itself_accepts_the_unit() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    complaints = [line for line in done.stderr.splitlines() if "eagle-eye-agent.service" in line]
    # The program is not installed where the tests run.
    assert [line for line in complaints if "is not executable" not in line] == []
