"""A copy beside a job's traffic, on a link and a clock that are made up: what goes when, and what it disturbs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from eagle_eye.checkpoint.traffic import Cap, Carrier, Cost, IdleSpans, next_piece

RATE, DELAY_S, LOOK_S = 125e6, 0.0004, 0.002


@dataclass
class Job:
    """Steps of (idle, busy) in turn; each step ends after its last pair."""

    steps: list[list[tuple[float, float]]]
    busy: list[tuple[float, float]] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        now_s = 0.0
        for step in self.steps:
            for idle_s, busy_s in step:
                self.busy.append((now_s + idle_s, now_s + idle_s + busy_s))
                now_s += idle_s + busy_s
            self.marks.append(now_s)

    def busy_s(self, began_s: float, ended_s: float) -> float:
        return sum(max(0.0, min(ended_s, end) - max(began_s, begin)) for begin, end in self.busy)


@dataclass
class Run:
    sent: int
    collided_s: float
    idle_s: float


def run(job: Job, after_s: float = 0.0) -> Run:
    """Send without end beside the job; count from a time on, once the job is known."""
    spans = IdleSpans()
    carrier, cost, cap = Carrier(spans), Cost(), Cap(None)
    now_s, own, marks, found = 0.0, 0, iter(job.marks), Run(0, 0.0, 0.0)
    next_mark_s, end_s = next(marks), job.marks[-1]

    def total(at_s: float) -> int:
        return int(own * 1.05 + RATE * job.busy_s(0.0, at_s))

    def marked(at_s: float) -> float:
        mark_s = next_mark_s
        while mark_s <= at_s:
            spans.mark(mark_s)
            mark_s = next(marks, float("inf"))
        return mark_s

    spans.mark(0.0)
    while now_s < end_s:
        count, wait_s = next_piece(now_s, spans.sight(now_s), 1 << 40, cost, cap)
        began_s = now_s
        if count:
            now_s += DELAY_S + count / RATE
            own += count
            next_mark_s = marked(now_s)
            if not carrier.sent(now_s, total(now_s), count):
                cost.measured(count, now_s - began_s)
        else:
            until_s = now_s + min(wait_s, 0.005)
            while now_s < until_s:
                now_s += LOOK_S
                next_mark_s = marked(now_s)
                carrier.observe_traffic(now_s, total(now_s))
        if began_s >= after_s and count:
            found.sent += count
            found.collided_s += job.busy_s(began_s, now_s)
    found.idle_s = end_s - after_s - job.busy_s(after_s, end_s)
    return found


def jitter(seed: int) -> Iterator[float]:
    """Numbers from -1 to 1, always the same."""
    while True:
        seed = (seed * 1103515245 + 12345) % (1 << 31)
        yield 2 * seed / (1 << 31) - 1


def steady() -> Job:
    return Job([[(0.3, 0.2)]] * 40)


def of_many_phases() -> Job:
    return Job([[(0.06, 0.05), (0.04, 0.05), (0.2, 0.1)]] * 40)


def shaky() -> Job:
    shake = jitter(7)
    return Job([[(0.3 * (1 + 0.05 * next(shake)), 0.2 * (1 + 0.05 * next(shake)))] for _ in range(40)])


def in_turn() -> Job:
    return Job([[(0.2, 0.1)], [(0.5, 0.1)]] * 20)


def shrinking() -> Job:
    return Job([[(0.5 * 0.98**number, 0.2)] for number in range(40)])


def growing() -> Job:
    return Job([[(0.3 * 1.02**number, 0.2)] for number in range(40)])


def with_pauses() -> Job:
    return Job([[(4.0 if number % 10 == 9 else 0.3, 0.2)] for number in range(40)])


JOBS = [steady, of_many_phases, shaky, in_turn, shrinking, growing, with_pauses]


@pytest.mark.parametrize("job", JOBS)
def test_a_copy_disturbs_training_for_less_than_a_fiftieth_of_the_time(job: object) -> None:
    made: Job = job()  # type: ignore[operator]
    found = run(made, made.marks[4])
    assert found.collided_s < 0.02 * (made.marks[-1] - made.marks[4])


@pytest.mark.parametrize("job", JOBS)
def test_most_of_the_idle_time_is_used(job: object) -> None:
    made: Job = job()  # type: ignore[operator]
    found = run(made, made.marks[4])
    assert found.sent > 0.55 * RATE * found.idle_s


def test_a_job_that_has_changed_is_disturbed_for_a_few_steps_only() -> None:
    job = Job([[(0.6, 0.2)]] * 20 + [[(0.2, 0.2)]] * 20)
    assert run(job, job.marks[25]).collided_s < 0.02 * (job.marks[-1] - job.marks[25])


def test_before_anything_is_known_collisions_are_as_short_as_a_piece() -> None:
    job = Job([[(0.3, 0.2)]] * 3)
    assert run(job).collided_s < 3 * 0.03
