"""Participation of nodes in a job over time, as a limited number of timeline rows. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.natural_order import natural
from eagle_eye.server.model.account_records import Attempt
from eagle_eye.server.model.records import Incident

ROWS_MAX = 256
NAMES_MAX = 8  # nodes named per row


class Bar(NamedTuple):
    """An attempt in which the row's nodes took part: begin, end, and number of nodes."""

    attempt_id: str
    attempt: int
    start_s: float
    end_s: float
    nodes: int


class LaneRow(NamedTuple):
    """One node, or ``size`` neighbours in the order of their names; ``incidents`` are ids of those concerning them.

    ``ranks`` are the lowest and highest rank there in the newest report, None if unknown.
    """

    label: str
    nodes: tuple[str, ...]
    size: int
    ranks: tuple[int, int] | None
    bars: tuple[Bar, ...]
    incidents: tuple[str, ...]


def rows(
    attempts: Sequence[Attempt],
    members: Mapping[str, Sequence[str]],
    ranks: Iterable[MemberRank],
    incidents: Sequence[Incident],
    now_s: float,
    most: int = ROWS_MAX,
) -> list[LaneRow]:
    """Return at most ``most`` rows in the order of the nodes' names.

    ``members`` are the nodes of each attempt by its id. A node that an incident accuses gets a row of its own, while
    there is room; the others share rows if there are too many.
    """
    taking_part: dict[str, set[str]] = defaultdict(set)
    for attempt in attempts:
        for node in members.get(attempt.id, ()):
            taking_part[node].add(attempt.id)
    concerned: dict[str, list[str]] = defaultdict(list)
    accused: dict[str, None] = {}
    for incident in incidents:
        for node in incident.nodes:
            concerned[node].append(incident.id)
        if incident.node is not None:
            accused[incident.node] = None
    of_node: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        of_node[rank.node].append(rank.rank)
    names = sorted(taking_part, key=natural)
    alone = set(list(accused)[: (most - 1) // 2])
    return [_row(group, attempts, taking_part, of_node, concerned, now_s) for group in _groups(names, alone, most)]


def _groups(names: list[str], alone: set[str], most: int) -> list[list[str]]:
    """Return the names in order, in groups of neighbours; those in ``alone`` share no group."""
    if len(names) <= most:
        return [[name] for name in names]
    apart = [name for name in names if name in alone]
    # Each separate node splits the group around it, so that it costs two rows.
    room = max(1, most - 2 * len(apart))
    size = -(-(len(names) - len(apart)) // room)
    groups: list[list[str]] = []
    open_ = False
    for name in names:
        if name in alone:
            groups.append([name])
            open_ = False
        elif open_ and len(groups[-1]) < size:
            groups[-1].append(name)
        else:
            groups.append([name])
            open_ = True
    return groups


def _row(
    group: list[str],
    attempts: Sequence[Attempt],
    taking_part: Mapping[str, set[str]],
    ranks: Mapping[str, list[int]],
    concerned: Mapping[str, list[str]],
    now_s: float,
) -> LaneRow:
    bars = []
    for attempt in attempts:
        there = sum(attempt.id in taking_part[name] for name in group)
        if there:
            end_s = max(attempt.started_s, now_s if attempt.ended_s is None else attempt.ended_s)
            bars.append(Bar(attempt.id, attempt.attempt, attempt.started_s, end_s, there))
    numbers = [number for name in group for number in ranks.get(name, ())]
    label = group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}"
    return LaneRow(
        label,
        tuple(group[:NAMES_MAX]),
        len(group),
        (min(numbers), max(numbers)) if numbers else None,
        tuple(bars),
        tuple(dict.fromkeys(one for name in group for one in concerned.get(name, ()))),
    )
