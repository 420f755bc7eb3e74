"""A disk that fills up under a real server: refused, said once, nothing lost, and over by itself."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.server.builders import frame
from tests.server.own_process import OwnProcess, serving, wait_until

DISK_BYTES = 16 << 20
ROUNDS = 3
REFUSED = "frames are refused, and agents keep them"
TAKEN = "frames are taken again"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system that is small enough to fill")
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here (a container needs CAP_SYS_ADMIN)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        for size in (64 << 10, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def send_until(server: OwnProcess, sequence: int, status: int, taken: list[int]) -> int:
    """Send large frames until one is answered with the status; return the sequence after it."""
    found = None

    def answered() -> bool:
        nonlocal sequence, found
        found = server.send(frame(sequence, time_s=time.time(), dropped={"x" * 60_000: 1})).status_code
        assert found in (200, 503)
        if found == 200:
            taken.append(sequence)
        sequence += 1
        return found == status

    wait_until(answered)
    return sequence


def said_so_often(server: OwnProcess, words: str, count: int) -> bool:
    return server.said().count(words) == count


def test_a_disk_that_fills_again_and_again_is_said_once_each_time_and_loses_nothing(small_disk: Path) -> None:
    taken: list[int] = []
    sequence = 1
    data = small_disk / "data"
    with serving(data, log=small_disk.with_suffix(".log")) as server:
        for number in range(1, ROUNDS + 1):
            fill(small_disk / "filler")
            sequence = send_until(server, sequence, 503, taken)
            wait_until(lambda: server.storage() != "ok")
            for _ in range(20):
                server.send(frame(sequence, time_s=time.time(), dropped={"x" * 60_000: 1}))
            (small_disk / "filler").unlink()
            sequence = send_until(server, sequence, 200, taken)
            wait_until(partial(said_so_often, server, TAKEN, number))
            assert server.said().count(REFUSED) == number
            assert "Traceback" not in server.said()
            assert server.storage() == "ok"
    with serving(data, log=small_disk.with_suffix(".log")) as server:
        answers = [server.send(frame(one, time_s=time.time())).json() for one in taken]
        assert [answer["duplicates"] for answer in answers] == [1] * len(taken)
