"""Paces a job's copies: piece by piece, while training leaves the network idle, and within the store's cap.

Torch does not report when a collective begins and ends, for any backend; but its traffic passes the interface that the
copies use, and the kernel counts that. So ranks do nothing, and traffic on no network or another one does not delay the
copies. A thread per interface, shared by all copies, reads the counter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from eagle_eye.checkpoint.carrier import Carrier
from eagle_eye.checkpoint.connection import PIECE_BYTES, SendPace
from eagle_eye.checkpoint.idle_spans import IdleSpans, LinkState
from eagle_eye.checkpoint.link_counter import LinkCounter, outgoing_interface
from eagle_eye.checkpoint.pacing import PIECE_BYTES_MIN, POLL_S, Cap, Cost, next_piece

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.002
LOOK_SELDOM_S, SELDOM_AFTER_S = 0.25, 30.0  # without any step for so long
LATE_STEPS, LATE_S = 10, 10.0  # a copy that takes longer than both goes on whatever passes
DRAINED_BYTES = 4096  # the last acknowledgement may take its time
DRAIN_POLL_S, DRAIN_S = 0.0005, 5.0


class CopyUnwanted(OSError):
    """The copy is no longer needed, but part of it is still to be sent."""


class Capped:
    """As fast as the cap allows: for restores, and for copies over an unknown network."""

    def __init__(self, cap: Cap, wanted: Callable[[], bool] = lambda: True) -> None:
        self._cap = cap
        self._wanted = wanted

    @contextlib.asynccontextmanager
    async def piece(self, left: int, unsent: Callable[[], int]) -> AsyncIterator[int]:  # noqa: ARG002
        """See Pace."""
        least = min(left, PIECE_BYTES_MIN)
        while True:
            _check(self._wanted)
            allowed = self._cap.allowed_bytes(time.monotonic())
            if allowed is None or allowed >= least:
                break
            await asyncio.sleep(self._cap.wait_s(least))
        count = min(left, PIECE_BYTES if allowed is None else min(PIECE_BYTES, allowed))
        self._cap.take(count)
        yield count


class Traffic:
    """One job's outgoing copies. ``cap`` is the store's; ``count`` counts what the status tells."""

    def __init__(self, cap: Cap, count: Callable[[str], None], *, paced: bool) -> None:
        self._cap = cap
        self._count = count
        self._paced = paced
        self._links: dict[int, _Link] = {}
        self._has_ranks = False

    def has_ranks(self, *, here: bool) -> None:
        """Set whether ranks of the job are here: while none is, links are not observed, and only the cap applies."""
        self._has_ranks = here
        for link in self._links.values():
            link.watch(on=here)

    def mark(self) -> None:
        """Record that a rank of this node has ended a step, and begins another one."""
        now_s = time.monotonic()
        for link in self._links.values():
            link.mark(now_s)

    def urgent(self) -> SendPace:
        """Return the pace of copies that a restart waits for."""
        return Capped(self._cap)

    def copy(self, address: str, wanted: Callable[[], bool]) -> SendPace:
        """Return the pace of one copy to another node's IP address. For an unknown interface: the cap's."""
        link = self._link(address) if self._paced else None
        return Capped(self._cap, wanted) if link is None else _Between(link, self._cap, self._count, wanted)

    def status(self) -> list[dict[str, Any]]:
        """Return the state of the interfaces used by copies, as plain containers."""
        return [link.status() for link in self._links.values()]

    def close(self) -> None:
        """Stop observing."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _link(self, address: str) -> _Link | None:
        try:
            number = outgoing_interface(address)
            if number is None:
                return None
            link = self._links.get(number)
            if link is None:
                link = self._links[number] = _Link(LinkCounter(number))
                link.watch(on=self._has_ranks)
        except (OSError, ValueError) as error:
            _log.info("copies to %s are not sent between collectives: %s", address, error)
            return None
        return link if link.seen else None


