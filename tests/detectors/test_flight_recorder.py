"""Which ranks hold a job up, by flight recorders: each test is one small job, told as what its ranks have open."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.detectors.progress.flight_recorder import StuckRanks, analyse
from eagle_eye.detectors.signs.flight_record import Group, Operation, ReducedDump
from eagle_eye.detectors.signs.flight_waits import Waits
from eagle_eye.detectors.signs.wait_graph import strong_components
from eagle_eye.detectors.types import Blind

WORLD = Group("0", "default_pg", (0, 1, 2, 3))
LEFT, RIGHT = Group("1", "TENSOR", (0, 1)), Group("2", "TENSOR", (2, 3))
EVEN, ODD = Group("3", "DATA", (0, 2)), Group("4", "DATA", (1, 3))


def op(group: Group, sequence: int, state: str = "scheduled", name: str = "all_reduce", size: int = 8) -> Operation:
    shape = ((size,),)
    return Operation(group, sequence, f"nccl:{name}", state, False, shape, shape, ("Float", "Float"))


def exchange(group: Group, sequence: int, name: str, state: str = "scheduled") -> Operation:
    return Operation(group, sequence, f"nccl:{name}", state, True, ((8,),), ((8,),), ("Float", "Float"))


def rank(number: int, *operations: Operation, groups: Sequence[Group] = (), claim: int | None = None) -> ReducedDump:
    """Return a rank's recording; ``claim`` is what the world group says to have enqueued."""
    known = groups or tuple(g for g in (WORLD, LEFT, RIGHT, EVEN, ODD) if number in g.ranks)
    return ReducedDump.of(number, known, operations, {} if claim is None else {WORLD: claim})


def world(*sequences: int) -> list[ReducedDump]:
    """Return ranks that have completed all up to the lowest and have the rest of their sequences open."""
    done = min(sequences)
    return [
        rank(number, op(WORLD, done, "completed"), *(op(WORLD, s) for s in range(done + 1, last + 1)))
        for number, last in enumerate(sequences)
    ]


def summary(finding: StuckRanks) -> tuple[str, tuple[int, ...]]:
    return finding.kind, finding.culprits


def test_the_rank_that_enqueued_less_is_behind() -> None:
    finding = analyse(world(7, 7, 6, 7))
    assert summary(finding) == ("behind", (2,))
    (wait,) = finding.waits
    assert (wait.group, wait.sequence, wait.operation, wait.waiting) == (WORLD, 7, "nccl:all_reduce", (0, 1, 3))


def test_dumps_without_a_record_say_that_nothing_was_recorded() -> None:
    with pytest.raises(Blind, match="nothing was recorded: set TORCH_FR_BUFFER_SIZE"):
        analyse([rank(number) for number in range(4)])


def test_a_rank_whose_group_counts_no_operation_never_came() -> None:
    told = [rank(number, op(WORLD, 7)) for number in range(3)]
    assert summary(analyse([*told, rank(3, claim=-1)])) == ("missing", (3,))


def test_a_rank_whose_dump_cannot_be_used_is_not_accused() -> None:
    told = [rank(number, op(WORLD, 7)) for number in range(3)]
    with pytest.raises(Blind, match="leads to rank 3, whose dump cannot be used"):
        analyse(told, unread={3})


def test_a_rank_seen_behind_is_named_though_another_dump_cannot_be_used() -> None:
    assert summary(analyse(world(7, 7, 6), unread={3})) == ("behind", (2,))


def test_two_ranks_can_be_behind() -> None:
    assert summary(analyse(world(7, 5, 6, 7))) == ("behind", (1,)), "rank 2 waits for rank 1 in number 6"
    assert summary(analyse(world(7, 6, 6, 7))) == ("behind", (1, 2))


def test_all_in_the_same_collective_is_symmetric_and_names_nobody() -> None:
    finding = analyse([rank(number, op(WORLD, 7)) for number in range(4)])
    assert summary(finding) == ("symmetric", ())
    assert finding.waits[0].waiting == (0, 1, 2, 3)


def test_a_victim_that_is_late_elsewhere_because_it_waits_is_not_named() -> None:
    ranks = [
        rank(0, op(LEFT, 5), op(WORLD, 9, "completed")),  # waits for 1, so has not come to the world's 10
        rank(1, op(LEFT, 4, "completed"), op(WORLD, 9, "completed")),
        rank(2, op(WORLD, 10)),
        rank(3, op(WORLD, 10)),
    ]
    assert summary(analyse(ranks)) == ("behind", (1,))


def test_a_rank_stuck_in_a_collective_that_its_peers_completed_is_stuck_by_itself() -> None:
    ranks = [
        rank(0, op(LEFT, 5, "completed"), op(WORLD, 10)),
        rank(1, op(LEFT, 5)),
        rank(2, op(WORLD, 10)),
        rank(3, op(WORLD, 10)),
    ]
    assert analyse(ranks).culprits == (1,)


