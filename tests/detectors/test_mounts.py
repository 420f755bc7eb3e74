"""Hangs behind a network filesystem: a node that alone cannot reach it goes; storage that is down names nobody."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.progress.hang import CONFIDENCE_EARLY, CONFIDENCE_RIPE, Hang
from eagle_eye.detectors.progress.storage_stall import StorageStall
from eagle_eye.detectors.signs.progress import Patience
from eagle_eye.detectors.types import Pause, Verdict
from eagle_eye.server.engine.incidents import fuse
from tests.detectors.windows import Story

PATIENCE = Patience(floor_s=60, typical_steps=3, start_deadline_s=1800, warmup_steps=3)
DETECTOR = Hang(patience=PATIENCE, rank_silent_s=10, silent_node_s=10)
MOUNTS = "node_mounts_unresponsive"


def stuck(standstill: int = 70, *dead: int, lags: bool = True) -> Story:
    """The rank of n3 waits for a read that never returns; the mounts of ``dead`` nodes no longer answer."""
    story = Story(nodes=8, rows=standstill + 100).hardware()
    story.device["train_step_seconds"][:] = 2.0
    story.standstill(standstill).waiting(standstill - 1)
    story.device["gpu_utilization_ratio"][-standstill + 1 :, 3] = 0.0
    story.device["gpu_power_watts"][-standstill + 1 :, 3] = 90.0
    if lags:
        story.device["nccl_sequence"][-standstill:, 3] -= 1
    story.node["node_blocked_tasks"][-standstill:, 3] = 9.0
    story.node["node_iowait_ratio"][-standstill:, 3] = 0.4
    story.node[MOUNTS] = np.zeros((standstill + 100, 8))
    story.node[MOUNTS][-standstill + 20 :, list(dead)] = 1.0
    return story


def unhooked(standstill: int, *dead: int) -> Story:
    story = stuck(standstill, *dead)
    for name in [name for name in story.device if name.startswith(("train_", "nccl_"))]:
        del story.device[name]
    return story


def said(story: Story) -> list[Verdict]:
    return DETECTOR.detect(story.window())


def test_the_one_node_whose_mount_is_dead_leaves_at_the_floor() -> None:
    (verdict,) = said(stuck(70, 3))
    assert (verdict.node, verdict.confidence, verdict.asks) == ("n3", CONFIDENCE_RIPE, None)
    assert verdict.kinds == {"standstill", "collective_sequence", "gpu_activity", "mount"}
    assert "network filesystem" in verdict.summary


def test_before_the_floor_it_is_reported() -> None:
    (verdict,) = said(stuck(40, 3))
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_EARLY)


def test_a_job_that_never_paused_so_long_needs_no_floor() -> None:
    story = stuck(45, 3)
    story.pauses = [Pause("", 20.0)]
    (verdict,) = said(story)
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_RIPE)


def test_pauses_of_the_job_that_were_longer_excuse_it() -> None:
    story = stuck(70, 3)
    story.pauses = [Pause("", 60.0)]
    assert all(verdict.confidence == CONFIDENCE_EARLY for verdict in said(story))


def test_without_the_hook_it_leaves_at_the_floor_too() -> None:
    (verdict,) = said(unhooked(70, 3))
    assert (verdict.node, verdict.confidence) == ("n3", CONFIDENCE_RIPE)
    assert verdict.kinds == {"standstill", "gpu_activity", "mount"}


@pytest.mark.parametrize("dead", [(), (3, 4), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_mounts_that_answer_or_are_dead_elsewhere_too_exclude_nobody(dead: tuple[int, ...]) -> None:
    assert all(verdict.confidence == CONFIDENCE_EARLY for verdict in said(stuck(100, *dead)))
    assert said(unhooked(100, *dead)) == []


def test_a_mount_that_never_answered_is_not_why_the_job_stands() -> None:
    story = stuck(100, 3)
    story.node[MOUNTS][:, 3] = 1.0
    assert [verdict.confidence for verdict in said(story)] == [CONFIDENCE_EARLY]


def test_where_other_nodes_mounts_are_not_asked_it_has_no_witness() -> None:
    story = stuck(100, 3)
    story.node[MOUNTS][:, [n for n in range(8) if n != 3]] = np.nan
    assert [verdict.confidence for verdict in said(story)] == [CONFIDENCE_EARLY]


def test_a_node_whose_mount_is_dead_and_whose_rank_waits_with_all_others_is_not_accused() -> None:
    story = stuck(100, 3, lags=False)
    for metric in ("gpu_utilization_ratio", "gpu_power_watts"):
        story.device[metric][-99:, 3] = story.device[metric][-99:, 4]
    assert [verdict.node for verdict in said(story)] == [None]


def test_a_mount_elsewhere_does_not_acquit_the_rank_that_holds_all_up() -> None:
    (verdict,) = said(stuck(100, 5))
    assert verdict.node == "n3"
    assert "mount" not in verdict.kinds


def test_the_hang_explains_the_storage_that_its_node_waits_for() -> None:
    story = stuck(100, 3)
    window = story.window()
    found = fuse([*DETECTOR.detect(window), *StorageStall(patience=PATIENCE).detect(window)]).findings
    assert {family: finding.verdict.fault for family, finding in found.items()} == {"stop": "hang"}
