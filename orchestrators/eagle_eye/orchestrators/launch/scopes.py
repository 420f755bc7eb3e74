"""Whose processes go on in the next attempt. Pure.

A smaller restart than that of the job keeps the processes of nodes that are well. They leave what broke, wait at their
restart points, and meet the new ones in the next attempt, from a step that the nodes have in memory. What has no
restart point has to be new, and then all is: nobody else would leave a collective.
"""

from __future__ import annotations

from eagle_eye.orchestrators.launch.state import State
from eagle_eye.schema.action import RestartScope


def staying(state: State, scope: RestartScope, plan: tuple[str, ...] | None) -> frozenset[str]:
    """Return the nodes whose ranks may go on in the next attempt, on the nodes of ``plan``; none: every rank is new.

    Only after an attempt that has made steps, and where whatever does not go on has ended by itself or is the culprit
    that a scope of ``rank`` ends: a process of which neither is known might still take part.
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
    """Whether ranks that go on have the same numbers among as many in the plan: they cannot get others."""
    if plan is None or len(plan) != len(state.members):
        return False
    return all(then == now for now, then in zip(state.members, plan, strict=True) if now in kept)


def has_point(state: State, node: str) -> bool:
    """Whether each of the node's ranks has said that it has a restart point."""
    ranks = state.started.get(node, ())
    return bool(ranks) and state.points.get(node, frozenset()).issuperset(ranks)


def late(state: State) -> frozenset[str]:
    """Return the kept nodes of which not every rank waits at its restart point."""
    return frozenset(
        node for node in state.kept if not state.waiting.get(node, frozenset()).issuperset(state.started[node])
    )