def test_ranks_held_up_by_a_broken_link_are_not_named_by_those_who_wait_for_them() -> None:
    ranks = [
        rank(0, op(LEFT, 5), op(EVEN, 3, "completed")),
        rank(1, op(LEFT, 5), op(ODD, 3, "completed")),
        rank(2, op(EVEN, 4)),
        rank(3, op(ODD, 4)),
    ]
    finding = analyse(ranks)
    assert summary(finding) == ("symmetric", ())
    assert finding.waits[0].group == LEFT


def test_an_operation_queued_behind_the_culprits_wait_does_not_hide_the_culprit() -> None:
    # Rank 0 has come to LEFT's 5; rank 1 too, but its GPU first needs RIGHT's ranks, and those need rank 0.
    ranks = [
        rank(0, op(LEFT, 5), op(EVEN, 3, "completed")),
        rank(1, op(ODD, 7), op(LEFT, 5)),
        rank(2, op(EVEN, 4), op(RIGHT, 6)),
        rank(3, op(RIGHT, 6), op(ODD, 7)),
    ]
    assert analyse(ranks).culprits == (0,)


def test_different_operations_at_one_number_are_the_programs_fault() -> None:
    ranks = [rank(number, op(WORLD, 7, name="broadcast" if number == 3 else "all_reduce")) for number in range(4)]
    finding = analyse(ranks)
    assert summary(finding) == ("desynchronised", ())
    assert finding.application
    assert finding.waits[0].absent == (3,), "who differs from the majority"


