"""The store as a service manager runs it: a process that says when it is ready."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.checkpoint.store_client import answers

COMMAND = (sys.executable, "-m", "eagle_eye.cli.main", "checkpoint", "store", "--listen", "127.0.0.1:0")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eagle-eye-test-", dir="/dev/shm") as name:
        yield Path(name)


def test_systemd_hears_that_it_is_ready_once_ranks_are_answered(folder: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30.0)
        store = subprocess.Popen(
            [*COMMAND, "--folder", str(folder)],
            env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "PYTHONPATH": ":".join(sys.path)},
            stderr=subprocess.DEVNULL,
        )
        try:
            assert manager.recv(100) == b"READY=1"
            assert answers(folder)
        finally:
            store.send_signal(signal.SIGTERM)
            assert store.wait(30) == 0


def test_a_store_whose_manager_is_gone_serves_all_the_same(folder: Path, tmp_path: Path) -> None:
    store = subprocess.Popen(
        [*COMMAND, "--folder", str(folder)],
        env={"NOTIFY_SOCKET": str(tmp_path / "nobody"), "PYTHONPATH": ":".join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert store.stderr is not None
    try:
        assert "listening on" in store.stderr.readline()
        assert "systemd cannot be notified" in store.stderr.readline()
        assert answers(folder)
    finally:
        store.send_signal(signal.SIGTERM)
        store.stderr.close()
        assert store.wait(30) == 0
