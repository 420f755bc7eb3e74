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
import statistics
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from eagle_eye.checkpoint.connection import PIECE_BYTES, SendPace

# Learns when and for how long a job's training leaves the network idle, from its traffic.
#
# Gemini (SOSP 2023, section 5) profiles the first iterations for the spans without collectives. Here every step is
# profiled: the latest lengths of each idle span in a step are kept, by the number of bursts before it.
STEPS_KEPT = 16  # so that what has changed counts after a few steps
STEPS_MIN = 3  # fewer say nothing of the next
LOW_QUANTILE = 0.2  # of an idle span's past lengths: the estimate is this short
BURSTS_MAX = 64  # per step


@dataclass(frozen=True)
class LinkState:
    """The link's current state.

    ``busy``: others' traffic passes. Else it is idle since ``began_s``, and until ``ends_s``; None: unknown.
    """

    busy: bool
    began_s: float
    ends_s: float | None


class IdleSpans:
    """The idle spans of a job's steps. Fed in order of observation; all times are of one clock."""

    def __init__(self) -> None:
        # By the number of bursts before it in the step: (length, whether the step ended in it).
        self._lengths: defaultdict[int, deque[tuple[float, bool]]] = defaultdict(lambda: deque(maxlen=STEPS_KEPT))
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)
        self._bursts_of_steps: deque[int] = deque(maxlen=STEPS_KEPT)
        self._bursts = 0
        self._busy_since_s: float | None = None
        self._idle_since_s: float | None = None
        self._marked_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """How long a step takes, None before the first two marks."""
        return statistics.median(self._steps) if self._steps else None

    @property
    def lengths_s(self) -> list[float]:
        """The length that each idle span of most steps is taken to have, in order; unknown ones are left out."""
        bursts = statistics.median_high(self._bursts_of_steps) if self._bursts_of_steps else 0
        known = (self._shortest(burst, 0.0) for burst in range(bursts + 1))
        return [length for length in known if length is not None]

    def mark(self, now_s: float) -> None:
        """Mark the end of a step and the start of the next."""
        if self._marked_s is not None:
            self._steps.append(now_s - self._marked_s)
            self._bursts_of_steps.append(self._bursts)
        self._marked_s = now_s
        if self._idle_since_s is not None:
            self._lengths[self._bursts].append((max(0.0, now_s - self._idle_since_s), True))
            self._idle_since_s = now_s
        elif self._busy_since_s is None:
            self._idle_since_s = now_s
        self._bursts = 0

    def busy(self, began_s: float) -> None:
        """Traffic passes since then."""
        if self._idle_since_s is not None:
            self._lengths[self._bursts].append((max(0.0, began_s - self._idle_since_s), False))
        self._idle_since_s, self._busy_since_s = None, began_s

    def idle(self, began_s: float) -> None:
        """The link is idle since then."""
        if self._busy_since_s is not None and (self._marked_s is None or self._busy_since_s >= self._marked_s):
            self._bursts = min(self._bursts + 1, BURSTS_MAX)
        self._busy_since_s = None
        self._idle_since_s = began_s if self._marked_s is None else max(began_s, self._marked_s)

    def sight(self, now_s: float) -> LinkState:
        """Return the link's current state."""
        since_s = self._idle_since_s
        if since_s is None:
            return LinkState(busy=self._busy_since_s is not None, began_s=now_s, ends_s=None)
        length = self._shortest(self._bursts, now_s - since_s)
        return LinkState(busy=False, began_s=since_s, ends_s=None if length is None else since_s + length)

    def _shortest(self, burst: int, passed_s: float) -> float | None:
        """Return how long an idle span lasts that has lasted for so long; None where it has never been longer.

        What it was sometimes, and has outlasted, it is not this time: so steps of several kinds are told apart.
        """
        seen = self._lengths.get(burst, ())
        if len(seen) < STEPS_MIN:
            return None
        longer = sorted(one for one in seen if one[0] > passed_s)
        if not longer:
            return None
        length, step_ended = longer[int(LOW_QUANTILE * (len(longer) - 1))]
        if not step_ended or burst == 0:
            return length
        return length + (self._shortest(0, 0.0) or 0.0)


