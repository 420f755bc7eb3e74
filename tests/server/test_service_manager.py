"""What systemd hears of the server: nothing before it answers, READY once it does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

from eagle_eye.server.service_manager import say_ready


def test_ready_is_said_once_requests_are_answered(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "eagle_eye.cli.main",
                "server",
                "--listen",
                listen,
                "--data",
                str(tmp_path / "data"),
            ],
            env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")},
            stderr=subprocess.DEVNULL,
        )
        try:
            assert manager.recv(100) == b"READY=1"
            with urlopen(f"http://{listen}/healthz", timeout=30) as answer:
                assert answer.status == 200
        finally:
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0


def test_an_abstract_socket_is_spoken_to_and_one_that_is_gone_harms_nothing(tmp_path: Path) -> None:
    name = f"eagle-eye-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        manager.settimeout(10)
        say_ready({"NOTIFY_SOCKET": f"@{name}"})
        assert manager.recv(100) == b"READY=1"
    say_ready({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    say_ready({})
