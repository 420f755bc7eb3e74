"""Standstills: who holds the job up, when that may be acted on, and what is a pause."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eagle_eye.detectors.progress.hang import CONFIDENCE_EARLY, CONFIDENCE_RIPE, Hang
from eagle_eye.detectors.signs.host_activity import busy_with_io
from eagle_eye.detectors.signs.progress import Patience
from eagle_eye.detectors.types import Blind, Evidence, Pause, Verdict, WindowEvent
from tests.detectors.slow_stories import hookless, without
from tests.detectors.windows import NOW_S, Story

PATIENCE = Patience(floor_s=60, typical_steps=3, start_deadline_s=1800, warmup_steps=3)
DETECTOR = Hang(patience=PATIENCE, rank_silent_s=10, silent_node_s=10)


def job(rows: int = 120, standstill: int = 20, step_s: float = 2.0) -> Story:
    story = Story(nodes=8, rows=rows).hardware()
    story.device["train_step_seconds"][:] = step_s
    story.standstill(standstill)
    return story.waiting(standstill - 1)


def lagging(story: Story, columns: list[int], standstill: int = 20) -> Story:
    story.device["nccl_sequence"][-standstill:, columns] -= 1
    return story


def said(story: Story) -> list[Verdict]:
    return DETECTOR.detect(story.window())


def test_a_lagging_rank_is_the_culprit_at_the_floor_and_may_be_pausing_before() -> None:
    (verdict,) = said(lagging(job(), [3]))
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_EARLY)
    (verdict,) = said(lagging(job(standstill=70), [3], 70))
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_RIPE)
    assert verdict.kinds == {"standstill", "collective_sequence"}


def test_a_lagging_rank_is_reported_as_soon_as_a_step_is_overdue() -> None:
    (verdict,) = said(lagging(job(standstill=7), [3], 7))
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_EARLY)


@pytest.mark.parametrize("rows", [3, 60, 300])
def test_low_power_alone_cannot_tell_whether_gpus_wait(rows: int) -> None:
    story = hookless(Story(nodes=4, rows=900).hardware())
    story = without(story, "gpu_tensor", "gpu_dram", "gpu_sm_active", "gpu_nvlink", "gpu_pcie", "node_rdma")
    assert said(story) == []
    power = story.device["gpu_power_watts"].copy()
    power[-rows:] *= 150 / 530
    story.device["gpu_power_watts"] = power
    with pytest.raises(Blind, match="no counter that training alone moves is observed"):
        said(story)


def test_short_steps_wait_for_the_floor() -> None:
    (verdict,) = said(lagging(job(step_s=0.04), [3]))
    assert verdict.confidence == CONFIDENCE_EARLY
    (verdict,) = said(lagging(job(standstill=70, step_s=0.04), [3], 70))
    assert verdict.confidence == CONFIDENCE_RIPE


def test_a_host_that_writes_may_be_saving_a_checkpoint_that_nobody_announced() -> None:
    story = lagging(job(standstill=100), [0], 100)
    story.node["node_disk_write_bytes_per_second"][-100:, 0] = 2e9
    (verdict,) = said(story)
    assert (verdict.node, verdict.confidence) == ("n0", CONFIDENCE_EARLY)


def test_a_write_that_has_lasted_since_before_the_window_is_still_one() -> None:
    story = lagging(job(standstill=100), [0], 100)
    story.node["node_disk_write_bytes_per_second"][-100:, 0] = 2e9
    whole = story.window()
    later = dataclasses.replace(
        whole,
        times_s=whole.times_s[-60:],
        node_times_s=whole.node_times_s[-60:],
        device={name: values[-60:] for name, values in whole.device.items()},
        node={name: values[-60:] for name, values in whole.node.items()},
        advanced_s=whole.advanced_s - 900.0,
    )
    assert busy_with_io(later, 0, later.advanced_s) is True
    assert busy_with_io(later, 1, later.advanced_s) is None
    (verdict,) = DETECTOR.detect(later)
    assert (verdict.node, verdict.confidence) == ("n0", CONFIDENCE_EARLY)


def test_a_pipeline_that_lags_with_its_culprit_is_told_apart_by_what_its_gpus_do() -> None:
    story = lagging(job(), [2, 3, 6])
    story.device["gpu_utilization_ratio"][-19:, 3] = 0.0
    story.device["gpu_power_watts"][-19:, 3] = 90.0
    (verdict,) = said(story)
    assert verdict.node == "n3"
    assert verdict.kinds == {"standstill", "collective_sequence", "gpu_activity"}


def test_odd_gpus_alone_name_nobody() -> None:
    story = job(standstill=100)
    story.device["gpu_utilization_ratio"][-99:, 3] = 0.0
    (verdict,) = said(story)
    assert verdict.node is None


def test_all_ranks_in_one_collective_are_a_hang_of_unknown_culprit_after_the_floor() -> None:
    assert said(job(standstill=40)) == []
    (verdict,) = said(job(standstill=100))
    assert (verdict.node, verdict.asks) == (None, None)


def test_the_floor_itself_is_long_enough() -> None:
    assert len(said(job(standstill=int(PATIENCE.floor_s)))) == 1


def test_while_most_hosts_write_nothing_restarts_the_job() -> None:
    story = job(standstill=100)
    story.node["node_disk_write_bytes_per_second"][-100:] = 2e9
    assert said(story) == []


def test_a_job_that_pauses_outside_any_collective_does_not_hang() -> None:
    story = job(standstill=100)
    story.device["nccl_sequence"][-100:] -= 1
    assert said(story) == []


def test_an_evaluation_that_nobody_announced_keeps_the_gpus_at_work() -> None:
    story = job(standstill=100)
    story.device["gpu_tensor_active_ratio"][:] = 0.4
    story.device["gpu_power_watts"][:] = 610.0
    assert said(story) == []


def uncounted(standstill: int = 100) -> Story:
    """A job whose ranks report steps and no collectives."""
    story = job(standstill=standstill)
    story.device.pop("nccl_sequence")
    return story


def test_without_sequences_and_kernels_a_standstill_is_only_reported() -> None:
    story = uncounted()
    story.device.pop("gpu_utilization_ratio")
    (verdict,) = said(story)
    assert verdict.asks == "notify"


def test_without_sequences_gpus_that_all_run_a_kernel_and_do_no_work_wait_for_each_other() -> None:
    (verdict,) = said(uncounted())
    assert (verdict.node, verdict.asks) == (None, None)
    assert verdict.kinds == {"standstill", "gpu_activity"}


def test_without_sequences_gpus_that_run_nothing_may_be_pausing() -> None:
    story = uncounted()
    story.device["gpu_utilization_ratio"][-99:] = 0.0
    assert said(story) == []


def test_without_sequences_the_one_gpu_that_runs_nothing_and_whose_process_rests_is_the_culprit() -> None:
    story = uncounted()
    story.device["gpu_utilization_ratio"][-99:, 3] = 0.0
    assert [verdict.confidence for verdict in said(story)] == [CONFIDENCE_EARLY]
    story.device["rank_cpu_seconds_total"] = 1.2 * np.cumsum(np.ones((120, 8)), axis=0)
    story.device["rank_cpu_seconds_total"][-99:, 3] = story.device["rank_cpu_seconds_total"][-99, 3]
    (verdict,) = said(story)
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_RIPE)
    assert verdict.kinds == {"standstill", "gpu_activity", "rank_process"}


def test_ranks_inside_a_collective_outvote_power_that_kernels_keep_while_they_wait() -> None:
    story = job(standstill=100)
    story.device["gpu_power_watts"][:] = 600.0
    del story.device["gpu_tensor_active_ratio"], story.device["gpu_nvlink_tx_bytes_per_second"]
    (verdict,) = said(story)
    assert verdict.kinds == {"standstill", "collective_sequence"}


def test_sequences_that_start_from_other_offsets_are_no_lag() -> None:
    story = job(standstill=40)
    story.device["nccl_sequence"] += 100 * np.arange(8)
    assert said(story) == []


def test_sequences_seen_at_other_moments_of_fast_steps_are_no_lag() -> None:
    story = job(standstill=40, step_s=0.05)
    story.device["nccl_sequence"][:80] += np.random.default_rng(0).integers(0, 300, (80, 8))
    assert said(story) == []


def test_ranks_that_all_stand_elsewhere_accuse_nobody() -> None:
    story = job(standstill=40)
    story.device["nccl_sequence"][-40:] += np.random.default_rng(0).integers(0, 300, 8)
    assert said(story) == []


def test_a_node_whose_rows_tell_of_an_earlier_moment_does_not_lag() -> None:
    story = job(standstill=20)
    story.device["nccl_sequence"][-10:, 3] = story.device["nccl_sequence"][-1, 3] - np.arange(10, 0, -1)
    assert said(story) == []


def test_a_rank_that_ended_well_while_its_peers_wait_is_the_programs_fault() -> None:
    story = job(standstill=100)
    story.events.append(WindowEvent(NOW_S - 99, "n2", 0, "process_exit", {"exit_code": 0, "rank": 2}))
    (verdict,) = said(story)
    assert verdict.application
    assert verdict.node is None


def stuck(standstill: int) -> Story:
    """Return a job that a node holds up which neither launches nor writes, while its peers' GPUs wait."""
    story = lagging(job(rows=standstill + 100, standstill=standstill), [3], standstill)
    story.device["gpu_utilization_ratio"][-standstill + 1 :, 3] = 0.0
    story.device["gpu_power_watts"][-standstill + 1 :, 3] = 90.0
    return story


