"""Finds the members of a job's attempt and their roles, as far as still known. Touches: store, history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.natural_order import natural
from eagle_eye.server.charts.peer_selection import picked
from eagle_eye.server.history.history import History
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.store.store import ATTEMPTS, JOBS, MEMBERSHIPS, PAGE_LIMIT_MAX, Store

ROLES_NODES_MAX = 256  # nodes whose frames are read for the roles of ranks of an ended attempt
ROLES_S = 4.0


class Members(NamedTuple):
    """``nodes`` are the attempt's; ``ranks`` those of their ranks that are known, with their roles."""

    nodes: tuple[str, ...]
    ranks: tuple[MemberRank, ...]


def members_of(store: Store, fleet: Fleet, job: str, attempt: int, time_s: float) -> Members:
    """Return the members of the attempt that ran at ``time_s``: from the schedulers, the agents or the accounts.

    Both are empty if unknown.
    """
    record = store.get(JOBS, job)
    ranks: list[MemberRank] = []
    nodes: set[str] = set()
    if record is not None and record.attempt == attempt:
        ranks = record.ranks
        nodes.update(record.nodes)
    heard = fleet.jobs().get(job)
    if heard is not None and heard[0] == attempt and (not ranks or not any(rank.role for rank in ranks)):
        ranks = heard[1] or ranks
    nodes.update(rank.node for rank in ranks)
    if not nodes:
        nodes.update(_on_record(store, job, attempt, time_s))
    return Members(tuple(sorted(nodes, key=natural)), tuple(ranks))


def ranks_seen(
    history: History, job: str, attempt: int, always: Sequence[str], nodes: Sequence[str], time_s: float
) -> tuple[MemberRank, ...]:
    """Return the ranks that agents reported just before ``time_s`` (from a sample of many nodes); needs raw history.

    Raises HistoryUnavailable.
    """
    asked = tuple(dict.fromkeys((*always, *picked(nodes, ROLES_NODES_MAX))))
    if not asked:
        return ()
    found: dict[tuple[str, int], MemberRank] = {}
    for reported in history.ranks(asked, time_s - ROLES_S, time_s):
        for rank in reported.ranks:
            if rank.job == job and rank.attempt == attempt:
                found[reported.node, rank.device] = MemberRank(rank.rank, reported.node, rank.device, rank.role)
    return tuple(found.values())


def _on_record(store: Store, job: str, attempt: int, time_s: float) -> list[str]:
    known = [a for a in store.page(ATTEMPTS, {"job": job}, limit=PAGE_LIMIT_MAX).items if a.attempt == attempt]
    begun = [a for a in known if a.started_s <= time_s] or known
    latest = max(begun, key=lambda a: a.started_s, default=None)
    membership = None if latest is None else store.get(MEMBERSHIPS, latest.id)
    return [] if membership is None else membership.nodes
