"""What the server last heard from each node, in memory: clock offsets, freshness and the agents' own troubles.

Beside it: node clocks that step, senders whose series nothing maps, which nodes a trusted source vouches for, and which
have yet to send again what a former leader acknowledged.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.frame import Frame, Rank
from eagle_eye.schema.names import UNKNOWN
from eagle_eye.server.history.history import LATE_S
from eagle_eye.server.model.batch import ResolvedTemplate
from eagle_eye.server.model.clock import SEEN_S, STEP_S, NodeClock, corrected, is_same_base
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.identity import Clusters, NameClaims, NodeNames
from eagle_eye.server.telemetry.counters import metric_name

CLOCK_SAID_S = 3600.0  # how long a node's troubles mention it
CLOCK_LOG_NODE_S = 600.0  # minimum time between two log lines about one node
CLOCK_LOG_PER_MINUTE = 20  # lines: when the server's own clock is set, every node's clock appears to be

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Noted:
    set_s: float = float("-inf")
    set_by_s: float = 0.0
    reported: bool = False
    moved_s: float = float("-inf")
    moved: int = 0
    logged_s: float = float("-inf")


class ClockNotes:
    """Clock steps and moved timestamps per node.

    ``steps`` counts clock steps by who detected them; ``moved`` counts moved timestamps by what carried them.
    """

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter({"agent": 0, "server": 0})
        self.moved: Counter[str] = Counter({"frame": 0, "event": 0, "sample": 0})
        self._noted: dict[str, _Noted] = {}
        self._minute_s = float("-inf")
        self._logged = 0

    def note_set(self, node: str, by_s: float, now_s: float, *, reported: bool) -> None:
        """Record that a node's clock was set by ``by_s``; ``reported`` means that the agent reported it."""
        self.steps["agent" if reported else "server"] += 1
        noted = self._noted.setdefault(node, _Noted())
        noted.set_s, noted.set_by_s, noted.reported = now_s, by_s, reported
        self._say(node, noted, now_s)

    def note_moved(self, node: str, what: str, count: int, now_s: float) -> None:
        """Record that ``count`` timestamps of a node were implausible and were moved."""
        if not count:
            return
        self.moved[what] += count
        noted = self._noted.setdefault(node, _Noted())
        noted.moved = count if now_s - noted.moved_s > CLOCK_SAID_S else noted.moved + count
        noted.moved_s = now_s
        self._say(node, noted, now_s)

    def said(self, node: str, now_s: float) -> str | None:
        """Describe what happened to a node's clock in the last hour; None if nothing did."""
        noted = self._noted.get(node)
        return None if noted is None else _said(noted, now_s)

    def _say(self, node: str, noted: _Noted, now_s: float) -> None:
        if abs(now_s - self._minute_s) >= 60.0:
            self._minute_s, self._logged = now_s, 0
        if abs(now_s - noted.logged_s) < CLOCK_LOG_NODE_S or self._logged >= CLOCK_LOG_PER_MINUTE:
            return
        noted.logged_s = now_s
        self._logged += 1
        _log.warning("node %s: %s", node, _said(noted, now_s))


def _said(noted: _Noted, now_s: float) -> str | None:
    parts: list[str] = []
    if now_s - noted.set_s <= CLOCK_SAID_S:
        who = "the agent says so" if noted.reported else "seen by what it sends"
        parts.append(f"its clock was set by {noted.set_by_s:+.1f} s ({who})")
    if now_s - noted.moved_s <= CLOCK_SAID_S:
        parts.append(f"{noted.moved} times that it sent cannot be and were moved to when they came")
    return "; ".join(parts) or None


# Which senders of remote write name no series that is mapped. Written on the event loop, read from any thread.
# Their requests are answered as written, because senders would take anything else for a failure and send them again.

UNMAPPED_S_MIN = 180.0  # one request of several may well have nothing that is mapped
UNMAPPED_HEARD_S_MAX = 600.0
NAMES_SHOWN = 4
NAME_CHARS_MAX = 80
_OF_EVERY_TARGET = ("scrape_", "target_info", "otel_scope_info")  # these names say nothing about the sender


@dataclass(slots=True)
class _Sender:
    since_s: float  # of the first request after the last with a mapped series
    heard_s: float = 0.0
    names: list[str] = field(default_factory=list)


