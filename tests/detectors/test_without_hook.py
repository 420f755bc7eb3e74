"""Jobs that report nothing themselves: what their GPUs, hosts and networks tell in place of steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eagle_eye.detectors.signs.activity_pace import changed_of_late
from eagle_eye.detectors.signs.gpu_activity import activity_outliers
from eagle_eye.detectors.signs.progress import Patience, Progress, progress
from eagle_eye.detectors.signs.without_hook import work
from eagle_eye.detectors.types import Blind, Verdict
from eagle_eye.server.engine.detector_schedule import build_detectors
from eagle_eye.server.engine.settings import DetectionSettings
from tests.detectors.windows import Story

DETECTORS = {detector.name: detector for detector in build_detectors(DetectionSettings())}
PATIENCE = Patience(floor_s=60, typical_steps=3, start_deadline_s=1800, warmup_steps=3)
ROWS = 400
TRAFFIC = ("_rx_bytes_per_second", "_tx_bytes_per_second")


def job(nodes: int = 8, rows: int = ROWS, gpus: int = 2) -> Story:
    story = Story(nodes=nodes, gpus=gpus, rows=rows).complete()
    for name in [name for name in story.device if name.startswith(("train_", "nccl_"))]:
        del story.device[name]
    story.device["gpu_memory_used_bytes"] = np.full((rows, gpus * nodes), 7e10)
    return story


def slower(story: Story, ratio: float, rows: int) -> Story:
    """The same work takes longer: everything that the job does in a second becomes less."""
    for values in (story.device, story.node, story.link):
        for name in values:
            if name == "gpu_tensor_active_ratio" or name.endswith(TRAFFIC):
                values[name][-rows:] /= 1 + ratio
    return story


def polling(story: Story, rows: int) -> Story:
    """Kernels that wait keep SMs and memory busy: a third of what training did."""
    for name, usual in (("gpu_dram_active_ratio", 0.4), ("gpu_sm_active_ratio", 0.8)):
        story.device[name] = np.full(story.device["gpu_power_watts"].shape, usual)
        story.device[name][-rows:] = 0.3 * usual
    return story.waiting(rows)


def said(name: str, story: Story) -> list[Verdict]:
    return DETECTORS[name].detect(story.window())


class TestWork:
    def test_gpus_at_work_are_not_idle(self) -> None:
        seen = work(job().window())
        assert seen is not None
        assert seen.idle_s == 0

    def test_gpus_that_only_wait_are_idle_since_the_last_row_of_work(self) -> None:
        story = job().waiting(30)
        seen = work(story.window())
        assert seen is not None
        assert (seen.idle_s, seen.since_s) == (30.0, float(story.times_s[-31]))

    def test_exporters_read_in_turns_show_idle_gpus(self) -> None:
        story = job().waiting(12)
        for values in story.device.values():
            for turn in range(4):  # each row has values of two of the eight nodes
                values[turn::4, [column for column in range(16) if column // 4 != turn]] = np.nan
        seen = work(story.window())
        assert seen is not None
        assert 8 <= seen.idle_s <= 16

    def test_those_that_are_still_heard_tell_of_a_job_most_of_which_is_silent(self) -> None:
        story = job().waiting(30)
        for name in story.device:
            story.device[name][-30:, :12] = np.nan
        seen = work(story.window())
        assert seen is not None
        assert seen.idle_s == 30.0

    def test_a_job_five_times_slower_is_not_idle(self) -> None:
        story = slower(job(), 4.0, rows=30)
        story.device["gpu_power_watts"][-30:] = 300.0
        seen = work(story.window())
        assert seen is not None
        assert seen.idle_s == 0

    def test_memory_that_kernels_poll_while_they_wait_is_no_work(self) -> None:
        seen = work(polling(job(), 30).window())
        assert seen is not None
        assert seen.idle_s == 30.0

    def test_memory_alone_says_that_a_job_goes_on(self) -> None:
        story = polling(job(), 30)
        for values in (story.device, story.node):
            for name in [name for name in values if name == "gpu_tensor_active_ratio" or name.endswith(TRAFFIC)]:
                del values[name]
        seen = work(story.window())
        assert seen is not None
        assert seen.idle_s == 0

    def test_power_that_hardly_falls_is_outvoted_by_tensor_cores_at_rest(self) -> None:
        story = job().waiting(30)
        story.device["gpu_power_watts"][-30:] = 450.0
        seen = work(story.window())
        assert seen is not None
        assert seen.idle_s == 30.0

    def test_a_job_that_never_used_tensor_cores_is_told_by_its_power(self) -> None:
        story = job().waiting(30)
        story.device["gpu_tensor_active_ratio"][:] = 0.0
        seen = work(story.window())
        assert seen is not None
        assert seen.idle_s == 30.0

    def kept(self, rows: int, without: tuple[str, ...] = ("gpu_tensor_active_ratio",)) -> Story:
        """A job whose kernels keep power, SMs and memory while they wait; tensor cores are not observed."""
        story = polling(job(), rows)
        for name, usual in (("gpu_power_watts", 600.0), ("gpu_sm_active_ratio", 0.7), ("gpu_dram_active_ratio", 0.4)):
            story.device[name][-rows:] = usual
        for name in without:
            story.device.pop(name, None)
            story.node.pop(name, None)
        return story

    def test_wires_on_which_nothing_moves_any_more_outvote_kernels_that_keep_all_else(self) -> None:
        seen = work(self.kept(30).window())
        assert seen is not None
        assert (seen.idle_s, seen.by_wires) == (30.0, True)

    def test_the_sum_of_both_directions_is_nvlink_too(self) -> None:
        story = self.kept(30)
        story.device["gpu_nvlink_bytes_per_second"] = 2 * story.device.pop("gpu_nvlink_tx_bytes_per_second")
        seen = work(story.window())
        assert seen is not None
        assert (seen.idle_s, seen.by_wires) == (30.0, True)

    def test_an_evaluation_that_moves_one_of_them_is_work(self) -> None:
        story = self.kept(30)
        story.device["gpu_nvlink_tx_bytes_per_second"][-30:] = 5e10
        seen = work(story.window())
        assert seen is not None
        assert seen.idle_s == 0

    def test_one_wire_alone_says_nothing(self) -> None:
        others = ("gpu_pcie_tx_bytes_per_second", "node_rdma_tx_bytes_per_second")
        seen = work(self.kept(30, ("gpu_tensor_active_ratio", *others)).window())
        assert seen is not None
        assert seen.idle_s == 0

    def test_a_wire_that_is_used_in_bursts_says_nothing_between_them(self) -> None:
        story = self.kept(8)
        story.device["gpu_nvlink_tx_bytes_per_second"][np.arange(ROWS) % 12 > 2] = 0.0
        seen = work(story.window())
        assert seen is not None
        assert seen.idle_s == 0

    def test_readings_of_one_device_that_repeat_are_no_work(self) -> None:
        story = job(nodes=3).waiting(30)
        story.device["gpu_tensor_active_ratio"][-30:, 0] = 0.45
        seen = work(story.window())
        assert seen is not None
        assert seen.idle_s == 30.0

    def test_a_source_that_is_rows_behind_repeats_what_was_before(self) -> None:
        story = job().waiting(10)
        story.device["gpu_tensor_active_ratio"][-10:-6] = 0.45
        seen = work(story.window())
        assert seen is not None
        assert seen.idle_s == 10.0

    def test_ports_that_the_job_does_not_use_keep_nothing_going(self) -> None:
        story = job().waiting(30)
        story.node["node_rdma_tx_bytes_per_second"][:] = 2e3
        seen = work(story.window())
        assert seen is not None
        assert seen.idle_s == 30.0

    def test_less_power_alone_is_no_standstill(self) -> None:
        story = job().waiting(30)
        story.device = {name: story.device[name] for name in ("gpu_power_watts", "gpu_utilization_ratio")}
        story.node = {}
        seen = work(story.window())
        assert seen is not None
        assert seen.idle_s == 0

    def test_without_power_and_profiling_nobody_knows(self) -> None:
        story = job()
        story.device = {"gpu_utilization_ratio": story.device["gpu_utilization_ratio"]}
        assert work(story.window()) is None


class TestProgress:
    def test_earlier_pauses_of_the_job_make_one_due_later(self) -> None:
        story = job()
        story.device["gpu_power_watts"][100:160] = 230.0
        story.device["gpu_tensor_active_ratio"][100:160] = 0.0
        story.waiting(30)
        assert progress(story.window(), PATIENCE).due_s == pytest.approx(1.5 * 61)

    def test_two_rows_without_work_between_scrapes_are_no_pause_of_old(self) -> None:
        story = job()
        story.device["gpu_tensor_active_ratio"][100] = 0.0
        rare = dataclasses.replace(
            story.waiting(60).window(), interval_s=15.0, times_s=1_000.0 - 15.0 * np.arange(ROWS - 1, -1, -1)
        )
        rare = dataclasses.replace(rare, node={}, node_times_s=rare.times_s)
        state = progress(rare, PATIENCE)
        assert (state.ripe, state.known_pause_s) == (True, 0.0)

    def test_a_job_that_has_hardly_worked_may_be_starting(self) -> None:
        with pytest.raises(Blind, match="may be starting"):
            progress(job(rows=90).waiting(60).window(), PATIENCE)

    def test_a_job_whose_processes_are_gone_has_ended(self) -> None:
        story = job().waiting(30)
        story.device["gpu_memory_used_bytes"][-30:] = 5e8
        with pytest.raises(Blind, match="processes have ended"):
            progress(story.window(), PATIENCE)

    def test_a_job_that_loads_its_weights_again_has_not_begun_to_work(self) -> None:
        story = job().waiting(90)
        story.device["gpu_memory_used_bytes"][-90:-60] = 5e8
        with pytest.raises(Blind, match="have ended"):
            progress(story.window(), PATIENCE)

    def test_where_nobody_says_what_gpus_do_it_cannot_tell(self) -> None:
        story = job()
        story.device = {"gpu_utilization_ratio": story.device["gpu_utilization_ratio"]}
        with pytest.raises(Blind, match="nobody what its GPUs do"):
            progress(story.window(), PATIENCE)


class TestHang:
    def culprit(self, rows: int) -> Story:
        story = job().waiting(rows)
        story.device["gpu_utilization_ratio"][-rows:, 4] = 0.0
        return story

    @pytest.mark.parametrize("rows", [70, 300])
    def test_the_gpu_that_runs_nothing_while_all_others_wait_is_only_reported(self, rows: int) -> None:
        (verdict,) = said("hang", self.culprit(rows))
        assert verdict.node == "n2"
        assert verdict.kinds == {"standstill", "gpu_activity"}
        assert verdict.confidence < 0.9

    def unseen(self, rows: int, device: int = 2) -> Story:
        """A GPU of n2 runs nothing while all others wait; of its process nothing is seen."""
        story = job(gpus=4).waiting(rows)
        story.device["gpu_utilization_ratio"][-rows:, 8 + device] = 0.0
        return story

    def test_a_rank_that_only_trains_on_a_host_that_does_no_more_is_the_culprit_after_three_floors(self) -> None:
        (verdict,) = said("hang", self.unseen(190))
        assert (verdict.node, verdict.confidence >= 0.9) == ("n2", True)
        (verdict,) = said("hang", self.unseen(170))
        assert (verdict.node, verdict.confidence >= 0.9) == ("n2", False)

    @pytest.mark.parametrize("device", [0, 3])
    def test_the_first_and_the_last_of_a_node_may_work_for_the_others(self, device: int) -> None:
        (verdict,) = said("hang", self.unseen(300, device))
        assert (verdict.node, verdict.confidence >= 0.9) == ("n2", False)

    def test_a_host_whose_processors_are_busier_than_its_peers_may_compile(self) -> None:
        story = self.unseen(300)
        story.node["node_cpu_utilization_ratio"][-300:] *= 0.6  # the others' loaders rest
        story.node["node_cpu_utilization_ratio"][-300:, 2] += 0.05
        (verdict,) = said("hang", story)
        assert (verdict.node, verdict.confidence >= 0.9) == ("n2", False)

    def test_processors_that_rest_as_all_others_do_hide_no_work(self) -> None:
        story = self.unseen(300)
        story.node["node_cpu_utilization_ratio"][:, 2] *= 3.0
        story.node["node_cpu_utilization_ratio"][-300:] *= 0.6
        (verdict,) = said("hang", story)
        assert (verdict.node, verdict.confidence >= 0.9) == ("n2", True)

    def test_a_process_that_is_seen_to_do_a_little_may_wait_for_a_download(self) -> None:
        story = self.unseen(300)
        rates = np.full(story.device["gpu_power_watts"].shape, 1.2)
        rates[-300:, 10] = 0.3
        story.device["rank_cpu_seconds_total"] = np.cumsum(rates, axis=0)
        (verdict,) = said("hang", story)
        assert (verdict.node, verdict.confidence >= 0.9) == ("n2", False)

    def test_where_nobody_sees_the_hosts_processors_it_is_only_reported(self) -> None:
        story = self.unseen(300)
        del story.node["node_cpu_utilization_ratio"]
        (verdict,) = said("hang", story)
        assert (verdict.node, verdict.confidence >= 0.9) == ("n2", False)

    def test_a_node_that_stands_by_hides_no_culprit(self) -> None:
        story = self.unseen(190)
        for metric in ("gpu_utilization_ratio", "gpu_tensor_active_ratio", "gpu_memory_used_bytes"):
            story.device[metric][:, -4:] = 0.0  # n7 has never worked
        story.device["gpu_power_watts"][:, -4:] = 70.0
        (verdict,) = said("hang", story)
        assert (verdict.node, verdict.confidence >= 0.9) == ("n2", True)

    def test_with_a_process_that_does_nothing_it_is_the_culprit_at_the_floor(self) -> None:
        story = self.culprit(70)
        story.device["rank_cpu_seconds_total"] = 1.2 * np.cumsum(np.ones((ROWS, 16)), axis=0)
        story.device["rank_cpu_seconds_total"][-70:, 4] = story.device["rank_cpu_seconds_total"][-70, 4]
        (verdict,) = said("hang", story)
        assert verdict.node == "n2"
        assert verdict.kinds == {"standstill", "gpu_activity", "rank_process"}
        assert verdict.confidence >= 0.9

    def test_gpus_of_many_nodes_that_run_nothing_are_no_hang_while_nobody_sees_their_processes(self) -> None:
        story = job().waiting(130)
        story.device["gpu_utilization_ratio"][-130:, :6] = 0.0
        assert said("hang", story) == []

    def test_before_the_floor_it_may_be_a_checkpoint(self) -> None:
        assert said("hang", self.culprit(40)) == []

    def resting(self, rows: int, cpus: float) -> Story:
        """As above, in a job that once paused for 20 s; since the standstill the process uses so many processors."""
        story = self.culprit(rows)
        for name, value in (("gpu_power_watts", 230.0), ("gpu_tensor_active_ratio", 0.0)):
            story.device[name][100:120] = value
        rates = np.full(story.device["gpu_power_watts"].shape, 1.2)
        rates[-rows:, 4] = cpus
        story.device["rank_cpu_seconds_total"] = np.cumsum(rates, axis=0)
        return story

    def test_a_process_that_does_nothing_needs_no_floor_in_a_job_that_never_paused_so_long(self) -> None:
        (verdict,) = said("hang", self.resting(45, 0.01))
        assert (verdict.node, verdict.confidence >= 0.9) == ("n2", True)
        assert said("hang", self.resting(28, 0.01)) == []

    def test_one_that_compiles_while_all_others_wait_is_not_reported(self) -> None:
        assert said("hang", self.resting(130, 0.9)) == []

    def test_where_all_wait_without_a_kernel_processors_that_all_use_are_no_work(self) -> None:
        story = job().waiting(70)
        story.device["gpu_utilization_ratio"][-70:] = 0.03
        story.device["gpu_utilization_ratio"][-70:, 4] = 0.99
        rates = np.full(story.device["gpu_power_watts"].shape, 1.2)
        story.device["rank_cpu_seconds_total"] = np.cumsum(rates, axis=0)
        assert [verdict.node for verdict in said("hang", story)] == ["n2"]
        rates[-70:, 5] = 3.0
        story.device["rank_cpu_seconds_total"] = np.cumsum(rates, axis=0)
        assert said("hang", story) == []

    def test_a_process_that_is_gone_does_not_hang(self) -> None:
        story = self.culprit(130)
        story.device["gpu_memory_used_bytes"][-130:, 4] = 5e8
        assert said("hang", story) == []

    def test_a_rank_that_writes_is_not_accused(self) -> None:
        story = self.culprit(130)
        story.node["node_disk_write_bytes_per_second"][-130:, 2] = 2e9
        assert said("hang", story) == []

    def evaluating(self, tensor: float) -> Story:
        """All GPUs run a kernel; a single one uses its tensor cores a little."""
        story = job(gpus=4).waiting(300)
        story.device["gpu_tensor_active_ratio"][:-300] = 0.09
        story.device["gpu_tensor_active_ratio"][-300:, 8] = tensor
        return story

    def test_a_single_gpu_that_evaluates_while_all_others_wait_is_no_hang(self) -> None:
        assert said("hang", self.evaluating(0.06)) == []

    def test_a_reading_that_is_stuck_since_before_the_standstill_is_no_evaluation(self) -> None:
        (verdict,) = said("hang", self.evaluating(0.09))
        assert (verdict.node, verdict.asks) == (None, None)

    def test_all_gpus_in_a_collective_are_a_hang_of_unknown_culprit_after_the_floor(self) -> None:
        (verdict,) = said("hang", job().waiting(70))
        assert (verdict.node, verdict.asks) == (None, None)
        assert verdict.kinds == {"standstill", "gpu_activity"}

    def test_gpus_that_run_nothing_at_all_are_a_pause(self) -> None:
        story = job().waiting(130)
        story.device["gpu_utilization_ratio"][-130:] = 0.0
        assert said("hang", story) == []

    def test_where_wires_alone_rest_it_may_be_an_evaluation(self) -> None:
        story = job().waiting(130)
        story.device["gpu_power_watts"][-130:] = 600.0
        del story.device["gpu_tensor_active_ratio"]
        with pytest.raises(Blind, match="or compute is not observed"):
            said("hang", story)

    def test_where_utilization_is_not_observed_it_cannot_tell(self) -> None:
        story = job().waiting(130)
        del story.device["gpu_utilization_ratio"]
        with pytest.raises(Blind, match="wait for each other"):
            said("hang", story)


def test_where_rows_are_rare_what_gpus_did_minutes_ago_does_not_count() -> None:
    story = job().waiting(20)
    story.device["gpu_utilization_ratio"][-20:, 4] = 0.0
    story.device["gpu_utilization_ratio"][-20:-4, 0] = 0.0  # wrote a checkpoint until a minute ago
    window = story.window()
    times_s = window.now_s - 15.0 * np.arange(len(window.times_s))[::-1]
    rare = dataclasses.replace(window, interval_s=15.0, times_s=times_s)
    assert activity_outliers(rare, since_s=float(times_s[-21])) == {2}


def test_where_nodes_report_in_turn_one_odd_reading_of_a_minute_is_not_another_activity() -> None:
    story = job().waiting(20)
    story.device["gpu_utilization_ratio"][-1, 0] = 0.0
    for values in story.device.values():
        values[::2, :8] = values[1::2, 8:] = np.nan
    window = story.window(interval_s=15.0)
    times_s = window.now_s - 7.5 * np.arange(len(window.times_s))[::-1]
    assert activity_outliers(dataclasses.replace(window, times_s=times_s), since_s=float(times_s[-21])) == set()


class TestSilence:
    def test_a_node_that_falls_silent_with_its_job_is_unreachable(self) -> None:
        story = job().waiting(70)
        story.heard_s[3] -= 70
        (verdict,) = said("node_silent", story)
        assert (verdict.node, "standstill" in verdict.kinds) == ("n3", True)

    def test_one_that_fell_silent_long_after_the_job_stopped_has_not_stopped_it(self) -> None:
        story = job().waiting(70)
        story.heard_s[3] -= 55
        assert said("node_silent", story) == []

    def test_one_that_falls_silent_while_the_gpus_rest_as_in_any_step_may_have_stopped_it(self) -> None:
        story = job().waiting(70)
        story.heard_s[3] -= 55
        for values in (story.device, story.node, story.link):
            for name in values:
                values[name][-150:-120] = values[name][-30:]
        (verdict,) = said("node_silent", story)
        assert (verdict.node, "standstill" in verdict.kinds) == ("n3", True)

    def test_where_kernels_keep_all_but_the_wires_it_is_unreachable_too(self) -> None:
        story = TestWork().kept(70)
        story.heard_s[3] -= 70
        (verdict,) = said("node_silent", story)
        assert (verdict.node, "standstill" in verdict.kinds) == ("n3", True)

    def test_while_most_hosts_write_it_is_a_checkpoint_that_nobody_announced(self) -> None:
        story = job().waiting(70)
        story.heard_s[3] -= 70
        story.node["node_disk_write_bytes_per_second"][-70:] = 2e9
        assert said("node_silent", story) == []


class TestNetwork:
    def test_errors_that_one_port_alone_counts_while_nothing_moves_exclude_its_node(self) -> None:
        story = job().waiting(70)
        story.link["link_errors_total"][-70:, 6] += 20.0 * np.arange(1, 71)
        (verdict,) = said("network_hang", story)
        assert (verdict.node, verdict.asks) == ("n3", None)
        assert verdict.kinds == {"standstill", "nic_errors"}
        assert verdict.confidence >= 0.9

    def flap(self) -> Story:
        """Return a job that stands still since a port of n3 fell and came back."""
        story = job().waiting(130)
        story.link["link_downed_total"][-131:, 6] += 1.0
        return story

    def test_a_flap_as_the_job_stopped_is_blamed_where_all_gpus_wait(self) -> None:
        (verdict,) = said("network_hang", self.flap())
        assert (verdict.node, verdict.asks) == ("n3", "restart_job")

    def test_a_flap_is_not_blamed_where_the_gpu_of_another_node_is_waited_for(self) -> None:
        story = self.flap()
        story.device["gpu_utilization_ratio"][-130:, 4] = 0.0
        assert said("network_hang", story) == []
        assert [verdict.node for verdict in said("hang", story)] == ["n2"]

    @pytest.mark.parametrize("fell", [150, 30])
    def test_a_port_that_fell_long_before_or_after_the_stop_has_not_caused_it(self, fell: int) -> None:
        story = job().waiting(90)
        story.link["link_up"][-fell:, 6] = 0.0
        assert said("network_hang", story) == []

    def test_a_port_that_errs_since_the_job_became_slower_is_degraded(self) -> None:
        story = slower(job(), 0.3, rows=80)
        story.link["link_errors_total"][-80:, 6] += 20.0 * np.arange(1, 81)
        (verdict,) = said("nic_degraded", story)
        assert (verdict.node, "job_activity" in verdict.kinds) == ("n3", True)
        assert verdict.slowdown_ratio == pytest.approx(0.3, rel=0.2)

    def test_notifications_and_pauses_everywhere_while_the_job_is_slower_are_congestion(self) -> None:
        story = slower(job(), 0.4, rows=100)
        story.node["node_pfc_rx_pause_packets_per_second"][-100:] = 3_000.0
        story.node["node_congestion_notifications_total"][-100:] += 500.0 * np.arange(1, 101)[:, None]
        (verdict,) = said("network_congestion", story)
        assert (verdict.node, verdict.asks) == (None, "notify")

    def test_hosts_that_all_wait_for_io_while_nothing_moves_wait_for_the_storage(self) -> None:
        story = job().waiting(40)
        story.node["node_iowait_ratio"][-40:] = 0.4
        for name in ("disk_read", "disk_write"):
            story.node[f"node_{name}_bytes_per_second"][-40:] = 1e6
        (verdict,) = said("storage_stall", story)
        assert verdict.fault == "storage_stall"

    def test_hosts_that_have_all_waited_for_io_for_a_minute_are_reported_even_where_the_job_tells_nothing(self) -> None:
        story = job()
        story.node["node_io_pressure_ratio"][-80:] = 0.6
        (verdict,) = said("storage_stall", story)
        assert "whether the job does is not known" in verdict.summary

    def test_hosts_that_write_while_they_wait_are_not(self) -> None:
        story = job()
        story.node["node_io_pressure_ratio"][-80:] = 0.6
        story.node["node_disk_write_bytes_per_second"][-80:] = 2e9
        assert said("storage_stall", story) == []


class TestPace:
    def test_a_lasting_slowdown_is_seen_and_measured(self) -> None:
        found = changed_of_late(slower(job(), 0.2, rows=150).window())
        assert found is not None
        assert found[0].growth == pytest.approx(0.2, rel=0.2)

    def test_a_pause_of_fifteen_seconds_is_no_slowdown(self) -> None:
        story = job()
        for name in [name for name in story.device if name.endswith(TRAFFIC)] + ["gpu_tensor_active_ratio"]:
            story.device[name][-25:-10] = 0.0
        story.node["node_rdma_tx_bytes_per_second"][-25:-10] = 0.0
        assert changed_of_late(story.window()) is None

    def test_ordinary_weather_is_none(self) -> None:
        assert changed_of_late(job().window()) is None


@pytest.mark.parametrize(("reported", "outlasting_s"), [(True, 36.0), (False, 52.0)])
def test_a_rest_of_gpus_outlasts_those_before_later_than_a_pause_of_steps(reported: bool, outlasting_s: float) -> None:
    """The longest of many rests is soon exceeded by a little."""
    seen = Progress(
        advanced_s=0.0,
        standstill_s=outlasting_s - 1.0,
        typical_step_s=1.0,
        due_s=30.0,
        ripe_s=60.0,
        phase="",
        accused_due_s=30.0,
        reported=reported,
        known_pause_s=26.0,
    )
    assert not seen.outlasts_pauses
    assert dataclasses.replace(seen, standstill_s=outlasting_s).outlasts_pauses