LOOK_S_MIN = 0.001  # a rate over less is noise: the kernel counts segments of 64 KiB at once
QUIET_S = 0.004  # a collective's pauses between its rounds are shorter
BUSY_BYTES = 16 << 10  # heartbeats and control messages are shorter
BUSY_RATIO = 0.1  # of the link's highest rate: acknowledgements of received data take a fortieth
OWN_RATIO = 1.15  # headers are a twentieth of what is sent, and some is retransmitted
RATE_OVER_S = 0.01
PEAK_HALVES_S = 60.0


class Carrier:
    """Reports to ``spans`` when others' traffic starts and stops. ``total`` counts all bytes sent by the interface."""

    def __init__(self, spans: IdleSpans) -> None:
        self._spans = spans
        self._busy_until_s: float | None = None
        self._looked_s: float | None = None
        self._total = 0
        self._rate = 0.0
        self.peak_bytes_per_s = 0.0
        self.collisions = 0

    def observe_traffic(self, now_s: float, total: int) -> None:
        """Take the sent bytes so far; none since the last look were our own."""
        if self._looked_s is None or total < self._total:  # first, or the interface was recreated
            self._looked_s, self._total = now_s, total
        elif now_s - self._looked_s >= LOOK_S_MIN:
            self._passed(now_s, total, 0)

    def sent(self, now_s: float, total: int, own_bytes: int) -> bool:
        """Take the sent bytes so far and how many were our own; return whether others sent, too."""
        if self._looked_s is None or total < self._total or now_s <= self._looked_s:
            self._looked_s, self._total = now_s, total
            return False
        others = self._passed(now_s, total, own_bytes)
        self.collisions += others
        return others

    def _passed(self, now_s: float, total: int, own_bytes: int) -> bool:
        began_s = self._looked_s if self._looked_s is not None else now_s
        lasted_s, moved = now_s - began_s, total - self._total
        self._looked_s, self._total = now_s, total
        self._rate += (moved / lasted_s - self._rate) * min(1.0, lasted_s / RATE_OVER_S)
        self.peak_bytes_per_s = max(self._rate, self.peak_bytes_per_s * 0.5 ** (lasted_s / PEAK_HALVES_S))
        others = moved - own_bytes * OWN_RATIO
        if others >= BUSY_BYTES and others >= BUSY_RATIO * self.peak_bytes_per_s * lasted_s:
            if self._busy_until_s is None:
                # Possibly not read for a while: at the highest rate the traffic began this long ago.
                self._spans.busy(max(began_s, now_s - others / self.peak_bytes_per_s))
            self._busy_until_s = now_s
            return True
        if self._busy_until_s is not None and now_s - self._busy_until_s >= QUIET_S:
            self._spans.idle(self._busy_until_s)
            self._busy_until_s = None
        return False


# Reads an interface's sent bytes by netlink, so that it is the one of this network namespace.
#
# A file below /sys/class/net may be of another namespace, and /proc/net/dev asks every interface of the host.
NETLINK_ROUTE = 0  # linux/netlink.h
REQUEST, ERROR = 1, 2
GET_ROUTE, NEW_ROUTE, GET_STATS, NEW_STATS = 26, 24, 94, 92  # linux/rtnetlink.h
ROUTE_TO, ROUTE_LINK, LOCAL_ROUTE = 1, 4, 2  # RTA_DST, RTA_OIF, RTN_LOCAL
LINK_STATS = 1  # IFLA_STATS_LINK_64, and its bit in the mask
SENT_OFFSET = 24  # of tx_bytes in rtnl_link_stats64
ANSWER_WITHIN_S = 1.0

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_ROUTE = struct.Struct("=8BI")  # family, bits of the destination, ..., type, flags
_STATS = struct.Struct("=BxxxII")  # family, interface, mask
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_COUNT = struct.Struct("=Q")
_INDEX = struct.Struct("=I")


