"""Which whole steps are kept, and how far they reach back: as a job's coordinator decides it, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.checkpoint.messages import CopyInfo, KeptStep
from eagle_eye.checkpoint.shared_memory import SPACED
from eagle_eye.checkpoint.slots import Agreement, kept_from_before

REACH_S = 100.0


def copy(step: int, captured_s: float, rank: int = 0, attempt: int = 1, plan: str = "1-p") -> CopyInfo:
    return CopyInfo(plan, rank, step, 10, (), captured_s, attempt)


@dataclass
class Job:
    """A job of one rank, as its coordinator knows it.

    ``whole_s`` are the whole steps of its course, at a restart those that are kept; ``longest_s`` was between two.
    """

    keep: int = 2
    reach_s: float = REACH_S
    now_s: float = 0.0
    step: int = 0
    attempt: int = 1
    whole_s: dict[int, float] = field(default_factory=dict)
    longest_s: float = 0.0

    def __post_init__(self) -> None:
        self.agreement = Agreement(frozenset({0}), self.keep, reach_s=self.reach_s)

    @property
    def kept(self) -> set[int]:
        return self.agreement.whole

    def captures(self, after_s: float, clock_s: float = 0.0) -> None:
        """A step is whole so long after the one before; the rank's clock goes so much wrong."""
        self.now_s += after_s
        self.step += 1
        self.longest_s = max(self.longest_s, self.now_s - max(self.whole_s.values(), default=self.now_s))
        self.whole_s[self.step] = self.now_s
        self.agreement.copied(copy(self.step, self.now_s + clock_s))

    def skips(self, after_s: float) -> None:
        self.now_s += after_s
        self.step += 1
        self.agreement.missed(self.step)

    def restarts(self, after_s: float, place: int) -> None:
        """Another attempt goes on from one of the kept steps."""
        self.now_s += after_s
        last = sorted(self.kept)[place % len(self.kept)]
        held = [copy(step, self.whole_s[step], attempt=self.attempt) for step in self.kept]
        before = kept_from_before("1-p", held, self.kept, (last, self.attempt), self.reach_s)
        self.attempt, self.step = self.attempt + 1, last
        self.whole_s = {one.step: one.captured_s for one in before}
        self.agreement = Agreement(frozenset({0}), self.keep, whole=set(self.whole_s), reach_s=self.reach_s)
        for one in before:
            self.agreement.date(one.step, one.captured_s)

    def age_s(self, step: int) -> float:
        """Return how much older a step is than the newest whole one."""
        return self.whole_s[max(self.whole_s)] - self.whole_s[step]


class TestReach:
    def test_steps_at_a_regular_pace_reach_back_once_and_less_than_twice(self) -> None:
        job = Job()
        for step in range(1, 1000):
            job.captures(1.0)
            if step > REACH_S:
                assert REACH_S <= min(job.age_s(one) for one in job.kept if job.age_s(one) >= REACH_S) < 2 * REACH_S

    def test_without_a_reach_the_newest_alone_are_kept(self) -> None:
        job = Job(reach_s=0.0)
        for _ in range(10):
            job.captures(REACH_S)
        assert job.kept == {9, 10}

    def test_before_the_job_has_run_so_long_its_first_step_is_kept(self) -> None:
        job = Job()
        for _ in range(50):
            job.captures(1.0)
        assert job.kept == {1, 2, 49, 50}

    @settings(max_examples=300, deadline=None)
    @given(
        keep=st.integers(1, 3),
        reach_s=st.integers(1, 60),
        events=st.lists(
            st.one_of(
                st.tuples(st.just("captures"), st.integers(1, 20)),
                st.tuples(st.just("skips"), st.integers(1, 20)),
                st.tuples(st.just("restarts"), st.integers(1, 20), st.integers(0, 4)),
            ),
            max_size=80,
        ),
    )
    def test_whatever_the_pace_and_the_restarts_a_kept_step_is_old_enough_and_not_much_older(
        self, keep: int, reach_s: int, events: Sequence[tuple[str, int] | tuple[str, int, int]]
    ) -> None:
        job = Job(keep, float(reach_s))
        for name, *arguments in events:
            if name == "restarts" and not job.kept:
                continue
            getattr(job, name)(*map(float, arguments[:1]), *arguments[1:])
            if not job.kept:
                continue
            begun_s = max(job.age_s(step) for step in job.whole_s)
            assert set(sorted(job.whole_s)[-keep:]) <= job.kept
            assert len(job.kept) <= keep + SPACED
            old_enough = [job.age_s(step) for step in job.kept if job.age_s(step) >= reach_s]
            assert bool(old_enough) == (begun_s >= reach_s)
            limit_s = reach_s + max(float(reach_s), job.longest_s) + (job.longest_s if keep == 1 else 0.0)
            assert min(old_enough, default=0.0) <= limit_s

    @pytest.mark.parametrize(("spaced", "suffices"), [(SPACED - 1, False), (SPACED, True)])
    def test_no_fewer_steps_would_do_whichever_were_chosen(self, spaced: int, suffices: bool) -> None:
        reach, choices = 4, {frozenset[int]()}
        for now in range(1, 30):
            before = {choice | {now - 1} for choice in choices}
            choices = {frozenset(some) for one in before for some in combinations(one, min(spaced, len(one)))}
            if now > reach:
                choices = {one for one in choices if any(reach <= now - step < 2 * reach for step in one)}
        assert bool(choices) == suffices


