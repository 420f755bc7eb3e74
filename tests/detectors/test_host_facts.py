"""Facts about hosts and processes: panics, machine checks, OOM kills and the many ways in which an end is reported."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from eagle_eye.detectors.hardware.gpu_hang import GpuHang
from eagle_eye.detectors.hardware.gpu_memory import GpuMemory
from eagle_eye.detectors.hardware.host_errors import HostErrors
from eagle_eye.detectors.hardware.out_of_memory import OutOfMemory
from eagle_eye.detectors.progress.process_exit import ProcessExit
from eagle_eye.detectors.progress.process_gone import ProcessGone
from eagle_eye.detectors.signs.progress import Patience
from eagle_eye.detectors.types import Blind, Verdict, Window, WindowEvent
from tests.detectors.windows import NOW_S, Story

PATIENCE = Patience(floor_s=10, typical_steps=3, start_deadline_s=1800, warmup_steps=3)
MEMORY = GpuMemory()
HOSTS, KILLS = HostErrors(patience=PATIENCE), OutOfMemory(patience=PATIENCE)
EXITS, HANGS = ProcessExit(settle_s=1, silent_s=5), GpuHang(patience=PATIENCE)
GONE = ProcessGone(patience=PATIENCE, intervals=4, floor_s=10)
ECHO = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"


def only(verdicts: list[Verdict]) -> Verdict:
    assert len(verdicts) == 1, verdicts
    return verdicts[0]


def ended(*ends: tuple[str, Any, float], **attributes: Any) -> Story:
    """Ranks of nodes ended with codes so many seconds ago, and nobody says more about them."""
    story = Story(gpus=2).complete()
    for node, code, before_s in ends:
        story.happened("process_exit", node, before_s, 0, exit_code=code, **attributes)
    return story


class TestHostErrors:
    def test_a_panic_and_silence_are_a_dead_node(self) -> None:
        story = Story().complete().happened("kernel_panic", "n1", 2, text="Kernel panic - not syncing")
        story.heard_s[1] = NOW_S - 2
        verdict = only(HOSTS.detect(story.window()))
        assert (verdict.fault, verdict.node, verdict.asks, verdict.fact) == ("node_unreachable", "n1", None, True)

    def test_a_panic_that_the_next_boot_reports_explains_the_job_that_stopped(self) -> None:
        story = Story().complete().standstill(30).happened("kernel_panic", "n1", 1)
        assert "standstill" in only(HOSTS.detect(story.window())).kinds

    def test_an_old_panic_of_a_node_that_works_says_nothing(self) -> None:
        assert HOSTS.detect(Story().complete().happened("kernel_panic", "n1", 30).window()) == []
        assert HOSTS.detect(Story().complete().happened("kernel_panic", "n1", 3000).window()) == []

    def test_a_goodbye_is_not_silence(self) -> None:
        story = Story().complete().happened("kernel_panic", "n1", 2)
        story.heard_s[1], story.farewell[1] = NOW_S - 2, True
        assert HOSTS.detect(story.window()) == []

    @pytest.mark.parametrize(
        "attributes", [{}, {"text": "Machine check: Processor context corrupt"}, {"text": "UE row 3"}]
    )
    def test_an_uncorrected_machine_check_asks_for_a_drain(self, attributes: dict[str, Any]) -> None:
        verdict = only(HOSTS.detect(Story().complete().happened("machine_check", "n1", 5, **attributes).window()))
        assert (verdict.node, verdict.asks) == ("n1", "drain_node")

    @pytest.mark.parametrize(
        "text",
        ["mce: [Hardware Error]: Corrected error, no action required.", "EDAC MC0: 1 CE memory read error on DIMM"],
    )
    def test_corrected_errors_are_no_news(self, text: str) -> None:
        story = Story().complete().happened("machine_check", "n1", 5, text=text)
        assert HOSTS.detect(story.window()) == []

    def test_a_machine_check_that_took_the_node_along_is_a_dead_node(self) -> None:
        story = Story().complete().standstill(20).happened("machine_check", "n1", 20)
        story.heard_s[1] = NOW_S - 20
        assert only(HOSTS.detect(story.window())).asks is None

    def test_errors_of_other_nodes_are_not_ours(self) -> None:
        assert HOSTS.detect(Story().complete().happened("kernel_panic", "n9", 1).window()) == []


def says(what: str, before_s: float, node: str = "n1", text: str = "", rows: int = 0, **attributes: Any) -> Story:
    """A job on whose node the kernel said something, and that has stood still for ``rows`` rows."""
    story = Story(gpus=2).complete()
    if rows:
        story.standstill(rows)
    return heard(story, what, before_s, node, text, **attributes)


def heard(story: Story, what: str, before_s: float, node: str, text: str = "", **attributes: Any) -> Story:
    story.events.append(
        WindowEvent(NOW_S - before_s, node, -1, "host_error", {"what": what, "text": text, **attributes})
    )
    return story


def died(story: Story, before_s: float, *nodes: str) -> Story:
    for node in nodes or story.nodes:
        story.exit(node, 1, before_s, ECHO)
    return story


PASSING = ["pcie_fatal", "device_gone", "cpu_stuck"]
STOPPING = [*PASSING, "gpu_unusable"]


class TestWhatTheKernelSaysOfAHost:
    @pytest.mark.parametrize("what", [*STOPPING, "nic_failed", "nic_stalled"])
    def test_what_stops_a_job_excludes_its_node_beside_a_standstill(self, what: str) -> None:
        verdict = only(HOSTS.detect(says(what, 20.5, rows=20).window()))
        assert (verdict.node, verdict.fact, verdict.asks) == ("n1", True, None)
        assert verdict.fault == ("network_hang" if what.startswith("nic") else "host_errors")
        assert verdict.kinds == {"host_error", "standstill"}

    @pytest.mark.parametrize("what", [*STOPPING, "nic_failed", "disk_failed"])
    def test_so_it_does_beside_the_end_of_the_ranks(self, what: str) -> None:
        verdict = only(HOSTS.detect(died(says(what, 8), 3).window()))
        assert (verdict.node, verdict.asks) == ("n1", None)

    @pytest.mark.parametrize("what", [*PASSING, "nic_failed", "disk_failed", "disk_errors", "task_blocked", "newer"])
    def test_without_cost_to_the_job_it_is_reported(self, what: str) -> None:
        verdict = only(HOSTS.detect(says(what, 30).window()))
        assert (verdict.node, verdict.fact, verdict.asks) == ("n1", False, "notify")
        assert verdict.fault == ("nic_degraded" if what.startswith("nic") else "host_errors")

    @pytest.mark.parametrize("what", ["disk_errors", "task_blocked", "storage_silent", "newer"])
    def test_what_healthy_nodes_say_too_excludes_nobody(self, what: str) -> None:
        assert only(HOSTS.detect(died(says(what, 8), 3).window())).asks == "notify"
        assert only(HOSTS.detect(says(what, 20.5, rows=20).window())).asks == "notify"

    def test_a_machine_check_beside_a_crash_excludes(self) -> None:
        story = died(Story(gpus=2).complete().happened("machine_check", "n1", 8, text="UE row 3"), 3)
        verdict = only(HOSTS.detect(story.window()))
        assert (verdict.fault, verdict.node, verdict.asks) == ("host_errors", "n1", None)

    def test_of_two_nodes_the_first_is_the_cause(self) -> None:
        story = heard(says("pcie_fatal", 20.2, "n3", rows=20), "pcie_fatal", 21, "n2")
        verdicts = HOSTS.detect(story.window())
        assert [(verdict.node, verdict.asks) for verdict in verdicts] == [("n2", None), ("n3", "notify")]

    def test_what_a_fourth_of_the_job_says_at_one_moment_accuses_nobody(self) -> None:
        story = heard(heard(says("pcie_fatal", 21, rows=20), "pcie_fatal", 21, "n2"), "pcie_fatal", 21, "n3")
        assert {verdict.asks for verdict in HOSTS.detect(story.window())} == {"notify"}

    @pytest.mark.parametrize(("rate", "asks"), [(1e3, "notify"), (2e10, None)])
    def test_an_adapter_that_the_job_does_not_use_accuses_nobody(self, rate: float, asks: str | None) -> None:
        story = died(says("nic_failed", 8, link="mlx5_1"), 3)
        for name in ("link_rx_bytes_per_second", "link_tx_bytes_per_second"):
            story.link[name][:, [link.node == "n1" and link.link == "mlx5_1" for link in story.links]] = rate
        assert only(HOSTS.detect(story.window())).asks == asks

    def test_a_cpu_was_stuck_before_its_watchdog_spoke(self) -> None:
        text = "watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [python3:7]"
        verdict = only(HOSTS.detect(died(says("cpu_stuck", 3, text=text), 5).window()))
        assert (verdict.asks, verdict.onset_s) == (None, NOW_S - 25)

    def test_a_cpu_that_the_end_of_the_ranks_kept_busy_is_no_cause(self) -> None:
        text = "watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [python3:7]"
        assert only(HOSTS.detect(died(says("cpu_stuck", 3, text=text), 30).window())).asks == "notify"

    def test_a_dead_disk_of_another_node_than_the_one_whose_rank_failed_is_no_cause(self) -> None:
        story = died(says("disk_failed", 8), 3, "n0", "n2").exit("n3", 1, 3.5, "OSError: [Errno 5] Input/output error")
        assert only(HOSTS.detect(story.window())).asks == "notify"

    @pytest.mark.parametrize("text", ["blocked in __schedule, nfs, sunrpc", "blocked in io_schedule, ext4"])
    def test_a_task_that_waits_in_a_filesystem_waits_for_storage(self, text: str) -> None:
        verdict = only(HOSTS.detect(says("task_blocked", 30, text=text).window()))
        assert (verdict.fault, verdict.node) == ("storage_stall", "n1")

    def test_storage_that_half_of_the_nodes_miss_at_a_standstill_explains_it(self) -> None:
        story = heard(says("storage_silent", 10, rows=40), "storage_silent", 12, "n2")
        verdict = only(HOSTS.detect(story.window()))
        assert (verdict.fault, verdict.node, verdict.nodes) == ("storage_stall", None, ("n1", "n2"))
        assert "standstill" in verdict.kinds

    def test_storage_that_was_missed_long_before_does_not(self) -> None:
        story = heard(says("storage_silent", 55, rows=20), "storage_silent", 55, "n2")
        assert "standstill" not in only(HOSTS.detect(story.window())).kinds


class TestOutOfMemory:
    def test_a_kill_of_some_other_process_says_nothing_while_the_job_goes_on(self) -> None:
        story = Story().complete().happened("oom_kill", "n1", 20, process="node_exporter")
        assert KILLS.detect(story.window()) == []
        assert EXITS.detect(story.window()) == []

    def test_nor_does_one_of_a_training_process(self) -> None:
        assert KILLS.detect(Story().complete().happened("oom_kill", "n1", 20, process="python3").window()) == []

    def test_nor_does_the_hang_of_a_job_beside_which_an_exporter_was_killed(self) -> None:
        story = Story().complete().standstill(20).happened("oom_kill", "n1", 20, process="fluent-bit")
        assert KILLS.detect(story.window()) == []

    @pytest.mark.parametrize("attributes", [{}, {"process": "python3"}, {"process": "pt_main_thread"}])
    def test_a_job_that_stopped_when_its_process_was_killed_ran_out_of_memory(self, attributes: dict[str, Any]) -> None:
        verdict = only(
            KILLS.detect(Story().complete().standstill(20).happened("oom_kill", "n1", 20, **attributes).window())
        )
        assert (verdict.fault, verdict.node) == ("out_of_memory", "n1")
        assert verdict.confidence >= 0.9

    def test_a_rank_that_says_nothing_since_the_kill_tells_at_once(self) -> None:
        verdict = only(KILLS.detect(self.silent_since_the_kill(4)))
        assert verdict.kinds == {"oom_kill", "rank_gone"}

    def test_two_rows_without_a_rank_are_no_proof(self) -> None:
        assert KILLS.detect(self.silent_since_the_kill(2)) == []

    def silent_since_the_kill(self, rows: int) -> Window:
        story = Story().complete().standstill(rows).happened("oom_kill", "n1", rows, process="my_binary")
        for name in ("train_step", "nccl_sequence", "nccl_completed_sequence"):
            story.device[name][-rows:, 1] = np.nan
        return story.window()

    def test_where_exits_are_reported_they_tell(self) -> None:
        story = Story().complete().standstill(20).happened("oom_kill", "n1", 20, process="python3").exit("n1", 137, 20)
        assert KILLS.detect(story.window()) == []
        assert only(EXITS.detect(story.window())).fault == "out_of_memory"

    def test_a_killed_data_loader_takes_its_rank_along(self) -> None:
        text = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."
        story = Story().complete().happened("oom_kill", "n1", 6, process="pt_data_worker").exit("n1", 1, 5, text)
        assert only(EXITS.detect(story.window())).fault == "out_of_memory"

    def test_a_crash_long_after_a_kill_is_a_crash(self) -> None:
        story = Story().complete().happened("oom_kill", "n1", 50, process="python").exit("n1", -9, 5)
        assert only(EXITS.detect(story.window())).fault == "process_crash"

    def test_a_segmentation_fault_beside_a_kill_is_a_crash(self) -> None:
        story = Story().complete().happened("oom_kill", "n1", 5, process="node_exporter").exit("n1", -11, 5)
        assert only(EXITS.detect(story.window())).fault == "process_crash"


def without_hook(nodes: int = 4) -> Story:
    """A job whose ranks report nothing; its GPUs work at 660 W and hold 70 GB."""
    story = Story(nodes=nodes, gpus=2).complete()
    for name in [name for name in story.device if name.startswith(("train_", "nccl_"))]:
        del story.device[name]
    story.device["gpu_memory_used_bytes"] = np.full((60, len(story.series)), 7e10)
    return story


def waiting(rows: int, nodes: int = 4) -> Story:
    """Its GPUs only wait in the newest rows."""
    return without_hook(nodes).waiting(rows)


class TestProcessGone:
    def test_a_process_that_left_its_gpu_while_all_others_wait_has_crashed(self) -> None:
        story = waiting(6)
        story.device["gpu_memory_used_bytes"][-6:, 3] = 5e8
        verdict = only(GONE.detect(story.window()))
        assert (verdict.fault, verdict.node, verdict.device) == ("process_crash", "n1", 1)
        assert not verdict.fact

    def test_the_kernel_has_time_to_say_why_before_the_job_is_restarted(self) -> None:
        confidence = []
        for rows in (6, 12):
            story = waiting(rows)
            story.device["gpu_memory_used_bytes"][-rows:, 3] = 5e8
            confidence.append(only(GONE.detect(story.window())).confidence)
        assert confidence[0] < 0.9 <= confidence[1]

    def reloaded(self, loading: list[int], ended: int = 25) -> Story:
        """All processes ended ``ended`` rows ago; new ones fill the GPUs' memory, some later than others."""
        story = waiting(ended)
        memory = story.device["gpu_memory_used_bytes"]
        memory[-ended:] = 5e8
        memory[-10:, [c for c in range(memory.shape[1]) if c not in loading]] = 7e10
        return story

    @pytest.mark.parametrize("loading", [[2, 3], [2, 3, 4, 5]])
    def test_a_node_that_loads_its_weights_later_than_others_has_not_crashed(self, loading: list[int]) -> None:
        story = self.reloaded(loading)
        assert GONE.detect(story.window()) == []

    def test_one_that_ended_while_others_kept_their_memory_has_crashed(self) -> None:
        story = self.reloaded([2, 3])
        story.device["gpu_memory_used_bytes"][-25:, [0, 1, 4, 5, 6, 7]] = 7e10
        assert only(GONE.detect(story.window())).node == "n1"

    def away(self, rows: int, back: int, *events: str) -> Story:
        """n1 was heard of no more for ``rows`` rows, and then for ``back`` rows with nothing in its GPUs' memory."""
        story = waiting(rows + back)
        story.device["gpu_memory_used_bytes"][-back:, 2:4] = 5e8
        for values in story.device.values():
            values[-rows - back : -back, 2:4] = np.nan
        for kind in events:
            story.happened(kind, "n1", 1)
        return story

    def test_a_node_that_fell_silent_as_the_job_stopped_and_came_back_empty_has_restarted(
        self,
    ) -> None:
        verdict = only(GONE.detect(self.away(30, 3, "agent_start").window()))
        assert (verdict.fault, verdict.node, verdict.confidence) == ("node_unreachable", "n1", 0.95)
        assert verdict.kinds == {"silence", "gpu_memory_freed", "gpu_activity"}

    def test_one_that_said_goodbye_or_whose_agent_has_not_started_or_that_still_holds_memory_has_not(self) -> None:
        goodbye = self.away(30, 3, "agent_stop", "agent_start")
        silent = self.away(30, 3)
        holding = self.away(30, 3, "agent_start")
        holding.device["gpu_memory_used_bytes"][-3:, 3] = 7e10
        short = self.away(8, 3, "agent_start")
        for story in (goodbye, silent, holding, short):
            assert only(GONE.detect(story.window())).fault == "process_crash"

    def test_of_an_end_while_the_node_was_away_the_kernel_has_its_say_once_it_is_back(self) -> None:
        assert only(GONE.detect(self.away(30, 3).window())).confidence < 0.9
        assert only(GONE.detect(self.away(30, 12).window())).confidence >= 0.9

    def test_its_peers_may_follow_later(self) -> None:
        story = waiting(16)
        story.device["gpu_memory_used_bytes"][-16:, 3] = 5e8
        story.device["gpu_memory_used_bytes"][-8:] = 5e8
        assert only(GONE.detect(story.window())).node == "n1"

    def test_a_job_that_ends_as_a_whole_has_not_crashed(self) -> None:
        story = waiting(6)
        story.device["gpu_memory_used_bytes"][-6:, :4] = 5e8
        story.device["gpu_memory_used_bytes"][-5:] = 5e8
        assert GONE.detect(story.window()) == []

    def test_missing_readings_before_a_jobs_end_are_no_crash(self) -> None:
        story = waiting(6)
        story.device["gpu_memory_used_bytes"][-5:] = 5e8
        story.device["gpu_memory_used_bytes"][-11:-5, 2:4] = np.nan
        assert GONE.detect(story.window()) == []

    def test_a_node_that_leaves_a_job_that_goes_on_has_not_crashed(self) -> None:
        story = without_hook()
        story.device["gpu_memory_used_bytes"][-10:, 2:4] = 5e8
        assert GONE.detect(story.window()) == []

    def test_stages_that_go_on_for_a_while_have_to_wait_for_longer_than_any_pause(self) -> None:
        for rows, found in ((8, 0), (12, 1)):
            story = waiting(rows)
            story.device["gpu_memory_used_bytes"][-rows - 25 :, 3] = 5e8
            assert len(GONE.detect(story.window())) == found

    def test_a_pause_in_which_all_hold_their_memory_is_none(self) -> None:
        assert GONE.detect(waiting(20).window()) == []

    def test_gpus_that_were_never_used_were_not_left(self) -> None:
        story = waiting(6)
        story.device["gpu_memory_used_bytes"][:, 3] = 5e8
        assert GONE.detect(story.window()) == []

    def test_where_exits_or_steps_are_reported_they_tell(self) -> None:
        story = waiting(6).happened("process_exit", "n1", 6, 1, exit_code=0)
        story.device["gpu_memory_used_bytes"][-6:, 3] = 5e8
        assert GONE.detect(story.window()) == []

    def test_of_two_nodes_the_one_whose_kernels_run_waits_for_the_other(self) -> None:
        story = waiting(6, nodes=2)
        story.device["gpu_memory_used_bytes"][-6:, 3] = 5e8
        assert only(GONE.detect(story.window())).node == "n1"

    def test_of_two_nodes_the_last_may_be_saving_when_the_job_ends(self) -> None:
        story = waiting(6, nodes=2)
        story.device["gpu_memory_used_bytes"][-6:, 2:] = 5e8
        story.device["gpu_utilization_ratio"][-6:, 0] = 0.0
        assert GONE.detect(story.window()) == []

    def rare(self, rows: int) -> Window:
        """As rows that are 15 s apart show it: what was n1's is free in the newest ``rows``, n3's one row later."""
        story = waiting(rows, nodes=8)
        story.device["gpu_memory_used_bytes"][-rows:, 2:4] = 5e8
        story.device["gpu_memory_used_bytes"][1 - rows :, 6:8] = 5e8
        window = story.window()
        times_s = window.now_s - 15.0 * np.arange(len(window.times_s))[::-1]
        return dataclasses.replace(window, interval_s=15.0, times_s=times_s, node={}, node_times_s=times_s)

    def test_several_that_ended_together_name_nobody_once_no_scheduler_would_let_the_others_live(self) -> None:
        assert GONE.detect(self.rare(4)) == []
        verdict = only(GONE.detect(self.rare(7)))
        assert (verdict.fault, verdict.node, verdict.nodes) == ("process_crash", None, ())

    def test_others_that_nobody_has_seen_since_do_not_count_as_holding_on(self) -> None:
        story = waiting(6)
        story.device["gpu_memory_used_bytes"][-6:, 3] = 5e8
        for name in ("gpu_memory_used_bytes", "gpu_power_watts"):
            story.device[name][-5:, 4:] = np.nan
        assert GONE.detect(story.window()) == []

    def test_all_that_ended_in_rows_of_different_moments_have_ended_together(self) -> None:
        story = waiting(50, nodes=8)
        story.device["gpu_memory_used_bytes"][-50:] = 5e8
        story.device["gpu_memory_used_bytes"][-2:, 8:] = np.nan
        assert GONE.detect(story.window()) == []

    def test_a_gpu_that_counts_memory_errors_is_the_cause_and_named_first(self) -> None:
        story = waiting(6)
        story.device["gpu_memory_used_bytes"][-6:, 3] = 5e8
        story.device["gpu_ecc_uncorrected_total"][-2:, 3] += 1
        assert GONE.detect(story.window()) == []
        assert only(MEMORY.detect(story.window())).node == "n1"

    def test_an_oom_kill_and_a_gpu_that_is_free_need_no_steps(self) -> None:
        story = waiting(3).happened("oom_kill", "n1", 3, process="train")
        story.device["gpu_memory_used_bytes"][-3:, 3] = 5e8
        assert only(KILLS.detect(story.window())).kinds == {"oom_kill", "gpu_memory_freed"}


