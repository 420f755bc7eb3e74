"""A copy between two stores: the cap that it keeps to, and that it ends where nobody needs it any more."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.checkpoint.connection import BlockingConnection
from eagle_eye.checkpoint.messages import VERSION, Captured, Grant, Hello, Member, Skipped, Welcome, Whole
from eagle_eye.checkpoint.store import PORT, SOCKET, ask_status
from tests.checkpoint.running_store import KEY, WITHIN_S, Rank, running_store

RATE = 400_000
SHARD_BYTES = 260_000
CAP_BURST_BYTES = 64 << 10


class Captures:
    """A rank on n1 whose shards have a copy on n2."""

    def __init__(self, near: Path, far: Path) -> None:
        members = tuple(
            Member(node, f"127.0.0.1:{(folder / PORT).read_text()}", ranks)
            for node, folder, ranks in (("n1", near, (0,)), ("n2", far, ()))
        )
        self._rank = Rank(near, members=members, holders=("n1", "n2"), capacity_bytes=SHARD_BYTES)
        self._connection = self._rank._connection

    def capture(self, step: int) -> None:
        slot = self._rank._grants.pop() if self._rank._grants else self._rank._hears(Grant).slot
        Path(self._rank.slots[slot]).write_bytes(bytes([step]) * SHARD_BYTES)
        self._connection.send(Captured(step, slot, SHARD_BYTES, (), 1.7e9, 0.0))

    def skip(self, step: int) -> None:
        self._connection.send(Skipped(step, "another rank had no slot"))

    def whole(self) -> int:
        step: int = self._rank._hears(Whole).step
        return step

    def close(self) -> None:
        self._rank.close()


@contextlib.contextmanager
def greeted(folder: Path) -> Iterator[None]:
    """A rank of the job is there: a store takes copies of no job that it does not know."""
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(str(folder / SOCKET))
        BlockingConnection(end, WITHIN_S).ask(Hello(VERSION, "llm", KEY), Welcome)
        yield


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    near, far = tmp_path / "n1", tmp_path / "n2"
    with running_store(near, "n1", copy_bytes_per_s=float(RATE)), running_store(far, "n2"), greeted(far):
        yield near, far
        until(lambda: status(near)["whole_step"] == status(far)["whole_step"])  # n2 has been told everything


@pytest.fixture
def rank(folders: tuple[Path, Path]) -> Iterator[Captures]:
    rank = Captures(*folders)
    yield rank
    rank.close()


def status(folder: Path) -> dict[str, Any]:
    (job,) = ask_status(folder)
    return job


def counts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = status(folder)["counts"]
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_copy_keeps_to_the_cap(rank: Captures) -> None:
    began_s = time.monotonic()
    rank.capture(1)
    assert rank.whole() == 1
    assert time.monotonic() - began_s >= (SHARD_BYTES - CAP_BURST_BYTES) / RATE


def test_the_rest_of_a_copy_that_no_step_needs_is_not_sent(rank: Captures, folders: tuple[Path, Path]) -> None:
    near, far = folders
    rank.capture(1)
    rank.skip(1)
    until(lambda: counts(near).get("copies_dropped") == 1)
    rank.capture(2)
    assert rank.whole() == 2
    assert counts(far)["bytes_received"] == SHARD_BYTES


def test_a_copy_that_is_on_its_way_when_the_next_step_comes_is_counted(
    rank: Captures, folders: tuple[Path, Path]
) -> None:
    rank.capture(1)
    rank.capture(2)
    assert [rank.whole(), rank.whole()] == [1, 2]
    assert counts(folders[0])["copies_late"] == 1