class LinkCounter:
    """The bytes that an interface has sent since it came up. Raises OSError where the kernel does not report them."""

    def __init__(self, interface: int) -> None:
        self.interface = interface
        self._socket = _netlink()
        message = _STATS.pack(socket.AF_UNSPEC, interface, LINK_STATS)
        self._request = _HEADER.pack(_HEADER.size + len(message), GET_STATS, REQUEST, 0, 0) + message

    def sent_bytes(self) -> int:
        """Return them. Raises OSError."""
        answer = _asked(self._socket, self._request, NEW_STATS)
        for kind, value in _attributes(answer[_HEADER.size + _STATS.size :]):
            if kind == LINK_STATS:
                sent: int = _COUNT.unpack_from(value, SENT_OFFSET)[0]
                return sent
        raise OSError("the kernel counts nothing of this interface")

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def outgoing_interface(address: str) -> int | None:
    """Return the index of the interface by which this host reaches an IP address; None for its own address.

    Raises OSError where it is unreachable.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    route = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0)
    message = route + _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), ROUTE_TO) + packed
    asking = _netlink()
    try:
        request = _HEADER.pack(_HEADER.size + len(message), GET_ROUTE, REQUEST, 0, 0) + message
        answer = _asked(asking, request, NEW_ROUTE)
    finally:
        asking.close()
    if answer[_HEADER.size + 7] == LOCAL_ROUTE:
        return None
    for kind, value in _attributes(answer[_HEADER.size + _ROUTE.size :]):
        if kind == ROUTE_LINK:
            number: int = _INDEX.unpack_from(value)[0]
            return None if socket.if_indextoname(number) == "lo" else number
    raise OSError(f"no interface leads to {address}")


def _netlink() -> socket.socket:
    asking = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_ROUTE)
    asking.settimeout(ANSWER_WITHIN_S)
    return asking


def _asked(asking: socket.socket, request: bytes, kind: int) -> bytes:
    asking.send(request)
    answer = asking.recv(1 << 14)
    _, got, _, _, _ = _HEADER.unpack_from(answer)
    if got == ERROR:
        code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        raise OSError(code, "the kernel does not say")
    if got != kind:
        raise OSError(f"the kernel answers {got} where {kind} was expected")
    return answer


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[-(-length // 4) * 4 :]


# Decides how much of a copy to send now, or how long to wait, to avoid training's traffic.
#
# After Gemini (SOSP 2023, section 5): a piece takes a + bytes/B, and only a part of an idle span is used.
MARGIN_RATIO = 0.85  # of an idle span that is used; the rest is for steps that are shorter than the ones before
PIECE_S = 0.02  # the longest piece where it is known when the span ends: what comes too early waits for so much
BLIND_PIECE_S = 0.005  # the longest where that is not known
PIECE_BYTES_MIN = 64 << 10  # what is shorter waits for the next span, unless nothing else is left
POLL_S = 0.005
FORGET_RATIO = 0.9  # of what the pieces before have said, with each piece
FIRST_DELAY_S, FIRST_BYTES_PER_S = 0.0005, 50e6  # until something is measured
B_RATIO_MIN = 0.01  # of a piece's time that its bytes take: for less, chance is taken for a
GROWTH_MAX = 2.0
BURST_S = 0.02  # of its rate that a cap lets pass at once


class Cost:
    """What a piece costs: ``delay_s`` (a) and ``bytes_per_s`` (B), by least squares over the newest pieces."""

    def __init__(self) -> None:
        self.delay_s, self.bytes_per_s = FIRST_DELAY_S, FIRST_BYTES_PER_S
        self._sums: tuple[float, ...] = (0.0,) * 5  # of 1, x, y, x², xy; see ``measured``
        self._largest = FIRST_BYTES_PER_S * BLIND_PIECE_S

    def seconds(self, count: int) -> float:
        """Return how long a piece of so many bytes takes."""
        return self.delay_s + count / self.bytes_per_s

    def bytes_within(self, seconds: float) -> int:
        """Return how many bytes a piece may have that takes so long; at most twice the longest that was measured."""
        return max(0, int(min((seconds - self.delay_s) * self.bytes_per_s, self._largest * GROWTH_MAX)))

    def measured(self, count: int, seconds: float) -> None:
        """A piece of so many bytes took so long, and had the link for itself. Shorter ones say too little of B."""
        if count < PIECE_BYTES_MIN or seconds <= 0:
            return
        self._largest = max(self._largest, float(count))
        x, y = 1.0 / count, seconds / count  # y = a x + 1/B: so pieces of all lengths count alike
        self._sums = tuple(
            old * FORGET_RATIO + new for old, new in zip(self._sums, (1.0, x, y, x * x, x * y), strict=True)
        )
        mean_x, mean_y, mean_xx, mean_xy = (one / self._sums[0] for one in self._sums[1:])
        variance, delay_s = mean_xx - mean_x * mean_x, 0.0
        if variance > (0.05 * mean_x) ** 2:  # else they are too much alike to say which part of their time is a
            delay_s = max(0.0, (mean_xy - mean_x * mean_y) / variance)
        if mean_y - delay_s * mean_x < B_RATIO_MIN * mean_y:
            delay_s = 0.0
        self.delay_s, self.bytes_per_s = delay_s, 1.0 / (mean_y - delay_s * mean_x)


class Cap:
    """The most that all copies of a store may take of the network: a bucket of tokens. None: no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._burst = 0.0 if bytes_per_s is None else max(float(PIECE_BYTES_MIN), bytes_per_s * BURST_S)
        self._tokens = self._burst
        self._at_s: float | None = None

    def allowed_bytes(self, now_s: float) -> int | None:
        """Return how many bytes may go now, None for any number."""
        if self.bytes_per_s is None:
            return None
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._tokens = min(self._burst, self._tokens + passed_s * self.bytes_per_s)
        self._at_s = now_s
        return max(0, int(self._tokens))

    def spend(self, count: int) -> None:
        """So many bytes go."""
        self._tokens -= count

    def wait_s(self, count: int) -> float:
        """Return how long it takes until so many bytes may go."""
        missing = min(float(count), self._burst) - self._tokens
        return 0.0 if self.bytes_per_s is None else max(0.0, missing / self.bytes_per_s)


def next_piece(now_s: float, sight: LinkState | None, left: int, cost: Cost, cap: Cap) -> tuple[int, float]:
    """Return how many of the bytes that are left go now, and how long to wait where it is none.

    Without a ``sight`` of the link (None) the cap alone decides.
    """
    least, wait_s = min(left, PIECE_BYTES_MIN), POLL_S
    if sight is None:
        count = max(least, min(left, cost.bytes_within(PIECE_S)))
    elif sight.busy:
        return 0, wait_s
    elif sight.ends_s is None:
        count = max(least, min(left, cost.bytes_within(BLIND_PIECE_S)))
    else:
        room_s = sight.began_s + MARGIN_RATIO * (sight.ends_s - sight.began_s) - now_s
        count = min(left, cost.bytes_within(min(room_s, PIECE_S)))
        if count < least:
            return 0, max(wait_s, sight.ends_s - now_s)
    allowed = cap.allowed_bytes(now_s)
    if allowed is not None:
        if allowed < least:
            return 0, cap.wait_s(least)
        count = min(count, allowed)
    return count, 0.0


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
        self._cap.spend(count)
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
                self._carrier.observe_traffic(time.monotonic(), self._counter.sent_bytes())
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
                self._cap.spend(count)
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
