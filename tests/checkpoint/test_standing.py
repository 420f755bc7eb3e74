"""How a job's checkpoints stand, as the store says in its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.checkpoint.held_job import HeldJob, ShardSlots
from eagle_eye.checkpoint.messages import Agreed, Captured, CopyInfo, Skipped
from eagle_eye.checkpoint.slots import Needed
from eagle_eye.checkpoint.store import LOOK_EVERY_S, StandingFile, standing_of
from eagle_eye.schema.checkpoint_files import (
    OLDER_MAX,
    SAID_EVERY_S,
    STANDING_FILE,
    JobStanding,
    OlderStep,
    read_standing,
)
from tests.checkpoint.stores import JOB, Node, Rank, opened, running, until

SHARD = b"state" * 1000


def job_of(folder: Path) -> JobStanding | None:
    said = read_standing(folder)
    return said.jobs[0] if said is not None and said.jobs else None


def said(node: Node, holds: Callable[[JobStanding], bool]) -> JobStanding:
    """Return what the store says as soon as it is so."""
    found: list[JobStanding] = []

    def is_said() -> bool:
        job = job_of(node.folder)
        if job is not None and holds(job):
            found.append(job)
        return bool(found)

    until(is_said, f"{job_of(node.folder)} is otherwise")
    return found[0]


def captured(ranks: list[Rank], step: int, blocked_s: float = 0.25, captured_s: float = 1.7e9) -> None:
    """All ranks capture the step, each a second after the one before, and it is whole."""
    for number, rank in enumerate(ranks):
        slot = rank.granted()
        rank.slots[slot][: len(SHARD)] = SHARD
        rank.connection.send(Captured(step, slot, len(SHARD), (), captured_s + number, blocked_s))
    for rank in ranks:
        rank.whole(step)


class Job:
    """A job with a rank on each of two nodes."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.ranks: list[Rank] = []

    def begins(self, **changes: Any) -> list[Rank]:
        self.ends()
        self.ranks = opened(self.nodes, **changes)
        return self.ranks

    def ends(self) -> None:
        for rank in self.ranks:
            rank.connection.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with running([tmp_path / "a", tmp_path / "b"]) as nodes:
        made = Job(nodes)
        yield made
        made.ends()


def test_a_store_says_which_step_is_whole_and_what_that_cost(job: Job) -> None:
    ranks = job.begins()
    captured(ranks, 1)
    captured(ranks, 2)
    for node in job.nodes:
        found = said(node, lambda one: one.whole_step == 2 and one.sent_bytes == 2 * len(SHARD))
        assert (found.job, found.attempt, found.step, found.captured, found.skipped) == (JOB, 1, 2, 2, 0)
        assert (found.copies, found.copies_wanted, found.blocked_s) == (2, 2, 0.5)
        assert found.reserved_bytes == 6 * len(SHARD)


def test_a_store_says_which_older_steps_it_has_and_when_its_own_ranks_captured_them(job: Job) -> None:
    ranks = job.begins(reach_s=100.0)
    for step in range(1, 7):
        captured(ranks, step, captured_s=30.0 * step)
    for number, node in enumerate(job.nodes):
        found = said(node, lambda one: one.whole_step == 6)
        assert found.older == [OlderStep(step, 30.0 * step + number) for step in (2, 4, 5)]


def test_a_store_that_lacks_a_shard_of_an_older_step_does_not_name_it(job: Job) -> None:
    ranks = job.begins()
    captured(ranks, 1)
    captured(ranks, 2)
    said(job.nodes[0], lambda one: [older.step for older in one.older] == [1])
    (held,) = job.nodes[0].store._jobs.values()
    shard, slot = next((shard, slot) for shard, slot, copy in held.job.copies() if (copy.rank, copy.step) == (1, 1))
    del shard.sums[slot]  # as where its checksum does not fit
    assert said(job.nodes[0], lambda one: not one.older).copies == 2


