"""PCIe links that lost width or speed, and links that only rest."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.hardware.pcie_degraded import PcieDegraded
from eagle_eye.detectors.types import Blind
from tests.detectors.slow_stories import (
    LONG_ROWS,
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

DETECTOR = PcieDegraded()


def narrow(story: Story, column: int = 5, rows: int = SICK_ROWS, lanes: float = 4.0) -> Story:
    story.device["gpu_pcie_link_width"][-rows:, column] = lanes
    return story


def less_traffic(story: Story, column: int = 5, rows: int = SICK_ROWS) -> Story:
    for name in ("gpu_pcie_rx_bytes_per_second", "gpu_pcie_tx_bytes_per_second"):
        story.device[name][-rows:, column] *= 0.5
    return story


def replays(story: Story, column: int = 5, rows: int = SICK_ROWS, each: float = 50.0) -> Story:
    story.device["gpu_pcie_replays_total"][-rows:, column] = each * np.arange(1, rows + 1)
    return story


def surge(story: Story, node: int = 1, rows: int = SICK_ROWS) -> Story:
    story.node["node_pfc_tx_pause_packets_per_second"][-rows:, node] = 5_000
    return story


class TestFires:
    def test_a_link_that_lost_lanes_and_carries_less_is_named(self) -> None:
        verdict = one(DETECTOR.detect(less_traffic(narrow(job())).window()))
        assert (verdict.fault, verdict.node, verdict.device) == ("pcie_degraded", "n1", 1)
        assert verdict.confidence >= 0.9
        assert verdict.kinds == {"pcie_link", "pcie_bandwidth"}
        assert "x4 instead of x16" in verdict.summary
        assert abs(verdict.onset_s - (NOW_S - SICK_ROWS)) <= 1.0

    @pytest.mark.parametrize("sign", [surge, replays])
    def test_pauses_and_replays_support_it(self, sign: object) -> None:
        verdict = one(DETECTOR.detect(sign(narrow(job())).window()))  # type: ignore[operator]
        assert len(verdict.kinds) == 2
        assert verdict.confidence >= 0.9

    def test_steps_that_became_longer_at_the_same_moment_support_it_and_say_what_it_costs(self) -> None:
        verdict = one(DETECTOR.detect(longer_steps(narrow(job())).window()))
        assert verdict.kinds == {"pcie_link", "step_time"}
        assert verdict.slowdown_ratio == pytest.approx(0.2, rel=0.2)

    def test_a_lower_generation_under_load_counts(self) -> None:
        story = less_traffic(job())
        story.device["gpu_pcie_link_generation"][-SICK_ROWS:, 5] = 3
        assert one(DETECTOR.detect(story.window())).node == "n1"

    def test_a_narrow_link_alone_only_notifies(self) -> None:
        verdict = one(DETECTOR.detect(narrow(job()).window()))
        assert verdict.kinds == {"pcie_link"}
        assert verdict.confidence < 0.9

    def test_a_link_that_was_always_narrow_is_compared_with_its_slot(self) -> None:
        verdict = one(DETECTOR.detect(narrow(job(), rows=120).window()))
        assert verdict.node == "n1"

    def test_replays_with_two_other_signs_are_enough_where_links_are_not_reported(self) -> None:
        story = without(surge(less_traffic(replays(job()))), "gpu_pcie_link")
        verdict = one(DETECTOR.detect(story.window()))
        assert verdict.confidence >= 0.9
        assert verdict.kinds == {"pcie_replays", "pcie_bandwidth", "pfc_pauses"}

    def test_replays_that_reach_the_peers_too_are_the_worst_links(self) -> None:
        story = without(surge(less_traffic(replays(job()))), "gpu_pcie_link")
        noise = np.random.default_rng(7).normal(1.0, 0.05, len(story.series))
        others = np.arange(len(story.series)) != 5
        story.device["gpu_pcie_replays_total"][-SICK_ROWS:, others] = (
            12.0 * np.arange(1, SICK_ROWS + 1)[:, None] * noise[others]
        )
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.device) == ("n1", 1)
        assert verdict.kinds == {"pcie_replays", "pcie_bandwidth", "pfc_pauses"}

    def test_needs_no_hook(self) -> None:
        story = hookless(less_traffic(narrow(job(rows=240), rows=LONG_ROWS), rows=LONG_ROWS))
        slower(story, rows=LONG_ROWS, ratio=0.9)
        verdict = one(DETECTOR.detect(story.window()))
        assert verdict.slowdown_ratio == pytest.approx(0.11, rel=0.2)

    def test_claims_no_cost_while_the_pace_before_is_not_in_view(self) -> None:
        verdict = one(DETECTOR.detect(hookless(less_traffic(narrow(job(rows=23)))).window()))
        assert verdict.slowdown_ratio == 0

    def test_a_clear_case_is_named_within_fifteen_seconds(self) -> None:
        after = first_said(DETECTOR, less_traffic(narrow(job(rows=60))), 60 - SICK_ROWS)
        assert after is not None
        assert after <= 14


class TestStaysQuiet:
    def test_gpus_that_rest_drop_the_generation_and_nobody_is_blamed(self) -> None:
        story = idle(job(), 30)
        story.device["gpu_pcie_link_generation"][-30:, 5] = 1
        with pytest.raises(Blind, match="not under load"):
            DETECTOR.detect(story.window())

    def test_one_gpu_that_rests_while_others_work_is_no_fault(self) -> None:
        story = job()
        story.device["gpu_pcie_link_generation"][-30:, 5] = 1
        story.device["gpu_utilization_ratio"][-30:, 5] = 0
        story.device["gpu_tensor_active_ratio"][-30:, 5] = 0
        assert DETECTOR.detect(story.window()) == []

    def test_a_slot_built_narrow_on_all_nodes_is_no_fault(self) -> None:
        story = job()
        for node in story.nodes:
            story.device["gpu_pcie_link_width"][:, story.column(node)[3]] = 8
        assert DETECTOR.detect(story.window()) == []

    def test_another_generation_of_another_role_is_no_fault(self) -> None:
        story = job()
        columns = story.column("n5")
        story.device["gpu_pcie_link_generation"][:, columns] = 4
        role_of = np.zeros(len(story.series), dtype=np.intp)
        role_of[columns] = 1
        assert DETECTOR.detect(story.window(role_of=role_of)) == []

    def test_a_link_seen_while_it_retrains_is_no_fault(self) -> None:
        assert DETECTOR.detect(narrow(job(), rows=2).window()) == []

    def test_replays_alone_are_no_fault(self) -> None:
        assert DETECTOR.detect(replays(job()).window()) == []

    def test_pauses_alone_are_the_networks(self) -> None:
        assert DETECTOR.detect(surge(job()).window()) == []

    def test_is_blind_without_links_and_replays(self) -> None:
        with pytest.raises(Blind, match="PCIe"):
            DETECTOR.detect(without(job(), "gpu_pcie").window())

    def test_a_width_that_a_hung_driver_repeats_is_one_reading(self) -> None:
        story = longer_steps(job())
        story.device["gpu_pcie_link_width"][-SICK_ROWS, 5] = 4
        assert DETECTOR.detect(repeated(story, 5, SICK_ROWS).window()) == []

    def test_a_generation_that_does_not_exist_is_a_failed_reading_and_accuses_no_peer(self) -> None:
        story = job()
        slot = [i for i, series in enumerate(story.series) if series.device == 1]
        story.device["gpu_pcie_link_generation"][:, slot[1:]] = 25.0
        assert DETECTOR.detect(story.window()) == []

    def test_a_gpu_that_answers_has_a_link(self) -> None:
        assert DETECTOR.detect(longer_steps(narrow(job(), lanes=0.0)).window()) == []
