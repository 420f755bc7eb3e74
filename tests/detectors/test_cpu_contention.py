"""Hosts that hold their GPUs up, and hosts that are merely busy."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.slowness.cpu_contention import CpuContention
from eagle_eye.detectors.types import Blind
from tests.detectors.slow_stories import (
    LONG_ROWS,
    ROWS,
    SICK_ROWS,
    first_said,
    held_up,
    hookless,
    hot,
    idle,
    job,
    longer_steps,
    one,
    out_of_phase,
    slower,
    without,
)
from tests.detectors.windows import NOW_S, Story

DETECTOR = CpuContention()


def busy(story: Story, node: int = 1, rows: int = SICK_ROWS, share: float = 0.95) -> Story:
    jitter = 0.01 * np.random.default_rng(5).uniform(size=rows)  # no two readings are the same
    story.node["node_cpu_utilization_ratio"][-rows:, node] = share - jitter
    story.node["node_cpu_pressure_ratio"][-rows:, node] = 0.6 - jitter
    return story


def gpus_less(story: Story, node: str = "n1", rows: int = SICK_ROWS, ratio: float = 0.85) -> Story:
    columns = story.column(node)
    for name in ("gpu_utilization_ratio", "gpu_tensor_active_ratio", "gpu_power_watts"):
        story.device[name][-rows:, columns] *= ratio
    return story


def computes_longer(story: Story, node: str = "n1", rows: int = SICK_ROWS, ratio: float = 1.2) -> Story:
    columns = story.column(node)
    for column in columns:
        held_up(story, column, rows, 1 / ratio)
    story.device["nccl_collective_seconds"][-rows:, columns] = 0.08
    return story


def slowed(host_rows: int = LONG_ROWS, job_rows: int = LONG_ROWS, *, hook: bool = False) -> Story:
    """A host is busy and the job moves less in a second, on all nodes alike: GPUs that wait are idle."""
    story = job(rows=3 * LONG_ROWS)
    return slower(busy(story if hook else hookless(story), rows=host_rows), job_rows, 0.75)


class TestWithoutPeers:
    def test_of_two_nodes_the_one_that_is_busier_than_it_was_is_named(self) -> None:
        verdict = one(DETECTOR.detect(gpus_less(busy(hookless(job(nodes=2)))).window()))
        assert verdict.node == "n1"

    def test_of_two_nodes_one_that_was_as_busy_all_along_is_not(self) -> None:
        story = gpus_less(busy(hookless(job(nodes=2)), rows=ROWS))
        assert DETECTOR.detect(story.window()) == []

    def test_of_two_nodes_one_that_strays_as_far_now_and_then_is_not(self) -> None:
        story = gpus_less(busy(hookless(job(nodes=2)), share=0.6))
        for metric in ("node_cpu_utilization_ratio", "node_cpu_pressure_ratio"):
            story.node[metric][:-SICK_ROWS:2, 1] = 0.55
        assert DETECTOR.detect(story.window()) == []


class TestByTheJob:
    def test_a_job_that_is_slower_since_a_host_became_busy_is_held_up_by_it(self) -> None:
        verdict = one(DETECTOR.detect(slowed().window()))
        assert verdict.node == "n1"
        assert verdict.kinds == {"host_cpu", "job_activity"}
        assert verdict.confidence < 0.8  # told, not acted on
        assert verdict.slowdown_ratio == pytest.approx(1 / 3, abs=0.05)
        assert "slower since the same moment" in verdict.summary

    def test_a_job_that_became_slower_before_is_not(self) -> None:
        assert DETECTOR.detect(slowed(job_rows=2 * LONG_ROWS).window()) == []

    def test_a_job_that_became_slower_later_is_not(self) -> None:
        assert DETECTOR.detect(slowed(host_rows=2 * LONG_ROWS).window()) == []

    def test_a_job_that_is_as_fast_as_before_is_not(self) -> None:
        assert DETECTOR.detect(slowed(job_rows=1).window()) == []

    def test_steps_that_are_reported_say_it_themselves(self) -> None:
        assert DETECTOR.detect(slowed(hook=True).window()) == []


class TestFires:
    def test_a_busy_host_whose_gpus_all_do_less_is_named(self) -> None:
        verdict = one(DETECTOR.detect(gpus_less(busy(job())).window()))
        assert (verdict.fault, verdict.node, verdict.device) == ("cpu_contention", "n1", None)
        assert verdict.confidence >= 0.9
        assert verdict.kinds == {"host_cpu", "gpu_activity"}
        assert abs(verdict.onset_s - (NOW_S - SICK_ROWS)) <= 2.0

    def test_a_busy_host_whose_ranks_all_compute_longer_is_named(self) -> None:
        verdict = one(DETECTOR.detect(computes_longer(busy(job())).window()))
        assert verdict.kinds >= {"host_cpu", "compute_time", "collective_arrival"}
        assert verdict.slowdown_ratio == pytest.approx(0.12, rel=0.1)

    def test_a_busy_host_whose_ranks_wait_for_data_is_named(self) -> None:
        story = busy(job())
        story.device["train_data_wait_seconds"] = np.full((120, 24), 0.005)
        story.device["train_data_wait_seconds"][-SICK_ROWS:, story.column("n1")] = 0.08
        longer_steps(story, ratio=1.15)
        verdict = one(DETECTOR.detect(story.window()))
        assert verdict.kinds == {"host_cpu", "data_wait"}
        assert verdict.slowdown_ratio == pytest.approx(0.15, rel=0.1)

    @pytest.mark.parametrize(
        ("metric", "value"),
        [("node_cpu_steal_ratio", 0.2), ("node_memory_pressure_ratio", 0.4), ("node_cpu_pressure_ratio", 0.5)],
    )
    def test_steal_and_pressure_count_as_well(self, metric: str, value: float) -> None:
        story = gpus_less(job())
        story.node.setdefault(metric, np.zeros((120, 6)))
        story.node[metric][-SICK_ROWS:, 1] = value
        assert one(DETECTOR.detect(story.window())).node == "n1"

    def test_needs_neither_hook_nor_profiling_counters(self) -> None:
        story = without(hookless(gpus_less(busy(job()))), "gpu_tensor", "gpu_sm_active", "node_cpu_pressure")
        verdict = one(DETECTOR.detect(story.window()))
        assert verdict.node == "n1"
        assert verdict.confidence >= 0.9

    def test_a_node_whose_agent_ticks_at_another_moment_is_compared_all_the_same(self) -> None:
        story = out_of_phase(hookless(gpus_less(busy(job()))), "n1")
        verdict = one(DETECTOR.detect(story.window(node_times_s=story.times_s)))
        assert verdict.node == "n1"
        assert verdict.confidence >= 0.9

    def test_a_host_that_is_the_last_of_several_to_calm_down_is_not_to_blame(self) -> None:
        story = job(nodes=12)
        for index in (3, 4, 5):
            gpus_less(busy(story, index, rows=60), f"n{index}", rows=60)
        calm = job(nodes=12)
        for index in (4, 5):
            columns = story.column(f"n{index}")
            for name in ("node_cpu_utilization_ratio", "node_cpu_pressure_ratio"):
                story.node[name][-15:, index] = calm.node[name][-15:, index]
            for name in ("gpu_utilization_ratio", "gpu_tensor_active_ratio", "gpu_power_watts"):
                story.device[name][-15:, columns] = calm.device[name][-15:, columns]
        verdict = one(DETECTOR.detect(story.window()))
        assert verdict.node is None
        assert verdict.asks == "notify"

    def test_what_was_always_so_needs_two_effects(self) -> None:
        story = computes_longer(busy(job(), rows=120), rows=120)
        assert one(DETECTOR.detect(story.window())).node == "n1"
        assert DETECTOR.detect(gpus_less(busy(job(), rows=120), rows=120).window()) == []

    def test_a_clear_case_is_named_within_fifteen_seconds(self) -> None:
        after = first_said(DETECTOR, hookless(gpus_less(busy(job(rows=60)))), 60 - SICK_ROWS)
        assert after is not None
        assert after <= 14

    def test_rows_a_minute_apart_are_enough(self) -> None:
        story = hookless(gpus_less(busy(job(rows=16), rows=4), rows=4))
        story.times_s = NOW_S - 60.0 * np.arange(15, -1, -1)
        assert one(DETECTOR.detect(story.window(interval_s=60.0))).node == "n1"


class TestStaysQuiet:
    def test_a_busy_host_that_holds_nobody_up_is_no_fault(self) -> None:
        assert DETECTOR.detect(busy(job(), rows=60).window()) == []

    @pytest.mark.parametrize(
        ("metric", "usual_s", "more_s"),
        [("train_compute_seconds", 0.3, 0.04), ("train_data_wait_seconds", 0.05, 0.04)],
    )
    def test_a_busy_host_whose_ranks_stray_as_far_as_others_is_no_fault(
        self, metric: str, usual_s: float, more_s: float
    ) -> None:
        story = busy(job(nodes=12))
        level_s = usual_s + more_s * np.random.default_rng(7).normal(size=len(story.series))
        level_s[story.column("n1")] = usual_s + more_s
        story.device[metric] = np.full((ROWS, len(story.series)), usual_s)
        story.device[metric][-SICK_ROWS:] = level_s
        assert DETECTOR.detect(longer_steps(story, ratio=1.1).window()) == []

    def test_a_host_that_is_as_busy_as_others_are_now_and_then_is_told_of_without_action(self) -> None:
        story = gpus_less(busy(job(nodes=12), rows=30), rows=30)
        for name in ("node_cpu_utilization_ratio", "node_cpu_pressure_ratio"):
            story.node[name][10:40, 8] = story.node[name][-30:, 1]
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.confidence) == ("n1", 0.75)

    def test_slow_gpus_without_a_busy_host_are_left_to_others(self) -> None:
        assert DETECTOR.detect(computes_longer(gpus_less(job())).window()) == []

    def test_one_slow_gpu_of_a_busy_host_is_no_contention(self) -> None:
        assert DETECTOR.detect(hot(busy(job())).window()) == []

    def test_a_job_whose_hosts_are_all_busy_is_no_finding_about_one(self) -> None:
        story = gpus_less(job())
        story.node["node_cpu_utilization_ratio"][:] = 0.9
        assert DETECTOR.detect(story.window()) == []

    def test_a_checkpoint_writer_is_no_fault(self) -> None:
        story = gpus_less(busy(job()))
        story.phase = ["checkpoint"] * len(story.phase)
        with pytest.raises(Blind, match="checkpoint"):
            DETECTOR.detect(story.window())

    def test_a_busy_host_of_a_job_that_stands_still_is_no_finding(self) -> None:
        with pytest.raises(Blind, match="not under load"):
            DETECTOR.detect(busy(idle(job(), 30), rows=30).window())

    def test_a_few_rows_are_no_contention(self) -> None:
        assert DETECTOR.detect(gpus_less(busy(job(), rows=6), rows=6).window()) == []

    def test_nodes_that_became_busy_together_are_one_finding_about_nobody(self) -> None:
        story = job(nodes=12)
        for index in (3, 4, 5):
            gpus_less(busy(story, index), f"n{index}")
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.nodes, verdict.asks) == (None, ("n3", "n4", "n5"), "notify")

    def test_hosts_that_became_busy_too_without_holding_gpus_up_are_named_as_well(self) -> None:
        story = busy(gpus_less(busy(job(nodes=12), 3), "n3"), 4)
        verdict = one(DETECTOR.detect(story.window()))
        assert verdict.nodes == ("n3",)
        assert "hosts of n3, n4 became busy together and GPUs of n3 are held up" in verdict.summary

    def test_is_blind_without_host_metrics(self) -> None:
        with pytest.raises(Blind, match="host metric"):
            DETECTOR.detect(without(job(), "node_").window())

    def test_another_host_of_which_one_reading_was_high_and_repeated_is_no_company(self) -> None:
        story = gpus_less(busy(job(nodes=12), 3), "n3")
        for name in ("node_cpu_utilization_ratio", "node_cpu_pressure_ratio"):
            story.node[name][-SICK_ROWS - 20 : -SICK_ROWS - 8, 8] = 0.95
        assert one(DETECTOR.detect(story.window())).node == "n3"
