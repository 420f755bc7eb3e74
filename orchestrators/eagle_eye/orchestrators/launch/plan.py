"""Chooses the nodes of the next attempt, and their order. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from eagle_eye.planning.plan import Plan
from eagle_eye.planning.rank_layout import nodes_used


@dataclass(frozen=True)
class LauncherNodes:
    """The launcher's nodes, in order: the first ``wanted`` start, the rest are spares.

    A job may run on ``least`` to ``wanted`` nodes.
    """

    nodes: tuple[str, ...]
    least: int
    wanted: int


def choose_nodes(
    fleet: LauncherNodes,
    current: tuple[str, ...],
    unusable: AbstractSet[str],
    draining: AbstractSet[str] = frozenset(),
) -> tuple[str, ...] | None:
    """Return the nodes of the next attempt by node rank, None where fewer than ``least`` are usable.

    Nodes that stay keep their place, so that most ranks keep their neighbours; a spare takes the place of the node it
    replaces; without spares the job shrinks. A draining node is used only where the job could not run otherwise. Never
    returns an unusable node, nor a node twice.
    """
    chosen = _fill(fleet, current, unusable | draining)
    if len(chosen) >= fleet.least:
        return chosen
    missing = fleet.least - len(chosen)
    kept = [node for node in fleet.nodes if node in draining and node not in unusable][:missing]
    if len(kept) < missing:
        return None
    return _fill(fleet, current, unusable | (draining - set(kept)))


def lay_out(plan: Plan, current: tuple[str, ...], chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Return the chosen nodes by their places in the plan's layout, without those that add no speed.

    A new node takes the place of one that is gone. Where the job shrinks, places are assigned to copy the least. The
    plan must have layouts for the numbers of chosen and of current nodes.
    """
    gone = [node for node in current if node not in chosen]
    places = list(current)
    for node in chosen:
        if node in current:
            continue
        if gone:
            places[places.index(gone.pop(0))] = node
        else:
            places.append(node)
    for node in gone:
        places = list(plan.lost(places, node).nodes)
    return tuple(places[: nodes_used(plan, len(places))])


def _fill(fleet: LauncherNodes, current: tuple[str, ...], unusable: AbstractSet[str]) -> tuple[str, ...]:
    places = current or fleet.nodes[: fleet.wanted]
    places += ("",) * (fleet.wanted - len(places))
    spares = [node for node in fleet.nodes if node not in places and node not in unusable]
    filled = []
    for node in places:
        if node and node not in unusable:
            filled.append(node)
        elif spares:
            filled.append(spares.pop(0))
    return tuple(filled)