class UnmappedSenders:
    """The senders whose series are all unmapped, since when, and some of the names."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}

    def record_request(self, sender: str, unmapped: Iterable[bytes], now_s: float, *, mapped: bool) -> None:
        """Note a request: some names that are not mapped, and whether any other is."""
        names = sorted((name.decode(errors="replace") for name in unmapped), key=_is_of_every_target)
        if mapped:
            self._senders.pop(sender, None)
        elif names:
            known = self._senders.setdefault(sender, _Sender(now_s))
            known.heard_s, known.names = now_s, names[:NAMES_SHOWN]

    def said(self, now_s: float) -> Iterator[str]:
        """Yield what to say of each sender that goes on like this."""
        for sender, known in sorted(self._senders.copy().items()):
            if known.heard_s - known.since_s >= UNMAPPED_S_MIN and now_s - known.heard_s <= UNMAPPED_HEARD_S_MAX:
                names = ", ".join(f"{name[:NAME_CHARS_MAX]!a}" for name in known.names)
                yield f"none of the series that {sender} writes is mapped, among them {names}"


def _is_of_every_target(name: str) -> bool:
    return name.startswith(_OF_EVERY_TARGET)


# Which nodes a trusted source vouches for, so that invented names cannot raise limits.


class Vouchers:
    """The sources that vouch for nodes.

    Vouched nodes are those whose own agent reports (its token is bound to the node), that an administrator sends frames
    for, that hold an agent's token, that a scheduler or launcher names, and those of the topology file, ``placed``. A
    remote-write token vouches only for nodes that it names without a wildcard. On the event loop.
    """

    def __init__(self, placed: Iterable[str] = ()) -> None:
        self._placed = frozenset(placed)
        self._spoken: set[str] = set()
        self._enrolled: AbstractSet[str] = frozenset()
        self._declared: AbstractSet[str] = frozenset()
        self._scheduled: dict[str, NodeNames] = {}
        # Per scheduler, its node names resolved to ours: of a hundred domains of one name only one matches.
        self._meant: dict[tuple[str, str], str] = {}

    def note_spoken(self, node: str) -> None:
        """Record that the node's own agent, or an administrator, sent its frames."""
        self._spoken.add(node)

    def use_tokens(self, nodes: AbstractSet[str]) -> None:
        """Replace the set of nodes that hold a valid agent's token."""
        self._enrolled = nodes

    def use_jobs(self, nodes: AbstractSet[str]) -> None:
        """Replace the set of nodes of jobs that launchers and schedulers declare."""
        self._declared = nodes

    def use_scheduler(self, source: str, names: NodeNames) -> None:
        """Replace the set of a scheduler's nodes, by the scheduler's names for them."""
        self._scheduled[source] = names

    def forget(self, nodes: Collection[str]) -> None:
        """Forget that the nodes reported; other sources still vouch for them."""
        self._spoken.difference_update(nodes)
        self._meant = {key: node for key, node in self._meant.items() if node not in nodes}

    def vouch_for(self, node: str) -> bool:
        """Return whether any source vouches for the node."""
        if node in self._spoken or node in self._enrolled or node in self._declared or node in self._placed:
            return True
        return self._is_scheduled(node)

    def count(self, nodes: AbstractSet[str]) -> int:
        """Return how many of the nodes are vouched for."""
        others = nodes - self._spoken - self._enrolled - self._declared - self._placed
        named = sum(map(self._is_scheduled, others)) if self._scheduled else 0
        return len(nodes) - len(others) + named

    def _is_scheduled(self, node: str) -> bool:
        return any(self._is_meant(source, names, node) for source, names in self._scheduled.items())

    def _is_meant(self, source: str, names: NodeNames, node: str) -> bool:
        theirs = names.ours(node)
        if theirs is None:
            return False
        return theirs.casefold() == node.casefold() or self._meant.setdefault((source, theirs), node) == node


class Unvouched:
    """Unvouched nodes, each with the remote-write token that named it first ("" if no longer known)."""

    def __init__(self) -> None:
        self._tokens: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, node: object) -> bool:
        return node in self._tokens

    def token_of(self, node: str) -> str:
        """Return the token, "" for none."""
        return self._tokens.get(node, "")

    def count_of(self, token: str) -> int:
        """Return how many nodes the token named."""
        return self._counts[token]

    def add(self, node: str, token: str) -> None:
        """Add a node, replacing its earlier token."""
        self.discard(node)
        self._tokens[node] = token
        self._counts[token] += 1

    def discard(self, node: str) -> None:
        """Remove a node if present."""
        token = self._tokens.pop(node, None)
        if token is not None:
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]


