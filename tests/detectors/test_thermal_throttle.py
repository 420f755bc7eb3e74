"""Heat that slows a GPU, and heat that does not."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.slowness.thermal_throttle import ThermalThrottle
from eagle_eye.detectors.types import Blind
from tests.detectors.slow_stories import (
    ACTIVITY,
    LONG_ROWS,
    ROWS,
    SICK_ROWS,
    first_said,
    hookless,
    hot,
    idle,
    job,
    one,
    out_of_phase,
    without,
)
from tests.detectors.windows import NOW_S, Story

DETECTOR = ThermalThrottle()


class TestFires:
    def test_names_the_gpu_that_is_hot_and_slow(self) -> None:
        verdict = one(DETECTOR.detect(hot(job()).window()))
        assert (verdict.fault, verdict.node, verdict.device) == ("thermal_throttle", "n1", 1)
        assert verdict.confidence >= 0.9
        assert verdict.kinds == {"sm_clock", "temperature", "throttle_reason", "power"}
        assert abs(verdict.onset_s - (NOW_S - SICK_ROWS)) <= 1.0

    def test_measures_what_it_costs_on_the_steps(self) -> None:
        verdict = one(DETECTOR.detect(hot(job()).window()))
        assert verdict.slowdown_ratio == pytest.approx(0.15, rel=0.1)
        assert "reckoned" not in verdict.summary

    def test_reckons_what_it_costs_without_the_hook(self) -> None:
        verdict = one(DETECTOR.detect(without(hookless(hot(job())), *ACTIVITY, "node_rdma").window()))
        assert verdict.slowdown_ratio == pytest.approx(0.7 * 0.25, rel=0.1)
        assert "reckoned from counters" in verdict.summary

    def test_counters_tell_the_jobs_pace_without_the_hook(self) -> None:
        verdict = one(DETECTOR.detect(hookless(hot(job(rows=240), rows=LONG_ROWS)).window()))
        assert verdict.slowdown_ratio == pytest.approx(0.15, rel=0.1)
        assert "reckoned" not in verdict.summary

    def test_temperature_clock_and_power_are_enough_where_nvml_gives_no_reasons(self) -> None:
        verdict = one(DETECTOR.detect(without(hot(job()), "gpu_throttle_reasons").window()))
        assert verdict.confidence >= 0.9
        assert verdict.kinds == {"sm_clock", "temperature", "power"}

    def test_temperature_and_clock_alone_only_notify(self) -> None:
        verdict = one(DETECTOR.detect(without(hot(job()), "gpu_throttle_reasons", "gpu_power_watts").window()))
        assert verdict.confidence < 0.9

    def test_clock_and_bit_are_enough_where_temperatures_are_missing(self) -> None:
        verdict = one(DETECTOR.detect(without(hot(job()), "gpu_temperature", "gpu_memory_temp").window()))
        assert verdict.confidence >= 0.9

    def test_a_clear_case_is_named_within_fifteen_seconds(self) -> None:
        after = first_said(DETECTOR, hot(job(rows=60)), 60 - SICK_ROWS)
        assert after is not None
        assert after <= 14

    def test_a_small_loss_counts_when_it_has_lasted_a_minute(self) -> None:
        assert DETECTOR.detect(hot(job(), rows=40, ratio=0.95).window()) == []
        assert one(DETECTOR.detect(hot(job(), rows=80, ratio=0.95).window())).node == "n1"

    def test_a_clock_that_flickers_while_it_throttles_still_counts(self) -> None:
        story = hot(job(), rows=30)
        story.device["gpu_sm_clock_hertz"][-30::4, 5] /= 0.8
        assert one(DETECTOR.detect(story.window())).node == "n1"

    def test_all_gpus_of_a_node_are_one_verdict_without_a_device(self) -> None:
        story = job()
        for column in story.column("n2"):
            hot(story, column)
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.device) == ("n2", None)

    @pytest.mark.parametrize("interval_s", [15.0, 30.0, 60.0])
    def test_rows_far_apart_are_enough(self, interval_s: float) -> None:
        story = hookless(hot(job(rows=16), rows=5))
        story.times_s = NOW_S - interval_s * np.arange(15, -1, -1)
        verdict = one(DETECTOR.detect(story.window(interval_s=interval_s)))
        assert verdict.node == "n1"
        assert verdict.confidence >= 0.9

    def test_a_node_whose_agent_ticks_at_another_moment_is_compared_all_the_same(self) -> None:
        verdict = one(DETECTOR.detect(out_of_phase(hookless(hot(job())), "n1").window()))
        assert (verdict.node, verdict.device) == ("n1", 1)
        assert verdict.confidence >= 0.9
        assert abs(verdict.onset_s - (NOW_S - SICK_ROWS)) <= 1.5

    def test_two_sick_nodes_at_different_times_are_two(self) -> None:
        story = hot(hot(job(nodes=8, rows=240), rows=SICK_ROWS), column=25, rows=150)
        assert {verdict.node for verdict in DETECTOR.detect(story.window())} == {"n1", "n6"}

    def test_a_gpu_that_throttles_in_a_stage_with_time_to_spare_costs_nothing(self) -> None:
        story = hot(job())
        for name in ("train_step_seconds", "nccl_collective_seconds", "gpu_tensor_active_ratio"):
            story.device[name] = job().device[name]
        verdict = one(DETECTOR.detect(story.window()))
        assert verdict.slowdown_ratio == 0
        assert "not longer" in verdict.summary


class TestStaysQuiet:
    def test_a_hot_node_that_keeps_its_clock_is_no_fault(self) -> None:
        assert DETECTOR.detect(hot(job(), rows=60, ratio=1.0).window()) == []

    def test_a_low_clock_without_heat_is_left_to_others(self) -> None:
        story = job()
        story.device["gpu_sm_clock_hertz"][-40:, 5] *= 0.8
        assert DETECTOR.detect(story.window()) == []

    def test_a_software_power_cap_bit_is_no_heat(self) -> None:
        story = hot(job(), celsius=70.0)
        story.device["gpu_throttle_reasons"][-SICK_ROWS:] = 0x4
        assert DETECTOR.detect(story.window()) == []

    def test_a_gpu_that_is_hot_because_it_works_more_is_no_fault(self) -> None:
        story = hot(job(), rows=60, ratio=0.94)
        story.device["gpu_throttle_reasons"][:] = 0x4
        story.device["gpu_power_watts"][-60:, 5] *= 1.1
        assert DETECTOR.detect(story.window()) == []

    def test_a_few_rows_are_no_throttling(self) -> None:
        assert DETECTOR.detect(hot(job(), rows=6).window()) == []

    def test_a_single_noisy_row_is_no_throttling(self) -> None:
        story = job()
        hot(story, rows=1, ratio=0.2)
        assert DETECTOR.detect(story.window()) == []

    def test_a_job_that_stands_still_says_nothing_of_clocks(self) -> None:
        story = idle(job(), 30)
        story.device["gpu_sm_clock_hertz"][-30:, 5] *= 0.3
        with pytest.raises(Blind, match="not under load"):
            DETECTOR.detect(story.window())

    def test_rows_of_a_checkpoint_are_not_compared(self) -> None:
        story = hot(job())
        story.phase = ["checkpoint"] * len(story.phase)
        with pytest.raises(Blind, match="checkpoint"):
            DETECTOR.detect(story.window())

    def test_a_pause_between_two_times_of_work_leaves_no_trace(self) -> None:
        story = job()
        story.device["gpu_sm_clock_hertz"][-25:-5, 5] *= 0.3
        story.device["gpu_temperature_celsius"][-25:-5, 5] = 85
        for name in ("gpu_utilization_ratio", "gpu_tensor_active_ratio"):
            story.device[name][-25:-5] = 0.0
        assert DETECTOR.detect(story.window()) == []

    def test_gpus_of_another_role_are_no_peers(self) -> None:
        story = job()
        columns = [c for node in ("n4", "n5") for c in story.column(node)]
        story.device["gpu_sm_clock_hertz"][:, columns] = 1.41e9
        story.device["gpu_temperature_celsius"][:, columns] = 85
        role_of = np.zeros(len(story.series), dtype=np.intp)
        role_of[columns] = 1
        assert DETECTOR.detect(story.window(role_of=role_of)) == []

    def test_an_idle_gpu_is_no_slow_one(self) -> None:
        story = hot(job(), rows=40, ratio=0.5)
        story.device["gpu_tensor_active_ratio"][-40:, 5] = 0.01
        assert DETECTOR.detect(story.window()) == []

    def test_noisy_clocks_are_no_fault(self) -> None:
        story = job(nodes=16, gpus=8)
        rng = np.random.default_rng(7)
        spread = 1 + 0.02 * rng.normal(size=128)
        story.device["gpu_sm_clock_hertz"] = 1.7e9 * spread * (1 + 0.01 * rng.normal(size=(ROWS, 128)))
        story.device["gpu_temperature_celsius"] += 14
        assert DETECTOR.detect(story.window()) == []

    def test_is_blind_without_clocks(self) -> None:
        with pytest.raises(Blind, match="gpu_sm_clock_hertz"):
            DETECTOR.detect(Story().window())


class TestRooms:
    def test_a_cold_gpu_whose_clock_fell_at_the_same_time_shares_no_heat(self) -> None:
        story = hot(job(rows=240), rows=60)
        story.device["gpu_sm_clock_hertz"][-60:-30, 9] *= 0.85
        assert one(DETECTOR.detect(story.window())).node == "n1"

    def test_nodes_that_throttle_together_are_a_matter_of_the_room(self) -> None:
        story = job(nodes=12)
        for node in ("n3", "n4", "n5"):
            for column in story.column(node):
                hot(story, column)
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.nodes, verdict.asks) == (None, ("n3", "n4", "n5"), "notify")

    def test_the_last_of_a_rack_that_is_still_slow_is_not_to_blame(self) -> None:
        story = job(nodes=12, rows=200)
        for place, node in enumerate(("n3", "n4", "n5")):
            for column in story.column(node):
                hot(story, column, rows=60)
            if place:
                for name in ("gpu_sm_clock_hertz", "gpu_temperature_celsius", "gpu_throttle_reasons"):
                    story.device[name][-10 * place :, story.column(node)] = job(nodes=12).device[name][:1, :4]
        verdict = one(DETECTOR.detect(story.window()))
        assert verdict.node is None
        assert set(verdict.nodes) == {"n3", "n4", "n5"}

    def test_most_of_a_switch_is_a_matter_of_its_rack_even_when_they_come_one_by_one(self) -> None:
        story = job(nodes=12, rows=400)
        story.switches = ("a",) * 4 + ("b",) * 8
        for place, node in enumerate(("n0", "n1", "n2")):
            hot(story, story.column(node)[0], rows=320 - 110 * place)
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.asks) == (None, "notify")
        assert set(verdict.nodes) == {"n0", "n1", "n2"}

    def test_the_first_to_throttle_of_an_aisle_that_grows_hot_is_not_accused(self) -> None:
        story = job(nodes=12, rows=300)
        rise = np.linspace(0, 14, 200)
        for node in ("n3", "n4", "n5", "n6"):
            story.device["gpu_temperature_celsius"][-200:, story.column(node)] += rise[:, None]
        hot(story, story.column("n4")[0], celsius=86)
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.asks) == (None, "notify")
        assert "n4" in verdict.nodes

    def test_heat_of_the_day_in_the_whole_room_is_no_finding(self) -> None:
        story = job(rows=400)
        story.device["gpu_temperature_celsius"] += np.linspace(0, 16, 400)[:, None]
        story.device["gpu_sm_clock_hertz"] *= np.linspace(1, 0.95, 400)[:, None]
        assert DETECTOR.detect(story.window()) == []

    def test_warm_neighbours_that_were_always_so_do_not_excuse_a_node(self) -> None:
        story = job(nodes=12)
        for node in ("n3", "n5", "n6"):
            story.device["gpu_temperature_celsius"][:, story.column(node)] = 82
        hot(story, story.column("n4")[0])
        assert one(DETECTOR.detect(story.window())).node == "n4"
