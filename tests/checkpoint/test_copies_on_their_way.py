"""A copy between two stores: the cap that it keeps to, and that it ends where nobody needs it any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.checkpoint.messages import JobNode, Skipped, Whole
from tests.checkpoint.stores import WITHIN_S, Node, Rank, close, opening

RATE = 400_000
SHARD_BYTES = 260_000
CAP_BURST_BYTES = 64 << 10


class Captures:
    """A rank on a node whose shards have a copy on another one."""

    def __init__(self, near: Node, far: Node) -> None:
        members = (JobNode(near.name, near.store.address, (0,)), JobNode(far.name, far.store.address, ()))
        self._rank = Rank(near)
        self._rank.hello()
        holders = (near.name, far.name)
        self._rank.open(opening([near], members=members, holders=holders, capacity_bytes=SHARD_BYTES))

    def capture(self, step: int) -> None:
        self._rank.capture(step, bytes([step]) * SHARD_BYTES)

    def skip(self, step: int) -> None:
        self._rank.connection.send(Skipped(step, "another rank had no slot"))

    def whole(self) -> int:
        return self._rank.expect(Whole).step

    def close(self) -> None:
        close(self._rank)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    near, far = Node(tmp_path / "a", "a", copy_bytes_per_s=float(RATE)).start(), Node(tmp_path / "b", "b").start()
    there = Rank(far, 1)  # a store takes copies of no job that it does not know
    there.hello()
    try:
        yield near, far
        until(lambda: near.status["whole_step"] == far.status["whole_step"])  # the other has been told everything
    finally:
        close(there)
        near.stop()
        far.stop()


@pytest.fixture
def rank(nodes: tuple[Node, Node]) -> Iterator[Captures]:
    rank = Captures(*nodes)
    yield rank
    rank.close()


def counts(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = node.status["counts"]
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


def test_the_rest_of_a_copy_that_no_step_needs_is_not_sent(rank: Captures, nodes: tuple[Node, Node]) -> None:
    near, far = nodes
    rank.capture(1)
    rank.skip(1)
    until(lambda: counts(near).get("copies_dropped") == 1)
    rank.capture(2)
    assert rank.whole() == 2
    assert counts(far)["bytes_received"] == SHARD_BYTES


def test_a_copy_that_is_on_its_way_when_the_next_step_comes_is_counted(
    rank: Captures, nodes: tuple[Node, Node]
) -> None:
    rank.capture(1)
    until(lambda: bool(nodes[0].status["copies"]))  # its sums are there, and it goes first
    rank.capture(2)
    assert [rank.whole(), rank.whole()] == [1, 2]
    assert counts(nodes[0])["copies_late"] == 1
