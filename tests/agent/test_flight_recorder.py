"""Flight-recorder dumps as they appear on a node."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_eye.agent.collectors import flight_recorder
from eagle_eye.agent.collectors.flight_recorder import DEPARTED_KEPT_S, FlightRecorderCollector, dump_paths, parse_dump
from eagle_eye.agent.processes.process_files import Environments
from tests.agent.fakes import REPOSITORY, FakeClock
from tests.agent.flight_node import Node
from tests.agent.nccl_fakes import flight_dump, process
from tests.loopback import free_port


@pytest.fixture
def node(tmp_path: Path, clock: FakeClock) -> Node:
    return Node(tmp_path, clock)


def test_a_new_dump_is_a_row_once(node: Node) -> None:
    node.runs(process(device=4))
    agent = node.agent()
    node.collects(agent)
    node.writes()
    assert node.collects(agent).devices == {}  # it may still be being written
    assert node.collects(agent).devices == {4: {"nccl_sequence": 7.0, "nccl_completed_sequence": 6.0}}
    assert node.collects(agent).devices == {}


def test_a_dump_that_is_written_anew_is_read_anew(node: Node) -> None:
    node.runs(process())
    agent = node.agent()
    for enqueued in (7, 9):
        node.writes(flight_dump(enqueued=enqueued))
        node.collects(agent)
        assert node.collects(agent).devices[0]["nccl_sequence"] == enqueued


def test_an_old_dump_is_no_progress(node: Node) -> None:
    node.writes(ago_s=flight_recorder.FRESH_S + 10.0)
    node.runs(process())
    agent = node.agent()
    for _ in range(3):
        assert node.collects(agent).devices == {}
    assert agent.dumps() == []


def test_a_dump_written_just_before_the_agent_began_is_read(node: Node) -> None:
    node.writes(ago_s=10.0)
    node.runs(process())
    agent = node.agent()
    node.collects(agent)
    assert node.collects(agent).devices[0]["nccl_sequence"] == 7.0


def test_a_clock_that_jumps_makes_no_dump_old(node: Node) -> None:
    node.runs(process())
    agent = node.agent()
    node.collects(agent)
    node.clock.jump(1e6)
    node.writes(ago_s=2e6)
    node.collects(agent)
    assert node.collects(agent).devices[0]["nccl_sequence"] == 7.0


def test_the_newest_dump_of_each_rank_is_kept_for_whoever_gathers_evidence(node: Node) -> None:
    node.runs(process(0), process(1))
    agent = node.agent()
    node.collects(agent)
    for rank in (0, 1):
        node.writes(flight_dump(enqueued=rank), rank)
    for _ in range(3):
        node.collects(agent)
    assert [(item.process.rank, item.dump.enqueued) for item in agent.dumps()] == [(0, 0), (1, 1)]
    assert json.loads(agent.dumps()[1].dump.reduced)["rank"] == 1


def test_a_rank_that_dumps_and_dies_leaves_its_dump_but_no_row(node: Node) -> None:
    node.runs(process())
    agent = node.agent()
    node.collects(agent)
    node.writes()
    node.processes.publish([])
    node.collects(agent)
    assert node.collects(agent).devices == {}
    assert len(agent.dumps()) == 1


def test_a_place_is_watched_for_a_while_only_after_its_rank_has_gone(node: Node) -> None:
    node.runs(process())
    agent = node.agent()
    node.collects(agent)
    node.processes.publish([])
    node.clock.advance(DEPARTED_KEPT_S + 1.0)
    node.collects(agent)
    node.writes()
    node.collects(agent)
    node.collects(agent)
    assert agent.dumps() == []


def test_a_dump_of_a_job_of_another_size_is_no_row(node: Node) -> None:
    node.runs(process(world_size=8))
    agent = node.agent()
    node.collects(agent)
    node.writes()
    node.collects(agent)
    observed = node.collects(agent)
    assert observed.devices == {}
    assert observed.problem.endswith("its widest group has 2 ranks, the job 8: of another job?")


@pytest.mark.parametrize(
    ("raw", "reason"), [(b"\x80\x02cos\nsystem\n.", "bad"), (b"[" + b" " * (16 << 20) + b"]", "oversized")]
)
def test_a_dump_that_cannot_be_read_is_named_and_counted(node: Node, raw: bytes, reason: str) -> None:
    node.runs(process())
    agent = node.agent()
    node.collects(agent)
    path = node.writes(raw=raw)
    node.collects(agent)
    assert node.collects(agent).problem.startswith(f"{path}: ")
    assert node.drops.snapshot() == {f"flight_recorder_{reason}": 1}
    assert node.collects(agent).problem == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_that_is_not_the_processes_own_is_refused(node: Node) -> None:
    node.runs(process())
    agent = node.agent()
    node.collects(agent)
    path = node.writes()
    os.chown(path, 12_345, 12_345)
    node.collects(agent)
    assert node.collects(agent).problem == f"{path}: belongs to user 12345, the process to user 0"
    assert node.drops.snapshot() == {"flight_recorder_refused": 1}


def test_what_is_no_file_is_named_while_it_lies_there_and_counted_once(node: Node) -> None:
    node.runs(process())
    agent = node.agent()
    path = node.proc.folder / "trace_0"
    os.mkfifo(path)
    for _ in range(3):
        assert node.collects(agent).problem == f"{path}: not a regular file"
    assert node.drops.snapshot() == {"flight_recorder_refused": 1}
    path.unlink()
    assert node.collects(agent).problem == ""


def test_no_link_in_a_container_leads_to_the_hosts_files(node: Node, tmp_path: Path) -> None:
    container = tmp_path / "container"
    (container / "tmp").mkdir(parents=True)
    node.runs(process(), environ={"TORCH_FR_DUMP_TEMP_FILE": "/dumps/trace_"})
    node.proc.contains(1000, container)
    (container / "dumps").symlink_to(node.proc.folder)
    agent = node.agent()
    node.collects(agent)
    node.writes()
    node.collects(agent)
    assert node.collects(agent).devices == {}
    (container / "dumps").unlink()
    (container / "dumps").symlink_to("/tmp")  # its own
    node.writes().rename(container / "tmp/trace_0")
    node.collects(agent)
    assert node.collects(agent).devices[0]["nccl_sequence"] == 7.0


def test_one_dump_is_read_at_a_time(node: Node) -> None:
    node.runs(process(0), process(1))
    agent = node.agent()
    node.collects(agent)
    node.writes(rank=0)
    node.writes(rank=1)
    node.collects(agent)
    assert [len(node.collects(agent).devices) for _ in range(3)] == [1, 1, 0]


def test_a_device_of_which_another_source_tells_is_left_to_it(node: Node) -> None:
    node.runs(process())
    agent = FlightRecorderCollector(node.processes, node.drops, taken=lambda device: device == 0, proc=node.proc.path)
    node.collects(agent)
    node.writes()
    node.collects(agent)
    assert node.collects(agent).devices == {}
    assert len(agent.dumps()) == 1


def test_a_rank_that_has_enqueued_nothing_has_no_row(node: Node) -> None:
    node.runs(process())
    agent = node.agent()
    node.collects(agent)
    node.writes(flight_dump(enqueued=-1, completed=-1))
    node.collects(agent)
    assert node.collects(agent).devices == {}


def test_a_prefix_that_was_configured_is_watched_too(node: Node) -> None:
    node.runs(process(), environ={})
    agent = node.agent(f"{node.proc.folder}/trace_")
    node.collects(agent)
    node.writes()
    node.collects(agent)
    assert node.collects(agent).devices[0]["nccl_sequence"] == 7.0


def test_without_a_setting_torchs_own_places_are_watched(node: Node) -> None:
    node.proc.runs(1000, {"HOME": "/home/u"})
    environment = Environments(node.proc.path).of([process(3, pid=1000)])
    (found,) = environment.values()
    assert dump_paths(process(3), found, ()) == [
        Path("/home/u/.cache/torch/comm_lib_trace_rank_3"),
        Path("/tmp/nccl_trace_rank_3"),
    ]


def test_what_is_watched_is_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "PATHS_MAX", 1)
    node.runs(process(0), process(1))
    node.collects(node.agent())
    assert node.drops.snapshot() == {"flight_recorder_beyond": 1}


GLOO = """
import os, sys, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
folder, port = sys.argv[1:]
peer = os.fork()  # torch is imported once for both ranks
rank = 0 if peer else 1
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2", TORCH_FR_BUFFER_SIZE="200")
dist.init_process_group("gloo")
for _ in range(5):
    dist.all_reduce(torch.ones(4))
