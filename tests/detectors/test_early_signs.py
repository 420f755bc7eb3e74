"""Signs of something to come: what asks for a drain, and what every healthy fleet shows."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.hardware.early_signs import EarlySigns
from eagle_eye.detectors.types import Verdict
from tests.detectors.windows import NOW_S, Story

EARLY = EarlySigns()
LONG = 840  # rows: fourteen minutes


def only(verdicts: list[Verdict]) -> Verdict:
    assert len(verdicts) == 1, verdicts
    return verdicts[0]


def counting(metric: str, column: int, rows: int, per_row: float, story: Story | None = None) -> Story:
    """A counter that has grown by so much in each of the newest rows."""
    story = story or Story(rows=LONG).complete()
    story.device[metric][-rows:, column] += per_row * np.arange(1, rows + 1)
    return story


def heated(column: int, rise: float, rows: int = 300, metric: str = "gpu_temperature_celsius") -> Story:
    story = Story(nodes=8, rows=LONG).complete()
    story.device[metric][-rows:, column] += rise
    return story


class TestMemory:
    def test_a_pending_remap_asks_for_a_drain(self) -> None:
        story = Story().complete()
        story.device["gpu_remap_pending"][-10:, 2] = 1
        verdict = only(EARLY.detect(story.window()))
        assert (verdict.fault, verdict.node, verdict.asks, verdict.fact) == (
            "gpu_memory_error",
            "n2",
            "drain_node",
            True,
        )
        assert verdict.onset_s == NOW_S - 10

    def test_one_remapped_row_is_the_memorys_own_repair(self) -> None:
        story = Story().complete().happened("xid", "n2", 10, 0, code=63)
        story.device["gpu_remapped_rows_total"][-10:, 2] += 1
        assert EARLY.detect(story.window()) == []

    def test_rows_remapped_again_ask_for_a_drain(self) -> None:
        story = Story().complete()
        story.device["gpu_remapped_rows_total"][-40:, 2] += 1
        story.device["gpu_remapped_rows_total"][-10:, 2] += 1
        assert only(EARLY.detect(story.window())).asks == "drain_node"

    @pytest.mark.parametrize("code", [63, 92])
    def test_the_same_xid_again_asks_for_a_drain(self, code: int) -> None:
        story = (
            Story(rows=LONG).complete().happened("xid", "n2", 500, 0, code=code).happened("xid", "n2", 10, 0, code=code)
        )
        assert only(EARLY.detect(story.window())).asks == "drain_node"

    @pytest.mark.parametrize("code", [63, 92])
    def test_one_burst_of_it_does_not(self, code: int) -> None:
        story = Story().complete()
        for before in range(30):
            story.happened("xid", "n2", before, 0, code=code)
        assert EARLY.detect(story.window()) == []

    def test_corrected_errors_that_have_begun_ask_for_a_drain(self) -> None:
        verdict = only(EARLY.detect(counting("gpu_ecc_corrected_total", 1, 120, 0.5).window()))
        assert (verdict.fault, verdict.node, verdict.asks) == ("gpu_memory_error", "n1", "drain_node")

    def test_a_gpu_that_always_corrects_a_few_is_healthy(self) -> None:
        assert EARLY.detect(counting("gpu_ecc_corrected_total", 1, LONG, 0.1).window()) == []

    def test_single_corrected_errors_and_one_burst_are_healthy(self) -> None:
        story = Story(rows=LONG).complete()
        for row in (100, 400, 700, 820):
            story.device["gpu_ecc_corrected_total"][row:, 1] += 1
        story.device["gpu_ecc_corrected_total"][810:, 2] += 5_000
        assert EARLY.detect(story.window()) == []

    def test_what_all_gpus_count_is_no_nodes_own(self) -> None:
        story = Story(rows=LONG).complete()
        story.device["gpu_ecc_corrected_total"][-120:] += np.arange(1, 121)[:, None]
        assert EARLY.detect(story.window()) == []


class TestPcie:
    def test_replays_far_above_the_limit_ask_for_a_drain(self) -> None:
        verdict = only(EARLY.detect(counting("gpu_pcie_replays_total", 1, 120, 0.8).window()))
        assert (verdict.fault, verdict.node, verdict.asks) == ("pcie_degraded", "n1", "drain_node")

    def test_a_few_replays_are_healthy(self) -> None:
        assert EARLY.detect(counting("gpu_pcie_replays_total", 1, LONG, 0.05).window()) == []


class TestPorts:
    def test_two_flaps_in_five_minutes_are_tolerated_a_third_is_not(self) -> None:
        story = Story(rows=LONG).complete()
        story.link["link_downed_total"][-200:, 3] += 1
        story.link["link_downed_total"][-100:, 3] += 1
        assert EARLY.detect(story.window()) == []
        story = Story(rows=LONG).complete()
        for rows in (200, 100, 50):
            story.link["link_downed_total"][-rows:, 3] += 1
        verdict = only(EARLY.detect(story.window()))
        assert (verdict.fault, verdict.node, verdict.asks) == ("nic_degraded", "n1", "drain_node")

    def test_flaps_of_a_whole_switch_are_the_switchs(self) -> None:
        story = Story(rows=LONG).complete()
        for rows in (200, 100, 50):
            story.link["link_downed_total"][-rows:, ::2] += 1
        assert EARLY.detect(story.window()) == []


class TestHeat:
    def test_a_device_that_leaves_its_past_and_its_peers_behind_asks_for_a_drain(self) -> None:
        verdict = only(EARLY.detect(heated(2, 18.0).window()))
        assert (verdict.fault, verdict.node, verdict.asks) == ("thermal_throttle", "n2", "drain_node")

    def test_so_does_its_memory(self) -> None:
        verdict = only(EARLY.detect(heated(2, 20.0, metric="gpu_memory_temperature_celsius").window()))
        assert verdict.kinds == {"temperature_drift"}

    def test_a_device_that_is_always_hot_is_healthy(self) -> None:
        assert EARLY.detect(heated(2, 18.0, rows=LONG).window()) == []

    def test_a_warm_afternoon_is_no_nodes_fault(self) -> None:
        story = Story(nodes=8, rows=LONG).complete()
        story.device["gpu_temperature_celsius"][-300:] += 16.0
        assert EARLY.detect(story.window()) == []

    def test_more_power_makes_more_heat(self) -> None:
        story = heated(2, 18.0)
        story.device["gpu_power_watts"][-300:, 2] *= 1.15
        assert EARLY.detect(story.window()) == []

    def test_a_rise_that_ends_far_from_the_limit_is_weather(self) -> None:
        assert EARLY.detect(heated(2, 10.5).window()) == []

    def test_a_short_peak_is_no_drift(self) -> None:
        assert EARLY.detect(heated(2, 18.0, rows=60).window()) == []


class TestKernelLog:
    def test_a_link_that_does_not_train_asks_for_a_drain(self) -> None:
        verdict = only(EARLY.detect(Story().complete().happened("xid", "n2", 10, 0, code=136).window()))
        assert (verdict.fault, verdict.asks) == ("nvlink_degraded", "drain_node")

    def test_a_power_cable_is_reported_and_no_more(self) -> None:
        verdict = only(EARLY.detect(Story().complete().happened("xid", "n2", 10, 0, code=54).window()))
        assert (verdict.fault, verdict.asks) == ("power_throttle", "notify")
        assert verdict.confidence < 0.9

    @pytest.mark.parametrize("code", [13, 31, 32, 43, 45, 48, 74, 79, 94])
    def test_other_codes_are_others_business(self, code: int) -> None:
        assert EARLY.detect(Story().complete().happened("xid", "n2", 10, 0, code=code).window()) == []


def asked_for(words: str, *nodes: str) -> Story:
    story = Story(gpus=2).complete()
    for node in nodes:
        text = f"GPU recovery action changed from 0x0 (None) to {words}"
        story.happened("xid", node, 3, 0, code=154, text=text).happened("xid", node, 2, 1, code=154, text=text)
    return story


def test_an_imex_domain_that_wants_recovery_is_one_finding_of_all_its_nodes() -> None:
    verdict = only(EARLY.detect(asked_for("0x5 (Recover IMEX Domain)", "n0", "n1").window()))
    assert (verdict.fault, verdict.node, verdict.nodes) == ("nvlink_degraded", None, ("n0", "n1"))
    assert verdict.asks == "notify"
    assert "0x5 (Recover IMEX Domain), a matter of the domain" in verdict.summary


def test_a_recovery_that_nobody_has_looked_up_is_reported() -> None:
    verdict = only(EARLY.detect(asked_for("0x9 (Something New)", "n1").window()))
    assert (verdict.fault, verdict.node, verdict.asks) == ("host_errors", None, "notify")
    assert verdict.summary.startswith("the driver of n1 asks for 0x9 (Something New)")


@pytest.mark.parametrize("words", ["0x0 (None)", "0x1 (PF FLR)", "something else"])
def test_a_recovery_that_is_known_or_has_no_number_is_others_business(words: str) -> None:
    assert EARLY.detect(asked_for(words, "n1").window()) == []


def test_nothing_here_excludes_or_restarts() -> None:
    story = heated(2, 18.0).happened("xid", "n2", 10, 0, code=136).happened("xid", "n3", 10, 0, code=54)
    story.device["gpu_remap_pending"][-10:, 2] = 1
    said = EARLY.detect(counting("gpu_pcie_replays_total", 1, 120, 0.8, story).window())
    assert len(said) == 5
    assert {verdict.asks for verdict in said} == {"drain_node", "notify"}


def test_says_nothing_where_nothing_is_reported() -> None:
    assert EARLY.detect(Story().window()) == []
