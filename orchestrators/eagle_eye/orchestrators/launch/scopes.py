"""Determines whose processes continue in the next attempt. Pure.

A restart smaller than the whole job keeps the processes of healthy nodes. They leave the failed attempt, wait at their
restart points, and join the new ones in the next attempt, from a step that the nodes have in memory. A rank without a
restart point must be renewed, and then all are: it could not leave a collective.
"""

from __future__ import annotations

from eagle_eye.orchestrators.launch.state import State
from eagle_eye.schema.action import RestartScope


def staying(state: State, scope: RestartScope, plan: tuple[str, ...] | None) -> frozenset[str]:
    """Return the nodes whose ranks may continue in the next attempt, on the nodes of ``plan``; none: every rank is new.

    Only after an attempt that has made steps, and where every process that does not continue has exited by itself or is
    the culprit that a scope of ``rank`` ends: any other might still take part.
    """
    if scope == "job" or not state.stepped or state.distrust_since_s is not None:
        return frozenset()
    members = frozenset(state.members)
    ended = state.failed & members
    culprits = state.excluded & members - ended if scope == "rank" else frozenset[str]()
    kept = members - ended - culprits
    broken = ended or culprits or any(state.waiting.values())
    if not broken or not kept or kept & (state.excluded | state.succeeded) or members & state.lost:
        return frozenset()
    return kept if all(has_point(state, node) for node in kept) and fits(state, kept, plan) else frozenset()


def fits(state: State, kept: frozenset[str], plan: tuple[str, ...] | None) -> bool:
    """Whether continuing ranks keep their numbers and world size in the plan, which cannot change."""
    if plan is None or len(plan) != len(state.members):
        return False
    return all(then == now for now, then in zip(state.members, plan, strict=True) if now in kept)


def has_point(state: State, node: str) -> bool:
    """Whether each of the node's ranks has reported a restart point."""
    ranks = state.started.get(node, ())
    return bool(ranks) and state.points.get(node, frozenset()).issuperset(ranks)


def late(state: State) -> frozenset[str]:
    """Return the kept nodes of which not every rank waits at its restart point."""
    return frozenset(
        node for node in state.kept if not state.waiting.get(node, frozenset()).issuperset(state.started[node])
    )