class TestGpuHangWithoutHook:
    def gone(self, story: Story, rows: int) -> Story:
        for values in story.device.values():
            values[-rows:, 3] = np.nan
        return story

    def test_a_device_that_stopped_answering_when_the_others_began_to_wait_hangs(self) -> None:
        verdict = only(HANGS.detect(self.gone(waiting(20), 20).window()))
        assert (verdict.fault, verdict.node, verdict.device) == ("gpu_hang", "n1", 1)
        assert verdict.kinds == {"device_silence", "standstill"}

    def test_for_ten_seconds_it_cannot_tell(self) -> None:
        with pytest.raises(Blind, match="n1/gpu1 does not answer"):
            HANGS.detect(self.gone(waiting(6), 6).window())

    def test_a_pause_no_longer_than_the_jobs_own_proves_nothing(self) -> None:
        story = waiting(20)
        story.device["gpu_power_watts"][10:30] = 230.0
        story.device["gpu_tensor_active_ratio"][10:30] = 0.0
        with pytest.raises(Blind, match="n1/gpu1 does not answer"):
            HANGS.detect(self.gone(story, 20).window())

    @pytest.mark.parametrize("rows", [0, 40])
    def test_while_the_others_work_or_waited_long_before_it_cannot_tell(self, rows: int) -> None:
        """Of those that waited before it knows when the device has been silent for the floor."""
        story = waiting(rows) if rows else without_hook()
        with pytest.raises(Blind, match="n1/gpu1 does not answer"):
            HANGS.detect(self.gone(story, 9).window())


