"""Which slot may be written, which step is whole: by rules, and by a job whose stores' words arrive as they like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eagle_eye.checkpoint.messages import Agreed, CopyInfo
from eagle_eye.checkpoint.shared_memory import spaced_of
from eagle_eye.checkpoint.slots import Agreement, Needed, Slots


def copy(step: int, rank: int = 0) -> CopyInfo:
    return CopyInfo("2-plan", rank, step, 10, (), float(step), 1)


def whole(*steps: int) -> Agreed:
    return Agreed(1, whole=steps)


class TestSlots:
    def test_empty_slots_go_first_then_the_oldest_step(self) -> None:
        slots = Slots([copy(2), copy(1), None])
        assert slots.grant(()) == 2
        slots.written(2, copy(3))
        assert slots.grant(()) == 1

    def test_a_slot_whose_step_is_needed_is_not_granted(self) -> None:
        assert Slots([copy(1), copy(2)]).grant({1, 2}) is None

    def test_the_copy_in_a_granted_slot_is_gone(self) -> None:
        slots = Slots([copy(1)])
        slots.grant(())
        assert slots.copy_of(1) is None

    def test_there_is_one_grant_at_a_time(self) -> None:
        slots = Slots([None, None])
        assert slots.grant(()) == 0
        assert slots.grant(()) is None

    def test_a_slot_that_is_being_filled_is_neither_granted_nor_taken_again(self) -> None:
        slots = Slots([None, None, None])
        assert slots.take_slot(()) == 0
        assert slots.take_slot(()) == 1
        assert slots.grant(()) == 2

    def test_a_slot_that_was_filled_with_nothing_is_free(self) -> None:
        slots = Slots([None])
        slots.take_slot(())
        slots.filled(0, None)
        assert slots.grant(()) == 0

    def test_what_nobody_granted_cannot_have_been_written(self) -> None:
        with pytest.raises(ValueError, match="slot 1 was written, and slot None was to be"):
            Slots([None, None]).written(1, copy(1))

    def test_a_slot_less_renumbers_those_behind_it(self) -> None:
        slots = Slots([None, copy(1), None], granted=2)
        slots.remove(0)
        assert (slots.granted, slots.copy_of(1)) == (1, 0)

    @given(
        steps=st.lists(st.none() | st.integers(0, 9), min_size=1, max_size=6),
        needed=st.sets(st.integers(0, 9)),
        granted=st.none() | st.integers(0, 5),
    )
    def test_no_state_of_slots_lets_a_needed_step_go(
        self, steps: list[int | None], needed: set[int], granted: int | None
    ) -> None:
        slots = Slots([None if step is None else copy(step) for step in steps], granted)
        before = {one.step for one in slots.copies}
        slots.take_slot(needed)
        slots.grant(needed)
        assert before & needed <= {one.step for one in slots.copies}


class TestNeeded:
    def test_a_step_is_needed_until_keep_newer_ones_are_whole(self) -> None:
        needed = Needed(keep=2)
        needed.agree(whole(5))
        needed.agree(whole(6))
        assert 5 in needed.among([5], persists=False)
        needed.agree(whole(7))
        assert 5 not in needed.among([5], persists=False)

    def test_a_step_of_which_nothing_is_known_yet_is_needed(self) -> None:
        assert Needed(1, {5}).among([6], persists=False) == {6}

    def test_a_step_that_was_passed_by_is_not_needed(self) -> None:
        assert Needed(1, {5}).among([4], persists=False) == set()

    def test_a_void_step_is_not_needed(self) -> None:
        needed = Needed(1)
        needed.agree(Agreed(1, void=3))
        assert needed.among([3, 4], persists=False) == {4}

    def test_a_step_on_its_way_to_storage_stays_until_it_is_there(self) -> None:
        needed = Needed(1)
        needed.agree(Agreed(1, (10,), persist=10))
        needed.agree(Agreed(1, (12,), persist=10))
        assert 10 in needed.among([10], persists=True)
        needed.agree(Agreed(1, (12,), persisted=10))
        assert 10 not in needed.among([10], persists=True)

    def test_only_the_node_that_writes_it_to_storage_keeps_it_for_that(self) -> None:
        # Another node has no slot for it: while storage is slow, no later step could be copied there.
        needed = Needed(1)
        needed.agree(Agreed(1, (12,), persist=10))
        assert needed.among([10], persists=False) == set()

    def test_older_steps_that_are_kept_are_needed_until_a_later_word_names_others(self) -> None:
        needed = Needed(2, spaced=2)
        needed.agree(whole(1, 3, 8, 9))
        assert needed.among(range(11), persists=False) == {1, 3, 8, 9, 10}
        needed.agree(whole(3, 7, 9, 10))
        assert needed.among(range(11), persists=False) == {3, 7, 9, 10}

    def test_a_word_that_comes_late_does_not_bring_older_steps_back(self) -> None:
        needed = Needed(2, {3, 7, 9, 10}, spaced=2)
        needed.agree(whole(1, 3, 8, 9))
        assert needed.older == (3, 7)

    def test_who_knows_the_newest_step_alone_says_nothing_of_older_ones(self) -> None:
        needed = Needed(2, {3, 7, 9, 10}, spaced=2)
        needed.know([11])
        assert needed.known == (3, 7, 10, 11)

    def test_where_slots_are_missing_the_oldest_go_first(self) -> None:
        needed = Needed(2, {1, 3, 8, 9}, spaced=2)
        assert needed.among([1, 3, 8, 9], persists=False, slots_missing=1) == {3, 8, 9}

    def test_where_a_slot_is_missing_one_step_less_is_kept_but_the_newest(self) -> None:
        needed = Needed(2, {5, 6})
        assert needed.among([5, 6], persists=False, slots_missing=1) == {6}
        assert needed.among([5, 6], persists=False, slots_missing=9) == {6}

    @given(st.permutations([whole(1), whole(1, 2), Agreed(1, (1, 2), void=3), Agreed(1, (2, 4), persist=4)]))
    def test_the_order_of_words_does_not_matter(self, words: list[Agreed]) -> None:
        needed = Needed(2)
        for word in words:
            needed.agree(word)
        assert (needed.whole, needed.persisting) == ({2, 4}, 4)
        assert needed.among(range(7), persists=True) == {2, 4, 5, 6}

    def test_a_late_word_does_not_begin_to_persist_what_is_persisted(self) -> None:
        for words in permutations([Agreed(1, (4,), persist=4), Agreed(1, (4,), persisted=4)]):
            needed = Needed(1)
            for word in words:
                needed.agree(word)
            assert needed.persisting is None

    def test_whoever_missed_a_word_knows_it_by_the_next(self) -> None:
        agreement = Agreement(frozenset({0}), keep=2, persist_every=2)
        agreement.copied(copy(1))
        missed = agreement.copied(copy(2))
        needed = Needed(2)
        for word in agreement.copied(copy(3)):
            needed.agree(word)
        assert missed[0].persist == needed.persisting == 2
        assert needed.whole == {2, 3}


class TestAgreement:
    def test_a_step_is_whole_once_every_rank_has_brought_it(self) -> None:
        agreement = Agreement(frozenset({0, 1}))
        assert agreement.copied(copy(5, 0)) == []
        assert [word.whole for word in agreement.copied(copy(5, 1))] == [(5,)]

    def test_a_step_that_a_rank_has_passed_by_is_void(self) -> None:
        agreement = Agreement(frozenset({0, 1}))
        agreement.copied(copy(5, 0))
        assert [word.void for word in agreement.copied(copy(6, 1))] == [5]

    def test_a_step_that_a_rank_has_passed_by_is_void_also_where_it_came_to_a_void_one(self) -> None:
        agreement = Agreement(frozenset({0, 1}))
        agreement.copied(copy(5, 0))
        agreement.missed(6)
        assert [word.void for word in agreement.copied(copy(6, 1))] == [5]

    def test_a_step_that_a_rank_has_missed_is_void_and_stays_so(self) -> None:
        agreement = Agreement(frozenset({0, 1}))
        assert [word.void for word in agreement.missed(5)] == [5]
        assert agreement.copied(copy(5, 0)) == agreement.copied(copy(5, 1)) == []

    def test_a_step_is_never_both_whole_and_void(self) -> None:
        agreement = Agreement(frozenset({0}))
        agreement.copied(copy(5))
        assert agreement.missed(5) == []

    def test_steps_that_made_room_are_kept_no_longer_and_the_newest_always_is(self) -> None:
        agreement = Agreement(frozenset({0}), keep=2, reach_s=100.0)
        for step in range(1, 7):
            agreement.copied(copy(step))
        assert agreement.whole == {1, 2, 5, 6}
        agreement.gave_up([1, 2, 6])
        assert [word.whole for word in agreement.copied(copy(7))] == [(5, 6, 7)]

    def test_whoever_says_it_again_hears_what_became_of_a_step(self) -> None:
        agreement = Agreement(frozenset({0, 1}))
        agreement.missed(5)
        assert [word.void for word in agreement.copied(copy(5, 0), again=True)] == [5]
        agreement.copied(copy(6, 0))
        agreement.copied(copy(6, 1))
        assert [(word.whole, word.void) for word in agreement.missed(6, again=True)] == [((6,), None)]

    def test_one_step_is_persisted_at_a_time(self) -> None:
        agreement = Agreement(frozenset({0}), persist_every=10)
        assert [word.persist for step in (9, 10, 15, 20) for word in agreement.copied(copy(step))] == [None, 10, 10, 10]
        agreement.finished_persisting(10)
        assert [word.persist for word in agreement.copied(copy(21))] == [21]

    def test_what_is_overdue_on_storage_goes_there_with_the_next_whole_step(self) -> None:
        agreement = Agreement(frozenset({0}), persist_every=10, persisted=10)
        assert [word.persist for word in agreement.copied(copy(23))] == [23]

    def test_the_lengths_of_objects_are_known_as_long_as_a_step_is_persisted(self) -> None:
        agreement = Agreement(frozenset({0}), persist_every=1)
        for step in range(1, 5):
            agreement.copied(copy(step))
        assert 1 in agreement.copies
        agreement.finished_persisting(1)
        assert agreement.copies == {}

    def test_one_that_begins_anew_calls_nothing_void_before_it_has_heard_everyone(self) -> None:
        # Its predecessor may have said that step 5 is whole, and rank 2's store alone has heard it.
        agreement = Agreement(frozenset({0, 1, 2}), whole={4}, unheard={0, 1, 2})
        agreement.heard(0, [4])
        agreement.copied(copy(5, 0))
        agreement.heard(1, [4])
        assert agreement.copied(copy(6, 1)) == []
        assert [word.whole for word in agreement.heard(2, [5])] == [(5,)]
        assert agreement.missed(5) == []

    def test_what_was_passed_by_meanwhile_is_void_once_it_has_heard_everyone(self) -> None:
        agreement = Agreement(frozenset({0, 1}), whole={4}, unheard={0, 1})
        agreement.heard(0, [4])
        agreement.missed(5)
        assert [word.void for word in agreement.heard(1, [4])] == [5]

    @settings(max_examples=50)
    @given(st.permutations([(step, rank) for step in (1, 2, 3) for rank in (0, 1)]))
    def test_in_whatever_order_copies_come_the_last_step_becomes_whole(self, order: list[tuple[int, int]]) -> None:
        agreement = Agreement(frozenset({0, 1}))
        for step, rank in order:
            agreement.copied(copy(step, rank))
        assert agreement.newest_whole == 3


@dataclass
class Node:
    """What one store does with the rules, its one rank included, as ``job_service.py`` does it."""

    number: int
    own: Slots
    others: dict[int, Slots]
    needed: Needed
    waiting: dict[int, set[int]] = field(default_factory=dict)  # by captured step, the holders still to answer
    reported: dict[int, tuple[object, ...]] = field(default_factory=dict)

    def grant(self) -> None:
        steps = self.needed.among((one.step for one in self.own.copies), persists=True)
        before = {one.step for one in self.own.copies}
        self.own.grant(steps)
        assert before & steps <= {one.step for one in self.own.copies}


class Job(RuleBasedStateMachine):
    """Nodes of one rank each, copies on the next nodes, node 0 the coordinator.

    Words are delivered in any order, or lost; stores begin anew with what they have on record.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, Callable[[], None]]] = []  # to whom, and what it does there
        self.nodes: list[Node] = []
        self.step = 0
        self.announced: list[int] = []
        self.kept: set[int] = set()  # with the last of them

    @initialize(count=st.integers(2, 4), keep=st.integers(1, 3), replicas=st.integers(1, 3), reach_s=st.integers(0, 8))
    def begin(self, count: int, keep: int, replicas: int, reach_s: int) -> None:
        """A step is captured each second. Older ones are kept as far back as ``reach_s``."""
        self.keep, self.replicas, self.reach_s = keep, min(replicas, count), float(reach_s)
        slots = keep + spaced_of(reach_s) + 1
        for number in range(count):
            held = [(number - more) % count for more in range(1, self.replicas)]
            others = {rank: Slots([None] * slots) for rank in held}
            needed = Needed(keep, spaced=spaced_of(reach_s))
            self.nodes.append(Node(number, Slots([None] * slots), others, needed))
            self.nodes[-1].grant()
        self.agreement = Agreement(frozenset(range(count)), keep, reach_s=self.reach_s)

    def holders(self, rank: int) -> list[int]:
        return [(rank + more) % len(self.nodes) for more in range(1, self.replicas)]

    @rule()
    def every_rank_captures(self) -> None:
        self.step += 1
        for node in self.nodes:
            self.capture(node, self.step)

    @rule(data=st.data())
    def some_ranks_capture(self, data: st.DataObject) -> None:
        self.step += 1
        for number in data.draw(st.sets(st.sampled_from(range(len(self.nodes))))):
            self.capture(self.nodes[number], self.step)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def a_word_arrives(self, data: st.DataObject) -> None:
        self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))[1]()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def a_word_is_lost(self, data: st.DataObject) -> None:
        self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))

    @rule(data=st.data())
    def a_store_begins_anew(self, data: st.DataObject) -> None:
        node = self.nodes[data.draw(st.integers(0, len(self.nodes) - 1))]
        self.sent = [one for one in self.sent if one[0] != node.number]
        node.own.give_back()
        for slots in node.others.values():
            slots.give_back()
        node.waiting.clear()
        node.reported.clear()
        if node.number == 0:
            ranks = range(len(self.nodes))
            self.agreement = Agreement(
                frozenset(ranks),
                self.keep,
                whole=set(node.needed.whole),
                void=set(node.needed.void),
                unheard=set(ranks),
                reach_s=self.reach_s,
            )
            for one in node.own.copies:
                if one.step in node.needed.whole or not node.needed.passed(one.step):
                    self.agreement.date(one.step, one.captured_s)
        node.grant()
        for one in node.own.copies:
            if node.needed.unresolved(one.step):
                self.replicate(node, one, again=True)

    def capture(self, node: Node, step: int) -> None:
        slot = node.own.granted
        if slot is None:
            for word in [*node.reported.values(), ("missed", step, False)]:
                self.tell(node, word)
            return
        node.own.written(slot, copy(step, node.number))
        node.grant()
        self.replicate(node, copy(step, node.number), again=False)

    def replicate(self, node: Node, one: CopyInfo, *, again: bool) -> None:
        node.waiting[one.step] = set(self.holders(node.number))
        for holder in self.holders(node.number):
            self.sent.append((holder, lambda holder=holder: self.put(node, holder, one, again=again)))  # type: ignore[misc]
        if not node.waiting[one.step]:
            self.answered(node, one.step, again=again)

    def put(self, node: Node, holder: int, one: CopyInfo, *, again: bool) -> None:
        """The bytes arrive at the holder, and its answer at once; or the connection is lost, and all of it with it."""
        there = self.nodes[holder]
        slots = there.others[node.number]
        fits = node.own.copy_of(one.step) is not None
        if fits and slots.copy_of(one.step) is None:
            there.needed.know(node.needed.known, node.needed.known_void)
            needed = there.needed.among((other.step for other in slots.copies), persists=False)
            slot = slots.grant(needed)
            fits = slot is not None
            if slot is not None:
                slots.written(slot, one)
        if one.step not in node.waiting:
            return
        if fits:
            node.waiting[one.step].discard(holder)
            if node.waiting[one.step]:
                return
        self.answered(node, one.step, again=again, missed=not fits)

    def answered(self, node: Node, step: int, *, again: bool, missed: bool = False) -> None:
        del node.waiting[step]
        what = "missed" if missed else "copied"
        if node.needed.unresolved(step):
            node.reported[step] = (what, step, True)
        self.tell(node, (what, step, again))

    def tell(self, node: Node, word: tuple[object, ...]) -> None:
        what, step, again = word
        known = node.needed.known

        def arrives() -> None:
            self.announce(self.agreement.heard(node.number, known))
            before = self.agreement.newest_whole
            if what == "missed":
                self.announce(self.agreement.missed(step, again=again))  # type: ignore[arg-type]
            else:
                self.announce(self.agreement.copied(copy(step, node.number), again=again))  # type: ignore[arg-type]
            if self.agreement.newest_whole > before:
                self.announced.append(self.agreement.newest_whole)
                self.kept = self.agreement.whole - {self.agreement.newest_whole}

        self.sent.append((0, arrives))

    def announce(self, words: list[Agreed]) -> None:
        for word in words:
            for number in range(1, len(self.nodes)):
                self.sent.append((number, lambda number=number, word=word: self.agree(number, word)))  # type: ignore[misc]
            self.agree(0, word)

    def agree(self, number: int, word: Agreed) -> None:
        node = self.nodes[number]
        node.needed.agree(word)
        node.reported = {step: said for step, said in node.reported.items() if node.needed.unresolved(step)}
        node.grant()

    @invariant()
    def what_was_announced_is_held_everywhere(self) -> None:
        for step in {*sorted(set(self.announced))[-self.keep if self.nodes else 0 :], *self.kept}:
            for node in self.nodes:
                assert node.own.copy_of(step) is not None, f"step {step} of rank {node.number} is gone"
                for holder in self.holders(node.number):
                    slots = self.nodes[holder].others[node.number]
                    assert slots.copy_of(step) is not None, f"step {step} of rank {node.number} is gone on {holder}"

    def teardown(self) -> None:
        """Whatever was lost before: once words arrive again, later steps become whole."""
        if not self.nodes:
            return
        for node in self.nodes:  # what waits for an answer that was lost hears that the connection is
            for step in list(node.waiting):
                self.answered(node, step, again=False, missed=True)
        begun = self.step
        for _ in range(self.keep + spaced_of(self.reach_s) + 6):
            self.every_rank_captures()
            while self.sent:
                self.sent.pop(0)[1]()
        assert self.agreement.newest_whole > begun
        self.what_was_announced_is_held_everywhere()


Job.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestJob = Job.TestCase