class NodeQuota:
    """The nodes ever heard of: at most ``nodes_max`` vouched ones and as many unvouched ones."""

    def __init__(self, nodes_max: int, vouchers: Vouchers) -> None:
        self._nodes_max = nodes_max
        self._vouchers = vouchers
        self.known: set[str] = set()
        self.unvouched = Unvouched()

    def check(self, node: str) -> None:
        """Raise Refusal 403 unless the node is known and vouched for, or there is room for one more."""
        if node not in self.known and len(self.known) - len(self.unvouched) >= self._nodes_max:
            raise Refusal(
                403,
                "too_many_nodes",
                f"{self._nodes_max} nodes are known and {node!r} is none of them; remove those that"
                " are gone (eagle-eye nodes forget), or raise ingest.nodes_max",
            )

    def reserve(self, node: str, token: str, token_nodes_max: int) -> bool:
        """Reserve room for a node that a remote-write token names; return whether it is new and unvouched.

        ``release`` it if nothing of it is kept. Raises Refusal 403 if the token has named too many.
        """
        if self._vouchers.vouch_for(node):
            self.unvouched.discard(node)
            self.check(node)
            return False
        if node in self.known or node in self.unvouched:
            return node not in self.known
        named = self.unvouched.count_of(token)
        if named >= token_nodes_max:
            raise Refusal(
                403,
                "too_many_new_nodes",
                f"the token has named {named} nodes that nobody vouches for, and {node!r} is none of them; name them to"
                " the scheduler or in topology_file, remove those that are gone (eagle-eye nodes forget), or raise"
                " remote_write.token_nodes_max (of one token: tokens create --nodes-max)",
            )
        if len(self.unvouched) >= self._nodes_max:
            raise Refusal(
                403,
                "too_many_nodes",
                f"{self._nodes_max} nodes are known that nobody vouches for and {node!r} is none of them;"
                " raise ingest.nodes_max",
            )
        self.unvouched.add(node, token)
        return True

    def release(self, nodes: Collection[str]) -> None:
        """Release the reservations for those of the nodes that are not known."""
        for node in nodes:
            if node not in self.known:
                self.unvouched.discard(node)

    def leave(self, node: str) -> None:
        """Remove a node."""
        self.known.discard(node)
        self.unvouched.discard(node)


# Which nodes have yet to send again what a former leader acknowledged; until then their recent past is not whole.
# An agent keeps what was acknowledged for some minutes. It sends that again, newest first, to a server whose journal is
# another one, and says with each such request how many frames follow.

# How much time a request of a minute of frames is given: a fleet's agents take turns, so that this costs a server half
# a core at most (benchmarks/ingest/resends.py).
RESEND_S = 10e-3
RESEND_EVERY_S_MIN = 1.0  # below it, agents pace themselves
RESEND_EVERY_S_MAX = 300.0
REFILL_EVERY_S = 30.0  # windows are read anew so often at most: nodes may come one after the other
RESEND_PATIENCE_S = 10.0  # how long to wait for a request that is due


class _Progress(NamedTuple):
    whole: bool
    heard_s: float


