"""Power that is held down on one node, on a rack, and by design."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eagle_eye.detectors.slowness.power_throttle import PowerThrottle
from eagle_eye.detectors.types import Blind
from tests.detectors.slow_stories import (
    LONG_ROWS,
    SICK_ROWS,
    capped,
    first_said,
    hookless,
    hot,
    idle,
    job,
    one,
    repeated,
    without,
)
from tests.detectors.windows import NOW_S, Story

DETECTOR = PowerThrottle()


class TestFires:
    def test_names_the_gpu_whose_clock_and_power_are_down(self) -> None:
        verdict = one(DETECTOR.detect(capped(job()).window()))
        assert (verdict.fault, verdict.node, verdict.device) == ("power_throttle", "n1", 1)
        assert verdict.confidence >= 0.9
        assert verdict.kinds == {"sm_clock", "power"}
        assert abs(verdict.onset_s - (NOW_S - SICK_ROWS)) <= 1.0
        assert 0.1 < verdict.slowdown_ratio < 0.25

    def test_a_power_brake_is_surer(self) -> None:
        story = capped(job())
        story.device["gpu_throttle_reasons"][-SICK_ROWS:, 5] = 0x88
        verdict = one(DETECTOR.detect(story.window()))
        assert "throttle_reason" in verdict.kinds
        assert verdict.confidence > 0.95

    def test_a_single_node_with_a_lower_limit_is_named(self) -> None:
        story = job()
        for column in story.column("n2"):
            capped(story, column)
            story.device["gpu_power_limit_watts"][-SICK_ROWS:, column] = 500
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.device) == ("n2", None)
        assert "power_limit" in verdict.kinds
        assert "500 W" in verdict.summary

    def test_gpus_of_a_spare_node_are_no_peers(self) -> None:
        story = capped(job(nodes=3), rows=40, ratio=0.7)
        spare = story.column("n2")
        for name, value in (("gpu_sm_clock_hertz", 2.55e8), ("gpu_power_watts", 60.0), ("gpu_temperature_celsius", 34)):
            story.device[name][:, spare] = value
        for name in ("gpu_tensor_active_ratio", "gpu_utilization_ratio"):
            story.device[name][:, spare] = 0.0
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.device) == ("n1", 1)
        assert verdict.confidence >= 0.9

    def test_a_clock_that_fell_by_chance_and_saved_no_power_is_no_shared_cap(self) -> None:
        story = capped(job(rows=240), rows=60)
        story.device["gpu_sm_clock_hertz"][-60:-30, 9] *= 0.8
        assert one(DETECTOR.detect(story.window())).node == "n1"

    def test_needs_neither_hook_nor_profiling_counters(self) -> None:
        story = without(
            hookless(capped(job(rows=240), rows=LONG_ROWS)),
            "gpu_tensor",
            "gpu_sm_active",
            "gpu_throttle",
            "gpu_power_limit",
        )
        verdict = one(DETECTOR.detect(story.window()))
        assert verdict.node == "n1"
        assert verdict.confidence >= 0.9
        assert verdict.slowdown_ratio > 0.1

    def test_a_clear_case_is_named_within_fifteen_seconds(self) -> None:
        after = first_said(DETECTOR, capped(job(rows=60)), 60 - SICK_ROWS)
        assert after is not None
        assert after <= 14

    def test_rows_a_minute_apart_are_enough(self) -> None:
        story = hookless(capped(job(rows=16), rows=4))
        story.times_s = NOW_S - 60.0 * np.arange(15, -1, -1)
        assert one(DETECTOR.detect(story.window(interval_s=60.0))).node == "n1"

    @pytest.mark.parametrize("turn", [0, 1])
    def test_where_nodes_report_in_turn_none_is_overlooked(self, turn: int) -> None:
        story = capped(job(), rows=60)
        parity = (np.arange(len(story.times_s)) + turn) % 2
        for values in (*story.device.values(), *story.node.values(), *story.link.values()):
            values[parity[:, None] != np.arange(values.shape[1]) // (values.shape[1] // len(story.nodes)) % 2] = np.nan
        assert one(DETECTOR.detect(story.window(interval_s=2.0))).node == "n1"


class TestStaysQuiet:
    def test_the_software_cap_bit_alone_means_nothing(self) -> None:
        story = job()
        story.device["gpu_throttle_reasons"][:, 5] = 0x4
        assert DETECTOR.detect(story.window()) == []

    def test_a_low_clock_at_full_power_is_no_cap_but_more_work_or_a_poorer_chip(self) -> None:
        story = job()
        story.device["gpu_sm_clock_hertz"][:, 5] *= 0.93
        assert DETECTOR.detect(story.window()) == []

    def test_a_hot_gpu_is_left_to_another(self) -> None:
        assert DETECTOR.detect(hot(job()).window()) == []

    def test_a_victim_that_waits_is_no_capped_gpu(self) -> None:
        story = job()
        story.device["gpu_power_watts"][-40:, 5] *= 0.6
        story.device["gpu_tensor_active_ratio"][-40:, 5] *= 0.5
        assert DETECTOR.detect(story.window()) == []

    def test_a_clock_that_was_as_low_before_and_rose_again_is_reported_and_no_more(self) -> None:
        once, twice = (capped(job(rows=240), rows=70) for _ in range(2))
        for name in ("gpu_sm_clock_hertz", "gpu_power_watts"):
            twice.device[name][-140:-110, 5] = twice.device[name][-30:, 5]
        reported = [one(DETECTOR.detect(story.window())).confidence for story in (once, twice)]
        assert reported == [0.92, 0.8]

    def test_one_low_reading_that_is_repeated_has_not_lasted(self) -> None:
        assert DETECTOR.detect(repeated(capped(job(rows=240), rows=20), 5, 20).window()) == []

    @pytest.mark.parametrize(("rows", "reported"), [(5, False), (12, True)])
    def test_as_few_low_readings_as_its_peers_show_now_and_then_are_chance(self, rows: int, reported: bool) -> None:
        story = job(rows=40)
        low = np.random.default_rng(1).random((40, len(story.series))) < 0.2
        low[:, 5] = False
        story.device["gpu_sm_clock_hertz"] *= np.where(low, 0.92, 1.0)
        hookless(capped(story, rows=rows, ratio=0.9))
        story.times_s = NOW_S - 15.0 * np.arange(39, -1, -1)
        found = DETECTOR.detect(story.window(interval_s=15.0))
        assert [verdict.node for verdict in found] == (["n1"] if reported else [])

    @pytest.mark.parametrize(("lasted", "named"), [(1, True), (6, False)], ids=["for a reading", "for minutes"])
    def test_low_readings_that_stay_for_minutes_elsewhere_and_pass_are_chance(self, lasted: int, named: bool) -> None:
        story = job(rows=60)
        for first, column in zip((4, 14, 24, 34), (0, 2, 9, 12), strict=True):
            for low in range(6):  # as many low readings, in a row or apart
                row = first + low if lasted == 6 else (first + 9 * low) % 52
                story.device["gpu_sm_clock_hertz"][row, column] *= 0.85
        hookless(capped(story, rows=6, ratio=0.85))
        story.times_s = NOW_S - 15.0 * np.arange(59, -1, -1)
        found = DETECTOR.detect(story.window(interval_s=15.0))
        assert [verdict.node for verdict in found] == (["n1"] if named else [])

    @pytest.mark.parametrize(("lasted", "confidence"), [(2, 0.92), (10, 0.8)], ids=["for two readings", "for long"])
    def test_where_other_roles_clocks_wander_as_long_a_low_clock_is_reported_and_no_more(
        self, lasted: int, confidence: float
    ) -> None:
        story = capped(job(rows=60), rows=10, ratio=0.85)
        story.role_of = np.arange(len(story.series)) % 2
        for column, last in ((8, 30), (14, 60)):  # one wandered earlier, one does now
            story.device["gpu_sm_clock_hertz"][last - lasted : last, column] *= 0.85
        story.times_s = NOW_S - 15.0 * np.arange(59, -1, -1)
        found = DETECTOR.detect(hookless(story).window(interval_s=15.0))
        assert [(verdict.node, verdict.confidence) for verdict in found] == [("n1", confidence)]

    def test_a_lower_limit_that_does_not_slow_is_no_fault(self) -> None:
        story = job()
        story.device["gpu_power_limit_watts"][:, 5] = 650
        assert DETECTOR.detect(story.window()) == []

    def test_nodes_of_another_limit_are_peers_of_each_other(self) -> None:
        story = job(nodes=9)
        columns = [c for node in ("n6", "n7", "n8") for c in story.column(node)]
        story.device["gpu_power_limit_watts"][:, columns] = 500
        story.device["gpu_sm_clock_hertz"][:, columns] *= 0.88
        story.device["gpu_power_watts"][:, columns] *= 0.72
        assert DETECTOR.detect(story.window()) == []

    def test_another_model_that_nobody_told_us_of_is_no_fault(self) -> None:
        story = job(nodes=9)
        columns = story.column("n8")
        story.device["gpu_power_limit_watts"][:, columns] = 400
        story.device["gpu_memory_clock_hertz"][:, columns] = 1.6e9
        story.device["gpu_sm_clock_hertz"][:, columns] = 1.41e9
        story.device["gpu_power_watts"][:, columns] = 380
        assert DETECTOR.detect(story.window()) == []

    def test_many_nodes_that_were_always_slower_are_another_kind_of_machine(self) -> None:
        story = job(nodes=12)
        for node in ("n6", "n8", "n11"):
            for column in story.column(node):
                capped(story, column, rows=120)
        assert without(story, "gpu_power_limit", "gpu_memory_clock")
        assert DETECTOR.detect(story.window()) == []

    def test_a_node_that_was_always_slower_stays_whatever_else_shows_it(self) -> None:
        story = job(nodes=9)
        for column in story.column("n8"):
            capped(story, column, rows=120)
        assert without(story, "gpu_power_limit", "gpu_memory_clock")
        assert one(DETECTOR.detect(story.window())).asks == "notify"

    def test_clocks_that_dip_in_an_idle_phase_are_no_fault(self) -> None:
        story = idle(job(), 30)
        story.device["gpu_sm_clock_hertz"][-30:, 5] = 345e6
        with pytest.raises(Blind, match="not under load"):
            DETECTOR.detect(story.window())

    def test_a_few_rows_are_no_cap(self) -> None:
        assert DETECTOR.detect(capped(job(), rows=8).window()) == []

    def test_is_blind_without_clocks(self) -> None:
        with pytest.raises(Blind, match="gpu_sm_clock_hertz"):
            DETECTOR.detect(Story().window())


class TestRacks:
    def test_a_limit_lowered_on_several_nodes_is_one_finding(self) -> None:
        story = job(nodes=12)
        for node in ("n3", "n4", "n5", "n6"):
            for column in story.column(node):
                capped(story, column)
                story.device["gpu_power_limit_watts"][-SICK_ROWS:, column] = 500
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.nodes, verdict.asks) == (None, ("n3", "n4", "n5", "n6"), "notify")
        assert abs(verdict.onset_s - (NOW_S - SICK_ROWS)) <= 1.0
        assert verdict.slowdown_ratio == pytest.approx((700 / 500) ** 0.5 - 1), "else each node seems to have its own"

    def test_a_limit_of_nothing_is_a_reading_that_failed(self) -> None:
        story = job(nodes=12)
        for place, node in enumerate(("n3", "n4", "n5")):
            story.device["gpu_power_limit_watts"][-SICK_ROWS + place, story.column(node)[0]] = 0
        assert DETECTOR.detect(story.window()) == []

    def test_limits_of_which_a_single_reading_was_higher_were_not_lowered(self) -> None:
        story = job(nodes=12)
        for node in ("n3", "n4", "n5"):
            story.device["gpu_power_limit_watts"][1, story.column(node)[0]] = 3500
        assert DETECTOR.detect(story.window()) == []

    @pytest.mark.parametrize("delay", [0, 10, 40])
    def test_nodes_that_lost_power_together_are_one_finding(self, delay: int) -> None:
        story = job(nodes=12, rows=200)
        for place, node in enumerate(("n3", "n4", "n5")):
            for column in story.column(node):
                capped(story, column, rows=100 - place * delay)
        verdict = one(DETECTOR.detect(story.window()))
        assert (verdict.node, verdict.asks) == (None, "notify")
        assert set(verdict.nodes) == {"n3", "n4", "n5"}

    def test_wandering_clocks_do_not_hide_that_a_rack_fell_together(self) -> None:
        rng = np.random.default_rng(5)
        story = hookless(job(nodes=16, gpus=8, rows=200))
        for node in ("n3", "n4", "n5", "n6"):
            for column in story.column(node):
                story.device["gpu_sm_clock_hertz"][-100:, column] *= 0.85
                story.device["gpu_power_watts"][-100:, column] *= 0.8
        clock = story.device["gpu_sm_clock_hertz"]
        wander = 1 - np.minimum(rng.exponential(0.06, clock.shape), 0.3)
        wander[:, story.column("n3")] = 1.0
        story.device["gpu_sm_clock_hertz"] = clock * wander
        found = DETECTOR.detect(without(story, "gpu_power_limit", "gpu_throttle").window())
        assert [(verdict.node, verdict.nodes) for verdict in found] == [(None, ("n3", "n4", "n5", "n6"))]

    def test_a_cap_that_is_lifted_node_by_node_accuses_nobody_in_the_end(self) -> None:
        story = job(nodes=12, rows=200)
        plain = job(nodes=12, rows=200)
        for place, node in enumerate(("n3", "n4", "n5", "n6")):
            for column in story.column(node):
                capped(story, column, rows=100)
                story.device["gpu_power_limit_watts"][-100:, column] = 500
            back = 8 * (place + 1)
            for name in ("gpu_sm_clock_hertz", "gpu_power_watts", "gpu_power_limit_watts"):
                story.device[name][-back:, story.column(node)] = plain.device[name][-back:, story.column(node)]
        for rows in range(2, 40, 3):
            seen = story.window()
            view = dataclasses.replace(
                seen,
                now_s=float(seen.times_s[-rows]),
                times_s=seen.times_s[: -rows + 1],
                device={name: values[: -rows + 1] for name, values in seen.device.items()},
            )
            verdict = one(DETECTOR.detect(view))
            assert (verdict.node, verdict.nodes) == (None, ("n3", "n4", "n5", "n6"))
            unlimited = dataclasses.replace(view, device={k: v for k, v in view.device.items() if "limit" not in k})
            assert {verdict.node for verdict in DETECTOR.detect(unlimited)} <= {None}

    def test_a_job_of_stages_of_unknown_roles_does_not_hide_a_capped_gpu(self) -> None:
        story = hookless(capped(job(nodes=12)))
        for place, node in enumerate(story.nodes):
            story.device["gpu_power_watts"][:, story.column(node)] *= 1 - 0.1 * (place % 3)
        verdict = one(DETECTOR.detect(without(story, "gpu_power_limit", "gpu_throttle").window()))
        assert verdict.node == "n1"
        assert verdict.confidence >= 0.9

    def test_half_of_a_small_job_is_accused_of_nothing(self) -> None:
        story = job(nodes=4)
        for node in ("n2", "n3"):
            for column in story.column(node):
                capped(story, column)
        assert one(DETECTOR.detect(story.window())).node is None

    def test_a_gpu_that_lost_far_more_than_its_rack_lost_it_alone(self) -> None:
        story = job(nodes=12, rows=200)
        for node in ("n3", "n4", "n5"):
            for column in story.column(node):
                capped(story, column, rows=100, ratio=0.9)
        for column in story.column("n8"):
            capped(story, column, rows=100, ratio=0.6)
        accused = [verdict.node for verdict in DETECTOR.detect(story.window())]
        assert sorted(accused, key=str) == [None, "n8"]

    def test_a_limit_far_below_the_one_its_rack_got_is_its_own(self) -> None:
        story = job(nodes=12)
        for node, watts in (("n3", 600), ("n4", 600), ("n5", 600), ("n8", 200)):
            for column in story.column(node):
                capped(story, column, ratio=0.9 if watts == 600 else 0.6)
                story.device["gpu_power_limit_watts"][-SICK_ROWS:, column] = watts
        accused = {verdict.node: verdict.nodes for verdict in DETECTOR.detect(story.window())}
        assert accused == {None: ("n3", "n4", "n5"), "n8": ("n8",)}
