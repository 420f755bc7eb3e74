"""What the server last heard from each node, in memory: clock offsets, freshness, the agents' own troubles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.frame import Frame, Rank
from eagle_eye.server.engine.outlined import Outlined, RowGroup
from eagle_eye.server.errors import Refusal
from eagle_eye.server.history import LATE_S

OFFSET_APPLIED_S = 2.0  # clocks closer than this are left alone: the network's delay is of that order
_OFFSET_BUCKET_S = 60.0
FRESH_INTERVALS = 2.5  # a node of slow scrapes counts as heard just now for so many of them,
FRESH_INTERVAL_S_MAX = 120.0  # whatever interval it claims
_TROUBLES_MAX = 32  # collectors and drop reasons kept of one agent


@dataclass(slots=True)
class _Offset:
    """The least of received minus sent in this bucket and the one before: the least delayed request tells best."""

    started_s: float
    current_s: float
    previous_s: float | None = None

    def add(self, sample_s: float, now_s: float) -> float:
        if now_s - self.started_s >= _OFFSET_BUCKET_S:
            stale = now_s - self.started_s >= 2 * _OFFSET_BUCKET_S
            self.previous_s = None if stale else self.current_s
            self.started_s, self.current_s = now_s, sample_s
        self.current_s = min(self.current_s, sample_s)
        return self.value_s

    @property
    def value_s(self) -> float:
        return self.current_s if self.previous_s is None else min(self.current_s, self.previous_s)


@dataclass(frozen=True, slots=True)
class Heard:
    """The last that a node's agent said; ``farewell``: it was goodbye.

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
    """What a node's agent last said of who runs there."""

    node: str
    job: str | None
    ranks: Sequence[Rank]
    agent_version: str


class Presence(NamedTuple):
    """When a node was heard last, by the server's clock, and how often it speaks."""

    node: str
    received_s: float
    interval_s: float

    def is_fresh(self, now_s: float, fresh_s: float) -> bool:
        """Return whether the node was heard within ``fresh_s``, or longer where it speaks less often."""
        return abs(now_s - self.received_s) <= max(fresh_s, _patience_s(self.interval_s))


