"""The server's only source of time, times as text, and what is known of nodes' clocks.

Only ``SystemClock`` reads a clock; all other modules receive a Clock. What is said of a node's clock is pure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import msgspec

from eagle_eye.schema.frame import Frame


class Clock(Protocol):
    """Wall time for records, monotonic time for durations; a test's clock moves only on request."""

    def now_s(self) -> float:
        """Return Unix seconds."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds since some fixed moment; never decreases."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Return Unix seconds."""
        return time.time()

    def monotonic_s(self) -> float:
        """Return seconds since some fixed moment; never decreases."""
        return time.monotonic()


def rfc3339(time_s: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# A node's clock: its offset, when it was set, and which of its times are implausible. The offset is the server's clock
# minus the node's, to be added to the node's times.

OFFSET_APPLIED_S = 2.0  # smaller offsets are ignored: network delay is of that order
STEP_S = 2.0  # rarely exceeded by network delay; smaller clock steps are found within two minutes
SAME_BASE_S = 0.5  # base readings closer than this are of a clock that was not set between them
AHEAD_S_MAX = 5.0  # tolerance for times after their receipt: the unapplied offset, and a slightly early tick
AGE_S_MAX = 10 * 365 * 86_400.0  # no spool and no uptime is older
EARLIER_S_MAX = 86_400.0  # how long frames dated before the clock was set may still arrive
JUST_SET_S = 60.0  # how long events dated before that may still arrive
SEEN_S = 10.0  # without a report by the client, a smaller step may be slow requests instead
LASTS_REQUESTS, LASTS_S = 3, 1.0  # this many requests over this long that agree on later times rule out delay
_BUCKET_S = 60.0


class Moved(NamedTuple):
    """What is added to each time beside the offset (0 for plausible ones), and how many are implausible."""

    by_s: tuple[float, ...]
    times: int


@dataclass(slots=True)
class NodeClock:
    """The estimate of one node's offset: the minimum of received minus sent over one to two minutes.

    The least delayed request is the best estimate: no request arrives before it was sent. The estimate is too high by
    the network's minimum delay. It restarts when the clock was set: the node reports it (``base_s``, the clock minus
    one that is never set, has changed), a request is sent before a time that the node has already reported, or several
    requests agree on a higher offset. ``low_s`` to ``high_s``, before ``until_s``: samples that change nothing.
    """

    base_s: float | None
    started_s: float
    low_s: float  # the minimum of this bucket
    previous_s: float | None = None  # the minimum of the previous bucket
    before_s: float | None = None  # the estimate before the clock was set
    set_s: float = float("-inf")  # when that was detected, by the server's clock
    high_s: float = 0.0
    until_s: float = 0.0
    applied_s: float = 0.0
    _higher: tuple[int, float, float, float] | None = None  # requests that agree: count, since when, min and max

    @classmethod
    def of(cls, sample_s: float, received_s: float, base_s: float | None) -> NodeClock:
        """Return the estimate from a node's first request, or from an offset that is known."""
        clock = cls(base_s, received_s, sample_s)
        clock._note()
        return clock

    @property
    def value_s(self) -> float:
        """The estimated offset."""
        return self.low_s if self.previous_s is None else min(self.low_s, self.previous_s)

    def add_request(
        self, sent_s: float, received_s: float, base_s: float | None, newest_s: float | None, *, live: bool
    ) -> float | None:
        """Add one request's times; return by how much the clock was set, None if it was not.

        ``newest_s`` is the latest time that the node has reported before, by its clock. A request that is not ``live``
        contains delayed frames, and may itself have been delayed for long.
        """
        sample_s, value_s = received_s - sent_s, self.value_s
        if not is_same_base(base_s, self.base_s):
            self.base_s = base_s
            return self._begin(sample_s, received_s)
        if sample_s < value_s - STEP_S:
            return self._begin(sample_s, received_s)
        if sample_s <= value_s + STEP_S:
            self._higher = None
        elif live and ((newest_s is not None and newest_s > sent_s + STEP_S) or self._is_lasting(sample_s, received_s)):
            return self._begin(sample_s, received_s)
        if received_s - self.started_s >= _BUCKET_S:
            stale = received_s - self.started_s >= 2 * _BUCKET_S
            self.previous_s = None if stale else self.low_s
            self.started_s, self.low_s = received_s, sample_s
        self.low_s = min(self.low_s, sample_s)
        self._note()
        return None

    def moved(self, times_s: Sequence[float], received_s: float) -> Moved | None:
        """Return how to move a request's implausible times; None if all are plausible.

        Times after their receipt were dated by the clock before it was set, or else arbitrarily: then the latest of
        them becomes that of its receipt, and the others keep their distance to it. Times of a decade ago are treated
        the same way.
        """
        least_s, most_s = received_s - AGE_S_MAX - self.applied_s, received_s + AHEAD_S_MAX - self.applied_s
        if least_s <= min(times_s) and max(times_s) <= most_s:
            return None
        earlier_s = None if self.before_s is None else _applied(self.before_s) - self.applied_s
        by_s = [0.0] * len(times_s)
        odd: list[list[int]] = [[], []]
        for at, time_s in enumerate(times_s):
            if least_s <= time_s <= received_s - self.applied_s:
                continue
            if time_s <= most_s:
                odd[1].append(at)  # keeps its position among those further ahead, if there are any
            elif earlier_s is not None and received_s - EARLIER_S_MAX <= time_s + earlier_s + self.applied_s <= (
                received_s + AHEAD_S_MAX
            ):
                by_s[at] = earlier_s
            else:
                odd[time_s > most_s].append(at)
        for places in odd:
            last_s = max((times_s[at] for at in places), default=0.0)
            for at in places if not least_s <= last_s <= most_s else ():
                by_s[at] = received_s - last_s - self.applied_s
        return Moved(tuple(by_s), sum(one != 0.0 for one in by_s))

    def event_s(self, placed_s: float, received_s: float) -> float:
        """Return an event's corrected time; one dated before the clock was set gets that earlier clock's offset."""
        if self.before_s is None or received_s - self.set_s > JUST_SET_S:
            return placed_s
        if self.set_s - STEP_S <= placed_s <= received_s + AHEAD_S_MAX:
            return placed_s
        earlier_s = placed_s - self.applied_s + _applied(self.before_s)
        return earlier_s if self.set_s - JUST_SET_S <= earlier_s <= received_s + STEP_S else placed_s

    def _begin(self, sample_s: float, received_s: float) -> float:
        before_s = self.value_s
        self.before_s, self.set_s = before_s, received_s
        self.started_s, self.low_s, self.previous_s, self._higher = received_s, sample_s, None, None
        self._note()
        return before_s - sample_s

    def _is_lasting(self, sample_s: float, received_s: float) -> bool:
        """Return whether the last requests agree, within a tolerance, on later times than estimated."""
        if self._higher is None:
            self._higher = (1, received_s, sample_s, sample_s)
            return False
        count, since_s, least_s, most_s = self._higher
        least_s, most_s = min(least_s, sample_s), max(most_s, sample_s)
        if most_s - least_s > STEP_S:
            self._higher = (1, received_s, sample_s, sample_s)
            return False
        self._higher = (count + 1, since_s, least_s, most_s)
        return count + 1 >= LASTS_REQUESTS and received_s - since_s >= LASTS_S

    def _note(self) -> None:
        value_s = self.value_s
        self.high_s = value_s + STEP_S
        self.until_s = self.started_s + _BUCKET_S if self._higher is None else float("-inf")
        self.applied_s = _applied(value_s)


def corrected(
    frame: Frame, offset_s: float, received_s: float, event_s: Callable[[float, float], float] | None = None
) -> Frame:
    """Return the frame with its times by the server's clock: ``offset_s`` later.

    An event with an implausible time gets the frame's time, so that the event is kept. ``event_s(time_s, received_s)``
    may return a better time for an event than the offset alone.
    """
    if offset_s == 0.0 and not frame.events:
        return frame
    frame_s = frame.time_s + offset_s
    events = []
    for event in frame.events:
        time_s = event.time_s + offset_s
        if event_s is not None:
            time_s = event_s(time_s, received_s)
        placed_s = time_s if is_possible(time_s, received_s) else frame_s
        events.append(event if placed_s == event.time_s else msgspec.structs.replace(event, time_s=placed_s))
    return msgspec.structs.replace(frame, time_s=frame_s, events=events)


def is_possible(time_s: float, received_s: float) -> bool:
    """Return whether ``time_s`` is plausible for something received at ``received_s``, both by the server's clock."""
    return received_s - AGE_S_MAX <= time_s <= received_s + AHEAD_S_MAX


def _applied(estimate_s: float) -> float:
    return estimate_s if abs(estimate_s) > OFFSET_APPLIED_S else 0.0


def is_same_base(one: float | None, other: float | None) -> bool:
    """Return whether two bases are of a clock that was not set between them; None: not reported."""
    return one == other or (one is not None and other is not None and abs(one - other) <= SAME_BASE_S)