until_s = time.monotonic() + 30.0  # another thread notes the end of an operation a little later
while b'"retired":false' in (said := _dump_fr_trace_json()):
    assert time.monotonic() < until_s, said
    time.sleep(0.01)
open(f"{folder}/trace_{rank}", "wb").write(_dump_fr_trace())
open(f"{folder}/json_{rank}", "wb").write(_dump_fr_trace_json())
dist.barrier()
if peer and os.waitpid(peer, 0)[1]:
    sys.exit(1)
os._exit(0)
"""


@pytest.mark.slow
def test_what_torch_itself_dumps_is_read(node: Node) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    port = str(free_port())
    job = subprocess.Popen(
        [sys.executable, "-c", GLOO, str(node.proc.folder), port], cwd=REPOSITORY, start_new_session=True
    )
    try:
        assert job.wait(timeout=60.0) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    for rank in (0, 1):
        for name in ("trace", "json"):
            found = parse_dump((node.proc.folder / f"{name}_{rank}").read_bytes(), rank)
            assert found.enqueued == 5
            assert found.completed is not None
            assert 1 <= found.completed <= 5  # gloo's threads note ends in any order, and the last one stays
            kept = {entry["collective_seq_id"]: entry["state"] for entry in json.loads(found.reduced)["entries"]}
            open_ones = dict.fromkeys(range(found.completed + 1, 6), "scheduled")
            assert kept == (open_ones or {5: "completed"})
