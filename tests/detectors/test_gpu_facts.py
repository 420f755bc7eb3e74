"""Facts about GPUs: what the kernel log, the error counters and silence prove, and what they do not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from eagle_eye.detectors.hardware.gpu_hang import GpuHang
from eagle_eye.detectors.hardware.gpu_lost import GpuLost
from eagle_eye.detectors.hardware.gpu_memory import GpuMemory
from eagle_eye.detectors.hardware.nvswitch import NvSwitch
from eagle_eye.detectors.signs.gpu_errors import gpu_errors
from eagle_eye.detectors.signs.progress import Patience
from eagle_eye.detectors.types import Blind, Verdict, Window, WindowEvent
from eagle_eye.schema.driver_facts import BY_CODE, XIDS, code_of, recovery_of, sxid_severity
from tests.detectors.windows import NOW_S, Story

PATIENCE = Patience(floor_s=10, typical_steps=3, start_deadline_s=1800, warmup_steps=3)
LOST, MEMORY, HANGS = GpuLost(), GpuMemory(), GpuHang(patience=PATIENCE)
SWITCH = NvSwitch(patience=PATIENCE)
ALL = (LOST, MEMORY, HANGS, SWITCH)
RESET = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
DRAIN = "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
NONE = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"


def only(verdicts: list[Verdict]) -> Verdict:
    assert len(verdicts) == 1, verdicts
    return verdicts[0]


def logged(code: Any, before_s: float = 1.5, device: int = 0, rows: int = 0) -> Story:
    """A job on whose node n1 a GPU logged an XID, and that has stood still for ``rows`` rows."""
    story = Story(gpus=2).complete()
    return (story.standstill(rows) if rows else story).happened("xid", "n1", before_s, device, code=code)


def every(window: Window) -> list[Verdict]:
    return [verdict for detector in ALL for verdict in detector.detect(window)]


class TestXids:
    def test_each_code_is_in_the_table_once(self) -> None:
        assert len(BY_CODE) == len(XIDS)

    @pytest.mark.parametrize("code", [79, 79.0, "79", " 79 ", "0x4f", "79.0"])
    def test_a_code_may_come_as_any_kind_of_number(self, code: Any) -> None:
        assert code_of({"code": code}) == 79

    @pytest.mark.parametrize("code", [None, "NVRM", float("nan"), float("inf"), True, 79.5, [79], {}])
    def test_what_is_no_number_is_no_code(self, code: Any) -> None:
        assert code_of({"code": code}) is None
        assert every(logged(code).window()) == []

    @pytest.mark.parametrize(
        ("attributes", "action"),
        [
            ({"text": RESET}, "reset"),
            ({"text": DRAIN}, "drain_and_reset"),
            ({"text": NONE}, "none"),
            ({"text": "0x4 (Drain and Reset) to 0x2 (Node Reboot Required)"}, "reboot"),
            ({"recovery_action": "Drain P2P"}, "drain_p2p"),
            ({"action": 1}, "reset"),
            ({"text": "GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)"}, "reset"),
            ({"text": "GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)"}, "reboot"),
            ({"text": "GPU recovery action changed from 0x0 (None) to 0x5 (Recover IMEX Domain)"}, None),
            (
                {"text": "GPU recovery action changed from 0x0 (None) to 0x4 (None of the names known here)"},
                "drain_and_reset",
            ),
            ({"text": "GPU recovery action changed from None to a name that is new"}, None),
            ({"text": "something else"}, None),
            ({}, None),
        ],
    )
    def test_the_drivers_word_on_recovery_is_read(self, attributes: dict[str, Any], action: str | None) -> None:
        assert recovery_of(attributes) == action

    @pytest.mark.parametrize(
        ("attributes", "severity"),
        [
            ({"code": 20034, "text": "Fatal, Link 37 LTSSM Fault Up"}, "port"),
            ({"code": 20034}, "port"),
            ({"code": 23005}, "all"),
            ({"code": 22013, "text": "Non-fatal, Link 57 Minion Link DLREQ interrupt"}, "nonfatal"),
            ({"code": 12028}, "nonfatal"),
            ({"code": 12028, "text": "Fatal, Link 3 egress"}, "port"),
            ({"code": 99999}, "unknown"),
        ],
    )
    def test_an_nvswitch_error_is_as_fatal_as_its_line_or_the_table_says(
        self, attributes: dict[str, Any], severity: str
    ) -> None:
        assert sxid_severity(attributes) == severity

    def test_a_line_logged_thousands_of_times_is_one_error_and_costs_little(self) -> None:
        story = Story().complete()
        story.events = [WindowEvent(NOW_S - 20 + i / 250, "n1", 0, "xid", {"code": 63}) for i in range(4_000)]
        window = story.window()
        assert [(e.fact.code, e.occurrences) for e in gpu_errors(window)] == [(63, 1)]
        begun = time.process_time()
        assert every(window) == []
        assert time.process_time() - begun < 0.2

    def test_errors_of_before_this_attempt_are_not_its_own(self) -> None:
        story = logged(79, before_s=600)
        assert every(story.window()) == []

    def test_errors_of_other_nodes_are_not_ours(self) -> None:
        assert every(Story().complete().happened("xid", "n9", 1, 0, code=79).window()) == []


class TestGpuLost:
    @pytest.mark.parametrize("before_s", [0.0, 1.0, 30.0])
    def test_xid_79_excludes_at_once(self, before_s: float) -> None:
        verdict = only(LOST.detect(logged(79, before_s).window()))
        assert (verdict.fault, verdict.node, verdict.device) == ("gpu_lost", "n1", 0)
        assert verdict.fact
        assert verdict.asks is None
        assert verdict.onset_s == NOW_S - before_s

    def test_the_agents_word_that_the_device_is_gone_does_too(self) -> None:
        verdict = only(LOST.detect(Story(gpus=2).complete().happened("gpu_lost", "n2", 1, 1, uuid="GPU-1").window()))
        assert (verdict.fault, verdict.node, verdict.device) == ("gpu_lost", "n2", 1)

    def test_both_words_are_one_verdict(self) -> None:
        story = logged(79).happened("gpu_lost", "n1", 1, 0)
        assert only(LOST.detect(story.window())).fact

    def test_two_lost_gpus_of_a_node_are_one_verdict(self) -> None:
        story = logged(79).happened("xid", "n1", 1, 1, code=79)
        assert "1 more" in only(LOST.detect(story.window())).summary

    def test_an_nvml_that_does_not_answer_is_no_lost_gpu(self) -> None:
        story = Story(gpus=2).complete().standstill(20)
        for name, values in story.device.items():
            if name.startswith("gpu_"):
                values[-20:, 2] = np.nan
        assert LOST.detect(story.window()) == []

    def test_gpus_lost_on_most_nodes_at_once_accuse_none_of_them(self) -> None:
        story = Story(nodes=8).complete()
        for node in ("n1", "n2", "n3"):
            story.happened("xid", node, 2, 0, code=79)
        verdict = only(LOST.detect(story.window()))
        assert verdict.node is None
        assert verdict.nodes == ("n1", "n2", "n3")

    def test_a_gpu_that_no_rank_of_the_job_uses_drains_its_node(self) -> None:
        verdict = only(LOST.detect(logged(79, device=5).window()))
        assert verdict.asks == "drain_node"

    def test_a_gpu_that_the_log_does_not_name_still_is_the_nodes(self) -> None:
        verdict = only(LOST.detect(logged(79, device=-1).window()))
        assert (verdict.node, verdict.device, verdict.asks) == ("n1", None, None)

    def test_the_driver_may_ask_for_a_drain_instead(self) -> None:
        story = logged(79).happened("xid", "n1", 1, 0, code=154, text=DRAIN)
        assert only(LOST.detect(story.window())).asks == "drain_node"


class TestGpuMemory:
    @pytest.mark.parametrize(("code", "before_s"), [(64, 0), (95, 0), (140, 0), (48, 1.0)])
    def test_an_uncontained_error_excludes_at_once(self, code: int, before_s: float) -> None:
        verdict = only(MEMORY.detect(logged(code, before_s).window()))
        assert (verdict.fault, verdict.node, verdict.asks, verdict.fact) == ("gpu_memory_error", "n1", None, True)

    def test_a_contained_error_restarts_the_job_that_lost_its_process(self) -> None:
        story = logged(94, 1.0).exit("n1", -6, 0.5)
        assert only(MEMORY.detect(story.window())).asks == "restart_job"

    def test_a_contained_error_restarts_the_job_that_stands_still(self) -> None:
        assert only(MEMORY.detect(logged(94, 3.0, rows=3).window())).asks == "restart_job"

    def test_a_contained_error_of_a_job_that_goes_on_waits_for_its_end(self) -> None:
        assert MEMORY.detect(logged(94, 1.0).window()) == []
        assert only(MEMORY.detect(logged(94, 5.0).window())).asks == "drain_node"

    def test_a_double_bit_error_that_was_contained_restarts(self) -> None:
        story = logged(48, 3.0, rows=3).happened("xid", "n1", 3, 0, code=94)
        story.device["gpu_ecc_uncorrected_total"][-3:, 2] = 1
        assert only(MEMORY.detect(story.window())).asks == "restart_job"

    def test_neither_a_double_bit_error_nor_the_counter_acts_before_the_line_that_says_whether_it_was_contained(
        self,
    ) -> None:
        assert MEMORY.detect(logged(48, 0.5).window()) == []
        story = Story(gpus=2).complete()
        story.device["train_step_seconds"][:] = 12.0
        story.device["gpu_ecc_uncorrected_total"][-1, 5] = 1
        assert MEMORY.detect(story.window()) == []
        assert only(MEMORY.detect(story.window(now_s=NOW_S + 1))).node == "n2"

    def test_a_contained_error_followed_by_an_uncontained_one_excludes(self) -> None:
        story = logged(94, 3.0, rows=3).happened("xid", "n1", 2, 0, code=95)
        assert only(MEMORY.detect(story.window())).asks is None

    def test_the_counter_alone_excludes_the_node_of_a_job_that_stopped(self) -> None:
        story = Story(gpus=2).complete().standstill(3)
        story.device["gpu_ecc_uncorrected_total"][-2:, 5] = 1
        verdict = only(MEMORY.detect(story.window()))
        assert (verdict.node, verdict.device, verdict.asks) == ("n2", 1, None)
        assert verdict.onset_s == NOW_S - 2

    def test_the_counter_alone_drains_the_node_of_a_job_that_goes_on(self) -> None:
        story = Story().complete()
        story.device["gpu_ecc_uncorrected_total"][-20:, 2] += 3
        assert only(MEMORY.detect(story.window())).asks == "drain_node"

    def test_an_old_count_that_stays_is_no_fault(self) -> None:
        story = Story().complete()
        story.device["gpu_ecc_uncorrected_total"][:, 2] = 7
        assert MEMORY.detect(story.window()) == []

    def test_a_count_seen_late_or_with_gaps_is_no_growth(self) -> None:
        story = Story().complete()
        story.device["gpu_ecc_uncorrected_total"][:, 2] = 7
        story.device["gpu_ecc_uncorrected_total"][:40, 2] = np.nan
        story.device["gpu_ecc_uncorrected_total"][45:50, 2] = np.nan
        assert MEMORY.detect(story.window()) == []

    def test_a_counter_that_began_again_is_no_growth(self) -> None:
        story = Story().complete()
        story.device["gpu_ecc_uncorrected_total"][:, 2] = 7
        story.device["gpu_ecc_uncorrected_total"][30:, 2] = 0
        assert MEMORY.detect(story.window()) == []

    def test_a_glitch_of_the_counter_is_no_growth(self) -> None:
        story = Story().complete()
        story.device["gpu_ecc_uncorrected_total"][40:43, 2] = 4_294_967_295
        story.device["gpu_ecc_uncorrected_total"][50, 1] = 3
        assert MEMORY.detect(story.window()) == []

    def test_counters_of_many_nodes_that_move_at_once_are_their_source(self) -> None:
        story = Story(nodes=8).complete()
        story.device["gpu_ecc_uncorrected_total"][-20:, :5] += 4
        with pytest.raises(Blind, match="source"):
            MEMORY.detect(story.window())

    def test_cudas_own_word_counts_once_the_kernel_had_time_for_its_own(self) -> None:
        text = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
        assert MEMORY.detect(Story().complete().exit("n1", 1, 8, text).window()) == []
        assert only(MEMORY.detect(Story().complete().exit("n1", 1, 11, text).window())).node == "n1"
        contained = Story().complete().exit("n1", 1, 8, text).happened("xid", "n1", 1, 0, code=94)
        assert only(MEMORY.detect(contained.window())).asks == "restart_job"

    @pytest.mark.parametrize("code", [63, 92, 160, 171, 172])
    def test_what_was_repaired_or_only_counted_is_no_fault(self, code: int) -> None:
        assert every(logged(code).window()) == []

    def test_the_driver_decides_before_the_table(self) -> None:
        reset = logged(94, 3.0, rows=3).happened("xid", "n1", 2, 0, code=154, text=RESET)
        assert only(MEMORY.detect(reset.window())).asks is None
        drain = logged(95, 20.0).happened("xid", "n1", 19, 0, code="154", text=DRAIN)
        assert only(MEMORY.detect(drain.window())).asks == "drain_node"
        none = logged(95, 20.0).happened("xid", "n1", 19, 0, code=154, text=NONE)
        assert MEMORY.detect(none.window()) == []

    def test_a_drain_becomes_an_exclusion_when_the_job_restarts_anyway(self) -> None:
        story = logged(94, 3.0, rows=3).exit("n1", -6, 2).happened("xid", "n1", 2, 0, code=154, text=DRAIN)
        assert only(MEMORY.detect(story.window())).asks is None

    def test_the_drivers_word_counts_for_its_own_gpu_and_moment_only(self) -> None:
        other = logged(95, 20.0).happened("xid", "n1", 19, 1, code=154, text=NONE)
        assert only(MEMORY.detect(other.window())).asks is None
        later = logged(95, 50.0).happened("xid", "n1", 5, 0, code=154, text=NONE)
        assert only(MEMORY.detect(later.window())).asks is None


class TestTheWordingOfNewerDrivers:
    """XID 154 of drivers 595 and 610; what is asked for beside it must not be cancelled by it."""

    @pytest.mark.parametrize("code", [79, 119, 120, 62, 95])
    @pytest.mark.parametrize("asked", ["0x1 (PF FLR)", "0x2 (OS Reboot)"])
    def test_a_reset_or_reboot_excludes_the_node_of_the_error_beside_it(self, code: int, asked: str) -> None:
        said = f"GPU recovery action changed from 0x0 (None) to {asked}"
        story = logged(code, 3.0, rows=3).happened("xid", "n1", 3, 0, code=154, text=said)
        verdict = only(every(story.window()))
        assert (verdict.node, verdict.asks, verdict.fact) == ("n1", None, True)

    @pytest.mark.parametrize("asked", ["0x5 (Recover IMEX Domain)", "0x9 (Something New)"])
    def test_an_unknown_action_neither_cancels_the_error_beside_it_nor_acts_alone(self, asked: str) -> None:
        said = f"GPU recovery action changed from 0x0 (None) to {asked}"
        story = logged(79).happened("xid", "n1", 1, 0, code=154, text=said)
        assert only(LOST.detect(story.window())).asks is None
        alone = Story().complete().standstill(3).happened("xid", "n1", 3, 0, code=154, text=said)
        assert every(alone.window()) == []


class TestGpuHang:
    @pytest.mark.parametrize("code", [46, 62, 109, 110, 119, 120, 143])
    def test_its_codes_exclude_the_node_of_a_job_that_stopped(self, code: int) -> None:
        verdict = only(HANGS.detect(logged(code, 2.0, rows=2).window()))
        assert (verdict.fault, verdict.node, verdict.asks, verdict.fact) == ("gpu_hang", "n1", None, True)

    def test_an_exit_on_the_node_makes_waiting_needless(self) -> None:
        assert only(HANGS.detect(logged(119, 0.5).exit("n1", -6, 0.2).window())).asks is None

    def test_steps_longer_than_the_interval_are_not_waited_for(self) -> None:
        story = logged(119, 0.5)
        story.device["train_step_seconds"][:] = 12.0
        assert only(HANGS.detect(story.window())).asks is None

    def test_a_timeout_that_only_a_tool_met_drains_the_node_of_a_job_that_goes_on(self) -> None:
        assert HANGS.detect(logged(119, 1.0).window()) == []
        assert only(HANGS.detect(logged(119, 5.0).window())).asks == "drain_node"

    def test_a_reset_that_the_driver_asks_for_by_itself_is_one(self) -> None:
        story = Story().complete().standstill(3).happened("xid", "n1", 3, 0, code=154, text=RESET)
        assert only(HANGS.detect(story.window())).asks is None

    def test_a_reset_because_of_memory_is_left_to_that(self) -> None:
        story = logged(95, 3.0, rows=3).happened("xid", "n1", 2, 0, code=154, text=RESET)
        assert HANGS.detect(story.window()) == []

    @pytest.mark.parametrize("code", [13, 31, 32, 43, 45, 54, 74, 145, 14])
    def test_a_programs_errors_and_others_business_say_nothing(self, code: int) -> None:
        assert every(logged(code, 20.0, rows=20).window()) == []

    def gone(self, rows: int, columns: list[int], still: int = 0) -> Story:
        story = Story(gpus=2).complete()
        if still:
            story.standstill(still)
        for name, values in story.device.items():
            if name.startswith("gpu_"):
                values[-rows:, columns] = np.nan
        return story

    def test_a_device_that_stopped_answering_with_the_job_is_one(self) -> None:
        verdict = only(HANGS.detect(self.gone(20, [3], still=20).window()))
        assert (verdict.fault, verdict.node, verdict.device) == ("gpu_hang", "n1", 1)
        assert verdict.kinds == {"device_silence", "standstill"}
        assert not verdict.fact
        assert verdict.confidence >= 0.9

    def test_before_the_job_is_known_to_have_stopped_it_cannot_tell(self) -> None:
        story = self.gone(6, [3], still=5)
        story.device["train_step_seconds"][:] = 2.0
        with pytest.raises(Blind, match="n1/gpu1"):
            HANGS.detect(story.window())

    def silent_in_a_pause(self, rows: int, hook: bool, columns: Sequence[int] = (3,)) -> Window:
        """The job has stood still for half a minute longer than a device has been silent."""
        story = Story(gpus=2, rows=120).complete().standstill(rows + 30)
        if not hook:
            story.waiting(rows + 30)
            for name in [name for name in story.device if name.startswith(("train_", "nccl_"))]:
                del story.device[name]
        for name, values in story.device.items():
            if name.startswith("gpu_"):
                values[-rows:, columns] = np.nan
        return story.window()

    @pytest.mark.parametrize("hook", [True, False])
    def test_a_device_that_fell_silent_in_a_pause_is_why_the_job_does_not_go_on_after_it(self, hook: bool) -> None:
        verdict = only(HANGS.detect(self.silent_in_a_pause(20, hook)))
        assert (verdict.node, verdict.device) == ("n1", 1)
        assert verdict.kinds == {"device_silence", "standstill"}
        assert verdict.confidence >= 0.9

    @pytest.mark.parametrize("hook", [True, False])
    def test_a_node_whose_exporter_restarts_in_a_pause_is_not_accused(self, hook: bool) -> None:
        with pytest.raises(Blind, match="pause"):
            HANGS.detect(self.silent_in_a_pause(20, hook, (2, 3)))

    @pytest.mark.parametrize("hook", [True, False])
    def test_a_node_silent_for_far_longer_in_a_pause_is_accused(self, hook: bool) -> None:
        verdict = only(HANGS.detect(self.silent_in_a_pause(60, hook, (2, 3))))
        assert (verdict.node, verdict.device) == ("n1", None)

    @pytest.mark.parametrize("hook", [True, False])
    def test_in_a_pause_that_may_yet_end_nobody_can_tell(self, hook: bool) -> None:
        with pytest.raises(Blind, match="pause"):
            HANGS.detect(self.silent_in_a_pause(6, hook))

    def test_values_missing_from_a_job_that_goes_on_are_no_hang(self) -> None:
        assert HANGS.detect(self.gone(20, [3]).window()) == []

    def test_values_missing_since_long_before_the_standstill_are_no_hang(self) -> None:
        assert HANGS.detect(self.gone(55, [3], still=20).window()) == []

    def test_values_that_nobody_ever_sent_are_no_hang(self) -> None:
        assert HANGS.detect(self.gone(60, [3], still=20).window()) == []

    def test_a_node_none_of_whose_gpus_answers_is_one(self) -> None:
        verdict = only(HANGS.detect(self.gone(20, [2, 3], still=20).window()))
        assert (verdict.node, verdict.device) == ("n1", None)

    def test_an_exporter_that_stopped_everywhere_is_none(self) -> None:
        assert HANGS.detect(self.gone(20, [0, 2, 4], still=20).window()) == []
        assert HANGS.detect(self.gone(20, list(range(8)), still=20).window()) == []

    def test_a_silent_node_is_left_to_others(self) -> None:
        story = self.gone(20, [2, 3], still=20)
        story.heard_s[1] = NOW_S - 20
        assert HANGS.detect(story.window()) == []

    def test_a_device_gone_with_its_rank_is_known_at_once(self) -> None:
        verdict = only(HANGS.detect(self.gone(3, [3], still=3).exit("n1", 1, 3.0).window()))
        assert verdict.kinds == {"device_silence", "exit"}
        assert verdict.confidence >= 0.9

    def test_peers_that_give_up_long_after_do_not_hide_it(self) -> None:
        story = self.gone(40, [3], still=40)
        for node in ("n0", "n2", "n3"):
            story.exit(node, -6, 5, "Watchdog caught collective operation timeout")
        assert only(HANGS.detect(story.window())).kinds == {"device_silence", "standstill"}

    def test_rows_that_come_in_turns_hide_nothing(self) -> None:
        story = self.gone(20, [3], still=20)
        for values in story.device.values():  # the newest lines hold the rows of some nodes each
            values[-1, :4] = np.nan
            values[-2, 4:] = np.nan
        assert only(HANGS.detect(story.window())).node == "n1"

    def test_a_reset_after_the_crash_is_none(self) -> None:
        assert HANGS.detect(self.gone(5, [3], still=30).exit("n1", -11, 30).window()) == []

    def test_rows_that_end_with_all_processes_of_a_node_are_none(self) -> None:
        assert HANGS.detect(self.gone(5, [2, 3], still=5).exit("n1", -11, 5).window()) == []


class TestNvSwitch:
    def test_a_port_and_its_gpu_that_failed_together_hang_the_node(self) -> None:
        story = logged(74, 3.0, rows=3).happened("sxid", "n1", 3, code=20034, text="Fatal, Link 37 LTSSM Fault Up")
        verdict = only(SWITCH.detect(story.window()))
        assert (verdict.fault, verdict.node, verdict.asks) == ("gpu_hang", "n1", None)

    def test_an_error_fatal_to_the_fabric_hangs_the_node(self) -> None:
        story = Story().complete().standstill(3).happened("sxid", "n1", 3, code=22003)
        assert only(SWITCH.detect(story.window())).fault == "gpu_hang"

    def test_a_fatal_error_of_a_job_that_goes_on_drains(self) -> None:
        story = Story().complete().happened("sxid", "n1", 10, code=20034)
        verdict = only(SWITCH.detect(story.window()))
        assert (verdict.fault, verdict.asks) == ("nvlink_degraded", "drain_node")

    def test_a_link_that_went_down_proves_nothing_by_itself(self) -> None:
        assert SWITCH.detect(Story().complete().standstill(1).happened("sxid", "n1", 2, code=20034).window()) == []

    @pytest.mark.parametrize("code", [11012, 12028, 20001, 22013, 99999])
    def test_errors_that_the_switch_corrects_say_nothing(self, code: int) -> None:
        assert SWITCH.detect(Story().complete().standstill(20).happened("sxid", "n1", 20, code=code).window()) == []