class Resends:
    """The nodes that send again, on the event loop; ``monotonic_s`` is its clock.

    ``nodes()`` counts the nodes known. Detection is shown frames of the last ``window_s``, of a large fleet at most
    ``frames_max``; ``begun_s`` is when this server began to take frames, Unix seconds.
    """

    def __init__(
        self,
        begun_s: float,
        window_s: float,
        frames_max: int,
        nodes: Callable[[], int],
        monotonic_s: Callable[[], float],
    ) -> None:
        self._begun_s = begun_s
        self._window_s = window_s
        self._frames_max = frames_max
        self._nodes = nodes
        self._monotonic_s = monotonic_s
        self._began_s = monotonic_s()
        self._awaited: set[str] = set()
        self._nodes_of: dict[str, _Progress] = {}
        self._news = False
        self._taken_in_s = -math.inf

    def expect(self, nodes: Collection[str]) -> None:
        """Wait a little for what these may send again: they are known, and this server has not heard them of late."""
        self._awaited.update(nodes)

    def every_s(self) -> float:
        """Return how often each agent is to send such a request."""
        return min(self._nodes() * RESEND_S, RESEND_EVERY_S_MAX)

    def record_request(self, node: str, left: int, oldest_s: float) -> None:
        """Note a durable request of a node: ``left`` frames follow it, its own first is of ``oldest_s``."""
        self._awaited.discard(node)
        whole = left == 0 or oldest_s <= self._begun_s - self._reach_s()
        before = self._nodes_of.get(node)
        self._nodes_of[node] = _Progress(whole or (before is not None and before.whole), self._monotonic_s())
        self._news = self._news or before is None or not before.whole

    def incomplete(self) -> set[str]:
        """Return the nodes of whose recent past more is to come."""
        now_s = self._monotonic_s()
        if now_s - self._began_s > self._reach_s():  # frames that came since then fill what detection is shown
            return set()
        patience_s = RESEND_PATIENCE_S + 2.0 * self.every_s()
        awaited = self._awaited if now_s - self._began_s <= patience_s else set()
        sending = self._nodes_of.items()
        return awaited.union(node for node, at in sending if not at.whole and now_s - at.heard_s <= patience_s)

    def ready(self) -> bool:
        """Return whether windows read from the journal would reach further back than those in memory, for all nodes."""
        now_s = self._monotonic_s()
        due = self._news and now_s - self._taken_in_s >= REFILL_EVERY_S
        return due and now_s - self._began_s <= self._reach_s() and not self.incomplete()

    def taken_in(self) -> None:
        """Note that the windows have been read from the journal."""
        self._news, self._taken_in_s = False, self._monotonic_s()

    def problem(self) -> str:
        """Return whose recent past is not whole, "" if it is that of all."""
        missing = self.incomplete()
        if not missing:
            return ""
        return (
            f"the last minutes of {len(missing)} nodes are not complete yet, such as {min(missing)}: until they"
            " are, faults are still found, but no incident of their jobs is closed"
        )

    def _reach_s(self) -> float:
        return min(self._window_s, self._frames_max / max(self._nodes(), 1))


RECENT_S = 6 * 3_600.0  # a node silent for longer has left the fleet, and should not raise alarms
FRESH_INTERVALS = 2.5  # a node that scrapes slowly counts as fresh for this many of its intervals,
FRESH_INTERVAL_S_MAX = 120.0  # an interval above this counts as this
_TROUBLES_MAX = 32  # collectors and drop reasons kept per agent
BOOT_ID = "boot id"


@dataclass(frozen=True, slots=True)
class Heard:
    """What a node's agent last reported; ``farewell`` means that the agent announced its shutdown.

    ``received_s`` is by the server's clock, ``time_s`` by the node's: Unix seconds.
    """

    received_s: float
    time_s: float
    job: str | None
    boot_id: str
    agent_version: str
    interval_s: float
    farewell: bool = False
    ranks: tuple[Rank, ...] = ()
    collectors: Mapping[str, str] = field(default_factory=dict)
    troubles: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)


class Voice(NamedTuple):
    """What a node's agent last reported about the jobs and ranks running there."""

    node: str
    job: str | None
    ranks: Sequence[Rank]
    agent_version: str


class Presence(NamedTuple):
    """When a node was last heard, by the server's clock, and how often it reports."""

    node: str
    received_s: float
    interval_s: float

    def is_fresh(self, now_s: float, fresh_s: float) -> bool:
        """Return whether the node was heard within ``fresh_s``, or longer where it reports less often."""
        return abs(now_s - self.received_s) <= max(fresh_s, _patience_s(self.interval_s))


