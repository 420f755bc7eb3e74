"""Who runs here: hostile processes, what cannot be seen, and what looking costs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from eagle_eye.agent.collector import Drops, Unsupported
from eagle_eye.agent.collectors.processes import LOOK_COST_RATIO, LOOK_S, LOOK_S_MAX, ProcessesCollector, ProcessHost
from eagle_eye.agent.processes.process_registry import TrainingProcesses
from eagle_eye.agent.processes.rank_tracker import AGAIN
from tests.agent.fakes import FakeClock
from tests.agent.process_tree import Node, ProcessTree, rank


@pytest.fixture
def node(tmp_path: Path, clock: FakeClock) -> Node:
    return Node(ProcessTree(tmp_path / "proc"), clock)


@pytest.mark.parametrize(("name", "value"), [("RANK", "99999999999"), ("EAGLE_EYE_JOB", "a\nb"), ("RANK", "-1")])
def test_a_hostile_environment_is_refused_counted_and_said_once(node: Node, name: str, value: str) -> None:
    node.tree.starts(10, rank(0) | {name: value})
    node.on_gpu = {10: 0}
    seen = node.look()
    assert seen.ranks == []
    assert f"process 10: {name} is " in seen.problem
    assert node.look().problem == ""
    assert node.drops.snapshot() == {"process_environment_refused": 1}


def test_environments_of_any_size_and_bytes_are_bounded(node: Node) -> None:
    node.tree.starts(10, b"RANK=0\0X=" + b"x" * (1 << 21))
    node.tree.starts(11, b"RANK=0\0EAGLE_EYE_JOB=\xff\xfe\0")
    node.tree.starts(12, b"RANK=0\0CUDA_VISIBLE_DEVICES=" + b"0," * 9_000)
    node.tree.starts(13, b"\0=\0RANK\0RANK=\0")
    node.on_gpu = {10: 0, 11: 0, 12: 0, 13: 0}
    assert node.look().ranks == []
    assert node.drops.snapshot() == {"process_environment_refused": 3}


def test_gpu_processes_that_proc_does_not_show_are_named(node: Node) -> None:
    node.on_gpu = {4711: 0}
    assert node.look().problem == ""  # it may just have ended
    assert "NVML names processes 4711 " in node.look().problem
    assert "host's process namespace" in node.look().problem


def test_hidden_processes_are_said_once(node: Node) -> None:
    node.tree.is_gone(1)
    assert "hidepid" in node.look().problem
    assert node.look().problem == ""


def test_names_of_the_node_that_disagree_are_said_once(node: Node) -> None:
    node.tree.starts(10, rank(0, SLURMD_NODENAME="node17.example.org", EAGLE_EYE_NODE="gpu-3"))
    node.on_gpu = {10: 0}
    problem = node.look().problem
    assert problem.startswith("the launcher (EAGLE_EYE_NODE) calls this node 'gpu-3', the agent 'node17'")
    assert "Slurm" not in problem
    assert node.look().problem == ""


def test_a_host_without_proc_is_unsupported(tmp_path: Path) -> None:
    collector = ProcessesCollector(TrainingProcesses(), Drops(), host=ProcessHost(tmp_path / "none"))
    with pytest.raises(Unsupported, match="not Linux"):
        collector.collect(1.0)


def test_processes_are_read_once_and_then_only_a_few_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, str]] = []
    files = node.collector._files
    original = files._read

    def read(pid: int, name: str, most: int) -> bytes | None:
        reads.append((pid, name))
        return original(pid, name, most)

    monkeypatch.setattr(files, "_read", read)
    for pid in range(100, 400):
        node.tree.starts(pid, {"PATH": "/bin"})
    node.look()
    assert len([pid for pid, name in reads if name == "environ"]) >= 300
    reads.clear()
    node.look()
    assert len(reads) <= AGAIN
    reads.clear()
    node.look(1.0)
    assert reads == []


def test_on_a_host_with_so_many_processes_that_looking_costs_looks_are_rarer(node: Node) -> None:
    node.cpu_s = itertools.cycle([0.0, 0.012])
    node.look()
    node.tree.starts(10, rank(0))
    node.on_gpu = {10: 0}
    every_s = 0.012 / LOOK_COST_RATIO
    assert LOOK_S < every_s < LOOK_S_MAX
    assert node.look(every_s - 1.0).ranks == []
    assert len(node.look(1.1).ranks) == 1
