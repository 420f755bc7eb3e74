"""NVLinks that are down or err."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.hardware.nvlink_degraded import NvlinkDegraded, _spare
from eagle_eye.detectors.types import Blind, WindowEvent
from tests.detectors.slow_stories import (
    SICK_ROWS,
    first_said,
    hookless,
    idle,
    job,
    longer_steps,
    one,
    repeated,
    slower,
    without,
)
from tests.detectors.windows import NOW_S, Story

DETECTOR = NvlinkDegraded()


def down(story: Story, column: int = 5, rows: int = SICK_ROWS, links: float = 12.0) -> Story:
    story.device["gpu_nvlinks_active"][-rows:, column] = links
    return story


def errors(story: Story, column: int = 5, rows: int = SICK_ROWS, each: float = 100.0) -> Story:
    story.device["gpu_nvlink_errors_total"][-rows:, column] = each * np.arange(1, rows + 1)
    return story


def less_traffic(story: Story, column: int = 5, rows: int = SICK_ROWS, ways: str = "rx tx") -> Story:
    for way in ways.split():
        story.device[f"gpu_nvlink_{way}_bytes_per_second"][-rows:, column] *= 0.6
    return story


def xid(story: Story, before_s: float, device: int = 1, code: int = 74) -> Story:
    story.events.append(WindowEvent(NOW_S - before_s, "n1", device, "xid", {"code": code}))
    return story


class TestFires:
    def test_links_down_with_less_traffic_name_the_gpu(self) -> None:
        verdict = one(DETECTOR.detect(less_traffic(down(job())).window()))
        assert (verdict.fault, verdict.node, verdict.device) == ("nvlink_degraded", "n1", 1)
        assert verdict.confidence >= 0.9
        assert "12 of 18 links" in verdict.summary
        assert abs(verdict.onset_s - (NOW_S - SICK_ROWS)) <= 1.0
        assert verdict.slowdown_ratio == 0  # the job's pace has not changed

    def test_claims_no_cost_while_the_pace_before_is_not_in_view(self) -> None:
        story = hookless(less_traffic(down(job(rows=24))))
        verdict = one(DETECTOR.detect(story.window()))
        assert verdict.confidence >= 0.9
        assert verdict.slowdown_ratio == 0

    def test_a_stage_with_time_to_spare_costs_nothing(self) -> None:
        story = less_traffic(down(job(), links=17.0))
        story.role_of = np.arange(len(story.window().series)) // 8
        story.device["train_compute_seconds"] = story.device["train_compute_seconds"] * np.where(story.role_of, 1, 0.8)
        assert _spare(story.window(), 5) == pytest.approx(0.12, rel=0.2)
        assert one(DETECTOR.detect(story.window())).slowdown_ratio == 0

    def test_one_gpu_that_moves_less_since_the_job_is_slower_is_only_reported(self) -> None:
        story = without(hookless(less_traffic(job(rows=200), rows=80)), "gpu_nvlinks", "gpu_nvlink_err", "gpu_pcie_l")
        slower(story, rows=80, ratio=0.88)
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.device) == ("n1", 1)
        assert verdict.kinds == {"nvlink_bandwidth", "step_time"}
        assert verdict.confidence < 0.9
        assert verdict.slowdown_ratio == pytest.approx(0.136, rel=0.15)

    def test_where_one_way_alone_is_observed_it_is_told_by_that(self) -> None:
        story = hookless(less_traffic(job(rows=200), rows=80))
        story = without(story, "gpu_nvlinks", "gpu_nvlink_err", "gpu_nvlink_tx", "gpu_pcie_l")
        found = one(DETECTOR.detect(slower(story, rows=80, ratio=0.88).window()))
        assert found.kinds == {"nvlink_bandwidth", "step_time"}

    def test_links_down_with_an_xid_are_enough(self) -> None:
        verdict = one(DETECTOR.detect(xid(down(job()), SICK_ROWS).window()))
        assert verdict.kinds == {"nvlinks", "xid"}
        assert verdict.confidence >= 0.9
        assert verdict.asks is None

    def test_steps_that_became_longer_say_what_it_costs(self) -> None:
        verdict = one(DETECTOR.detect(longer_steps(down(job())).window()))
        assert verdict.kinds == {"nvlinks", "step_time"}
        assert verdict.slowdown_ratio == pytest.approx(0.2, rel=0.2)

    def test_links_down_alone_only_notify(self) -> None:
        assert one(DETECTOR.detect(down(job()).window())).confidence < 0.9

    def test_links_that_were_always_down_are_found_against_the_peers(self) -> None:
        assert one(DETECTOR.detect(down(job(), rows=120).window())).node == "n1"

    def test_all_gpus_of_a_node_point_at_its_switch(self) -> None:
        story = job()
        for column in story.column("n2"):
            less_traffic(down(story, column), column)
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.device) == ("n2", None)
        assert "NVSwitch" in verdict.summary

    def test_a_node_that_is_the_whole_job_is_held_against_its_past(self) -> None:
        story = longer_steps(job(nodes=1, gpus=8))
        story.device["gpu_nvlinks_active"][-SICK_ROWS:] = 12.0
        verdict = one(DETECTOR.detect(story.window()))
        assert verdict.confidence >= 0.9
        assert "12 of 18 links" in verdict.summary

    def test_what_others_wrongly_show_hides_no_lost_link(self) -> None:
        story = less_traffic(down(job()))
        story.device["gpu_nvlinks_active"][-2, [1, 9, 13]] = 90.0
        assert "12 of 18 links" in one(DETECTOR.detect(story.window())).summary

    def test_errors_with_two_other_signs_are_enough(self) -> None:
        verdict = one(DETECTOR.detect(longer_steps(less_traffic(errors(job()))).window()))
        assert verdict.kinds == {"nvlink_errors", "nvlink_bandwidth", "step_time"}
        assert verdict.confidence >= 0.9

    def test_repeated_xids_of_a_job_that_goes_on_ask_for_a_planned_exchange(self) -> None:
        verdict = one(DETECTOR.detect(xid(xid(job(), 60), 20).window()))
        assert verdict.asks == "drain_node"
        assert verdict.confidence >= 0.9

    def test_a_clear_case_is_named_within_fifteen_seconds(self) -> None:
        after = first_said(DETECTOR, less_traffic(down(job(rows=60))), 60 - SICK_ROWS)
        assert after is not None
        assert after <= 14


class TestStaysQuiet:
    def test_a_single_xid_asks_for_a_look_at_most(self) -> None:
        verdict = one(DETECTOR.detect(xid(job(), 20).window()))
        assert verdict.asks == "drain_node"
        assert verdict.confidence < 0.9

    def test_another_xid_is_not_ours(self) -> None:
        assert DETECTOR.detect(xid(job(), 20, code=79).window()) == []

    def test_a_code_that_is_no_number_is_ignored(self) -> None:
        story = job()
        story.events.append(WindowEvent(NOW_S - 5, "n1", 1, "xid", {"code": "seventy-four"}))
        assert DETECTOR.detect(story.window()) == []

    def test_an_xid_of_a_job_that_stands_still_is_left_to_others(self) -> None:
        assert DETECTOR.detect(xid(idle(job(rows=200), 100), 95).window()) == []

    def test_a_few_errors_are_replayed(self) -> None:
        assert DETECTOR.detect(errors(job(), each=0.5).window()) == []

    def test_counts_that_no_other_row_shows_are_misreadings(self) -> None:
        story = job()
        story.device["gpu_nvlinks_active"][-30, 5] = story.device["gpu_nvlinks_active"][-2, 12] = 90.0
        assert DETECTOR.detect(story.window()) == []

    @pytest.mark.parametrize("links", [0.0, 12.0, 90.0])
    def test_a_count_that_a_hung_driver_repeats_is_one_reading(self, links: float) -> None:
        story = longer_steps(job())
        story.device["gpu_nvlinks_active"][-SICK_ROWS, 5] = links
        assert DETECTOR.detect(repeated(story, 5, SICK_ROWS).window()) == []

    def test_more_links_than_any_other_gpu_has_are_none_lost_later(self) -> None:
        story = longer_steps(job())
        story.device["gpu_nvlinks_active"][:-SICK_ROWS, 5] = story.device["gpu_nvlinks_active"][-1, 9] = 90.0
        assert DETECTOR.detect(story.window()) == []

    def test_one_low_reading_is_no_lost_link(self) -> None:
        story = longer_steps(job(), rows=3)
        story.device["gpu_nvlinks_active"][-3::2, 5] = 12.0
        assert DETECTOR.detect(story.window()) == []

    def test_errors_alone_are_no_fault(self) -> None:
        assert DETECTOR.detect(errors(job()).window()) == []

    def test_one_burst_of_errors_is_no_fault(self) -> None:
        story = longer_steps(job())
        story.device["gpu_nvlink_errors_total"][-10:, 5] = 5_000
        assert DETECTOR.detect(story.window()) == []

    def test_less_traffic_alone_is_no_fault(self) -> None:
        assert DETECTOR.detect(less_traffic(job()).window()) == []

    @pytest.mark.parametrize("way", ["rx", "tx"])
    def test_less_traffic_one_way_alone_is_the_counters(self, way: str) -> None:
        story = hookless(less_traffic(job(rows=200), rows=80, ways=way))
        story = without(story, "gpu_nvlinks", "gpu_nvlink_err", "gpu_pcie_l")
        assert DETECTOR.detect(slower(story, rows=80, ratio=0.88).window()) == []

    def test_a_model_with_fewer_links_is_no_fault(self) -> None:
        story = job()
        columns = story.column("n5")
        story.device["gpu_nvlinks_active"][:, columns] = 12
        role_of = np.zeros(len(story.series), dtype=np.intp)
        role_of[columns] = 1
        assert DETECTOR.detect(story.window(role_of=role_of)) == []

    def test_is_blind_without_nvlink_metrics(self) -> None:
        with pytest.raises(Blind, match="NVLinks"):
            DETECTOR.detect(without(job(), "gpu_nvlink").window())
