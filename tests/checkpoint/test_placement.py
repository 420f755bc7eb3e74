"""Where copies lie: the shape of Gemini's placement, failure domains parted, the same on every node."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.checkpoint.placement import REPLICAS_MAX, place

Domains = Mapping[str, Sequence[str]]


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(1, count + 1)]


def racks(*sizes: int) -> dict[str, list[str]]:
    """Racks of so many nodes, which are counted through."""
    every = iter(names(sum(sizes)))
    return {f"r{rack}": [next(every) for _ in range(size)] for rack, size in enumerate(sizes)}


def in_one_domain(holders: Mapping[str, Sequence[str]], domains: Domains) -> int:
    """Count the nodes all of whose copies lie in one domain, once for each such domain."""
    return sum(set(copies) <= set(nodes) for copies in holders.values() for nodes in domains.values())


def arrangements(nodes: Sequence[str], replicas: int) -> Iterator[Mapping[str, Sequence[str]]]:
    """Yield the holders of every placement of this shape: each choice of a ring, each order of it, all groups."""
    ring_nodes = replicas + len(nodes) % replicas if len(nodes) % replicas else 0
    for members in combinations(nodes, ring_nodes):
        rest = [node for node in nodes if node not in members]
        for ring in {members[:1] + tail for tail in permutations(members[1:])}:
            turned = {node: (ring + ring)[at : at + replicas] for at, node in enumerate(ring)}
            for groups in partitions(rest, replicas):
                yield turned | {node: group for group in groups for node in group}


def partitions(nodes: Sequence[str], size: int) -> Iterator[list[tuple[str, ...]]]:
    if not nodes:
        yield []
        return
    for others in combinations(nodes[1:], size - 1):
        rest = [node for node in nodes[1:] if node not in others]
        yield from ([(nodes[0], *others), *groups] for groups in partitions(rest, size))


@st.composite
def sites(draw: st.DrawFn) -> tuple[list[str], int, dict[str, list[str]]]:
    """Up to seven nodes in racks, some racks behind a switch, and how many copies."""
    nodes = names(draw(st.integers(2, 7)))
    rack_of = [draw(st.integers(0, 3)) for _ in nodes]
    switched = draw(st.booleans())
    domains: dict[str, list[str]] = {}
    for node, rack in zip(nodes, rack_of, strict=True):
        domains.setdefault(f"rack{rack}", []).append(node)
        if switched:
            domains.setdefault(f"switch{rack // 2}", []).append(node)
    return nodes, draw(st.integers(2, min(4, len(nodes)))), domains


@given(st.integers(1, 60), st.integers(1, 6))
def test_every_node_has_its_copies_on_itself_first_and_on_others(count: int, replicas: int) -> None:
    nodes = names(max(count, replicas))
    holders = place(nodes, replicas).holders
    assert list(holders) == nodes
    assert all(copies[0] == node and len(set(copies)) == replicas for node, copies in holders.items())


@given(st.integers(1, 60), st.integers(1, 6))
def test_every_node_holds_as_many_shards_as_any_other(count: int, replicas: int) -> None:
    nodes = names(max(count, replicas))
    held = [holder for copies in place(nodes, replicas).holders.values() for holder in copies]
    assert all(held.count(node) == replicas for node in nodes)


@given(st.integers(1, 60), st.integers(1, 6))
def test_what_does_not_fill_a_group_forms_a_ring_with_one_groups_nodes(count: int, replicas: int) -> None:
    nodes = names(max(count, replicas))
    found = place(nodes, replicas)
    rest = len(nodes) % replicas
    assert len(found.groups) == len(nodes) // replicas - bool(rest)
    assert len(found.ring) == (replicas + rest if rest else 0)
    assert all(
        found.holders[node] == (*group[at:], *group[:at]) for group in found.groups for at, node in enumerate(group)
    )
    twice = found.ring * 2
    assert all(found.holders[node] == twice[at : at + replicas] for at, node in enumerate(found.ring))


def test_one_copy_is_the_nodes_own() -> None:
    found = place(names(3), 1, racks(3))
    assert found.holders == {"n1": ("n1",), "n2": ("n2",), "n3": ("n3",)}
    assert found.shared_domains == {}


def test_neighbours_by_name_are_kept_apart_where_nobody_reported_domains() -> None:
    assert place(names(6), 2).groups == (("n1", "n4"), ("n2", "n5"), ("n3", "n6"))


@settings(max_examples=60, deadline=None)
@given(sites())
def test_no_placement_leaves_fewer_copies_in_one_domain(site: tuple[list[str], int, dict[str, list[str]]]) -> None:
    nodes, replicas, domains = site
    best = min(in_one_domain(holders, domains) for holders in arrangements(nodes, replicas))
    assert in_one_domain(place(nodes, replicas, domains).holders, domains) == best


@given(st.integers(2, 4), st.lists(st.integers(1, 12), min_size=2, max_size=6))
def test_racks_are_parted_wherever_each_group_can_have_a_node_of_another(replicas: int, sizes: list[int]) -> None:
    count = sum(sizes)
    if count % replicas or max(sizes) > (replicas - 1) * (count // replicas):
        return
    assert place(names(count), replicas, racks(*sizes)).shared_domains == {}


def test_racks_that_cross_switches_are_parted_from_both() -> None:
    nodes = names(16)
    domains = {f"rack{rack}": nodes[rack::4] for rack in range(4)} | {
        f"switch{s}": nodes[4 * s : 4 * s + 4] for s in range(4)
    }
    assert place(nodes, 2, domains).shared_domains == {}


def test_behind_one_switch_racks_are_parted_all_the_same() -> None:
    found = place(names(4), 2, {**racks(2, 2), "switch": names(4)})
    assert found.shared_domains == dict.fromkeys(names(4), ("switch",))


def test_copies_that_cannot_be_parted_are_told() -> None:
    found = place(names(6), 2, racks(4, 1, 1))
    (pair,) = [group for group in found.groups if set(group) <= {"n1", "n2", "n3", "n4"}]
    assert found.shared_domains == dict.fromkeys(sorted(pair), ("r0",))


def test_nodes_that_no_domain_names_are_told_and_stand_alone() -> None:
    found = place(names(4), 2, {"r0": ["n1", "n2"], "elsewhere": ["x1"]})
    assert found.without_domain == ("n3", "n4")
    assert found.shared_domains == {}


@given(sites(), st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_and_domains_are_told_does_not_matter(
    site: tuple[list[str], int, dict[str, list[str]]], chance: random.Random
) -> None:
    nodes, replicas, domains = site
    shuffled = chance.sample(nodes, len(nodes))
    reported = {
        name: chance.sample(domains[name], len(domains[name])) for name in chance.sample(sorted(domains), len(domains))
    }
    assert place(shuffled, replicas, reported) == place(nodes, replicas, domains)


def test_names_are_counted_as_people_count_them() -> None:
    assert place(["n10", "n9", "n1", "n2"], 2).groups == (("n1", "n9"), ("n2", "n10"))


@pytest.mark.parametrize(
    ("nodes", "replicas", "message"),
    [
        (names(2), 3, "replicas: 3 copies need as many nodes, got 2; ask for fewer copies or name more nodes"),
        ([], 1, "nodes: expected one or more, got none"),
        (names(4), 0, f"replicas: expected 1 to {REPLICAS_MAX}, got 0"),
        (names(99), 33, f"replicas: expected 1 to {REPLICAS_MAX}, got 33"),
        (["n1", "n2", "n1"], 2, "nodes: n1 is named 2 times; name each node once"),
    ],
)
def test_what_cannot_be_placed_is_refused(nodes: list[str], replicas: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(nodes, replicas)