def processes(story: Story, standstill: int, cpus: float, bytes_per_s: float = 0.0, held: float = 0.0) -> Story:
    """Every rank's process spins for its GPU; since the standstill that of n3 uses so many processors."""
    rates = np.full(story.device["train_step"].shape, 1.2)
    rates[-standstill:, 3] = cpus
    story.device["rank_cpu_seconds_total"] = np.cumsum(rates, axis=0)
    moved = np.full(rates.shape, 4e6)
    moved[-standstill:] = 0.0
    moved[-standstill:, 3] = bytes_per_s
    story.device["rank_io_bytes_total"] = np.cumsum(moved, axis=0)
    story.device["rank_blocked_ratio"] = np.zeros(rates.shape)
    story.device["rank_blocked_ratio"][-standstill:, 3] = held
    return story


def test_a_lagging_ranks_evidence_is_by_how_much_it_lags() -> None:
    (verdict,) = said(lagging(job(), [3]))
    assert verdict.evidence[1:] == (Evidence("nccl_sequence_lag", "n3", 0, 1.0, 0.0, 0.0, "collectives"),)


def test_a_silent_ranks_evidence_is_its_silence() -> None:
    story = job(standstill=30)
    story.silent_s[3] = 28.0
    (verdict,) = said(story)
    assert verdict.evidence[1:] == (Evidence("rank_silence_seconds", "n3", 0, 28.0, 0.0, 10, "seconds"),)


