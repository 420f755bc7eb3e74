from __future__ import annotations

import queue
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, field

from eagle_eye.orchestrators.receiver import Readmission, Resumption
from eagle_eye.orchestrators.subscriber import Lanes, concerns
from tests.orchestrators.builders import action


@dataclass(eq=False)
class Piece:
    """Work that goes on until it is let go."""

    keys: frozenset[Hashable]
    begun: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)

    def do(self) -> None:
        self.begun.set()
        self.let_go.wait(10.0)


class Floor:
    def __init__(self, parallel: int) -> None:
        self.work: queue.Queue[Piece] = queue.Queue()
        self.lanes = Lanes(self.work, Piece.do, lambda piece: piece.keys, parallel)
        self.lanes.start()

    def put(self, *keys: str) -> Piece:
        piece = Piece(frozenset(keys))
        self.work.put(piece)
        return piece


def begins(piece: Piece) -> bool:
    return piece.begun.wait(5.0)


def waits(piece: Piece) -> bool:
    return not piece.begun.wait(0.15)


def test_a_slow_job_does_not_hold_another_up_but_its_own_next_action() -> None:
    floor = Floor(parallel=4)
    slow, same, other = floor.put("job a"), floor.put("job a"), floor.put("job b")
    assert begins(slow)
    assert begins(other)
    assert waits(same)
    slow.let_go.set()
    assert begins(same)
    for piece in (same, other):
        piece.let_go.set()
    assert floor.lanes.stop(5.0)


def test_what_waits_is_not_overtaken_by_what_came_after_it() -> None:
    floor = Floor(parallel=4)
    first, both, last = floor.put("job a"), floor.put("job a", "node n2"), floor.put("node n2")
    assert begins(first)
    assert waits(last)
    first.let_go.set()
    assert begins(both)
    both.let_go.set()
    assert begins(last)
    last.let_go.set()
    assert floor.lanes.stop(5.0)


def test_no_more_than_so_many_at_once_and_none_after_the_end() -> None:
    floor = Floor(parallel=1)
    first, second = floor.put("job a"), floor.put("job b")
    assert begins(first)
    assert waits(second)
    assert (floor.lanes.running, floor.lanes.waiting) == (1, 1)
    assert not floor.lanes.stop(0.05)
    first.let_go.set()
    assert waits(second)


def test_work_that_raises_ends_nothing() -> None:
    work: queue.Queue[int] = queue.Queue()
    done: list[int] = []

    def do(number: int) -> None:
        if number == 0:
            raise OSError("the ledger's disk is full")
        done.append(number)

    lanes = Lanes(work, do, lambda _: frozenset(["one"]), 2)
    lanes.start()
    work.put(0)
    work.put(1)
    until_s = time.monotonic() + 5.0
    while not done and time.monotonic() < until_s:
        time.sleep(0.01)
    assert lanes.stop(5.0)
    assert done == [1]


def test_an_action_concerns_its_job_its_incident_and_its_nodes() -> None:
    wanted = action(0.0)
    keys = {("job", "j"), ("incident", "inc-1"), ("node", "n2")}
    assert concerns(wanted) == concerns(Resumption(wanted, "begun")) == keys
    assert concerns(Readmission(("n2", "n3"), "")) == {("node", "n2"), ("node", "n3")}
