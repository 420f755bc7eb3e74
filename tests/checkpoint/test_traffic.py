"""Copies on their way: the cap, what is not wanted any more, and an interface that is made up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_eye.checkpoint import traffic
from eagle_eye.checkpoint.connection import PIECE_BYTES, SendPace, StoreConnection
from eagle_eye.checkpoint.traffic import LOOK_EVERY_S, Cap, Capped, CopyUnwanted, Traffic
from tests.checkpoint.stores import close, opened, running
from tests.checkpoint.stores import until as wait_until

RATE = 100e6
WITHIN_S = 20.0


class Counter:
    """An interface on which others send at a rate, or not. ``looks`` counts how often somebody has asked."""

    def __init__(self) -> None:
        self.interface = socket.if_nametoindex("lo")
        self.broken = False
        self.looks = 0
        self._busy_since_s: float | None = None
        self._total = 0.0

    def is_looked_at(self) -> bool:
        """Whether anybody looks within a time in which those who do look fifty times."""
        before = self.looks
        time.sleep(50 * LOOK_EVERY_S)
        return self.looks > before

    def sent_bytes(self) -> int:
        self.looks += 1
        if self.broken:
            raise OSError("gone")
        busy_s = 0.0 if self._busy_since_s is None else time.monotonic() - self._busy_since_s
        return int(self._total + busy_s * RATE)

    def busy(self, *, on: bool) -> None:
        self._total = self.sent_bytes()
        self._busy_since_s = time.monotonic() if on else None

    def close(self) -> None:
        pass


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(traffic, "LinkCounter", lambda _: counter)
    monkeypatch.setattr(traffic, "outgoing_interface", lambda _: counter.interface)
    return counter


@contextlib.contextmanager
def of_a_job(counts: list[str] | None = None) -> Iterator[Traffic]:
    copies = Traffic(Cap(None), ([] if counts is None else counts).append, paced=True)
    copies.has_ranks(here=True)
    try:
        yield copies
    finally:
        copies.close()


async def sent(pace: SendPace, size: int) -> int:
    """Send so many bytes at the pace; return how many pieces it took."""
    pieces = 0
    while size:
        async with pace.piece(size, lambda: 0) as count:
            assert 0 < count <= size
            size -= count
            pieces += 1
    return pieces


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


def always() -> bool:
    return True


def counted(what: str) -> None:
    """Nobody looks at what is counted."""


def busy_is_seen(copies: Traffic) -> bool:
    seen = [link.sight(time.monotonic()) for link in copies._links.values()]
    return all(sight is not None and sight.busy for sight in seen)


def test_what_restores_keeps_to_the_cap() -> None:
    began_s = time.monotonic()
    asyncio.run(sent(Capped(Cap(2e6)), 600_000))
    assert time.monotonic() - began_s >= (600_000 - (64 << 10)) / 2e6


def test_several_copies_share_one_cap() -> None:
    cap = Cap(2e6)

    async def both() -> None:
        await asyncio.gather(sent(Capped(cap), 300_000), sent(Capped(cap), 300_000))

    began_s = time.monotonic()
    asyncio.run(both())
    assert time.monotonic() - began_s >= (600_000 - (64 << 10)) / 2e6


@pytest.mark.parametrize("address", ["127.0.0.1", "no address"])
def test_where_no_interface_is_known_copies_go_at_once(address: str) -> None:
    with of_a_job() as copies:
        assert asyncio.run(sent(copies.copy(address, always), 3 * PIECE_BYTES)) == 3
        assert copies.status() == []


@pytest.mark.usefixtures("counter")
def test_without_pacing_nobody_looks() -> None:
    copies = Traffic(Cap(None), counted, paced=False)
    asyncio.run(sent(copies.copy("10.0.0.1", always), 1 << 20))
    assert copies.status() == []


@pytest.mark.usefixtures("counter")
@pytest.mark.parametrize("paced", [True, False])
def test_what_nobody_wants_any_more_is_not_sent(paced: bool) -> None:
    copies = Traffic(Cap(None), counted, paced=paced)
    with pytest.raises(CopyUnwanted):
        asyncio.run(sent(copies.copy("10.0.0.1", lambda: False), 1 << 20))
    copies.close()


async def held_up(copies: Traffic, counter: Counter) -> asyncio.Future[int]:
    """Return a copy on its way that waits, because others send."""
    pace = copies.copy("10.0.0.1", always)
    counter.busy(on=True)
    await until(lambda: busy_is_seen(copies))
    sending = asyncio.ensure_future(sent(pace, 1 << 20))
    await asyncio.sleep(0.1)
    assert not sending.done()
    return sending


def test_a_copy_waits_while_others_send_and_goes_on_behind_them(counter: Counter) -> None:
    async def run() -> None:
        with of_a_job() as copies:
            sending = await held_up(copies, counter)
            counter.busy(on=False)
            await asyncio.wait_for(sending, WITHIN_S)

    asyncio.run(run())


def test_a_copy_that_is_late_goes_on_whatever_passes(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "LATE_S", 0.05)
    counts: list[str] = []

    async def run() -> None:
        with of_a_job(counts) as copies:
            pace = copies.copy("10.0.0.1", always)
            counter.busy(on=True)
            await until(lambda: busy_is_seen(copies))
            await asyncio.wait_for(sent(pace, 4 << 20), WITHIN_S)

    asyncio.run(run())
    assert counts == ["copies_hurried"]


def test_while_no_rank_is_here_nobody_looks(counter: Counter) -> None:
    async def run() -> None:
        with of_a_job() as copies:
            copies.copy("10.0.0.1", always)
            assert counter.is_looked_at()
            copies.has_ranks(here=False)
            await asyncio.sleep(10 * LOOK_EVERY_S)  # a look may have begun
            assert not counter.is_looked_at()
            copies.has_ranks(here=True)
            assert counter.is_looked_at()

    asyncio.run(run())


def test_a_copy_goes_on_where_the_ranks_that_sent_are_gone(counter: Counter) -> None:
    async def run() -> None:
        with of_a_job() as copies:
            sending = await held_up(copies, counter)
            copies.has_ranks(here=False)
            await asyncio.wait_for(sending, WITHIN_S)

    asyncio.run(run())


def test_a_store_looks_as_long_as_its_ranks_are_connected(counter: Counter, tmp_path: Path) -> None:
    with running([tmp_path / "a", tmp_path / "b"]) as nodes:
        ranks = opened(nodes)
        ranks[0].capture(1, b"state" * 100)
        ranks[1].capture(1, b"state" * 100)
        ranks[0].whole(1)
        assert counter.is_looked_at()
        close(*ranks)
        wait_until(lambda: all(node.status["ranks_connected"] == 0 for node in nodes), "no rank is connected")
        time.sleep(10 * LOOK_EVERY_S)  # a look may have begun
        assert not counter.is_looked_at()


def test_an_interface_that_is_not_seen_any_more_holds_nothing_up(counter: Counter) -> None:
    async def run() -> None:
        with of_a_job() as copies:
            pace = copies.copy("10.0.0.1", always)
            counter.busy(on=True)
            await until(lambda: busy_is_seen(copies))
            counter.broken = True
            await asyncio.wait_for(sent(pace, 4 << 20), WITHIN_S)
            assert not copies.status()[0]["seen"]

    asyncio.run(run())


def test_the_spans_between_marks_are_what_the_status_tells(counter: Counter) -> None:
    async def run() -> None:
        with of_a_job() as copies:
            copies.copy("10.0.0.1", always)
            for _ in range(6):
                copies.mark()
                await asyncio.sleep(0.1)
                counter.busy(on=True)
                await until(lambda: busy_is_seen(copies))
                counter.busy(on=False)
                await until(lambda: not busy_is_seen(copies))
            (reported,) = copies.status()
            assert reported["interface"] == "lo"
            assert reported["idle_spans_s"][0] >= 0.09

    asyncio.run(run())


def test_what_is_sent_piece_by_piece_arrives_as_it_was() -> None:
    async def run() -> None:
        server = socket.create_server(("127.0.0.1", 0))
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        one, other = StoreConnection(near), StoreConnection(far)
        data, into = bytes(range(256)) * 10_000, bytearray(2_560_000)
        sending = asyncio.ensure_future(one.send_data(memoryview(data), Capped(Cap(20e6))))
        await asyncio.wait_for(other.receive_into(memoryview(into)), WITHIN_S)
        await sending
        assert bytes(into) == data
        assert one.host == "127.0.0.1"
        for end in (one, other):
            end.close()
        server.close()

    asyncio.run(run())