def test_a_resting_process_is_evidence_beside_its_lag() -> None:
    (verdict,) = said(processes(stuck(45), 45, 0.01))
    assert [item.metric for item in verdict.evidence[1:]] == ["nccl_sequence_lag", "rank_cpu_seconds_total"]


def test_a_process_that_does_nothing_is_acted_on_once_the_job_has_never_paused_so_long() -> None:
    story = processes(stuck(45), 45, 0.01)
    story.pauses = [Pause("", 30.0)]
    (verdict,) = said(story)
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_RIPE)
    assert verdict.kinds == {"standstill", "collective_sequence", "gpu_activity", "rank_process"}


@pytest.mark.parametrize("pauses", [[], [Pause("", 4.0)], [Pause("", 45.0)], [Pause("eval", 45.0)]])
def test_within_the_jobs_own_pauses_and_without_any_the_floor_stays(pauses: list[Pause]) -> None:
    story = processes(stuck(45), 45, 0.01)
    story.pauses = pauses
    (verdict,) = said(story)
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_EARLY)


@pytest.mark.parametrize("doing", [{"cpus": 0.9}, {"cpus": 0.1, "bytes_per_s": 5e8}])
def test_a_process_that_compiles_or_writes_is_no_hang_for_half_an_hour(doing: dict[str, float]) -> None:
    story = processes(stuck(400), 400, **doing)
    (verdict,) = said(story)
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_EARLY)