class Fleet:
    """All nodes ever heard of. Written on the event loop, read from any thread.

    Holds at most ``nodes_max`` vouched nodes and as many unvouched ones; unvouched nodes cannot displace vouched ones.
    ``clusters`` are those that series name, ``claims`` tells which machine holds a name that several have.
    """

    def __init__(self, nodes_max: int, vouchers: Vouchers | None = None, clusters: Clusters | None = None) -> None:
        self.clusters = clusters or Clusters()
        self.claims = NameClaims()
        self._names = NodeNames()
        self._names_of_agents = NodeNames()
        self._disputed: frozenset[str] = frozenset()
        self._clocks: dict[str, NodeClock] = {}
        self._clocks_before: dict[str, tuple[float, float | None]] = {}  # offset and base in an earlier run
        self.clock_notes = ClockNotes()
        self.unmapped_senders = UnmappedSenders()
        self.vouchers = vouchers or Vouchers()
        self.room = NodeQuota(nodes_max, self.vouchers)
        self._listeners: list[Callable[[Collection[str]], None]] = []
        self._heard: dict[str, Heard] = {}
        # For nodes whose newest frame was a plain row: its template, time and time of receipt; see last().
        self._rows: dict[str, tuple[ResolvedTemplate, float, float]] = {}
        self._known = self.room.known
        self._heard_before: dict[str, float] = {}  # when nodes were last heard in an earlier run
        self._newest_s: float | None = None
        self._newest_interval_s = 0.0

    def know(
        self, node: str, heard_s: float | None = None, unvouched_by: str | None = None, *, has_agent: bool = False
    ) -> None:
        """Add a node from the records of an earlier run, in which it was last heard at ``heard_s``.

        ``unvouched_by`` is the remote-write token that named the node; None if it became known another way.
        ``has_agent``: its own agent was heard.
        """
        self._add(node)
        if has_agent:
            self._names_of_agents.add(node)
        if heard_s is not None:
            self._heard_before[node] = max(heard_s, self._heard_before.get(node, heard_s))
        if unvouched_by is not None and not self.vouchers.vouch_for(node):
            self.room.unvouched.add(node, unvouched_by)

    def know_clock(self, node: str, offset_s: float, base_s: float | None) -> None:
        """Start from a node's offset in an earlier run, unless its base has changed since.

        Its first request alone would not tell an offset from how long it waited for this server to start.
        """
        self._clocks_before[node] = offset_s, base_s

    @property
    def known_count(self) -> int:
        """Number of nodes ever heard of."""
        return len(self._known)

    def is_known(self, node: str) -> bool:
        """Return whether the node was ever heard of."""
        return node in self._known

    @property
    def vouched_count(self) -> int:
        """Number of vouched nodes among those heard since the start or shortly before."""
        return self.vouchers.count(self._heard.keys() | self._rows.keys())

    def check_room(self, node: str) -> None:
        """Raise Refusal 403 unless the node is known and vouched for, or there is room for one more."""
        self.room.check(node)

    def forget(self, nodes: Collection[str]) -> None:
        """Remove the nodes, as if they had never been heard of."""
        self.claims.forget(nodes)
        for node in nodes:
            self.room.leave(node)
            self._names.discard(node)
            self._names_of_agents.discard(node)
            for kept in (self._clocks, self._clocks_before, self._heard, self._rows, self._heard_before):
                kept.pop(node, None)
        self.vouchers.forget(nodes)
        for callback in self._listeners:
            callback(nodes)

    def leave(self, nodes: Iterable[str]) -> None:
        """Note that the nodes report to another cell: what they said here last is no news any more."""
        for node in nodes:
            self._heard.pop(node, None)
            self._rows.pop(node, None)

    def when_forgotten(self, callback: Callable[[Collection[str]], None]) -> None:
        """Register ``callback`` to be called with the nodes that are forgotten."""
        self._listeners.append(callback)

    def _add(self, node: str) -> bool:
        """Add a node to the known; return whether it is new."""
        if node in self._known:
            return False
        self._known.add(node)
        self._names.add(node)
        return True

    def _vouch(self, node: str) -> None:
        self.vouchers.note_spoken(node)
        self.room.unvouched.discard(node)

    def matching(self, name: str) -> Sequence[str]:
        """Return the nodes that a name may mean: those with an agent, or else all that were ever heard of."""
        return self._names_of_agents.matching(name) or self._names.matching(name)

    def other_spelling(self, node: str) -> str | None:
        """Return the name under which an agent reports the machine that has this name; None if it is this, or none."""
        return next((name for name in self._names_of_agents.matching(node) if name != node), None)

    def holds_name(self, node: str, boot_id: str, received_s: float, interval_s: float) -> bool:
        """Take what a machine of this boot id has just sent as the node; return whether the name is its own."""
        return boot_id == UNKNOWN or self.claims.heard(node, BOOT_ID, boot_id, received_s, interval_s)

    def keep_names(self, now_s: float) -> None:
        """Have the machines that were heard in an earlier run hold their names: nobody could be heard meanwhile."""
        for node, heard in self._all():
            self.holds_name(node, heard.boot_id, now_s, heard.interval_s)

    def agent_of(self, node: str) -> Heard | None:
        """Return what the agent last reported of the machine that has this name, maybe among others; None for none."""
        name = self._names_of_agents.ours(node)
        return None if name is None else self.last(name)

    def name_disputes(self, now_s: float) -> None:
        """Log which nodes' names two machines have, each once."""
        found = {dispute.node: str(dispute) for dispute in self.claims.disputes(now_s)}
        for node in found.keys() - self._disputed:
            _log.warning("%s: what is disputed accuses nobody; give one of them a name of its own", found[node])
        self._disputed = frozenset(found)

    def offset_s(
        self,
        node: str,
        sent_s: float,
        received_s: float,
        time_s: float | None = None,
        base_s: float | None = None,
    ) -> float:
        """Feed one request's times to the node's clock; return the offset to add (0.0 while clocks are close).

        ``time_s`` is the time of the request's newest frame (None: the time of sending), ``base_s`` the clock base that
        the frames report. See NodeClock.
        """
        clock = self._clocks.get(node)
        if clock is None:
            before = self._clocks_before.pop(node, None)
            if before is None or not is_same_base(base_s, before[1]):
                clock = self._clocks[node] = NodeClock.of(received_s - sent_s, received_s, base_s)
                return clock.applied_s
            clock = self._clocks[node] = NodeClock.of(before[0], received_s, base_s)
        before_s = clock.applied_s
        live = time_s is None or sent_s - time_s <= LATE_S
        base_changed = not is_same_base(base_s, clock.base_s)
        set_by_s = clock.add_request(sent_s, received_s, base_s, self._newest_time_s(node), live=live)
        if set_by_s is not None:
            self._redate(node, before_s - clock.applied_s)
            # An unchanged base means that it was not: earlier requests were slow, or the server's own clock was set.
            if base_changed or (base_s is None and abs(set_by_s) >= SEEN_S):
                self.clock_notes.note_set(node, set_by_s, received_s, reported=base_changed)
        return clock.applied_s

    def offsets_s(
        self,
        nodes: Sequence[str],
        sent_s: Sequence[float],
        received_s: Sequence[float],
        base_s: Sequence[float | None],
    ) -> list[float]:
        """Return what ``offset_s`` returns for one live request of each node."""
        found: list[float] = []
        known = self._clocks
        for node, sent, received, base in zip(nodes, sent_s, received_s, base_s, strict=True):
            clock = known.get(node)
            if (
                clock is not None
                and clock.low_s <= received - sent <= clock.high_s
                and received < clock.until_s
                and base == clock.base_s
            ):
                found.append(clock.applied_s)
            else:
                found.append(self.offset_s(node, sent, received, None, base))
        return found

    def moved_s(self, node: str, times_s: Sequence[float], received_s: float) -> Sequence[float] | None:
        """Return what to add, beside the offset, to a request's implausible times; None if all are plausible.

        Call after ``offset_s`` for the same request.
        """
        moved = self._clocks[node].moved(times_s, received_s)
        if moved is None:
            return None
        self.clock_notes.note_moved(node, "frame", moved.times, received_s)
        return moved.by_s

    def dated(self, frame: Frame, offset_s: float, received_s: float) -> Frame:
        """Return a frame that just arrived with ``offset_s`` added to its times, as ``corrected`` does.

        An event from before the clock was set is dated with the offset of that earlier clock.
        """
        clock = self._clocks.get(frame.node)
        placed = corrected(frame, offset_s, received_s, None if clock is None else clock.event_s)
        if frame.events:
            moved = [was.time_s + offset_s - now.time_s for was, now in zip(frame.events, placed.events, strict=True)]
            self.clock_notes.note_moved(frame.node, "event", sum(abs(by_s) > STEP_S for by_s in moved), received_s)
        return placed

    def _newest_time_s(self, node: str) -> float | None:
        row, whole = self._rows.get(node), self._heard.get(node)
        return row[1] if row is not None else whole.time_s if whole is not None else None

    def _redate(self, node: str, by_s: float) -> None:
        """Shift the time of the node's newest row or frame, so that it is the same moment on the clock just set."""
        row, whole = self._rows.get(node), self._heard.get(node)
        if row is not None:
            self._rows[node] = (row[0], row[1] + by_s, row[2])
        if whole is not None:
            self._heard[node] = dataclasses.replace(whole, time_s=whole.time_s + by_s)

    def is_late(self, frame: Frame, sent_s: float, moved_s: float = 0.0) -> bool:
        """Return whether the frame was sent with delay, after a newer frame of its node.

        ``sent_s`` is by the node's clock, as is the frame's time plus ``moved_s``, so setting a clock makes no frame
        late.
        """
        return self.is_time_late(frame.node, frame.time_s + moved_s, sent_s)

    def is_time_late(self, node: str, time_s: float, sent_s: float, resent: bool = False) -> bool:
        """Return whether a frame of the node with this time is late; see ``is_late``.

        ``resent``: another server had it before, so that every newer frame of the node makes it late.
        """
        if sent_s - time_s <= LATE_S and not resent:
            return False
        newest_s = self._newest_time_s(node)
        return newest_s is not None and time_s < newest_s

    def heard(self, frame: Frame, received_s: float, moved_s: float = 0.0, *, vouched: bool = True) -> bool:
        """Record a durable frame that is not late, with ``moved_s`` added to its time; return whether its node is new.

        ``vouched``: the sender is the node's own agent or an administrator.
        """
        new = self._add(frame.node)
        if vouched:
            self._vouch(frame.node)
            self._names_of_agents.add(frame.node)
        self._rows.pop(frame.node, None)
        # Not the maximum: after the clock was set back, that would hide a silence until the clock caught up.
        self._newest_s = received_s
        self._newest_interval_s = frame.interval_s
        heard = _heard(frame, received_s)
        self._heard[frame.node] = dataclasses.replace(heard, time_s=heard.time_s + moved_s) if moved_s else heard
        return new

    def heard_row(self, resolved: ResolvedTemplate, time_s: float, received_s: float) -> bool:
        """Record a durable row without a tail that is not late; return whether its node is new."""
        node = resolved.node
        new = self._add(node)
        self._vouch(node)
        self._names_of_agents.add(node)
        self._newest_s = received_s
        self._newest_interval_s = resolved.template.interval_s
        self._rows[node] = (resolved, time_s, received_s)
        return new

    def heard_rows(
        self, resolved: Sequence[ResolvedTemplate], time_s: Sequence[float], received_s: Sequence[float]
    ) -> None:
        """Record rows of known nodes as ``heard_row`` does."""
        nodes = [one.node for one in resolved]
        self._rows.update(zip(nodes, zip(resolved, time_s, received_s, strict=True), strict=True))
        self._newest_s = received_s[-1]
        self._newest_interval_s = resolved[-1].template.interval_s

    def last(self, node: str) -> Heard | None:
        """Return what the node's agent last reported, or None if it reported nothing since the server started."""
        row = self._rows.get(node)
        if row is None:
            return self._heard.get(node)
        resolved, time_s, received_s = row
        return _heard(replace(resolved.hollow, time_s=time_s), received_s)

    def jobs(self) -> dict[str, tuple[int, list[MemberRank]]]:
        """Return the jobs that agents report, each with its newest attempt and that attempt's ranks."""
        found: dict[str, tuple[int, list[MemberRank]]] = {}
        for node, heard in self._all():
            if heard.job is not None:
                found.setdefault(heard.job, (0, []))
            for rank in heard.ranks:
                attempt, members = found.get(rank.job, (0, []))
                if rank.attempt > attempt:
                    attempt, members = rank.attempt, []
                if rank.attempt == attempt:
                    members.append(MemberRank(rank.rank, node, rank.device, rank.role))
                found[rank.job] = (attempt, members)
        return found

    def _all(self) -> Iterator[tuple[str, Heard]]:
        for node in {**self._heard, **self._rows}:
            heard = self.last(node)
            if heard is not None:
                yield node, heard

    def unheard(self, since_s: float) -> list[str]:
        """Return the nodes that were not heard at ``since_s`` or later, in this run or an earlier one."""
        found = {node: self.presence(node) for node in self._known}
        return [node for node, last in found.items() if last is None or last.received_s < since_s]

    def names(self) -> frozenset[str]:
        """Return the names of all nodes ever heard of."""
        return frozenset(self._known.copy())

    def voices(self, since_s: float) -> Iterator[Voice]:
        """Yield what each node heard at ``since_s`` or later last reported about its jobs and ranks."""
        rows = self._rows.copy()
        for node, (resolved, _, received_s) in rows.items():
            if received_s >= since_s:
                frame = resolved.hollow
                yield Voice(node, job_of(frame), frame.ranks, frame.agent_version)
        for node, heard in self._heard.copy().items():
            if node not in rows and heard.received_s >= since_s:
                yield Voice(node, heard.job, heard.ranks, heard.agent_version)

    def presences(self) -> Iterator[Presence]:
        """Yield each node heard since the server started."""
        rows = self._rows.copy()
        for node, (resolved, _, received_s) in rows.items():
            yield Presence(node, received_s, resolved.template.interval_s)
        for node, heard in self._heard.copy().items():
            if node not in rows:
                yield Presence(node, heard.received_s, heard.interval_s)

    def presence(self, node: str) -> Presence | None:
        """Return when the node was last heard, in this run or an earlier one; None if never or too long ago."""
        last = self.last(node)
        if last is not None:
            return Presence(node, last.received_s, last.interval_s)
        before_s = self._heard_before.get(node)
        return None if before_s is None else Presence(node, before_s, 0.0)

    def newest_s(self) -> float | None:
        """Return when the last frame of any node was received, or None."""
        return self._newest_s

    def patience_s(self, fresh_s: float) -> float:
        """Return how long silence is normal: ``fresh_s``, or longer if the last node heard reports less often."""
        return max(fresh_s, _patience_s(self._newest_interval_s))

    def offsets(self) -> dict[str, float]:
        """Return each node's estimated clock offset: the server's clock minus the node's."""
        return {node: clock.value_s for node, clock in tuple(self._clocks.items())}

    def counts(self, now_s: float, fresh_s: float) -> tuple[int, int]:
        """Return how many nodes are known, and how many of them were heard within ``fresh_s``."""
        return len(self._known), sum(presence.is_fresh(now_s, fresh_s) for presence in self.presences())

    def recent(self, since_s: float) -> int:
        """Return how many nodes were heard at ``since_s`` or later, in this run or an earlier one."""
        last_s = {**self._heard_before, **{presence.node: presence.received_s for presence in self.presences()}}
        return sum(heard_s >= since_s for heard_s in last_s.values())


