"""Whether this server leads: keeps or watches the lease from a thread of its own. Every decision asks here first.

What is concluded from the lease is pure, with times as arguments; a ``LeaseKeeper`` reads and writes it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from eagle_eye.server.model.errors import NotLeading, StoreUnavailable

# No clocks of two servers are compared. A standby counts from the answer that first showed the lease as it is to the
# question whose answer still shows it so; the leader counts from before it sent its renewal. A standby therefore takes
# over a whole lease after the leader's last renewal took effect at the earliest, and the leader has stopped by itself
# half a lease earlier.

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


STEPS = 5  # renewals in the time of a lease, and looks of a standby
STEP_S_MAX = 1.0
REPLICAS_S = 10.0  # how often a leader looks at the database's replicas

_log = logging.getLogger(__name__)


class LeaseKeeper(Protocol):
    """Where the lease is kept. Every method raises StoreUnavailable when it cannot be reached."""

    def read(self) -> Lease:
        """Return the lease as it is."""
        ...

    def take_lease(self, seen: Lease, holder: str) -> int | None:
        """Take the lease if it is still as it was seen; return the new epoch. The leader before writes no more."""
        ...

    def renew(self, epoch: int, holder: str) -> Renewed | None:
        """Count a renewal; return None if the lease is another's by now.

        The epoch has risen where the database failed over: what the one before gave out last may be lost.
        """
        ...

    def rise(self, epoch: int, holder: str, to: int) -> bool:
        """Raise the epoch, if the lease is still this server's; return whether it was."""
        ...

    def release(self, epoch: int, holder: str) -> None:
        """Give the lease back, if it is still this server's."""
        ...

    def wish(self, seen: Lease, holder: str, nodes: int) -> None:
        """Wish that the leader step down for ``holder``, which so many nodes ask in vain, if the lease is as seen."""
        ...

    def replicas_behind(self) -> int:
        """Return how many replicas of the database may lack its last commits."""
        ...

    def close(self) -> None:
        """Release the connection."""
        ...