def test_a_gpu_that_evaluates_for_the_others_is_no_hang() -> None:
    story = stuck(400)
    story.device["gpu_utilization_ratio"][-399:, 3] = 0.95
    story.device["gpu_tensor_active_ratio"][-399:, 3] = 0.3
    (verdict,) = said(story)
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_EARLY)


def test_a_process_that_the_kernel_holds_waits_for_the_floor() -> None:
    story = processes(stuck(45), 45, 0.0, held=1.0)
    story.pauses = [Pause("", 30.0)]
    (verdict,) = said(story)
    assert verdict.confidence == CONFIDENCE_EARLY


def test_a_processor_that_spins_for_a_kernel_is_no_work() -> None:
    story = processes(stuck(70), 70, 1.0)
    story.device["gpu_utilization_ratio"][-69:, 3] = 1.0
    (verdict,) = said(story)
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_RIPE)


@pytest.mark.parametrize(("cpus", "confidence"), [(0.0, CONFIDENCE_RIPE), (1.0, CONFIDENCE_EARLY)])
def test_a_process_that_says_nothing_may_be_too_busy_to(cpus: float, confidence: float) -> None:
    story = processes(stuck(30), 30, cpus)
    story.silent_s[3] = 28.0
    (verdict,) = said(story)
    assert (verdict.node, verdict.confidence) == ("n3", confidence)


@pytest.mark.parametrize("accused", [False, True])
def test_a_pause_in_which_nobody_stood_out_is_no_excuse_for_who_stands_out_in_two_ways(accused: bool) -> None:
    story = stuck(20)
    story.pauses = [Pause("", 50.0, accused)]
    verdicts = said(story)
    assert [verdict.node for verdict in verdicts] == ([] if accused else ["n3"])
    assert all(verdict.confidence == CONFIDENCE_EARLY for verdict in verdicts)


def test_a_usual_pause_excuses_a_node_whose_host_writes() -> None:
    story = stuck(20)
    story.pauses = [Pause("", 50.0)]
    story.node["node_disk_write_bytes_per_second"][-19:, 3] = 2e9
    assert said(story) == []


def test_a_usual_pause_excuses_a_node_of_whose_host_nobody_knows_what_it_does() -> None:
    story = stuck(20)
    story.pauses = [Pause("", 50.0)]
    story.node.clear()
    assert said(story) == []


@pytest.mark.parametrize("seconds", [50.0, 90.0])
def test_the_jobs_own_pauses_are_its_patience(seconds: float) -> None:
    story = lagging(job(standstill=70), [3], 70)
    story.pauses = [Pause("", seconds)]
    assert bool(said(story)) == (1.5 * seconds <= 70)


@pytest.mark.parametrize("went_on", [False, True])
def test_while_a_rank_has_just_gone_on_nobody_holds_the_job_up(went_on: bool) -> None:
    story = lagging(job(rows=60), [3])
    if went_on:
        story.device["nccl_sequence"][-20:-2, 1] -= 1
    story.times_s = NOW_S - 7.5 * np.arange(59, -1, -1)
    for line in range(60):  # nodes report in turn, each every 15 s
        for values in story.device.values():
            values[line, (line + 1) % 2 :: 2] = np.nan
    named = [(verdict.node, verdict.confidence) for verdict in DETECTOR.detect(story.window(interval_s=15.0))]
    assert named == ([] if went_on else [("n3", CONFIDENCE_RIPE)])


def test_a_process_that_compiles_is_seen_to_although_its_reading_before_the_newest_was_lost() -> None:
    story = processes(stuck(20), 20, cpus=2.7)
    story.times_s = NOW_S - 5.0 * np.arange(119, -1, -1)
    for line in range(120):  # nodes report in turn, each every 10 s
        for values in story.device.values():
            values[line, (line + 1) % 2 :: 2] = np.nan
    for values in story.device.values():
        values[-3, 3] = np.nan
    (verdict,) = DETECTOR.detect(story.window(interval_s=10.0))
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_EARLY)