class Fleet:
    """All nodes that were ever heard of, at most ``nodes_max``. Used on the event loop and read by others."""

    def __init__(self, nodes_max: int) -> None:
        self._nodes_max = nodes_max
        self._offsets: dict[str, _Offset] = {}
        self._heard: dict[str, Heard] = {}
        # Of nodes that went on as before: outline, time and receipt of their newest row; see last().
        self._rows: dict[str, tuple[Outlined, float, float]] = {}
        self._known: set[str] = set()
        self._heard_before: dict[str, float] = {}  # when nodes were last heard in an earlier run
        self._newest_s: float | None = None
        self._newest_interval_s = 0.0

    def know(self, node: str, heard_s: float | None = None) -> None:
        """Count the node as known, from the records of an earlier run, in which it was last heard at ``heard_s``."""
        self._known.add(node)
        if heard_s is not None:
            self._heard_before[node] = max(heard_s, self._heard_before.get(node, heard_s))

    @property
    def known_count(self) -> int:
        """How many nodes were ever heard of."""
        return len(self._known)

    def check_room(self, node: str) -> None:
        """Return if the node is known or there is room for one more. Raises Refusal 403."""
        if node not in self._known and len(self._known) >= self._nodes_max:
            raise Refusal(
                403,
                "too_many_nodes",
                f"{self._nodes_max} nodes are known and {node!r} is none of them; raise ingest.nodes_max",
            )

    def offset_s(self, node: str, sent_s: float, received_s: float) -> float:
        """Take one request's times; return what to add to the node's times: 0.0 while the clocks are close.

        The estimate is the least of received minus sent over one to two minutes, so that one slow request
        does not move it. It is too high by the network's shortest delay.
        """
        sample_s = received_s - sent_s
        offset = self._offsets.get(node)
        if offset is None:
            self._offsets[node] = _Offset(received_s, sample_s)
            estimate_s = sample_s
        else:
            estimate_s = offset.add(sample_s, received_s)
        return _applied(estimate_s)

    def offsets_s(self, nodes: Sequence[str], sent_s: Sequence[float], received_s: Sequence[float]) -> list[float]:
        """Return what ``offset_s`` does for one request of each of the nodes."""
        found: list[float] = []
        known = self._offsets
        for node, sent, received in zip(nodes, sent_s, received_s, strict=True):
            offset = known.get(node)
            sample_s = received - sent
            if offset is None or sample_s < offset.current_s or received - offset.started_s >= _OFFSET_BUCKET_S:
                found.append(self.offset_s(node, sent, received))
            else:
                found.append(_applied(offset.value_s))
        return found

    def is_late(self, frame: Frame, sent_s: float) -> bool:
        """Return whether the frame has waited, and its node has been heard of with a newer one meanwhile.

        ``sent_s`` is by the node's clock, as the frame's time: a clock that was set back makes nothing late.
        """
        return self.is_time_late(frame.node, frame.time_s, sent_s)

    def is_time_late(self, node: str, time_s: float, sent_s: float) -> bool:
        """Return whether a frame of the node and time is late; see ``is_late``."""
        if sent_s - time_s <= LATE_S:
            return False
        row, whole = self._rows.get(node), self._heard.get(node)
        newest_s = row[1] if row is not None else whole.time_s if whole is not None else None
        return newest_s is not None and time_s < newest_s

    def heard(self, frame: Frame, received_s: float) -> bool:
        """Take note of a durable frame that is not late; return whether its node is new."""
        new = frame.node not in self._known
        self._known.add(frame.node)
        self._rows.pop(frame.node, None)
        # Not the highest: after the clock was set back that one would hide a silence until it is reached again.
        self._newest_s = received_s
        self._newest_interval_s = frame.interval_s
        self._heard[frame.node] = _heard(frame, received_s)
        return new

    def heard_row(self, outlined: Outlined, time_s: float, received_s: float) -> bool:
        """Take note of a durable row without a tail that is not late; return whether its node is new."""
        node = outlined.node
        new = node not in self._known
        self._known.add(node)
        self._newest_s = received_s
        self._newest_interval_s = outlined.outline.interval_s
        self._rows[node] = (outlined, time_s, received_s)
        return new

    def heard_rows(self, group: RowGroup, time_s: Sequence[float]) -> None:
        """Take note of rows of nodes that are known already, as ``heard_row`` does; ``time_s`` is by their clocks."""
        nodes = [outlined.node for outlined in group.outlined]
        self._rows.update(zip(nodes, zip(group.outlined, time_s, group.received_s, strict=True), strict=True))
        self._newest_s = group.received_s[-1]
        self._newest_interval_s = group.outlined[-1].outline.interval_s

    def last(self, node: str) -> Heard | None:
        """Return the last that the node's agent said, or None if it said nothing since the server started."""
        row = self._rows.get(node)
        if row is None:
            return self._heard.get(node)
        outlined, time_s, received_s = row
        return _heard(replace(outlined.hollow, time_s=time_s), received_s)

    def jobs(self) -> dict[str, tuple[int, list[MemberRank]]]:
        """Return the jobs that agents speak of, each with its newest attempt and that attempt's ranks."""
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

    def names(self) -> frozenset[str]:
        """Return the names of all nodes that were ever heard of."""
        return frozenset(self._known.copy())

    def voices(self, since_s: float) -> Iterator[Voice]:
        """Yield what each node heard at ``since_s`` or later last said of who runs there."""
        rows = self._rows.copy()
        for node, (outlined, _, received_s) in rows.items():
            if received_s >= since_s:
                frame = outlined.hollow
                yield Voice(node, job_of(frame), frame.ranks, frame.agent_version)
        for node, heard in self._heard.copy().items():
            if node not in rows and heard.received_s >= since_s:
                yield Voice(node, heard.job, heard.ranks, heard.agent_version)

    def presences(self) -> Iterator[Presence]:
        """Yield each node that was heard since the server started."""
        rows = self._rows.copy()
        for node, (outlined, _, received_s) in rows.items():
            yield Presence(node, received_s, outlined.outline.interval_s)
        for node, heard in self._heard.copy().items():
            if node not in rows:
                yield Presence(node, heard.received_s, heard.interval_s)

    def newest_s(self) -> float | None:
        """Return when the last frame of any node was received, or None."""
        return self._newest_s

    def patience_s(self, fresh_s: float) -> float:
        """Return for how long nobody need be heard: ``fresh_s``, or longer where the last heard is slower than that."""
        return max(fresh_s, _patience_s(self._newest_interval_s))

    def offsets(self) -> dict[str, float]:
        """Return each node's estimated clock offset: the server's clock minus the node's."""
        return {node: offset.value_s for node, offset in tuple(self._offsets.items())}

    def counts(self, now_s: float, fresh_s: float) -> tuple[int, int]:
        """Return how many nodes are known, and how many of them were heard within ``fresh_s``."""
        return len(self._known), sum(presence.is_fresh(now_s, fresh_s) for presence in self.presences())

    def recent(self, since_s: float) -> int:
        """Return how many nodes were heard at ``since_s`` or later, in this run or an earlier one."""
        last_s = {**self._heard_before, **{presence.node: presence.received_s for presence in self.presences()}}
        return sum(heard_s >= since_s for heard_s in last_s.values())


def _applied(estimate_s: float) -> float:
    return estimate_s if abs(estimate_s) > OFFSET_APPLIED_S else 0.0


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
    """Return the job that the frame speaks of, the first of several; None: no job."""
    return frame.job or next((rank.job for rank in frame.ranks), None)