def test_different_sizes_are_the_programs_fault_only_where_they_must_agree() -> None:
    uneven = [rank(number, op(WORLD, 7, name="all_to_all", size=8 + number)) for number in range(4)]
    assert analyse(uneven).kind == "symmetric"
    assert analyse([rank(n, op(WORLD, 7, size=8 + n // 3)) for n in range(4)]).kind == "desynchronised"


def test_the_same_elements_in_another_shape_agree() -> None:
    ranks = [rank(number, op(WORLD, 7)) for number in range(3)]
    other = Operation(WORLD, 7, "nccl:all_reduce", "scheduled", False, ((2, 4),), ((8,),), ("Float", "Float"))
    assert analyse([*ranks, rank(3, other)]).kind == "symmetric"


def test_ranks_that_wait_for_each_other_crosswise_are_the_programs_fault() -> None:
    other = Group("9", "", (0, 1))
    ranks = [
        rank(0, op(LEFT, 5), op(other, 2, "completed"), groups=(LEFT, other)),
        rank(1, op(other, 3), op(LEFT, 4, "completed"), groups=(LEFT, other)),
    ]
    assert summary(analyse(ranks)) == ("desynchronised", ())


def test_a_rank_without_a_dump_is_missing_where_a_group_expects_it() -> None:
    finding = analyse([rank(number, op(WORLD, 7)) for number in range(3)])
    assert summary(finding) == ("missing", (3,))
    assert finding.without_dump == (3,)


def test_a_rank_without_a_dump_is_not_named_while_another_is_seen_to_be_behind() -> None:
    finding = analyse(world(7, 6, 7, 7)[:3])
    assert (finding.culprits, finding.without_dump) == ((1,), (3,))


def test_a_rank_without_a_dump_is_not_expected_by_groups_without_it() -> None:
    finding = analyse([rank(0, op(LEFT, 5), groups=(LEFT,)), rank(1, op(LEFT, 5), groups=(LEFT,))])
    assert (finding.kind, finding.without_dump) == ("symmetric", ())


def test_with_most_dumps_missing_it_cannot_tell() -> None:
    with pytest.raises(Blind, match="3 of 4 ranks left no dump"):
        analyse([rank(0, op(WORLD, 7))])


def test_a_rank_that_left_early_never_came() -> None:
    ranks = [*(rank(number, op(WORLD, 7)) for number in range(3)), rank(3)]
    assert summary(analyse(ranks)) == ("missing", (3,))


def test_a_group_says_how_far_a_rank_with_nothing_open_has_come() -> None:
    ranks = [*(rank(n, op(WORLD, 7), claim=7) for n in range(3)), rank(3, claim=6)]
    assert summary(analyse(ranks)) == ("behind", (3,))


def test_a_groups_word_that_disagrees_with_the_operations_does_not_count() -> None:
    # The number is that of a send: rank 3 seems far ahead and has not come to the collective.
    ranks = [*(rank(n, op(WORLD, 7), claim=990) for n in range(3)), rank(3, claim=985)]
    assert summary(analyse(ranks)) == ("missing", (3,))


def test_nothing_open_cannot_tell() -> None:
    with pytest.raises(Blind, match="no rank has an unfinished operation"):
        analyse([rank(number, op(WORLD, 7, "completed")) for number in range(4)])


def test_groups_of_unknown_members_cannot_tell() -> None:
    unknown = Group("5", "", ())
    with pytest.raises(Blind, match="which ranks form"):
        analyse([rank(number, op(unknown, 7), groups=()) for number in range(4)])


class TestExchanges:
    pair = Group("7", "PIPELINE", (0, 2))
    line = Group("8", "PIPELINE", (0, 1, 2, 3))

    def test_a_receiver_waits_for_its_sender(self) -> None:
        ranks = [rank(0, groups=(self.line,)), rank(1, exchange(self.line, 4, "recv 1<-0"), groups=(self.line,))]
        ranks += [rank(n, groups=(self.line,)) for n in (2, 3)]
        assert analyse(ranks).culprits == (0,)

    def test_a_sender_waits_for_its_receiver(self) -> None:
        ranks = [rank(0, exchange(self.line, 4, "send 0->1"), groups=(self.line,)), rank(1, groups=(self.line,))]
        ranks += [rank(n, groups=(self.line,)) for n in (2, 3)]
        assert analyse(ranks).culprits == (1,)

    def test_in_a_pair_numbers_tell(self) -> None:
        ranks = [
            rank(0, exchange(self.pair, 6, "send 0->1"), groups=(self.pair,)),
            rank(2, exchange(self.pair, 5, "recv 1<-0", "completed"), groups=(self.pair,)),
        ]
        assert analyse(ranks).culprits == (2,)

    def test_a_chain_along_the_pipeline_ends_at_its_root(self) -> None:
        ranks = [
            rank(0, exchange(self.line, 9, "send 0->1"), groups=(self.line,)),
            rank(1, exchange(self.line, 3, "send 1->2"), groups=(self.line,)),
            rank(2, exchange(self.line, 5, "send 2->3"), groups=(self.line,)),
            rank(3, groups=(self.line,)),
        ]
        assert analyse(ranks).culprits == (3,)

    def test_met_exchanges_are_symmetric(self) -> None:
        ranks = [
            rank(0, exchange(self.line, 4, "send 0->1"), groups=(self.line,)),
            rank(1, exchange(self.line, 4, "recv 1<-0"), groups=(self.line,)),
            *(rank(n, groups=(self.line,)) for n in (2, 3)),
        ]
        assert summary(analyse(ranks)) == ("symmetric", ())

    def test_numbers_of_exchanges_are_not_taken_for_those_of_collectives(self) -> None:
        ranks = [rank(n, exchange(WORLD, 900 + n, "send 0->1", "completed"), op(WORLD, 7)) for n in range(4)]
        assert analyse(ranks).kind == "symmetric"


@given(st.data())
def test_in_one_group_exactly_those_furthest_behind_are_named(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 12))
    group = Group("0", "", tuple(range(size)))
    last = data.draw(st.lists(st.integers(1, 5), min_size=size, max_size=size))
    ranks = [
        ReducedDump.of(
            n, (group,), [op(group, s, "completed" if s <= min(last) else "started") for s in range(1, e + 1)]
        )
        for n, e in enumerate(last)
    ]
    data.draw(st.randoms()).shuffle(ranks)
    if len(set(last)) == 1:
        with pytest.raises(Blind):
            analyse(ranks)
    else:
        assert summary(analyse(ranks)) == ("behind", tuple(n for n, e in enumerate(last) if e == min(last)))


@given(st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=8, max_size=8))
def test_components_are_the_nodes_that_lead_to_each_other(edges: list[list[int]]) -> None:
    reach = [{node} for node in range(8)]
    for _ in range(8):
        for node in range(8):
            reach[node] |= {far for target in edges[node] for far in reach[target]}
    component_of, count = strong_components(edges)
    assert set(component_of) == set(range(count))
    for a in range(8):
        for b in range(8):
            assert (component_of[a] == component_of[b]) == (b in reach[a] and a in reach[b])


def test_thousands_of_ranks_take_seconds() -> None:
    size, tensor = 4096, 8
    everyone = Group("0", "", tuple(range(size)))
    rows = [Group(f"r{i}", "", tuple(range(i, i + tensor))) for i in range(0, size, tensor)]
    columns = [Group(f"c{i}", "", tuple(range(i, size, tensor))) for i in range(tensor)]
    culprit = 1234
    ranks = []
    for number in range(size):
        groups = (everyone, rows[number // tensor], columns[number % tensor])
        late = number == culprit
        mate = number // tensor == culprit // tensor
        operations = (
            [op(groups[1], 5, "completed")] if late else [op(groups[1], 6, "scheduled" if mate else "completed")]
        )
        operations += [] if mate else [op(groups[2], 9), op(everyone, 3)]
        ranks.append(ReducedDump.of(number, groups, operations))
    started = time.perf_counter()
    assert analyse(ranks).culprits == (culprit,)
    assert time.perf_counter() - started < 10


def test_ranks_of_which_nothing_is_known_cost_nothing() -> None:
    huge = Group("0", "default_pg", tuple(range(300_000)))
    late = rank(1, op(huge, 6, "completed"), groups=(huge,))
    waits = Waits([rank(0, op(huge, 7), groups=(huge,)), late, rank(2, op(huge, 7), groups=(huge,))])
    assert len(waits.ranks) == 300_000
    assert len(waits.graph.edges) < 10


def test_groups_of_one_name_are_told_apart_by_their_hash() -> None:
    groups = [Group("1", "TENSOR", tuple(range(first, first + 8))) for first in range(0, 8_000, 8)]
    assert len({hash(group) for group in groups}) == len(groups)
