"""How a job's checkpoints stand, as the store says in its file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_eye.checkpoint.held_job import HeldJob
from eagle_eye.checkpoint.messages import Agreed
from eagle_eye.checkpoint.slots import Needed
from eagle_eye.checkpoint.standing import LOOK_EVERY_S, StandingFile, standing_of
from eagle_eye.schema.memory_standing import SAID_EVERY_S, STANDING_FILE, JobStanding, read_standing
from tests.checkpoint.running_store import SHARD, Rank, running_store

WITHIN_S = 20.0


def job_of(folder: Path) -> JobStanding | None:
    said = read_standing(folder)
    return said.jobs[0] if said is not None and said.jobs else None


def said(folder: Path, holds: Callable[[JobStanding], bool]) -> JobStanding:
    """Return what the store says as soon as it is so."""
    until_s = time.monotonic() + WITHIN_S
    while (job := job_of(folder)) is None or not holds(job):
        assert time.monotonic() < until_s, job
        time.sleep(0.02)
    return job


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    with running_store(tmp_path / "store") as folder:
        yield folder


def test_a_store_says_which_step_is_whole_and_what_that_cost(store: Path) -> None:
    rank = Rank(store)
    rank.captures(1)
    rank.captures(2)
    job = said(store, lambda job: job.whole_step == 2)
    assert (job.job, job.attempt, job.step, job.captured, job.skipped) == ("llm", 1, 2, 2, 0)
    assert (job.copies, job.copies_wanted, job.blocked_s) == (1, 1, 0.5)
    assert job.reserved_bytes == 3 * len(SHARD)
    rank.close()


def test_a_step_that_is_skipped_is_one_that_ranks_have_come_to(store: Path) -> None:
    rank = Rank(store)
    rank.captures(1)
    rank.skips(2)
    job = said(store, lambda job: job.skipped == 1)
    assert (job.step, job.whole_step, job.void) == (2, 1, 1)
    rank.close()


def test_a_store_says_which_processes_are_its_ranks(store: Path) -> None:
    rank = Rank(store)
    assert said(store, lambda job: bool(job.pids)).pids == [os.getpid()]
    rank.close()
    said(store, lambda job: not job.pids)


def test_a_new_attempt_has_its_own_steps_and_goes_on_counting(store: Path) -> None:
    first = Rank(store)
    first.captures(1)
    first.captures(2)
    first.close()
    second = Rank(store, step=1, resumed_step=1)
    job = said(store, lambda job: job.attempt == 2)
    assert (job.step, job.whole_step, job.copies, job.captured) == (1, 1, 1, 2)
    second.close()


def test_a_store_that_ends_says_nothing_any_more(tmp_path: Path) -> None:
    with running_store(tmp_path / "store") as folder:
        rank = Rank(folder)
        said(folder, lambda _: True)
        rank.close()
    assert not (folder / STANDING_FILE).exists()


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
    job.needed.agree(Agreed(0, whole=4, persist=4))
    job.persisting_since_s = 100.0
    assert standing_of(job, 130.0).persisting_for_s == 30.0
    job.needed.agree(Agreed(0, persisted=4))
    assert standing_of(job, 130.0).persisting_for_s is None