class TestClocks:
    def test_a_clock_that_is_set_back_loses_no_newest_step_and_steps_reach_back_again(self) -> None:
        job = Job()
        for _ in range(150):
            job.captures(1.0)
        for _ in range(250):
            job.captures(1.0, clock_s=-1e6)
            assert {job.step - 1, job.step} <= job.kept
            assert max(map(job.age_s, job.kept)) >= REACH_S
        assert min(job.age_s(one) for one in job.kept if job.age_s(one) >= REACH_S) < 2 * REACH_S

    def test_a_clock_that_is_set_forward_loses_no_newest_step_and_steps_reach_back_again(self) -> None:
        job = Job()
        for _ in range(150):
            job.captures(1.0)
        for _ in range(250):
            job.captures(1.0, clock_s=1e6)
            assert {job.step - 1, job.step} <= job.kept
        assert max(map(job.age_s, job.kept)) >= REACH_S

    def test_the_clock_of_one_of_three_ranks_does_not_matter(self) -> None:
        agreement = Agreement(frozenset({0, 1, 2}), keep=1, reach_s=REACH_S)
        for step in range(1, 251):
            for rank, clock_s in enumerate((0.0, 1e6 * (step % 2), 0.1)):
                agreement.copied(copy(step, step + clock_s, rank, plan="3-p"))
        assert [step for step in agreement.whole if REACH_S <= 250 - step < 2 * REACH_S + 2]


class TestFromBefore:
    def kept(self, *copies: CopyInfo, known: Sequence[int] = (1, 2, 3, 4, 5), last: int = 5) -> list[KeptStep]:
        return list(kept_from_before("2-p", copies, known, (last, 2), REACH_S))

    def both(self, step: int, captured_s: float, attempt: int = 2) -> list[CopyInfo]:
        return [copy(step, captured_s, rank, attempt, "2-p") for rank in (0, 1)]

    def test_it_is_the_resumed_step_and_older_ones_of_earlier_attempts(self) -> None:
        copies = [*self.both(1, 10.0, attempt=1), *self.both(4, 190.0), *self.both(5, 200.0)]
        assert self.kept(*copies) == [KeptStep(1, 1, 10.0), KeptStep(4, 2, 190.0), KeptStep(5, 2, 200.0)]

    def test_what_is_later_than_the_resumed_step_is_not_kept(self) -> None:
        assert [one.step for one in self.kept(*self.both(4, 190.0), *self.both(5, 200.0), last=4)] == [4]

    def test_a_step_that_lacks_a_shard_is_not_kept(self) -> None:
        assert [one.step for one in self.kept(self.both(4, 190.0)[0], *self.both(5, 200.0))] == [5]

    def test_a_step_of_another_course_of_training_is_not_kept(self) -> None:
        # A node that was away has a copy of step 4 that was made before the last attempt made it anew.
        copies = [*self.both(4, 90.0, attempt=1), self.both(4, 190.0)[0], *self.both(5, 200.0)]
        assert [one.step for one in self.kept(*copies)] == [5]

    def test_a_step_that_no_store_of_the_last_attempt_keeps_is_not_kept(self) -> None:
        copies = [*self.both(4, 90.0, attempt=1), *self.both(5, 200.0)]
        assert [one.step for one in self.kept(*copies, known=(5,))] == [5]

    @pytest.mark.parametrize("resumed_attempt", [1, 3])
    def test_a_resumed_step_that_another_attempt_captured_is_not_among_them(self, resumed_attempt: int) -> None:
        assert self.kept(*self.both(5, 200.0, resumed_attempt)) == []