def _heard(frame: Frame, received_s: float) -> Heard:
    troubles = [(name, said) for name, said in frame.collectors.items() if said != "ok"]
    return Heard(
        received_s=received_s,
        time_s=frame.time_s,
        job=job_of(frame),
        boot_id=frame.boot_id,
        agent_version=frame.agent_version,
        interval_s=frame.interval_s,
        farewell=any(event.kind == "agent_stop" for event in frame.events),
        ranks=tuple(frame.ranks),
        collectors=dict(list(frame.collectors.items())[:_TROUBLES_MAX]),
        troubles=dict(troubles[:_TROUBLES_MAX]),
        dropped=dict(list(frame.dropped.items())[:_TROUBLES_MAX]),
    )


def _patience_s(interval_s: float) -> float:
    return FRESH_INTERVALS * min(interval_s, FRESH_INTERVAL_S_MAX)


def job_of(frame: Frame) -> str | None:
    """Return the job that the frame names, the first of several; None if it names none."""
    return frame.job or next((rank.job for rank in frame.ranks), None)


class FleetCollector(Collector):
    """Node counts and each node's clock offset, read when scraped."""

    def __init__(self, fleet: Fleet, now_s: Callable[[], float], fresh_s: float) -> None:
        self._fleet = fleet
        self._now_s = now_s
        self._fresh_s = fresh_s

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        known, fresh = self._fleet.counts(self._now_s(), self._fresh_s)
        yield GaugeMetricFamily(metric_name("nodes_known"), "Nodes that were ever heard of.", value=known)
        yield GaugeMetricFamily(
            metric_name("nodes_vouched"),
            "Nodes heard since the start for which somebody vouches: what the fleet's budgets go by.",
            value=self._fleet.vouched_count,
        )
        yield GaugeMetricFamily(metric_name("nodes_fresh"), "Nodes heard of just now.", value=fresh)
        yield GaugeMetricFamily(
            metric_name("nodes_disputed"),
            "Node names under which two machines report at once; they accuse nobody.",
            value=sum(1 for _ in self._fleet.claims.disputes(self._now_s())),
        )
        newest_s = self._fleet.newest_s()
        if newest_s is not None:
            yield GaugeMetricFamily(
                metric_name("ingest_age_seconds"),
                "Time since anything was received of any node.",
                value=max(self._now_s() - newest_s, 0.0),
            )
        offsets = GaugeMetricFamily(
            metric_name("agent_clock_offset_seconds"), "The server's clock minus the node's.", labels=["node"]
        )
        for node, offset_s in self._fleet.offsets().items():
            offsets.add_metric([node], offset_s)
        yield offsets
        notes = self._fleet.clock_notes
        steps = CounterMetricFamily(
            metric_name("agent_clock_steps"), "Times that a node's clock was set, by who knew it.", labels=["seen_by"]
        )
        for who, count in notes.steps.items():
            steps.add_metric([who], count)
        yield steps
        moved = CounterMetricFamily(
            metric_name("ingest_moved_times"),
            "Times that cannot be, in the future or a decade old, and were moved, by what had them.",
            labels=["of"],
        )
        for what, count in notes.moved.items():
            moved.add_metric([what], count)
        yield moved
