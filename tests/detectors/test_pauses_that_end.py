"""Pauses that end: what the job did meanwhile does not count as standing still, and the clock begins when it stops."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.progress.hang import Hang
from eagle_eye.detectors.signs.progress import Patience, progress
from eagle_eye.detectors.types import Verdict
from tests.detectors.windows import NOW_S, Story

PATIENCE = Patience(floor_s=60, typical_steps=3, start_deadline_s=1800, warmup_steps=3)
DETECTOR = Hang(patience=PATIENCE, rank_silent_s=10, silent_node_s=10)
BEFORE = 80  # rows of training
TENSOR, COUNT, DONE = "gpu_tensor_active_ratio", "nccl_sequence", "nccl_completed_sequence"


def stopped(pause: int, since: int, gpus: int = 2) -> Story:
    """Steps of two seconds, then ``pause`` rows in which the job may do something else, and ``since`` in a barrier."""
    story = Story(nodes=8, gpus=gpus, rows=BEFORE + pause + since).hardware()
    story.device["train_step_seconds"][:] = 2.0
    return story.standstill(pause + since).waiting(pause + since - 1)


def noise(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(5).normal(1.0, 0.03, shape)


def evaluated(pause: int, since: int, columns: slice | list[int] = slice(None)) -> Story:
    """These ranks' GPUs compute for ``pause`` rows, outside of any collective; all others wait for them."""
    story = stopped(pause, since)
    rows = slice(BEFORE, BEFORE + pause)
    story.device[COUNT][rows, columns] = story.device[DONE][rows, columns]
    for metric, level in ((TENSOR, 0.3), ("gpu_power_watts", 610.0)):
        story.device[metric][rows, columns] = level * noise(story.device[metric][rows, columns].shape)
    return story


def said(story: Story) -> list[Verdict]:
    return DETECTOR.detect(story.window())


@pytest.mark.parametrize("seconds", [200, 718])
def test_an_evaluation_that_has_just_ended_kills_nothing(seconds: int) -> None:
    assert said(evaluated(seconds, since=6)) == []


def test_ranks_that_evaluate_longer_than_others_kill_nothing() -> None:
    story = evaluated(718, since=30)
    story.device[TENSOR][-30:-4, 5:7] = 0.3 * noise((26, 2))
    assert said(story) == []


def test_outside_collectives_power_shows_an_evaluation_without_profiling() -> None:
    story = evaluated(300, since=6)
    del story.device[TENSOR]
    assert said(story) == []


def test_a_hang_after_an_evaluation_counts_from_its_end() -> None:
    (verdict,) = said(evaluated(200, since=70))
    assert (verdict.node, verdict.asks) == (None, None)
    assert verdict.onset_s == NOW_S - 69  # when the last rank entered the barrier


def test_one_rank_that_has_just_evaluated_alone_is_forgiven() -> None:
    assert said(evaluated(300, since=6, columns=[7])) == []


def test_few_that_compute_while_all_others_wait_are_a_livelock() -> None:
    story = stopped(65, since=0)
    story.device[TENSOR][BEFORE:, 7] = 0.3 * noise((65,))
    (verdict,) = said(story)
    assert (verdict.fault, verdict.asks) == ("hang", None)


def test_a_reading_that_is_stuck_is_no_evaluation() -> None:
    story = stopped(65, since=0)
    story.device[TENSOR][BEFORE - 1 :, 7] = 0.3
    assert len(said(story)) == 1


def test_a_rank_that_has_just_entered_the_collective_restarts_the_clock() -> None:
    story = stopped(300, since=6)
    story.device[COUNT][BEFORE : BEFORE + 300, 7] -= 1
    del story.device[TENSOR]
    assert said(story) == []


def test_ranks_that_enter_collectives_for_ever_still_hang() -> None:
    story = stopped(1900, since=0)
    story.device[COUNT][BEFORE:, 7] += np.arange(1900)
    assert len(said(story)) == 1


def test_a_write_of_most_hosts_that_has_just_ended_kills_nothing() -> None:
    story = stopped(100, since=6)
    story.node["node_disk_write_bytes_per_second"][BEFORE : BEFORE + 100] = 2e9 * noise((100, 8))
    assert said(story) == []


def test_the_computing_of_the_last_step_does_not_move_the_clock() -> None:
    story = stopped(20, since=0)
    story.device[TENSOR][BEFORE : BEFORE + 4] = 0.4 * noise((4, 16))
    assert progress(story.window(), PATIENCE).standstill_s == 20


def test_without_the_hook_an_evaluation_that_has_just_ended_is_no_standstill() -> None:
    story = evaluated(200, since=6)
    story.device["gpu_power_watts"][BEFORE : BEFORE + 200] = 300.0 * noise((200, 16))
    for name in [name for name in story.device if name.startswith(("train_", "nccl_"))]:
        del story.device[name]
    assert progress(story.window(), PATIENCE).standstill_s == 6