class _Link:
    """An interface, and the thread that observes it. ``turn`` is held while sending a piece of a copy.

    ``seen``: what others send on it is known, or will be once there are ranks again.
    """

    def __init__(self, counter: LinkCounter) -> None:
        self.turn = asyncio.Lock()
        self.cost = Cost()
        self.seen = True
        self._counter = counter
        self._name = socket.if_indextoname(counter.interface)
        self._spans = IdleSpans()
        self._carrier = Carrier(self._spans)
        self._lock = threading.Lock()
        self._sending = False
        self._marked_s = time.monotonic()
        self._watched, self._ended = threading.Event(), threading.Event()
        self._look()
        threading.Thread(target=self._look_on, name="eagle-eye-checkpoint-link", daemon=True).start()

    @property
    def step_s(self) -> float | None:
        """How long a step takes, None before the first two."""
        return self._spans.step_s

    def mark(self, now_s: float) -> None:
        """Record the end of a step."""
        with self._lock:
            self._marked_s = now_s
            self._spans.mark(now_s)

    def watch(self, *, on: bool) -> None:
        """Start or stop observing."""
        if on:
            self._watched.set()
        else:
            self._watched.clear()

    def sight(self, now_s: float) -> LinkState | None:
        """Return the link's current state; None while not observed."""
        with self._lock:
            return self._spans.sight(now_s) if self.seen and self._watched.is_set() else None

    def begin(self) -> None:
        """Begin sending a piece: until its ``end`` the counter's bytes cannot be attributed."""
        with self._lock:
            self._look()
            self._sending = True

    def end(self, count: int, seconds: float) -> None:
        """The piece of so many bytes has left, and took so long."""
        with self._lock:
            self._sending = False
            if not self.seen:
                return
            try:
                total = self._counter.sent_bytes()
            except OSError as error:
                self._lost(error)
                return
            if not self._carrier.sent(time.monotonic(), total, count):
                self.cost.measured(count, seconds)

    def status(self) -> dict[str, Any]:
        """Return its state."""
        with self._lock:
            return {
                "interface": self._name,
                "seen": self.seen,
                "step_s": self._spans.step_s,
                "idle_spans_s": [round(length, 4) for length in self._spans.lengths_s],
                "bytes_per_s": round(self.cost.bytes_per_s),
                "delay_s": round(self.cost.delay_s, 6),
                "collisions": self._carrier.collisions,
            }

    def close(self) -> None:
        """Stop observing it."""
        self._ended.set()
        self._watched.set()  # its thread hears of it

    def _look_on(self) -> None:
        while self._watched.wait() and not self._ended.wait(LOOK_EVERY_S if self._trains() else LOOK_SELDOM_S):
            with self._lock:
                if not self.seen:
                    break
                if not self._sending:
                    self._look()
        with self._lock:
            self.seen = False
            self._counter.close()

    def _trains(self) -> bool:
        return time.monotonic() - self._marked_s < SELDOM_AFTER_S

    def _look(self) -> None:
        if self.seen:
            try:
                self._carrier.look(time.monotonic(), self._counter.sent_bytes())
            except OSError as error:
                self._lost(error)

    def _lost(self, error: OSError) -> None:
        self.seen = False
        _log.warning("interface %s is not seen any more, copies go at any time: %s", self._name, error)


class _Between:
    """Paces one copy between the bursts of training's traffic."""

    def __init__(self, link: _Link, cap: Cap, count: Callable[[str], None], wanted: Callable[[], bool]) -> None:
        self._link = link
        self._cap = cap
        self._count = count
        self._wanted = wanted
        self._began_s = time.monotonic()
        self._late = False

    @contextlib.asynccontextmanager
    async def piece(self, left: int, unsent: Callable[[], int]) -> AsyncIterator[int]:
        """See Pace."""
        link = self._link
        async with link.turn:
            count = await self._may_go(left)
            began_s = time.monotonic()
            link.begin()
            try:
                yield count
                await _drained(unsent, began_s + DRAIN_S)
            finally:
                link.end(count, time.monotonic() - began_s)

    async def _may_go(self, left: int) -> int:
        while True:
            _check(self._wanted)
            now_s = time.monotonic()
            sight = None if self._is_late(now_s) else self._link.sight(now_s)
            count, wait_s = next_piece(now_s, sight, left, self._link.cost, self._cap)
            if count:
                self._cap.take(count)
                return count
            await asyncio.sleep(min(wait_s, POLL_S))

    def _is_late(self, now_s: float) -> bool:
        """Whether the idle spans of so many steps have not sufficed: then training has to make room, within the cap."""
        if not self._late and now_s - self._began_s > max(LATE_S, LATE_STEPS * (self._link.step_s or 0.0)):
            self._late = True
            self._count("copies_hurried")
        return self._late


def _check(wanted: Callable[[], bool]) -> None:
    if not wanted():
        raise CopyUnwanted("the step will not be whole: the rest of its copy is not sent")


async def _drained(unsent: Callable[[], int], until_s: float) -> None:
    """Wait until everything sent has been acknowledged."""
    while unsent() > DRAINED_BYTES and time.monotonic() < until_s:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(DRAIN_POLL_S)
