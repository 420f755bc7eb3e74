"""What a slow device costs a job: measured where something tells, and nothing claimed where nothing does."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eagle_eye.detectors.signs.activity_pace import PaceChange
from eagle_eye.detectors.signs.slow_share import compute_excess, pace_change, slowness_by_pace
from eagle_eye.detectors.signs.without_hook import NODE_MOVES, STEADY_MOVES
from tests.detectors.slow_stories import ACTIVITY, LONG_ROWS, SICK_ROWS, hookless, hot, job, longer_steps, slower
from tests.detectors.windows import NOW_S

ONSET_S = NOW_S - SICK_ROWS


def change(growth: float, error: float) -> PaceChange:
    return PaceChange(growth, error, 0.01)


class TestByPace:
    def test_a_clear_change_is_the_cost(self) -> None:
        assert slowness_by_pace(change(0.2, 0.01), 0.05) == (0.2, True)

    def test_a_pace_that_has_not_changed_is_no_cost_whatever_counters_let_expect(self) -> None:
        assert slowness_by_pace(change(0.0, 0.01), 0.15) == (0.0, True)

    def test_a_small_cost_that_the_noise_hides_is_reckoned(self) -> None:
        assert slowness_by_pace(change(0.02, 0.02), 0.03) == (0.03, False)

    def test_a_noisy_pace_nearer_to_no_cost_claims_none(self) -> None:
        assert slowness_by_pace(change(0.01, 0.10), 0.15).ratio == 0

    def test_counters_that_show_a_little_of_what_one_expects_tell_the_cost(self) -> None:
        assert slowness_by_pace(PaceChange(0.02, 0.005, noted=0.03), 0.15) == (0.02, True)

    def test_counters_too_coarse_to_tell_bear_nothing_out(self) -> None:
        assert slowness_by_pace(PaceChange(0.02, 0.01, noted=0.03), 0.15) == (0.0, False)

    def test_nothing_is_claimed_while_the_pace_since_is_not_known_yet(self) -> None:
        assert slowness_by_pace(change(0.0, math.inf), 0.15) == (0.0, False)

    def test_where_nothing_tells_of_the_pace_it_is_reckoned(self) -> None:
        assert slowness_by_pace(None, 0.15) == (0.15, False)


class TestPaceChange:
    def test_steps_tell(self) -> None:
        found = pace_change(longer_steps(job(), ratio=1.2).window(), ONSET_S)
        assert found is not None
        assert found.clear
        assert found.growth == pytest.approx(0.2, rel=0.05)

    def test_a_steady_job_has_not_changed(self) -> None:
        found = pace_change(job().window(), ONSET_S)
        assert found is not None
        assert not found.clear

    def test_counters_tell_where_steps_are_not_reported(self) -> None:
        story = hookless(hot(job(rows=240), rows=LONG_ROWS))
        found = pace_change(story.window(), NOW_S - LONG_ROWS)
        assert found is not None
        assert found.clear
        assert found.growth == pytest.approx(0.15, rel=0.1)

    def test_the_grain_of_samples_hides_nothing_that_longer_stretches_show(self) -> None:
        story = hookless(hot(job(rows=480), rows=2 * LONG_ROWS))
        grain = np.where(np.arange(480) // 15 % 2, 0.8, 1.2)  # as of steps that are no part of a block
        for name in STEADY_MOVES:
            if name in story.device:
                story.device[name] *= grain[:, None]
        found = pace_change(story.window(), NOW_S - 2 * LONG_ROWS)
        assert found is not None
        assert found.clear

    @pytest.mark.parametrize(("ratio", "clear"), [(1.0, False), (1.12, True)])
    def test_steps_longer_than_blocks_are_compared_whole(self, ratio: float, clear: bool) -> None:
        story, times_s = hookless(job(rows=600)), np.arange(301.0)
        # Of each step 28 s compute, and the rest is waiting.
        worked_s = [times_s // step_s * 28.0 + np.minimum(times_s % step_s, 28.0) for step_s in (37.0, ratio * 37.0)]
        computes = np.concatenate([np.diff(half_s) for half_s in worked_s]) + 0.001
        for values in (story.device, story.node):
            for name in [name for name in values if name.startswith((*ACTIVITY, "node_rdma"))]:
                values[name] *= computes[:, None]
        found = pace_change(story.window(), NOW_S - 300)
        assert found is not None
        assert found.clear is clear
        assert found.growth == pytest.approx(ratio - 1, abs=0.02)

    def test_wires_that_carry_less_while_gpus_do_as_much_make_no_slow_job(self) -> None:
        story = hookless(job(rows=240))  # it exchanges gradients half as often
        for values in (story.device, story.node):
            for name in ("gpu_pcie_tx_bytes_per_second", NODE_MOVES):
                if name in values:
                    values[name][-LONG_ROWS:] *= 0.5
        found = pace_change(story.window(), NOW_S - LONG_ROWS)
        assert found is not None
        assert not found.clear

    def test_memory_that_waiting_kernels_poll_hides_no_slow_job(self) -> None:
        story = hookless(hot(job(rows=240), rows=LONG_ROWS))
        noise = np.random.default_rng(5).normal(1.0, 0.03, (240, 1))
        for name in [name for name in story.device if name.startswith(ACTIVITY)]:
            story.device[name] *= noise
        story.device["gpu_dram_active_ratio"] = np.full_like(story.device["gpu_tensor_active_ratio"], 0.5)
        found = pace_change(story.window(), NOW_S - LONG_ROWS)
        assert found is not None
        assert found.growth == pytest.approx(0.15, rel=0.1)

    def test_a_pace_that_has_moved_as_much_by_itself_shows_no_change(self) -> None:
        story = hookless(slower(slower(job(rows=480), rows=360, ratio=0.92), rows=LONG_ROWS, ratio=0.94))
        found = pace_change(story.window(), NOW_S - LONG_ROWS)
        assert found is not None
        assert not found.clear

    def test_a_pace_that_was_low_for_a_minute_is_no_lasting_change(self) -> None:
        story = hookless(slower(job(rows=300), rows=LONG_ROWS, ratio=0.8))
        slower(story, rows=LONG_ROWS // 2 - 10, ratio=1 / 0.8)
        found = pace_change(story.window(), NOW_S - LONG_ROWS)
        assert found is not None
        assert not found.clear

    def test_one_minute_of_a_slow_job_is_not_enough_to_know_what_it_costs(self) -> None:
        story = hookless(slower(job(rows=300), rows=60, ratio=0.8))
        found = pace_change(story.window(), NOW_S - 60)
        assert found is not None
        assert found.error == math.inf

    def test_a_steady_job_without_the_hook_has_not_changed(self) -> None:
        found = pace_change(hookless(job()).window(), ONSET_S)
        assert found is not None
        assert not found.clear

    def test_without_a_time_before_nobody_knows(self) -> None:
        change = pace_change(hookless(job(rows=22)).window(), ONSET_S)
        assert change is not None
        assert change.error == math.inf


def test_a_node_that_is_slow_as_a_whole_is_not_its_own_measure() -> None:
    story = job(nodes=3)
    for column in story.column("n1"):
        hot(story, column)
    found = compute_excess(story.window(), story.column("n1"), ONSET_S)
    assert found is not None
    assert found == pytest.approx(0.15, rel=0.1)
