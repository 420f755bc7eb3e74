"""The probability that simultaneous losses leave every shard a copy: counted exactly, in integers. Pure.

A group loses a shard when all of its members are lost, a ring when as many neighbours as there are copies are; what is
lost in one of them matters to no other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from functools import reduce
from itertools import combinations
from math import comb
from operator import and_, or_

from eagle_eye.checkpoint.placement import ShardPlacement

SUBSETS_MAX = 200_000  # of failure domains that are tried one by one: a second


def survival_ratio(placement: ShardPlacement, lost: int) -> Fraction:
    """Return which part of all sets of ``lost`` nodes leaves every shard a copy. Raises ValueError."""
    nodes = len(placement.holders)
    _check("lost", lost, nodes, "nodes of the placement")
    found = surviving_sets(len(placement.groups), len(placement.ring), placement.replicas, lost)
    return Fraction(found, comb(nodes, lost))


def surviving_sets(groups: int, ring_nodes: int, replicas: int, lost: int) -> int:
    """Return how many sets of ``lost`` nodes leave every shard a copy in groups of ``replicas`` beside one ring."""
    return sum(
        _of_the_ring(ring_nodes, replicas, in_ring) * _of_groups(groups, replicas, lost - in_ring)
        for in_ring in range(min(ring_nodes, lost) + 1)
    )


def closed_form_ratio(nodes: int, replicas: int, lost: int) -> Fraction:
    """Return the same by the formula of Gemini (SOSP 2023, section 4), which holds where all nodes are in groups.

    Raises ValueError where it says too much (``replicas`` does not divide ``nodes``) or too little (``lost`` is twice
    ``replicas`` or more: two groups may then be lost, which it subtracts twice).
    """
    if nodes % replicas:
        raise ValueError(f"nodes: expected a multiple of {replicas} replicas, got {nodes}; survival_ratio counts these")
    if not lost < 2 * replicas:
        raise ValueError(
            f"lost: expected fewer than {2 * replicas} for {replicas} replicas, got {lost}; survival_ratio counts these"
        )
    if lost < replicas:
        return Fraction(1)
    return 1 - Fraction(nodes // replicas * comb(nodes - replicas, lost - replicas), comb(nodes, lost))


def domain_survival_ratio(
    placement: ShardPlacement, domains: Mapping[str, Collection[str]], lost: int
) -> Fraction | None:
    """Return which part of all sets of ``lost`` failure domains, lost whole, leaves every shard a copy.

    Domains without a node of the placement are none of them; a node in no domain is never lost. None where there are
    more than ``SUBSETS_MAX`` such sets: they are not counted. Raises ValueError.
    """
    fatal = _planes(placement, domains)
    _check("lost", lost, len(fatal), "failure domains with nodes of the placement")
    subsets = comb(len(fatal), lost)
    if subsets > SUBSETS_MAX:
        return None
    if lost == 0:
        return Fraction(1)
    survived = 0
    for chosen in combinations(fatal, lost):
        # Of each shard, by its bit: is its first copy lost, and its second, and ...
        survived += not reduce(and_, (reduce(or_, copy) for copy in zip(*chosen, strict=True)))
    return Fraction(survived, subsets)


def _of_groups(groups: int, replicas: int, lost: int) -> int:
    """Count the sets of ``lost`` nodes in which no group is whole: by inclusion and exclusion."""
    nodes = groups * replicas
    return sum(
        (-1) ** whole * comb(groups, whole) * comb(nodes - whole * replicas, lost - whole * replicas)
        for whole in range(min(groups, lost // replicas) + 1)
    )


def _of_the_ring(nodes: int, replicas: int, lost: int) -> int:
    """Count the sets of ``lost`` nodes in which no ``replicas`` neighbours are.

    With one of the ``kept`` others marked, such a set is a place for the mark and, from there on, how many are lost
    between one kept node and the next: each time fewer than ``replicas``. Each set is counted once for each mark.
    """
    kept = nodes - lost
    if kept == 0:
        return int(nodes == 0)
    gaps: int = sum(
        (-1) ** wide * comb(kept, wide) * comb(lost - wide * replicas + kept - 1, kept - 1)
        for wide in range(min(kept, lost // replicas) + 1)
    )
    return nodes * gaps // kept


def _planes(placement: ShardPlacement, domains: Mapping[str, Collection[str]]) -> list[list[int]]:
    """Return, of each domain and for each copy in turn, the shards (bits) of which the copy lies in the domain."""
    domains_of: dict[str, list[int]] = {node: [] for node in placement.holders}
    there = [found for members in domains.values() if (found := domains_of.keys() & set(members))]
    for domain, members in enumerate(there):
        for node in members:
            domains_of[node].append(domain)
    planes = [[0] * placement.replicas for _ in there]
    for shard, holders in enumerate(placement.holders.values()):
        for copy, node in enumerate(holders):
            for domain in domains_of[node]:
                planes[domain][copy] |= 1 << shard
    return planes


def _check(what: str, value: int, most: int, of: str) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{what}: expected 0 to {most}, the {of}, got {value}")