def boot_s() -> float:
    """Return seconds since the host's start, those included for which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership:
    """This server's part in leading. It stands by, then leads, and is ``over`` until ``stand_by`` is called."""

    def __init__(self, keeper: LeaseKeeper, url: str, lease_s: float, now_s: Callable[[], float] = boot_s) -> None:
        """``url`` is where the other servers reach this one."""
        self.url = url
        self.leader_url = ""  # "" where nobody leads, as it was read last
        self.epoch = 0  # as it was read last
        self.takeovers = 0  # times that this server began to lead
        self.rises = 0  # times that it raised its epoch while it led
        self.replicas_behind = 0  # of the database, that may lack its last commits; as a leader read it last
        self._replicas_s = -math.inf
        self.step_downs = 0  # times that it gave way to a standby that clearly more nodes reach
        self.followed = ""  # who gave way to this server, which leads now; "" for nobody
        self._heard: Callable[[], int] = lambda: 0
        self._led_s = -math.inf  # when the term began
        self._yields_until_s = -math.inf
        self._wish = -1  # the last one that a leader has seen; -1: none in this term
        self._wished: tuple[str, int, float] = "", 0, -math.inf  # of whom, because of how many nodes, when
        self._keeper = keeper
        self._lease_s = lease_s
        self._now_s = now_s
        self._state: Literal["standby", "leading", "over"] = "standby"
        self._seen_s = now_s()  # when this leader and this epoch were first read
        self._watch = LeaseWatch(lease_s)
        self._term: LeaseTerm | None = None
        self._alive_s: float | None = None  # None: not serving yet
        self._problem = ""  # why the lease could not be read or written last
        self._lock = threading.Lock()
        self._keeping = threading.Lock()  # held by the thread that uses the keeper
        self._woken = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    @property
    def leads(self) -> bool:
        """Whether this server has the lease; ``left_s`` says whether it may decide at present."""
        return self._state == "leading"

    def left_s(self) -> float:
        """Return for how long this server may still decide; 0.0 where it must not."""
        term = self._term
        return 0.0 if term is None or not self.leads else term.left_s(self._now_s())

    def epoch_to_decide(self) -> int:
        """Return the epoch under which this server decides. Raises NotLeading where it must not."""
        return self.term_to_decide().epoch

    def term_to_decide(self) -> LeaseTerm:
        """Return the term in which this server decides; its epoch may rise. Raises NotLeading where it must not."""
        term = self._term
        if term is None or not self.leads:
            raise NotLeading(f"this server stands by and decides nothing; {self.leader()}")
        if term.left_s(self._now_s()) <= 0.0:
            raise NotLeading(
                f"the lease could not be renewed for half of records.lease_s ({self._lease_s:g} s): nothing is decided"
                f" until it is; {self._problem or 'the database is slow'}"
            )
        return term

    def rise_above(self, seen: int) -> int | None:
        """Lead under an epoch above the one that a subscriber has seen, and return it: the database was restored.

        None where this server's is as high, is not to rise so far, or is not this server's any more. May be called from
        any thread. Raises StoreUnavailable.
        """
        with self._keeping:
            term, sent_s = self._term, self._now_s()
            if term is None or not self.leads or seen <= term.epoch:
                return None
            before, epoch = term.epoch, risen(term.epoch, seen)
            said = {"before": before, "seen": seen}
            if epoch is None:
                _log.error(
                    "a subscriber has seen an epoch more than %d above this server's, which is not raised: correct the"
                    " subscriber, or raise it by hand (docs/how-to/two-servers.md)",
                    RISE_MAX,
                    extra=said,
                )
                return None
            if not self._keeper.rise(before, self.url, epoch):
                return None  # the next renewal finds out, too
            term.raised(epoch, sent_s)
            self._note(self.url, epoch)
            self.rises += 1
        _log.warning(
            "the epoch is raised above the one that a subscriber has seen: the database was restored",
            extra={**said, "epoch": epoch},
        )
        return epoch

    def settle(self) -> None:
        """Return once no question about the lease is under way: an epoch that was just raised is known then."""
        with self._keeping:
            pass

    def problem(self) -> str:
        """Return why this server must not decide, "" where it may."""
        try:
            self.epoch_to_decide()
        except NotLeading as error:
            return str(error)
        return ""

    @property
    def lease_problem(self) -> str:
        """Why the lease could not be read or written last, "" where it could."""
        return self._problem

    def seen_for_s(self) -> float:
        """Return for how long this server has known ``leader_url`` and ``epoch`` as they are."""
        return self._now_s() - self._seen_s

    def count_nodes(self, heard: Callable[[], int]) -> None:
        """Have ``heard`` called for the nodes heard in the last HEARD_LEASES; a standby's are those that ask in vain.

        From any thread.
        """
        self._heard = heard

    def nodes_in_vain(self) -> int:
        """Return how many nodes ask this standby and reach the leader neither by it nor otherwise; 0 for a leader."""
        return self._heard() if self._state == "standby" else 0

    def state(self) -> str:
        """Return who leads, and whether it is asked to step down, in words."""
        nodes = self.nodes_in_vain()
        said = f"; it is asked to step down: {nodes} of the nodes that ask here do not reach it" if nodes else ""
        return f"{self.leader()}{said}"

    def leader(self) -> str:
        """Return who leads, in words."""
        if self._problem:
            return f"who leads is not known: {self._problem}"
        return f"{self.leader_url} leads (epoch {self.epoch})" if self.leader_url else "nobody leads yet"

    def alive(self) -> None:
        """Note that the server answers: one that ceases to is not to lead. Called at least once a second."""
        self._alive_s = self._now_s()

    def start(self) -> None:
        """Look once, which takes a lease that is free, and keep on from a thread."""
        self.step()
        self._thread.start()

    def stand_by(self) -> None:
        """LeaseWatch the lease, and take it when its time has come."""
        with self._lock:
            if self._state == "over":
                self._state, self._term, self._watch = "standby", None, LeaseWatch(self._lease_s)
                self._alive_s = None
                self._heard = lambda: 0  # what it heard as a leader is no standby's

    def hand_over(self) -> None:
        """Decide no more, and have the lease given back at once. For signal handlers, too: it does not wait."""
        self._state = "over"
        self._woken.set()

    def close(self) -> None:
        """Give the lease back, and end."""
        self._closing = True
        self.hand_over()
        if self._thread.is_alive():
            self._thread.join(self._lease_s)
        if not self._thread.is_alive():
            self._keeper.close()  # else the thread does: it would connect anew after that

    def step(self) -> None:
        """Renew the lease, look at it, or give it back."""
        with self._keeping:
            self._step()

    def _step(self) -> None:
        try:
            if self._state == "leading":
                self._renew()
            elif self._state == "standby":
                self._look()
            elif self._term is not None:
                term, self._term = self._term, None
                self._keeper.release(term.epoch, self.url)
            self._problem = ""
        except StoreUnavailable as error:
            self._problem = str(error)
            self._watch.missed()
        except Exception as error:  # noqa: BLE001 - a bug must not end this thread: nobody would lead
            _log.exception("the lease could not be looked at for a reason that was not foreseen")
            self._problem = f"{type(error).__name__}, see the log"
            self._watch.missed()

    def _run(self) -> None:
        while not self._closing:
            self._woken.wait(min(self._lease_s / STEPS, STEP_S_MAX))
            self._woken.clear()
            self.step()
        self._keeper.close()

    def _renew(self) -> None:
        term, sent_s = self._term, self._now_s()
        assert term is not None  # noqa: S101 - a leader has a term
        if self._alive_s is not None and sent_s - self._alive_s >= self._lease_s:
            raise StoreUnavailable("this server's event loop stands still: its lease is not renewed")
        renewed = self._keeper.renew(term.epoch, self.url)
        if renewed is not None and renewed.epoch == term.epoch:
            term.renewed(sent_s)
            if self._gives_way(renewed.wish, sent_s):
                return
            if sent_s - self._replicas_s >= REPLICAS_S:
                self._replicas_s, self.replicas_behind = sent_s, self._keeper.replicas_behind()
            return
        if renewed is not None:
            said = {"before": term.epoch, "epoch": renewed.epoch}
            term.raised(renewed.epoch, sent_s)
            self._note(self.url, renewed.epoch)
            self.rises += 1
            _log.warning(
                "the epoch is raised: the database failed over, and may have lost its last commits", extra=said
            )
            return
        with self._lock:
            self._state, self._term = "over", None
        _log.error("another server has taken over: this one decides nothing more", extra={"epoch": term.epoch})

    def _gives_way(self, wish: Wish, now_s: float) -> bool:
        """Step down for a standby that clearly more nodes reach; return whether this server did."""
        before, self._wish = self._wish, wish.number
        if before in (-1, wish.number):
            return False
        heard = self._heard()
        if not gives_way(wish.nodes, heard, now_s - self._led_s, self._lease_s):
            return False
        with self._lock:
            term, self._term, self._state = self._term, None, "over"
        self.step_downs += 1
        self._yields_until_s = now_s + YIELD_LEASES * self._lease_s
        _log.error(
            "this server steps down: clearly more nodes reach a standby, which does not reach this server",
            extra={"heard": heard, "standby": wish.holder, "nodes_of_standby": wish.nodes},
        )
        if term is not None:
            self._keeper.release(term.epoch, self.url)
        return True

    def _look(self) -> None:
        asked_s = self._now_s()
        lease = self._keeper.read()
        self._note(lease.holder, lease.epoch)
        if not lease.holder and asked_s < self._yields_until_s:
            return
        if not self._watch.take_over(lease, asked_s, self._now_s()):
            if nodes := self.nodes_in_vain():
                self._keeper.wish(lease, self.url, nodes)
                self._wished = lease.holder, nodes, asked_s
            return
        sent_s = self._now_s()
        epoch = self._keeper.take_lease(lease, self.url)
        if epoch is None:
            return
        with self._lock:
            if self._state == "standby":
                self._note(self.url, epoch)
                self.takeovers += 1
                self._term, self._alive_s = LeaseTerm(epoch, self._lease_s, sent_s), None
                self._led_s, self._wish = sent_s, -1
                before, nodes, wished_s = self._wished
                given = not lease.holder and sent_s - wished_s < YIELD_LEASES * self._lease_s
                self.followed = (
                    f"{before}: {nodes} of the nodes that asked {self.url} did not reach it" if given else ""
                )
                self._state = "leading"
        if self._term is None:  # asked to stop meanwhile
            self._keeper.release(epoch, self.url)
            return
        said = {"epoch": epoch, "before": lease.holder or "nobody"}
        _log.warning("this server leads from now on", extra=said)

    def _note(self, leader_url: str, epoch: int) -> None:
        if (leader_url, epoch) != (self.leader_url, self.epoch):
            self.leader_url, self.epoch, self._seen_s = leader_url, epoch, self._now_s()
