"""Maps nodes and ports to switches, and decides whether trouble at several nodes has a shared cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.types import Integers, Window

SHARED_NODES_MIN = 2  # nodes of one switch that must be affected
SHARED_RATIO = 0.6  # of a switch's nodes or ports
STRAYS_RATIO = 0.1  # of all others, beyond which the switch is not the cause
LOOSE_NODES_MIN = 3  # without a switch that explains it: this many at one moment are no coincidence...
LOOSE_RATIO = 0.1  # ...nor are two that are more than this share of the job
NAMED_MAX = 4  # nodes listed in a summary

Flags = NDArray[np.bool_]


class SharedTrouble(NamedTuple):
    """Trouble that nodes share: the switches (or rails) that explain it, () if none is known; nodes as indexes."""

    switches: tuple[str, ...]
    nodes: tuple[int, ...]


class Ports(NamedTuple):
    """Each link row's node, as its index (-1: no member), and the switch it connects to ("" unknown): (L,)."""

    node_of: Integers
    switch_of: tuple[str, ...]


def ports(window: Window) -> Ports:
    """Return the node and switch of each link row; loops over all links, for the few ticks with a fault."""
    place = {node: index for index, node in enumerate(window.nodes)}
    node_of = np.array([place.get(link.node, -1) for link in window.links], dtype=np.intp)
    switches = window.switches or ("",) * len(window.nodes)
    switch_of = tuple(
        link.switch or (switches[node] if node >= 0 else "")
        for link, node in zip(window.links, node_of.tolist(), strict=True)
    )
    return Ports(node_of, switch_of)


def struck_switches(struck: Flags, node_of: Integers, switch_of: Sequence[str]) -> SharedTrouble | None:
    """Return the switches that are mostly affected while little else is; None if no switch explains it.

    ``struck`` (K,) marks affected things (ports, nodes), ``node_of`` (K,) their nodes, ``switch_of`` their switches.
    """
    hit: dict[str, list[int]] = {}
    for at in np.flatnonzero(struck).tolist():
        if switch_of[at]:
            hit.setdefault(switch_of[at], []).append(at)
    shared = [name for name, own in hit.items() if len(set(node_of[own].tolist())) >= SHARED_NODES_MIN]
    if not shared:
        return None
    members = Counter(switch_of)
    found = sorted(name for name in shared if len(hit[name]) >= SHARED_RATIO * members[name])
    explained = np.array([name in found for name in switch_of], dtype=np.bool_)
    strays = int((struck & ~explained).sum())
    if not found or strays > STRAYS_RATIO * max(int((~explained).sum()), 1):
        return None
    return SharedTrouble(tuple(found), _members(struck & explained, node_of))


def struck_at_once(struck: Flags, node_of: Integers, nodes: int) -> SharedTrouble | None:
    """Return the affected nodes of a job of ``nodes`` if they are too many for chance; no switch is named."""
    hit = _members(struck, node_of)
    if len(hit) >= LOOSE_NODES_MIN or (len(hit) >= SHARED_NODES_MIN and len(hit) > LOOSE_RATIO * nodes):
        return SharedTrouble((), hit)
    return None


def named(nodes: Sequence[str]) -> str:
    """Return nodes for display: a few by name, more by number."""
    if len(nodes) <= NAMED_MAX:
        return ", ".join(nodes)
    return f"{len(nodes)} nodes ({', '.join(nodes[:NAMED_MAX])}, …)"


def _members(struck: NDArray[Any], node_of: Integers) -> tuple[int, ...]:
    return tuple(int(node) for node in np.unique(node_of[struck]) if node >= 0)
