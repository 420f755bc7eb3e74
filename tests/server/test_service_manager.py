"""What systemd hears of the server: nothing before it answers, then READY and signs of life, at the end STOPPING."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from eagle_eye.server.command import ServiceManager
from tests.loopback import free_port

URL = "http://127.0.0.1:8470"
SERVING = ["READY=1", f"STATUS=serving {URL}"]
HANGS = """
import sys, time
from eagle_eye.cli.main import main
from eagle_eye.server.command import ServiceManager

def hang(manager):
    manager._send("STATUS=hangs")
    time.sleep(600)

ServiceManager.alive = hang
sys.exit(main())
"""


class Systemd:
    """The other end of the notification socket, and a clock."""

    def __init__(self, address: str, name: str) -> None:
        self.now_s = 1_000.0
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.settimeout(0)

    def manager(self, **environ: str) -> ServiceManager:
        return ServiceManager({"NOTIFY_SOCKET": self.name, "WATCHDOG_USEC": "30000000", **environ}, self._now_s, pid=77)

    def _now_s(self) -> float:
        return self.now_s

    def heard(self, patience_s: float = 0) -> list[str]:
        """Return the lines of one message; [] where none comes."""
        self._socket.settimeout(patience_s)
        try:
            return self._socket.recv(4096).decode().split("\n")
        except (BlockingIOError, TimeoutError):
            return []

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(str(tmp_path / "notify"), str(tmp_path / "notify"))
    yield made
    made.close()


def test_a_server_is_ready_once_it_answers_lives_while_its_loop_does_and_says_that_it_ends(
    systemd: Systemd, tmp_path: Path
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    child = subprocess.Popen(
        [sys.executable, "-m", "eagle_eye.cli.main", "server", "--listen", listen, "--data", str(tmp_path / "data")],
        env={**os.environ, "NOTIFY_SOCKET": systemd.name, "WATCHDOG_USEC": "600000"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert systemd.heard(60) == ["READY=1", f"STATUS=serving http://{listen}"]
        with urlopen(f"http://{listen}/healthz", timeout=30) as answer:
            assert answer.status == 200
        assert [systemd.heard(30) for _ in range(3)] == [["WATCHDOG=1"]] * 3
        child.send_signal(signal.SIGTERM)
        ends_s = time.monotonic() + 60
        while (said := systemd.heard(60)) == ["WATCHDOG=1"] and time.monotonic() < ends_s:
            pass
        assert said == ["STOPPING=1", "STATUS=stopping"]
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.communicate()


def test_a_server_that_is_aborted_shows_where_it_hung(tmp_path: Path, systemd: Systemd) -> None:
    # Its event loop stands still, as a hung one's: in one that runs another thread may get the signal, for it blocks
    # all signals while it starts a thread.
    child = subprocess.Popen(
        [sys.executable, "-c", HANGS, "server", "--listen", "127.0.0.1:0", "--data", str(tmp_path)],
        env={**os.environ, "NOTIFY_SOCKET": systemd.name},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert systemd.heard(60)[0] == "READY=1"
        assert systemd.heard(60) == ["STATUS=hangs"]
        child.send_signal(signal.SIGABRT)
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in said
    assert "in hang\n" in said
    assert "server/command.py" in said


def test_signs_of_life_come_three_times_as_often_as_they_must(systemd: Systemd) -> None:
    manager = systemd.manager()
    signs = 0
    for _ in range(1_200):
        systemd.now_s += 0.1
        manager.alive()
        signs += systemd.heard() == ["WATCHDOG=1"]
    assert 11 <= signs <= 12


@pytest.mark.parametrize(
    "environ",
    [{"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_PID": "78"}],
)
def test_a_watchdog_that_is_not_for_us_is_not_fed(systemd: Systemd, environ: dict[str, str]) -> None:
    manager = systemd.manager(**environ)
    systemd.now_s += 1e6
    manager.alive()
    assert systemd.heard() == []


def test_an_abstract_socket_is_spoken_to() -> None:
    name = f"eagle-eye-test-{os.getpid()}"
    systemd = Systemd(f"\0{name}", f"@{name}")
    systemd.manager().serving(URL)
    assert systemd.heard() == SERVING
    systemd.close()


@pytest.mark.parametrize("name", ["", "relative", "vsock:2:1", "/" + "x" * 200])
def test_without_an_address_nothing_is_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1"})
    manager.serving(URL)
    manager.alive()
    manager.stopping()
    assert caplog.text == ""


def test_a_manager_that_has_gone_harms_nothing_and_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "1"})
    manager.serving(URL)
    for _ in range(5):
        manager.alive()
    assert caplog.text.count("cannot be notified") == 1


def test_a_manager_that_does_not_read_is_not_waited_for_and_is_told_later(systemd: Systemd) -> None:
    other, manager = systemd.manager(), systemd.manager()
    for _ in range(2_000):  # more than the socket takes
        other.stopping()
    manager.serving(URL)
    while systemd.heard() == ["STOPPING=1", "STATUS=stopping"]:
        pass
    manager.alive()
    assert systemd.heard() == SERVING
    manager.alive()
    assert systemd.heard() == []
