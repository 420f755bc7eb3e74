"""A step's time: as 1F1B makes it, event by event."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.planning.step_time import least_time_s, simulate, step_time_s, step_times_s


class Stage(NamedTuple):
    forward_s: float
    backward_s: float


SECONDS = st.one_of(st.sampled_from((1.0, 2.0)), st.floats(0.01, 3.0))
STAGES = st.lists(st.builds(Stage, SECONDS, SECONDS), min_size=1, max_size=8)


def test_even_stages_take_the_micro_batches_and_one_more_for_each_stage_but_one() -> None:
    assert step_time_s([Stage(1.0, 2.0)] * 4, 16) == (16 + 4 - 1) * 3.0


@settings(max_examples=200, deadline=None)
@given(STAGES, st.integers(1, 24))
def test_a_steps_time_is_that_of_the_event_simulation(stages: list[Stage], micro_batches: int) -> None:
    simulated_s = simulate(stages, [micro_batches])[-1].end_s
    assert step_time_s(stages, micro_batches) == pytest.approx(simulated_s, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(STAGES, st.integers(1, 30))
def test_the_table_has_each_batchs_time_and_never_falls(stages: list[Stage], micro_batches: int) -> None:
    table = step_times_s(stages, micro_batches)
    assert table == pytest.approx([step_time_s(stages, batch) for batch in range(1, micro_batches + 1)])
    assert all(later >= sooner - 1e-9 for sooner, later in itertools.pairwise(table))


@settings(max_examples=100, deadline=None)
@given(STAGES, st.integers(1, 24))
def test_no_stage_needs_more_than_the_step_takes(stages: list[Stage], micro_batches: int) -> None:
    times_s = [sum(stage) for stage in stages]
    for place, stage in enumerate(stages):
        before_s, after_s = sum(times_s[:place]), sum(times_s[place + 1 :])
        least_s = least_time_s(before_s, *stage, after_s, len(stages) - 1 - place, micro_batches)
        assert least_s <= step_time_s(stages, micro_batches) * (1 + 1e-9)


def test_the_simulation_runs_every_pass_once_and_one_at_a_time() -> None:
    passes = simulate([Stage(1.0, 2.0), Stage(2.0, 1.0), Stage(1.0, 1.0)], [5])
    assert len({each[:4] for each in passes}) == len(passes) == 2 * 3 * 5
    for stage in range(3):
        own = sorted((each for each in passes if each.stage == stage), key=lambda each: each.begin_s)
        assert all(sooner.end_s <= later.begin_s for sooner, later in itertools.pairwise(own))


def test_the_simulation_never_has_more_micro_batches_under_way_than_stages_from_there_on() -> None:
    passes = sorted(simulate([Stage(1.0, 1.0)] * 4, [9]), key=lambda each: (each.begin_s, not each.backward))
    for stage in range(4):
        under_way = most = 0
        for each in (one for one in passes if one.stage == stage):
            under_way += -1 if each.backward else 1
            most = max(most, under_way)
        assert most == 4 - stage
