"""Which losses leave every shard a copy: counted, and the same as trying all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.checkpoint import placement
from eagle_eye.checkpoint.placement import (
    ShardPlacement,
    closed_form_ratio,
    domain_survival_ratio,
    place,
    survival_ratio,
    surviving_sets,
)


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(1, count + 1)]


def outlives(holders: Mapping[str, Sequence[str]], lost: set[str]) -> bool:
    return not any(set(copies) <= lost for copies in holders.values())


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_the_count_is_that_of_trying_every_set(nodes: int, replicas: int, data: st.DataObject) -> None:
    placement = place(names(max(nodes, replicas)), replicas)
    lost = data.draw(st.integers(0, len(placement.holders)))
    sets = [set(chosen) for chosen in combinations(placement.holders, lost)]
    left = sum(outlives(placement.holders, chosen) for chosen in sets)
    assert survival_ratio(placement, lost) == Fraction(left, len(sets))


@given(st.integers(1, 11), st.integers(1, 5), st.data())
def test_a_ring_of_any_size_is_counted(nodes: int, replicas: int, data: st.DataObject) -> None:
    nodes = max(nodes, replicas)
    lost = data.draw(st.integers(0, nodes))
    ring = names(nodes) * 2
    holders = {node: ring[at : at + replicas] for at, node in enumerate(names(nodes))}
    left = sum(outlives(holders, set(chosen)) for chosen in combinations(names(nodes), lost))
    assert surviving_sets(0, nodes, replicas, lost) == left


@pytest.mark.parametrize(("nodes", "lost", "ratio"), [(16, 2, 0.933), (16, 3, 0.800), (8, 4, 0.229), (5, 2, 0.600)])
def test_known_figures_for_two_copies(nodes: int, lost: int, ratio: float) -> None:
    assert float(survival_ratio(place(names(nodes), 2), lost)) == pytest.approx(ratio, abs=5e-4)


def test_one_ring_of_sixteen_is_worse_than_groups() -> None:
    assert surviving_sets(0, 16, 2, 2) / comb(16, 2) == pytest.approx(0.867, abs=5e-4)


@given(st.integers(1, 60), st.integers(1, 6), st.data())
def test_the_closed_form_is_the_count_where_it_holds(groups: int, replicas: int, data: st.DataObject) -> None:
    nodes = groups * replicas
    lost = data.draw(st.integers(0, min(nodes, 2 * replicas - 1)))
    assert closed_form_ratio(nodes, replicas, lost) == survival_ratio(place(names(nodes), replicas), lost)


@pytest.mark.parametrize(("nodes", "lost"), [(5, 2), (8, 4)])
def test_the_closed_form_is_refused_where_it_does_not_hold(nodes: int, lost: int) -> None:
    with pytest.raises(ValueError, match=r"survival_ratio counts these"):
        closed_form_ratio(nodes, 2, lost)


def test_a_thousand_nodes_are_counted_at_any_number_of_losses() -> None:
    ratios = [survival_ratio(place(names(1_001), 3), lost) for lost in (0, 2, 3, 30, 667, 1_001)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[1] == 1
    assert ratios[-1] == 0


@given(st.integers(2, 12), st.integers(1, 3), st.integers(1, 5), st.data())
def test_lost_domains_are_counted_by_what_lies_in_them(
    nodes: int, replicas: int, racks: int, data: st.DataObject
) -> None:
    every = names(max(nodes, replicas))
    domains = {
        f"r{rack}": data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True)) for rack in range(racks)
    }
    placement = place(every, replicas, domains)
    lost = data.draw(st.integers(0, racks))
    sets = [{node for rack in chosen for node in domains[rack]} for chosen in combinations(domains, lost)]
    left = sum(outlives(placement.holders, chosen) for chosen in sets)
    assert domain_survival_ratio(placement, domains, lost) == Fraction(left, len(sets))


def test_any_one_domain_may_go_where_copies_are_parted() -> None:
    domains = {f"r{rack}": names(64)[rack::8] for rack in range(8)}
    assert domain_survival_ratio(place(names(64), 2, domains), domains, 1) == 1


def test_domains_without_a_node_of_the_job_are_none_of_those_lost() -> None:
    domains = {"r0": ["n1"], "r1": ["n2"], "elsewhere": ["x1"]}
    placement = place(names(2), 2, domains)
    assert domain_survival_ratio(placement, domains, 2) == 0
    with pytest.raises(
        ValueError, match=r"lost: expected 0 to 2, the failure domains with nodes of the placement, got 3"
    ):
        domain_survival_ratio(placement, domains, 3)


def test_too_many_sets_of_domains_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "SUBSETS_MAX", 5)
    domains = {node: [node] for node in names(4)}
    placed = place(names(4), 2, domains)
    assert domain_survival_ratio(placed, domains, 1) == 1
    assert domain_survival_ratio(placed, domains, 2) is None


@pytest.mark.parametrize("lost", [-1, 5])
def test_a_loss_of_more_nodes_than_there_are_is_refused(lost: int) -> None:
    placement: ShardPlacement = place(names(4), 2)
    with pytest.raises(ValueError, match=f"lost: expected 0 to 4, the nodes of the placement, got {lost}"):
        survival_ratio(placement, lost)
