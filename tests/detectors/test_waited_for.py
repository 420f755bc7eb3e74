"""Direct evidence against one rank while all others wait for it: a stopped process, a silent node."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.progress.hang import CONFIDENCE_RIPE, Hang
from eagle_eye.detectors.progress.node_silent import NodeSilent
from eagle_eye.detectors.signs.exits import unplanned_exits
from eagle_eye.detectors.signs.progress import Patience
from eagle_eye.detectors.types import Blind, Pause, Verdict
from tests.detectors.windows import NOW_S, Story

PATIENCE = Patience(floor_s=10, typical_steps=3, start_deadline_s=1800, warmup_steps=3)
HANG = Hang(patience=PATIENCE, rank_silent_s=5, silent_node_s=10)
SILENT = NodeSilent(patience=PATIENCE, intervals=4, floor_s=10, alone_s=300)
CULPRIT = 2


def job(standstill: int, quorum: float | None = None, rows: int = 120) -> Story:
    """A job that has often paused for longer than it stands now."""
    story = Story(rows=rows).standstill(standstill)
    story.pauses = [Pause("", 100.0)] * 3
    if quorum is not None:
        story.device["train_quorum"] = np.full(story.device["train_step"].shape, quorum)
    return story


def stopped(story: Story, standstill: int, state: float = 1.0, column: int = CULPRIT) -> Story:
    """The rank has said nothing since its last step; its agent reports its process's state."""
    for name, values in story.device.items():
        if name != "train_quorum":
            values[-standstill + 2 :, column] = np.nan
    story.device["nccl_sequence"][-standstill : -standstill + 2, column] -= 1
    values = story.device.setdefault("rank_stopped_ratio", np.full(story.device["train_step"].shape, np.nan))
    values[-standstill + 2 :, column] = state
    story.silent_s[column] = standstill - 2
    return story


def silent(story: Story, standstill: int, column: int = CULPRIT) -> Story:
    for values in story.device.values():
        values[-standstill + 1 :, column] = np.nan
    story.heard_s[column] = NOW_S - standstill
    return story


def said(detector: Hang | NodeSilent, story: Story) -> list[Verdict]:
    try:
        return detector.detect(story.window())
    except Blind:
        return []


def sure(verdicts: list[Verdict]) -> list[str | None]:
    return [verdict.node for verdict in verdicts if verdict.confidence >= CONFIDENCE_RIPE]


@pytest.mark.parametrize("quorum", [None, 5.0])
def test_a_stopped_process_that_all_wait_for_is_acted_on_at_the_floor_whatever_the_job_s_pauses(
    quorum: float | None,
) -> None:
    assert sure(said(HANG, stopped(job(8, quorum), 8))) == []
    (verdict,) = said(HANG, stopped(job(12, quorum), 12))
    assert (verdict.node, verdict.confidence) == ("n2", CONFIDENCE_RIPE)
    own = set() if quorum is None else {"quorum"}
    assert verdict.kinds == {"standstill", "rank_silence", "process_stopped", "collective_sequence", *own}


def test_a_process_stopped_in_the_attempts_first_steps_is_acted_on_at_the_floor() -> None:
    assert said(HANG, stopped(job(8, rows=10), 8)) == []
    assert sure(said(HANG, stopped(job(12, rows=14), 12))) == ["n2"]
    assert said(HANG, stopped(job(12, rows=14), 12, state=0.0)) == []


def test_one_that_runs_may_pause_as_the_job_did_before() -> None:
    assert sure(said(HANG, stopped(job(40), 40, state=0.0))) == []


def test_a_stopped_process_is_left_alone_while_another_rank_does_not_wait() -> None:
    story = stopped(job(12), 12)
    story.device["nccl_sequence"][-12:, 0] -= 1
    assert sure(said(HANG, story)) == []


def test_a_stopped_process_in_a_phase_without_steps_is_left_alone() -> None:
    story = stopped(job(12), 12)
    story.phase = ["checkpoint"] * 4
    assert sure(said(HANG, story)) == []


def test_nobody_waits_for_a_replica_group_that_has_left_the_quorum() -> None:
    story = stopped(job(12, 5.0), 12)
    story.device["train_quorum"][:, CULPRIT] = 4.0
    assert sure(said(HANG, story)) == []


def test_what_another_quorum_s_replica_groups_do_holds_nothing_up() -> None:
    story = stopped(job(12, 5.0), 12)
    story.device["train_quorum"][:, 0] = 4.0
    story.device["nccl_sequence"][-12:, 0] -= 1
    assert sure(said(HANG, story)) == ["n2"]


def test_the_silent_node_of_a_replica_group_that_its_quorum_waits_for_is_acted_on_at_the_floor() -> None:
    assert sure(said(SILENT, silent(job(12, 5.0), 12))) == ["n2"]


def test_a_silent_node_without_replica_groups_may_be_silent_in_a_pause_of_the_job() -> None:
    assert sure(said(SILENT, silent(job(12), 12))) == []


def test_a_silent_node_is_not_to_blame_while_another_group_does_not_wait() -> None:
    story = silent(job(12, 5.0), 12)
    story.device["nccl_sequence"][-12:, 0] -= 1
    assert sure(said(SILENT, story)) == []


def test_a_silent_node_that_has_left_the_quorum_is_not_to_blame() -> None:
    story = silent(job(12, 5.0), 12)
    story.device["train_quorum"][:-30, CULPRIT] = 4.0
    story.device["train_quorum"][-30:, CULPRIT] = np.nan
    assert sure(said(SILENT, story)) == []


@pytest.mark.parametrize(("quorum", "counted"), [(None, 1), (5.0, 0)])
def test_an_exit_is_over_once_replica_groups_have_made_another_step(quorum: float | None, counted: int) -> None:
    assert len(unplanned_exits(job(12, quorum).exit("n1", -11, before_s=30).window())) == counted
    assert len(unplanned_exits(job(12, quorum).exit("n1", -11, before_s=5).window())) == 1


@pytest.mark.parametrize(("before", "named"), [(5.0, []), (4.0, ["n2"])])
def test_a_silence_that_passed_excuses_the_next_one_unless_the_group_left_its_quorum_by_it(
    before: float, named: list[str]
) -> None:
    story = silent(job(12, 5.0), 12)
    story.device["train_quorum"][:40] = before
    for values in story.device.values():
        values[40:80, CULPRIT] = np.nan
    assert sure(said(SILENT, story)) == named
