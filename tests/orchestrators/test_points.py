"""A runner's side of restart points: who is told to go on, and who is not listened to."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import msgspec
import pytest

from eagle_eye.orchestrators.launch.runner import RestartPoints
from eagle_eye.schema.restart_point import AtPoint, GoOn


class Runner:
    """A runner without anything but restart points."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.heard: list[AtPoint] = []
        self.points = RestartPoints(self.selector, self.heard.append)
        self.ranks: list[socket.socket] = []

    def rank(self) -> socket.socket:
        rank = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rank.settimeout(5.0)
        rank.connect(b"\0" + self.points.name.encode())
        self.ranks.append(rank)
        return rank

    def serves(self) -> None:
        while ready := self.selector.select(0.0):
            ready[0][0].data()

    def close(self) -> None:
        self.points.clear()
        self.points.disown()
        self.selector.close()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


def says(rank: socket.socket, number: int, attempt: int, *, waits: bool = False) -> None:
    rank.send(msgspec.json.encode(AtPoint(number, attempt, waits, "closed" if waits else "")))


def hears(rank: socket.socket) -> GoOn | None:
    rank.setblocking(False)
    try:
        return msgspec.json.decode(rank.recv(1 << 16), type=GoOn)
    except BlockingIOError:
        return None


def test_who_waits_is_told_to_go_on_and_then_has_a_restart_point_in_the_next_attempt(runner: Runner) -> None:
    rank = runner.rank()
    says(rank, 3, 1)
    says(rank, 3, 1, waits=True)
    runner.serves()
    assert [said.waits for said in runner.heard] == [False, True]
    runner.points.go_on(GoOn(2, {"MASTER_PORT": "7"}))
    assert hears(rank) == GoOn(2, {"MASTER_PORT": "7"})
    says(rank, 3, 2)
    runner.serves()
    assert runner.points.ranks(2) == {3}


def test_who_trains_or_is_in_the_attempt_already_is_told_nothing(runner: Runner) -> None:
    training, later = runner.rank(), runner.rank()
    says(training, 0, 1)
    says(later, 1, 2, waits=True)
    runner.serves()
    runner.points.go_on(GoOn(2, {}))
    assert (hears(training), hears(later)) == (None, None)


def test_who_ends_or_says_nonsense_has_no_restart_point_any_more(runner: Runner) -> None:
    gone, raving = runner.rank(), runner.rank()
    says(gone, 0, 1)
    says(raving, 1, 1)
    runner.serves()
    assert runner.points.ranks(1) == {0, 1}
    gone.close()
    raving.send(b"[")
    runner.serves()
    assert runner.points.ranks(1) == set()
