"""A fault that is seen late, from the stores over agents, server and webhook to what the next attempt is told."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from eagle_eye.agent.collectors.memory_checkpoint import MemoryCheckpointCollector
from eagle_eye.checkpoint.messages import Captured
from eagle_eye.detectors.types import Verdict
from eagle_eye.orchestrators.receiver import resume_from
from eagle_eye.schema.action import ActionRequest, MemberRank
from eagle_eye.schema.checkpoint_files import read_standing, read_steps, whole_in_memory
from eagle_eye.server.delivery.events import request_data
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.respond import Book, respond
from eagle_eye.server.engine.settings import PolicySettings
from tests.agent.nccl_fakes import FakeProc, process, published
from tests.checkpoint.stores import JOB, Node, Rank, contents, opened, running, until
from tests.server.engine.frames import START_S, Fleet

REACH_S, STEP_S, STEPS = 100.0, 30.0, 8
KEPT = {4: 120.0, 6: 180.0, 7: 210.0, 8: 240.0}  # of them, by when they were captured


@dataclass
class Job:
    """Two nodes that keep steps in memory and nothing on storage, and the fleet as the server sees it."""

    nodes: list[Node]
    fleet: Fleet

    @property
    def held(self) -> dict[int, float]:
        """The steps of which the stores together have all shards."""
        return whole_in_memory([copy for node in self.nodes for copy in read_steps(node.folder, JOB)])

    def is_reported(self, fault: str, onset_s: float) -> str:
        """Return what the next attempt finds in EAGLE_EYE_RESUME_FROM after a restart because of such a fault."""
        names = tuple(self.fleet.nodes)
        verdict = Verdict(
            detector="d",
            fault=fault,
            job="j",
            nodes=names,
            node=None,
            device=None,
            confidence=0.99,
            onset_s=onset_s,
            summary="",
            evidence=(),
            kinds=frozenset({"one", "two"}),
            fact=True,
            asks="restart_job",
        )
        seen = self.fleet.run(1)[-1].checkpoints
        ranks = tuple(MemberRank(rank, name, 0) for rank, name in enumerate(names))
        now_s, many = self.fleet.now_s, len(names)
        judgement = Judgement(
            "j", 0, now_s, (verdict,), members=many, heard=many, stepping=True, ranks=ranks, checkpoints=seen
        )
        numbers = itertools.count()
        settings = PolicySettings(mode="act")
        (action,) = respond(judgement, Book((), ()), settings, 10, "", lambda: f"ev{next(numbers)}", str, str).actions
        return resume_from(msgspec.convert(request_data(action, "https://server"), ActionRequest))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    fleet = Fleet(nodes=2)
    with running([tmp_path / "a", tmp_path / "b"]) as nodes:
        ranks = opened(nodes, reach_s=REACH_S)
        for step in range(1, STEPS + 1):
            for rank in ranks:
                captured(rank, step, START_S + STEP_S * step)
            for rank in ranks:
                rank.whole(step)
        fleet.now_s = START_S + STEP_S * STEPS + 10.0
        for name, node in zip(fleet.nodes, nodes, strict=True):
            fleet.node_rows[name] = row_of(node, tmp_path / name, fleet.now_s)
        yield Job(nodes, fleet)
        for rank in ranks:
            rank.connection.close()


def captured(rank: Rank, step: int, captured_s: float) -> None:
    slot, data = rank.granted(), contents(rank.rank, step)
    rank.slots[slot][: len(data)] = data
    rank.connection.send(Captured(step, slot, len(data), (), captured_s))


def newest_said(node: Node) -> int | None:
    said = read_standing(node.folder)
    return said.jobs[0].whole_step if said is not None and said.jobs else None


def row_of(node: Node, folder: Path, now_s: float) -> dict[str, float]:
    """Return what the agent of the node tells once its store has said that all steps are whole.

    The ranks are this process.
    """
    until(lambda: newest_said(node) == STEPS, "the store has said what it holds")
    folder.mkdir()
    proc = FakeProc(folder)
    proc.runs(os.getpid(), {"EAGLE_EYE_CHECKPOINT_STORE": str(node.folder)})
    collector = MemoryCheckpointCollector(published(process(pid=os.getpid())), proc=proc.path)
    return dict(collector.collect(now_s).node)


@pytest.mark.parametrize("fault", ["loss_not_finite", "loss_divergence", "silent_data_corruption"])
@pytest.mark.parametrize(("began_s", "step"), [(215.0, 7), (190.0, 6), (130.0, 4)])
def test_the_job_goes_on_at_the_newest_step_from_before_the_fault_that_memory_holds(
    job: Job, fault: str, began_s: float, step: int
) -> None:
    assert job.held[step] == START_S + KEPT[step] < START_S + began_s
    assert job.is_reported(fault, START_S + began_s) == f"memory:{step}"


def test_a_fault_from_before_all_that_memory_holds_is_told_no_step(job: Job) -> None:
    assert job.is_reported("loss_divergence", START_S + min(KEPT.values())) == ""
