"""The lease by which one of several servers leads: what each concludes from what it sees. Pure; times are passed in.

No clocks of two servers are compared. A standby counts from the answer that first showed the lease as it is to the
question whose answer still shows it so; the leader counts from before it sent its renewal. A standby therefore takes
over a whole lease after the leader's last renewal took effect at the earliest, and the leader has stopped by itself
half a lease earlier.
"""

from __future__ import annotations

from typing import NamedTuple

DECIDES_RATIO = 0.5  # of a lease, for which the leader decides after it sent a renewal
RISE_MAX = 1_000_000_000  # a subscriber that says more has seen no epoch of these servers
LEAP = 1_000_000  # of the epoch, for each failover of the database: more than its rises that may be lost with one
HEARD_LEASES = 2.0  # for how long a node that was heard counts as heard
CLEARLY = 2.0  # how many times as many nodes a standby must hear for the leader to give way
TERM_LEASES_MIN = 12.0  # for which a leader leads at least before it gives way: two must not take turns
YIELD_LEASES = 3.0  # for which who gave way leaves a free lease to others


class Lease(NamedTuple):
    """The lease as it is kept: ``epoch`` rises with each leader, ``renewals`` with each sign of life of this one.

    ``holder`` is the leader's URL, "" where nobody leads. ``backend_pid`` is the database's process that its writing
    connection talks to, 0 where there is none.
    """

    epoch: int
    renewals: int
    holder: str
    backend_pid: int


class Wish(NamedTuple):
    """A standby's wish that the leader step down; ``number`` rises with each one.

    ``nodes`` have asked it in vain: it does not reach the leader either. ``holder`` is its URL.
    """

    number: int
    nodes: int
    holder: str


class Renewed(NamedTuple):
    """A renewal: the epoch to lead under from now on, and the newest wish."""

    epoch: int
    wish: Wish


def gives_way(wished: int, heard: int, led_s: float, lease_s: float) -> bool:
    """Return whether a leader that hears so many nodes gives way to a standby that so many ask in vain.

    Both count the nodes of the last HEARD_LEASES, so what is cut off for a moment counts at both.
    """
    return led_s >= TERM_LEASES_MIN * lease_s and wished > CLEARLY * heard


def risen(epoch: int, seen: int) -> int | None:
    """Return the epoch to lead under once a subscriber has seen ``seen``; None where that is over RISE_MAX above."""
    return max(epoch, seen + 1) if seen - epoch <= RISE_MAX else None


class LeaseWatch:
    """A standby's: says when to take over. Times are those of its own clock, which goes on while the host sleeps."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: tuple[int, int] | None = None
        self._since_s = 0.0

    def take_over(self, lease: Lease, asked_s: float, answered_s: float) -> bool:
        """Note the lease as it was read, asked for and answered at these times; return whether to take over."""
        if not lease.holder:
            return True
        seen = lease.epoch, lease.renewals
        if seen != self._seen:
            self._seen, self._since_s = seen, answered_s
            return False
        return asked_s - self._since_s >= self._lease_s

    def missed(self) -> None:
        """Begin anew: the lease could not be read, and perhaps not be renewed for the same reason."""
        self._seen = None


class LeaseTerm:
    """A leader's: says for how long it may decide. Times are those of its own clock."""

    def __init__(self, epoch: int, lease_s: float, sent_s: float) -> None:
        """``sent_s`` is from before the lease was asked for."""
        self.epoch = epoch
        self._lease_s = lease_s
        self._sent_s = sent_s

    def renewed(self, sent_s: float) -> None:
        """Count from this time, which is from before the renewal was sent that succeeded."""
        self._sent_s = max(self._sent_s, sent_s)

    def raised(self, epoch: int, sent_s: float) -> None:
        """Lead under this epoch from now on; ``sent_s`` is from before it was written, which is a renewal, too."""
        self.epoch = epoch
        self.renewed(sent_s)

    def left_s(self, now_s: float) -> float:
        """Return for how long it may still decide; 0.0 once it must not."""
        return max(0.0, self._sent_s + DECIDES_RATIO * self._lease_s - now_s)