class TestProcessExit:
    @pytest.mark.parametrize(
        ("code", "name"), [(139, "SIGSEGV"), (137, "SIGKILL"), (135, "SIGBUS"), ("139", "SIGSEGV")]
    )
    def test_shells_and_containers_report_signals_their_own_way(self, code: Any, name: str) -> None:
        verdict = only(EXITS.detect(ended(("n2", code, 5), ("n0", 1, 4.9), ("n1", 134, 4.8)).window()))
        assert verdict.node == "n2"
        assert name in verdict.summary

    @pytest.mark.parametrize("code", [143, 130, 129, 0, 0.0, "0"])
    def test_a_planned_end_is_planned_however_it_is_reported(self, code: Any) -> None:
        assert EXITS.detect(ended(("n2", code, 5)).window()) == []

    def test_a_rank_is_known_by_its_device_where_the_event_does_not_say(self) -> None:
        assert only(EXITS.detect(ended(("n2", -11, 5)).window())).summary.startswith("rank 4 on n2")
        lost = Story().complete().happened("process_exit", "n2", 5, exit_code=-11)
        assert only(EXITS.detect(lost.window())).summary.startswith("a rank on n2")

    def test_a_lone_end_without_words_was_the_first(self) -> None:
        assert EXITS.detect(ended(("n2", 1, 1.5)).window()) == []
        assert only(EXITS.detect(ended(("n2", 1, 3)).window())).node == "n2"

    def test_so_was_one_that_came_clearly_before_the_others(self) -> None:
        assert only(EXITS.detect(ended(("n2", 1, 9), ("n0", 1, 5), ("n1", -6, 4)).window())).node == "n2"

    def test_ends_at_one_moment_without_words_accuse_nobody(self) -> None:
        assert only(EXITS.detect(ended(("n2", 1, 5.2), ("n0", 1, 5), ("n1", 134, 4)).window())).node is None

    def test_who_gives_up_first_in_a_job_that_hangs_is_chance(self) -> None:
        story = ended(("n2", 134, 5)).standstill(40)
        assert only(EXITS.detect(story.window())).node is None

    def test_an_exit_waits_while_its_gpu_may_have_vanished(self) -> None:
        def missing(seconds: int) -> Story:
            story = ended(("n2", 1, seconds)).hardware()
            for name in [name for name in story.device if name.startswith("gpu_")]:
                story.device[name][-seconds:, 4] = np.nan
            return story

        assert EXITS.detect(missing(5).window()) == []
        assert only(EXITS.detect(missing(9).window())).node == "n2"

    def test_a_crash_waits_while_the_hardware_beneath_it_is_looked_at(self) -> None:
        assert EXITS.detect(ended(("n2", -6, 2)).happened("xid", "n2", 2, 0, code=48).window()) == []
        counted = ended(("n2", -6, 2))
        counted.device["gpu_ecc_uncorrected_total"][-2:, 4] = 1
        assert EXITS.detect(counted.window()) == []
        assert only(EXITS.detect(ended(("n2", -6, 4)).happened("xid", "n2", 4, 0, code=48).window())).node == "n2"

    def test_a_crash_by_the_programs_word_on_failing_memory_waits_for_the_kernels(self) -> None:
        text = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
        assert EXITS.detect(Story().exit("n2", -6, 9, text).window()) == []
        assert only(EXITS.detect(Story().exit("n2", -6, 15, text).window())).node == "n2"

    def test_an_echo_is_never_first(self) -> None:
        assert only(EXITS.detect(Story().complete().exit("n2", 1, 5, ECHO).window())).node is None

    @pytest.mark.parametrize("code", [13, 31, 43])
    def test_a_programs_xid_on_its_gpu_makes_the_crash_the_programs(self, code: int) -> None:
        story = ended(("n2", 1, 5.0), ("n0", 1, 4.9)).happened("xid", "n2", 5, 0, code=code)
        verdict = only(EXITS.detect(story.window()))
        assert (verdict.node, verdict.application) == ("n2", True)
        assert "xid" in verdict.kinds

    def test_a_corrupted_push_buffer_names_the_first_but_not_the_program(self) -> None:
        story = ended(("n2", 1, 5.0), ("n0", 1, 4.9)).happened("xid", "n2", 5, 0, code=32)
        verdict = only(EXITS.detect(story.window()))
        assert (verdict.node, verdict.application) == ("n2", False)

    def test_an_xid_of_another_gpu_or_time_is_no_witness(self) -> None:
        story = ended(("n2", -11, 5)).happened("xid", "n2", 5, 1, code=31).happened("xid", "n2", 50, 0, code=13)
        assert not only(EXITS.detect(story.window())).application

    def test_the_same_traceback_everywhere_is_the_programs(self) -> None:
        story = Story()
        for node in story.nodes:
            story.exit(
                node, 1, 5, 'Traceback (most recent call last):\n  File "x.py"\nmylib.ConfigError: no such field'
            )
        verdict = only(EXITS.detect(story.window()))
        assert (verdict.node, verdict.application) == (None, True)

    @pytest.mark.parametrize(
        "text",
        [
            "RuntimeError: CUDA error: unspecified launch failure",
            "OSError: [Errno 5] I/O error",
            "IndexError: list index out of range",
        ],
    )
    def test_an_exception_on_one_node_alone_is_not_the_programs(self, text: str) -> None:
        verdict = only(EXITS.detect(Story().exit("n1", 1, 5, text).exit("n0", 1, 5, ECHO).window()))
        assert (verdict.node, verdict.application) == ("n1", False)
