"""How checkpoints in memory stand, as the agent tells of its node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.agent.collector import Observed
from eagle_eye.agent.collectors.memory_checkpoint import LOOK_EVERY_S, QUIET_S, MemoryCheckpointCollector
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.schema.checkpoint_files import (
    PERSIST_HANGS_S,
    STANDING_BYTES_MAX,
    STANDING_FILE,
    JobStanding,
    OlderStep,
    Standing,
    encode_standing,
)
from eagle_eye.schema.frame import block
from eagle_eye.schema.metrics import Scope
from tests.agent.fakes import FakeClock
from tests.agent.nccl_fakes import FakeProc, process

WELL: dict[str, Any] = {"step": 12, "whole_step": 11, "copies": 4, "copies_wanted": 4, "captured": 12, "skipped": 0}


class Node:
    """A node whose ranks keep checkpoints in memory; ``steps`` are what their hooks say."""

    def __init__(self, tmp_path: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.store = tmp_path / "store"
        self.proc = FakeProc(tmp_path)
        self.processes = TrainingProcesses()
        self.steps: dict[int, float] = {}
        self.collector = MemoryCheckpointCollector(
            self.processes,
            lambda one: self.steps.get(one.rank),
            proc=self.proc.path,
            monotonic_s=clock.monotonic_s,
        )

    def runs(self, *ranks: TrainingProcess, **environ: str) -> None:
        for one in ranks:
            self.proc.runs(one.pid, {"EAGLE_EYE_CHECKPOINT_STORE": str(self.store)} | environ)
        self.processes.publish(ranks)

    def says(self, *jobs: JobStanding, ago_s: float = 0.0, folder: Path | None = None) -> None:
        folder = folder or self.store
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STANDING_FILE).write_bytes(encode_standing(Standing(self.clock.now_s() - ago_s, list(jobs))))

    def sees(self, after_s: float = 1.0) -> Observed:
        self.clock.advance(after_s)
        return self.collector.collect(self.clock.now_s())

    def row(self) -> dict[str, float]:
        return self.sees().node


@pytest.fixture
def node(tmp_path: Path, clock: FakeClock) -> Node:
    return Node(tmp_path, clock)


def standing(job: str = "j", **changes: Any) -> JobStanding:
    return JobStanding(job=job, attempt=1, **(WELL | changes))


def test_a_nodes_row_says_which_step_is_whole_and_what_capturing_costs(node: Node) -> None:
    node.runs(process(0), process(1))
    node.says(standing(blocked_s=1.5, reserved_bytes=1 << 30, persisted_step=10, damaged=1))
    assert node.row() == {
        "memory_checkpoint_step": 11.0,
        "memory_checkpoint_age_steps": 1.0,
        "memory_checkpoint_copies": 4.0,
        "memory_checkpoint_copies_wanted": 4.0,
        "memory_checkpoint_captures_total": 12.0,
        "memory_checkpoint_skips_total": 0.0,
        "memory_checkpoint_blocked_seconds_total": 1.5,
        "memory_checkpoint_bytes": float(1 << 30),
        "memory_checkpoint_persisted_step": 10.0,
        "memory_checkpoint_persist_seconds": 0.0,
        "memory_checkpoint_damaged_total": 1.0,
    }


def test_older_whole_steps_are_told_with_their_age(node: Node) -> None:
    node.runs(process(0))
    now_s = node.clock.now_s()
    steps = ((1, 900.0), (4, 400.0), (9, 6.0), (10, 3.0))
    node.says(standing(older=[OlderStep(step, now_s - age_s) for step, age_s in steps]))
    row = node.row()
    reported = ("previous_step", "second_oldest_step", "oldest_step")
    assert [row[f"memory_checkpoint_{name}"] for name in reported] == [10.0, 4.0, 1.0]
    ages = ("previous_age_seconds", "second_oldest_age_seconds", "oldest_age_seconds")
    assert [row[f"memory_checkpoint_{name}"] for name in ages] == [4.0, 401.0, 901.0]


def test_the_only_older_step_is_the_previous_and_the_oldest_one(node: Node) -> None:
    node.runs(process(0))
    node.says(standing(older=[OlderStep(10, node.clock.now_s() - 3.0)]))
    row = node.row()
    assert (row["memory_checkpoint_previous_step"], row["memory_checkpoint_oldest_step"]) == (10.0, 10.0)
    assert "memory_checkpoint_second_oldest_step" not in row


def test_a_step_that_was_captured_in_the_future_is_of_now(node: Node) -> None:
    node.runs(process(0))
    node.says(standing(older=[OlderStep(10, node.clock.now_s() + 3.0)]))
    assert node.row()["memory_checkpoint_oldest_age_seconds"] == 0.0


def test_every_metric_of_a_row_is_in_the_catalogue(node: Node) -> None:
    node.runs(process(0))
    node.says(standing(persisted_step=1, older=[OlderStep(1, 1.0), OlderStep(2, 2.0)]))
    block(Scope.NODE, {-1: node.row()})


def test_a_step_that_the_hook_has_seen_counts_though_nobody_has_captured_it(node: Node) -> None:
    node.runs(process(0), process(1))
    node.steps = {0: 20.0, 1: 19.0}
    node.says(standing())
    assert node.row()["memory_checkpoint_age_steps"] == 9.0


def test_a_hook_that_counts_otherwise_makes_no_checkpoint_older(node: Node) -> None:
    node.runs(process(0))
    node.steps = {0: 3.0}
    node.says(standing())
    assert node.row()["memory_checkpoint_age_steps"] == 1.0


def test_before_the_first_step_is_whole_nothing_is_said_of_its_age(node: Node) -> None:
    node.runs(process(0))
    node.says(standing(whole_step=None, copies=0, copies_wanted=0))
    assert not {"memory_checkpoint_step", "memory_checkpoint_age_steps", "memory_checkpoint_copies"} & node.row().keys()


def test_a_node_without_checkpoints_in_memory_has_no_row_and_no_problem(node: Node) -> None:
    node.runs(process(0))
    seen = node.sees()
    assert (seen.node, seen.events, seen.problem) == ({}, [], "")


def test_a_store_is_found_when_it_comes(node: Node) -> None:
    node.runs(process(0))
    assert not node.row()
    node.says(standing())
    assert node.sees(LOOK_EVERY_S).node


def test_what_was_said_of_a_job_whose_ranks_are_gone_is_not_told(node: Node) -> None:
    node.runs(process(0))
    node.says(standing())
    assert node.row()
    node.processes.publish(())
    assert not node.row()


def test_a_job_of_another_name_is_known_by_its_processes(node: Node) -> None:
    node.runs(process(0, job="4711"))
    node.says(standing("checkpoints", pids=[process(0).pid]))
    assert node.row()["memory_checkpoint_step"] == 11.0


def test_a_process_is_known_by_the_number_that_it_has_in_its_container(node: Node) -> None:
    rank = process(0, job="4711")
    node.runs(rank)
    node.proc.runs(rank.pid, {"EAGLE_EYE_CHECKPOINT_STORE": str(node.store)}, own_pid=7)
    node.says(standing("checkpoints", pids=[7]))
    assert node.row()["memory_checkpoint_step"] == 11.0


def test_somebody_elses_job_is_not_reported(node: Node) -> None:
    node.runs(process(0))
    node.says(standing("another", pids=[1]))
    assert not node.row()


def test_ranks_with_roots_of_their_own_see_one_store(node: Node, tmp_path: Path) -> None:
    root = tmp_path / "root"
    ranks = [process(0), process(1)]
    node.runs(*ranks, EAGLE_EYE_CHECKPOINT_STORE="/store")
    for one in ranks:
        node.proc.contains(one.pid, root)
    node.says(standing(), folder=root / "store")
    assert node.row()["memory_checkpoint_captures_total"] == 12.0


def test_without_a_word_in_the_environment_a_store_is_looked_for_in_shared_memory(node: Node, tmp_path: Path) -> None:
    root = tmp_path / "root"
    node.runs(process(0), EAGLE_EYE_CHECKPOINT_STORE="")
    node.proc.contains(process(0).pid, root)
    node.says(standing(), folder=root / f"dev/shm/eagle-eye-{os.geteuid()}/some-node")
    assert node.row()["memory_checkpoint_step"] == 11.0


def test_on_a_shared_host_the_nodes_own_store_is_read(node: Node, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shared = root / f"dev/shm/eagle-eye-{os.geteuid()}"
    node.runs(process(0), EAGLE_EYE_CHECKPOINT_STORE="", EAGLE_EYE_NODE="n2")
    node.proc.contains(process(0).pid, root)
    node.says(standing(whole_step=5), folder=shared / "n1")
    node.says(standing(whole_step=6), folder=shared / "n2")
    assert node.row()["memory_checkpoint_step"] == 6.0


def test_of_several_jobs_on_a_node_only_what_adds_up_is_told(node: Node) -> None:
    node.runs(process(0), process(1, job="k"))
    node.says(standing("j", skipped=1), standing("k", skipped=2, persisting_for_s=3.0))
    row = node.row()
    assert row["memory_checkpoint_skips_total"] == 3.0
    assert row["memory_checkpoint_persist_seconds"] == 3.0
    assert "memory_checkpoint_step" not in row


def test_a_store_that_has_fallen_silent_is_named_and_not_believed(node: Node) -> None:
    node.runs(process(0))
    node.says(standing(), ago_s=QUIET_S + 5)
    seen = node.sees()
    assert not seen.node
    assert "its store has said nothing for 36 s" in seen.problem


def test_a_step_that_does_not_reach_storage_is_reported_once(node: Node) -> None:
    node.runs(process(0))
    node.says(standing(persisting_step=10, persisting_for_s=PERSIST_HANGS_S + 1))
    (event,) = node.sees().events
    assert (event.kind, event.attributes["step"], event.attributes["job"]) == ("checkpoint_stuck", 10, "j")
    assert not node.sees().events


def test_a_step_that_is_written_in_time_is_not_reported(node: Node) -> None:
    node.runs(process(0))
    node.says(standing(persisting_step=10, persisting_for_s=PERSIST_HANGS_S - 1))
    assert not node.sees().events


@pytest.mark.parametrize("content", [b"{", b" " * (STANDING_BYTES_MAX + 1)], ids=["broken", "too long"])
def test_a_file_that_is_not_a_stores_is_named(node: Node, content: bytes) -> None:
    node.runs(process(0))
    node.store.mkdir()
    (node.store / STANDING_FILE).write_bytes(content)
    seen = node.sees()
    assert not seen.node
    assert str(node.store / STANDING_FILE) in seen.problem


def test_a_link_that_leads_out_of_the_ranks_root_is_not_followed(node: Node, tmp_path: Path) -> None:
    root = tmp_path / "root"
    node.says(standing(), folder=tmp_path / "outside")
    (root / "store").mkdir(parents=True)
    (root / "store" / STANDING_FILE).symlink_to(tmp_path / "outside" / STANDING_FILE)
    node.runs(process(0), EAGLE_EYE_CHECKPOINT_STORE="/store")
    node.proc.contains(process(0).pid, root)
    assert not node.row()


def test_a_pipe_in_the_files_place_holds_nobody_up(node: Node) -> None:
    node.runs(process(0))
    node.store.mkdir()
    os.mkfifo(node.store / STANDING_FILE)
    assert "regular file" in node.sees().problem
