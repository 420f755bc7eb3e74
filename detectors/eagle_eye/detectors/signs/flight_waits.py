"""Builds the wait-for graph of all ranks from their flight recorders."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eagle_eye.detectors.signs.flight_record import Group, Operation, ReducedDump
from eagle_eye.detectors.signs.wait_graph import WaitGraph

NOWHERE = -1  # the position of a rank about which nothing is known in a group
SHOWN = 8  # ranks listed in a sentence

_Open = dict[int, Operation]  # open point-to-point operations of one direction by number


@dataclass(frozen=True, slots=True)
class Wait:
    """Ranks that wait in one operation. ``absent`` have not reached it; () if all have."""

    group: Group
    sequence: int
    operation: str
    waiting: tuple[int, ...]
    absent: tuple[int, ...] = ()


@dataclass(slots=True)
class _Roster:
    """One group's members with and without a dump, and their open operations."""

    group: Group
    members: list[int]
    silent: list[int]
    collectives: dict[int, dict[int, list[Operation]]] = field(default_factory=dict)  # rank: sequence: operations
    exchanges: dict[int, dict[int, list[Operation]]] = field(default_factory=dict)


class Waits:
    """The wait-for graph.

    ``ranks`` are all that any group expects, ``silent`` those without a dump; ``rank_at`` are those that wait or are
    waited for, by their node in the graph: of most ranks of a large job nothing is to be said. ``blocked`` wait for a
    rank, or in an operation that cannot complete. ``accusers`` holds, by rank, the nodes through which others wait for
    it, ``absent_in`` the operations that it has not reached; ``placed`` are those of them whose own dump shows their
    position. ``shared`` are nodes for an operation that all have reached, ``split`` those for one on which ranks
    disagree.
    """

    def __init__(self, recordings: Sequence[ReducedDump]) -> None:
        self.recordings = {recording.rank: recording for recording in recordings}
        known = {group for recording in recordings for group in recording.groups}
        expected = {rank for group in known for rank in group.ranks}
        self.silent = expected - self.recordings.keys()
        self.ranks = self.recordings.keys() | expected
        self.graph = WaitGraph()
        self._node_of: dict[int, int] = {}
        self.rank_at: dict[int, int] = {}
        self.blocked: set[int] = set()
        self.placed: set[int] = set()
        self.accusers: dict[int, list[int]] = defaultdict(list)
        self.absent_in: dict[int, list[Wait]] = defaultdict(list)
        self.shared: dict[int, Wait] = {}
        self.split: dict[int, Wait] = {}
        self.groups_known = False
        for roster in self._rosters():
            self.groups_known = True
            self._collectives(roster)
            self._exchanges(roster)

    def _rosters(self) -> Iterable[_Roster]:
        everyone = sorted(self.recordings)
        rosters: dict[Group, _Roster] = {}
        for rank in everyone:
            for operation in self.recordings[rank].unfinished:
                roster = rosters.get(operation.group)
                if roster is None:
                    members = operation.group.ranks or (everyone if operation.group.name == "0" else ())
                    present = [member for member in members if member in self.recordings]
                    silent = [member for member in members if member in self.silent]
                    roster = rosters[operation.group] = _Roster(operation.group, present, silent)
                kept = roster.exchanges if operation.point_to_point else roster.collectives
                kept.setdefault(rank, {}).setdefault(operation.sequence, []).append(operation)
        return [roster for roster in rosters.values() if len(roster.members) + len(roster.silent) > 1]

    def _positions(self, roster: _Roster, exchanges: bool) -> dict[int, int]:
        """Return up to which number each member has enqueued; the group's own count is used if it proves correct."""
        group = roster.group
        shown, claimed, trusted, mixed = {}, {}, True, False
        for rank in roster.members:
            recording = self.recordings[rank]
            seen = (recording.exchanges if exchanges else recording.collectives).get(group)
            mixed = mixed or group in (recording.collectives if exchanges else recording.exchanges)
            claim = recording.enqueued.get(group)
            if seen is not None:
                shown[rank] = seen
                trusted = trusted and (claim is None or claim == seen)
            if claim is not None and claim >= 0:
                claimed[rank] = claim
        if trusted and not mixed:
            shown = {**claimed, **shown}
        return {rank: shown.get(rank, NOWHERE) for rank in roster.members}

    def _collectives(self, roster: _Roster) -> None:
        if roster.collectives:
            self._disagreements(roster)
            self._numbered(roster, roster.collectives, self._positions(roster, exchanges=False))

    def _exchanges(self, roster: _Roster) -> None:
        if not roster.exchanges:
            return
        if len(roster.group.ranks) == 2:  # both ends number the same operations
            self._numbered(roster, roster.exchanges, self._positions(roster, exchanges=True))
        else:
            self._pairs(roster)

    def _numbered(
        self, roster: _Roster, opened: dict[int, dict[int, list[Operation]]], position_of: dict[int, int]
    ) -> None:
        """Add the waits in operations that all members number alike.

        If a member is known to be late, the ranks about which nothing is known are not counted as waited for.
        """
        behind = sorted(roster.members, key=lambda rank: (position_of[rank], rank))
        positions = [position_of[rank] for rank in behind]
        chain: list[int] = []  # node i waits for the i + 1 ranks that are furthest behind
        for late in behind[: bisect_left(positions, max(min(numbers) for numbers in opened.values()))]:
            chain.append(self._accuse(late, position_of[late], *chain[-1:]))
        inside = Counter(number for numbers in opened.values() for number in numbers)
        together: dict[int, list[int]] = {}
        halted: dict[int, list[int]] = {}
        orphaned: dict[int, list[int]] = {}
        for rank, numbers in opened.items():
            first = min(numbers)
            late_count = bisect_left(positions, first)
            if late_count:
                self._block(rank, chain[late_count - 1])
                halted.setdefault(first, []).append(rank)
            elif inside[first] == len(roster.members):  # none has completed it
                (orphaned if roster.silent else together).setdefault(first, []).append(rank)
        for first, ranks in together.items():
            self._share(_wait(roster.group, opened[ranks[0]][first][0], ranks))
        if orphaned:
            node = self.graph.node(*map(self._node, roster.silent))
            for rank in roster.silent:
                self.accusers[rank].append(node)
            for rank in (rank for ranks in orphaned.values() for rank in ranks):
                self._block(rank, node)
            self._note(roster.group, opened, orphaned, roster.silent)
        if halted:
            self._note(roster.group, opened, halted, behind[: bisect_left(positions, max(halted))])

    def _note(
        self,
        group: Group,
        opened: dict[int, dict[int, list[Operation]]],
        waiting: dict[int, list[int]],
        absent: Sequence[int],
    ) -> None:
        """Record, for the absent ranks, who waits for them and in which operation first."""
        first = min(waiting)
        everyone = [rank for ranks in waiting.values() for rank in ranks]
        wait = _wait(group, opened[waiting[first][0]][first][0], everyone, absent)
        for rank in absent:
            self.absent_in[rank].append(wait)

    def _accuse(self, rank: int, position: int, *more: int) -> int:
        """Return a new node that waits for the rank, known to be at ``position``, and for ``more`` nodes."""
        if position != NOWHERE:
            self.placed.add(rank)
        node = self.graph.node(self._node(rank), *more)
        self.accusers[rank].append(node)
        return node

    def _block(self, rank: int, node: int) -> None:
        self.graph.edge(self._node(rank), node)
        self.blocked.add(rank)

    def _node(self, rank: int) -> int:
        """Return the node of a rank."""
        node = self._node_of.get(rank)
        if node is None:
            node = self._node_of[rank] = self.graph.node()
            self.rank_at[node] = rank
        return node

    def _pairs(self, roster: _Roster) -> None:
        """Add the waits in sends and receives, pair by pair."""
        opened: dict[tuple[int, int], tuple[_Open, _Open]] = {}
        for rank, numbers in roster.exchanges.items():
            for number, operations in numbers.items():
                for ends in {operation.peers() for operation in operations}:
                    if ends is not None and rank in ends and self.ranks >= set(ends):
                        opened.setdefault(ends, ({}, {}))[rank == ends[1]][number] = operations[0]
        # If all pairs with as many sends as receives number them alike, a number identifies the operation.
        even = [pair for pair in opened.values() if len(pair[0]) == len(pair[1])]
        alike = bool(even) and all(sends.keys() == receives.keys() for sends, receives in even)
        position_of = self._positions(roster, exchanges=True)
        for (sender, receiver), (sends, receives) in opened.items():
            for waiting, other, own, others in (
                (sender, receiver, sends, receives),
                (receiver, sender, receives, sends),
            ):
                position = position_of.get(other, NOWHERE)
                met, due = _meetings(own, others, position if alike else None)
                if met and own is sends:
                    self._share(_wait(roster.group, own[met[0]], (sender, receiver)))
                if due:
                    self._block(waiting, self._accuse(other, position))
                    self.absent_in[other].append(_wait(roster.group, own[due[0]], (waiting,), (other,)))

    def _share(self, wait: Wait) -> None:
        """Add an operation that all have reached: each member waits for whatever holds any of the others up."""
        members = [self._node(rank) for rank in wait.waiting]
        node = self.graph.node(*members)
        self.shared[node] = wait
        for member in members:
            self.graph.edge(member, node)

    def _disagreements(self, roster: _Roster) -> None:
        """Add the operations that ranks issued differently at the same number: they never complete."""
        said: dict[int, dict[tuple[object, ...], list[int]]] = defaultdict(dict)
        for rank, numbers in roster.collectives.items():
            for number, operations in numbers.items():
                words = tuple(operation.signature() for operation in operations)
                said[number].setdefault(words, []).append(rank)
        for number, versions in said.items():
            # A coalesced collective has several operations, some of which may have completed: those are not compared.
            if len(versions) < 2 or len({len(words) for words in versions}) > 1:
                continue
            by_size = sorted(versions.values(), key=lambda ranks: (-len(ranks), ranks))
            odd = tuple(sorted(rank for ranks in by_size[1:] for rank in ranks))
            names = [
                f"{roster.collectives[ranks[0]][number][0].name} {_shapes(roster.collectives[ranks[0]][number][0])}"
                f" on {spelt(ranks)}"
                for ranks in by_size
            ]
            node = self.graph.node()
            self.split[node] = Wait(roster.group, number, "; ".join(names), tuple(sorted(by_size[0])), odd)
            for rank in (rank for ranks in by_size for rank in ranks):
                self._block(rank, node)


def spelt(ranks: Sequence[int]) -> str:
    """Return "rank 9" or "ranks 1, 2, 3 and 40 more"."""
    shown = ", ".join(str(rank) for rank in ranks[:SHOWN])
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def _wait(group: Group, operation: Operation, waiting: Sequence[int], absent: Sequence[int] = ()) -> Wait:
    return Wait(group, operation.sequence, operation.name, tuple(sorted(waiting)), tuple(sorted(absent)))


def _meetings(own: _Open, others: _Open, position: int | None) -> tuple[list[int], list[int]]:
    """Return the numbers of a rank's open exchanges that the other end has reached, and those it has not.

    ``position`` is how far the other end has come by the same numbering; None: only their order is known.
    """
    if position is not None:
        return [number for number in own if number in others], [number for number in own if number > position]
    in_order = sorted(own)
    return in_order[: len(others)], in_order[len(others) :]


def _shapes(operation: Operation) -> str:
    return f"{[list(shape) for shape in operation.input_sizes]} {'/'.join(dict.fromkeys(operation.dtypes))}".strip()
