"""Every how many captures a step is kept: by rules, and by a job whose copies take longer than its steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest

from eagle_eye.checkpoint.messages import Agreed, CopyInfo
from eagle_eye.checkpoint.slots import (
    EVERY_MAX,
    LOOK_BACK,
    SETTLING,
    SHRINK_AFTER,
    Agreement,
    CaptureInterval,
    Needed,
    Slots,
)


class Captures:
    """What comes of the captures of two ranks, one after the other."""

    def __init__(self) -> None:
        self.interval = CaptureInterval(frozenset({0, 1}))
        self._step = 0

    def are(self, outcomes: str) -> int:
        """Return the interval after captures that were whole (w), missed by one rank (.) or both (s), or by one while
        nothing is heard of the other (a).
        """
        for outcome in outcomes:
            self._step += 1
            if outcome == "w":
                self.interval.whole()
            else:
                self.interval.missed(self._step, 0)
            if outcome == "s":
                self.interval.missed(self._step, 1)
            elif outcome != "a":
                self.interval.heard(1, self._step)
        return self.interval.every

    def grown(self) -> Captures:
        while self.are(".") == 1:
            pass
        return self


class TestInterval:
    def test_it_doubles_where_fewer_than_half_become_whole(self) -> None:
        assert Captures().are("..w" * 5) == 2

    def test_it_stays_where_half_become_whole_for_twice_as_long_keeps_no_more(self) -> None:
        assert Captures().are(".w" * 100) == 1

    def test_it_stays_where_all_ranks_skip_the_same_steps(self) -> None:
        assert Captures().are("ssssw" * 20) == 1

    def test_it_stays_while_a_store_is_away(self) -> None:
        assert Captures().are("w" + "a" * 100 + "w" * 10) == 1

    def test_captures_that_were_on_their_way_do_not_count(self) -> None:
        grown = Captures().grown()
        assert grown.are("." * SETTLING + ".w" * LOOK_BACK) == 2

    def test_it_shrinks_slowly_once_none_is_lost(self) -> None:
        grown = Captures().grown()
        assert grown.are("w" * (SETTLING + SHRINK_AFTER - 1)) == 2
        assert grown.are("w") == 1

    def test_one_that_is_lost_keeps_it_from_shrinking(self) -> None:
        assert Captures().grown().are(("w" * (SHRINK_AFTER - 1) + ".") * 10) == 2

    def test_it_has_a_limit(self) -> None:
        assert Captures().are("." * 1000) == EVERY_MAX


@dataclass
class Rank:
    """A rank with its store, as they act: ``free_s`` is when the way to the other node is."""

    number: int
    slots: Slots
    needed: Needed
    every: int = 1
    calls: int = 0
    free_s: float = 0.0
    sending: set[int] = field(default_factory=set)

    def grant(self) -> None:
        steps = {one.step for one in self.slots.copies}
        self.slots.grant(self.needed.among(steps, persists=False) | (steps & self.sending))


class SlowJob:
    """Two ranks, a node each, that capture a step each second. A copy takes ``copy_s`` to the other node, a word
    ``word_s``. ``obeys``: the ranks capture what the job has agreed on.
    """

    def __init__(self, *, copy_s: float, word_s: float, obeys: bool) -> None:
        self.copy_s, self.word_s, self.obeys = copy_s, word_s, obeys
        self.agreement = Agreement(frozenset({0, 1}), keep=1)
        self.ranks = [Rank(number, Slots([None, None]), Needed(1)) for number in (0, 1)]
        self.whole: list[int] = []
        self.skipped: list[int] = []
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def run(self, steps: int) -> None:
        self.ranks[0].grant()  # the other one's store is slower to begin
        self._at(1.5, self.ranks[1].grant)
        for step in range(1, steps + 1):
            for rank in self.ranks:
                self._at(float(step), lambda rank=rank, step=step: self._capture(rank, step))  # type: ignore[misc]
        while self._events:
            self._now_s, _, happens = heapq.heappop(self._events)
            happens()

    def _at(self, time_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happens))

    def _said(self, happens: Callable[[], None]) -> None:
        self._at(self._now_s + self.word_s, happens)

    def _capture(self, rank: Rank, step: int) -> None:
        rank.calls += 1
        if self.obeys and rank.calls % rank.every:
            return
        slot = rank.slots.granted
        if slot is None:
            self.skipped.append(step)
            self._said(lambda: self._announce(self.agreement.missed(step, rank.number)))
            return
        copy = CopyInfo("2-p", rank.number, step, 1, (), self._now_s, 1)
        rank.slots.written(slot, copy)
        rank.sending.add(step)
        self._at(max(self._now_s, rank.free_s), lambda: self._send(rank, copy))
        rank.free_s = max(self._now_s, rank.free_s) + self.copy_s
        rank.grant()

    def _send(self, rank: Rank, copy: CopyInfo) -> None:
        if rank.needed.unresolved(copy.step):
            self._at(self._now_s + self.copy_s, lambda: self._sent(rank, copy))
        else:
            self._drop(rank, copy)

    def _sent(self, rank: Rank, copy: CopyInfo) -> None:
        if rank.needed.unresolved(copy.step):
            self._said(lambda: self._announce(self.agreement.copied(copy)))
        self._drop(rank, copy)

    def _drop(self, rank: Rank, copy: CopyInfo) -> None:
        rank.sending.discard(copy.step)
        rank.grant()

    def _announce(self, words: list[Agreed]) -> None:
        for word in words:
            self.whole += [step for step in word.whole if step not in self.whole]
            for rank in self.ranks:
                self._said(lambda rank=rank, word=word: self._hear(rank, word))  # type: ignore[misc]

    def _hear(self, rank: Rank, word: Agreed) -> None:
        rank.needed.agree(word)
        rank.every = word.capture_every
        rank.grant()


STEPS = 400
SLOW = [(2.2, 0.01), (3.3, 0.01), (0.3, 1.1)]  # seconds for a copy and for a word, where a step takes one


class TestSlowCopies:
    @pytest.mark.parametrize(("copy_s", "word_s"), SLOW)
    def test_left_to_themselves_ranks_keep_capturing_different_steps(self, copy_s: float, word_s: float) -> None:
        job = SlowJob(copy_s=copy_s, word_s=word_s, obeys=False)
        job.run(STEPS)
        assert len(job.whole) <= 1

    @pytest.mark.parametrize(("copy_s", "word_s"), SLOW)
    def test_by_an_agreed_interval_common_steps_become_whole(self, copy_s: float, word_s: float) -> None:
        job = SlowJob(copy_s=copy_s, word_s=word_s, obeys=True)
        job.run(STEPS)
        assert len(job.whole) >= STEPS / 5

    @pytest.mark.parametrize(("copy_s", "word_s"), [(0.3, 0.01), (1.5, 0.01), (1.2, 0.55)])
    def test_ranks_that_skip_the_same_steps_are_left_to_themselves(self, copy_s: float, word_s: float) -> None:
        jobs = [SlowJob(copy_s=copy_s, word_s=word_s, obeys=obeys) for obeys in (False, True)]
        for job in jobs:
            job.run(STEPS)
        assert jobs[0].whole == jobs[1].whole