def test_of_many_older_steps_the_oldest_and_the_newest_are_among_those_that_are_said(tmp_path: Path) -> None:
    job = HeldJob("llm", b"", tmp_path)
    shard = ShardSlots(0, "1-p", 10, local=True, wanted=30)
    shard.slots.holds = [CopyInfo("1-p", 0, step, 10, (), float(step)) for step in range(30)]
    shard.sums = dict.fromkeys(range(30), b"")
    job.shards[shard.key] = shard
    job.needed = Needed(keep=30, whole=set(range(30)))
    reported = [older.step for older in standing_of(job, 0.0).older]
    assert (len(reported), reported[:2], reported[-1]) == (OLDER_MAX, [0, 1], 28)


def test_a_step_that_is_skipped_is_one_that_ranks_have_come_to(job: Job) -> None:
    ranks = job.begins()
    captured(ranks, 1)
    ranks[0].connection.send(Skipped(2, "no slot is free"))
    found = said(job.nodes[0], lambda one: one.void == 1)
    assert (found.step, found.whole_step, found.skipped) == (2, 1, 1)
    assert said(job.nodes[1], lambda one: one.void == 1).skipped == 0


def test_a_step_that_was_not_due_was_not_captured_either(job: Job) -> None:
    ranks = job.begins()
    ranks[0].connection.send(Skipped(1, "no slot is free"))
    ranks[0].connection.send(Skipped(2, "another capture is due", due=False))
    assert said(job.nodes[0], lambda one: one.step == 2).skipped == 2


def test_a_store_says_which_processes_are_its_ranks(job: Job) -> None:
    ranks = job.begins()
    assert said(job.nodes[0], lambda one: bool(one.pids)).pids == [os.getpid()]
    ranks[0].connection.close()
    said(job.nodes[0], lambda one: not one.pids)


def test_a_new_attempt_has_its_own_steps_and_goes_on_counting(job: Job) -> None:
    ranks = job.begins()
    captured(ranks, 1)
    captured(ranks, 2)
    job.begins(attempt=2, step=1, resumed_step=1, resumed_attempt=1)
    for node in job.nodes:
        found = said(node, lambda one: one.attempt == 2 and one.copies_wanted == 2)
        assert (found.step, found.whole_step, found.copies, found.captured) == (1, 1, 2, 2)


def test_a_store_that_ends_says_nothing_any_more(job: Job) -> None:
    job.begins()
    said(job.nodes[0], lambda _: True)
    job.nodes[0].stop()
    assert not (job.nodes[0].folder / STANDING_FILE).exists()


class Watched:
    """A file that is said at times of the test's choosing; ``writes`` counts how often it was written."""

    def __init__(self, folder: Path) -> None:
        self.job = HeldJob("llm", b"", folder)
        self.writes = 0
        self._folder = folder
        self._file = StandingFile(folder, self._unix_s)

    def _unix_s(self) -> float:
        self.writes += 1
        return 1.7e9

    def says(self, now_s: float) -> JobStanding | None:
        self._file.say([self.job], now_s)
        return job_of(self._folder)


def test_changes_are_written_twice_a_second_at_most(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    for look in range(100):
        watched.job.came_to(look)
        watched.says(10.0 + 0.01 * look)
    assert watched.writes == 2


def test_what_has_not_changed_is_written_now_and_then(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.says(0.0)
    watched.says(SAID_EVERY_S - 0.1)
    assert watched.writes == 1
    watched.says(SAID_EVERY_S + LOOK_EVERY_S)
    assert watched.writes == 2


def test_a_file_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "not yet")
    assert watched.says(0.0) is None
    (tmp_path / "not yet").mkdir()
    assert watched.says(1.0) is not None


def test_how_long_writing_to_storage_takes_is_said_while_it_does(tmp_path: Path) -> None:
    job = HeldJob("llm", b"", tmp_path)
    job.needed = Needed(keep=1)
    job.needed.agree(Agreed(0, whole=(4,), persist=4))
    job.persisting_since_s = 100.0
    assert standing_of(job, 130.0).persisting_for_s == 30.0
    job.needed.agree(Agreed(0, persisted=4))
    assert standing_of(job, 130.0).persisting_for_s is None
