"""Flight-recorder dumps as they appear on a node, and asking for them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.agent.collector import Observed
from eagle_eye.agent.collectors import flight_recorder
from eagle_eye.agent.collectors.flight_recorder import DEPARTED_KEPT_S, FlightRecorderCollector
from eagle_eye.agent.drops import Drops
from eagle_eye.agent.nccl.dump_files import POLL_S, dump_paths, request_dumps
from eagle_eye.agent.nccl.flight_dump import read
from eagle_eye.agent.nccl.process_environment import Environments
from eagle_eye.agent.training_processes import TrainingProcess, TrainingProcesses
from tests.agent.fakes import REPOSITORY, FakeClock
from tests.agent.nccl_fakes import FakeProc, flight_dump, flight_entry, process, published

ON = {"TORCH_FR_DUMP_TEMP_FILE": "trace_", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "pipe_"}
DUMP = flight_dump(flight_entry(6), flight_entry(7, "started"))


class Node:
    """A node whose ranks may write dumps; its clock reads what files' times say."""

    def __init__(self, tmp_path: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.proc = FakeProc(tmp_path)
        self.processes = TrainingProcesses()
        self.drops = Drops()
        self.writes_done = 0

    def agent(self, *prefixes: str) -> FlightRecorderCollector:
        return FlightRecorderCollector(
            self.processes, self.drops, prefixes, proc=self.proc.path, monotonic_s=self.clock.monotonic_s
        )

    def runs(self, *processes: TrainingProcess, environ: dict[str, str] | None = None) -> None:
        for one in processes:
            self.proc.runs(one.pid, ON if environ is None else environ)
        self.processes.publish(processes)

    def writes(self, dump: Any = DUMP, rank: int = 0, ago_s: float = 0.0, raw: bytes | None = None) -> Path:
        path = self.proc.folder / f"trace_{rank}"
        path.write_bytes(pickle.dumps(dump, protocol=2) if raw is None else raw)
        self.writes_done += 1  # so that each writing has a time of its own
        at_ns = int((self.clock.now_s() - ago_s) * 1e9) + self.writes_done
        os.utime(path, ns=(at_ns, at_ns))
        return path

    def collects(self, agent: FlightRecorderCollector) -> Observed:
        self.clock.advance(1.0)
        return agent.collect(self.clock.now_s())


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


def test_a_file_that_is_not_the_processes_own_is_refused(node: Node, tmp_path: Path) -> None:
    node.runs(process())
    agent = node.agent()
    node.collects(agent)
    (tmp_path / "secret").write_bytes(b"root:x:0")
    (node.proc.folder / "trace_0").symlink_to(tmp_path / "secret")
    node.collects(agent)
    assert node.collects(agent).problem.endswith("trace_0: not a regular file")
    assert node.drops.snapshot() == {"flight_recorder_refused": 1}


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


class Rank:
    """A process that reads its pipe, and dumps or not when it is asked to."""

    def __init__(self, node: Node, rank: int) -> None:
        self.path = node.proc.folder / f"pipe_{rank}.pipe"
        os.mkfifo(self.path)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def asked(self) -> bool:
        return bool(os.read(self._descriptor, 128))

    def close(self) -> None:
        os.close(self._descriptor)


def test_ranks_are_asked_through_their_pipes_and_the_silent_are_named(node: Node) -> None:
    dumps, stuck, gone, unset = (process(rank, 4) for rank in range(4))
    node.runs(dumps, stuck, gone)
    node.proc.runs(unset.pid, {"HOME": "/nowhere"})
    ranks = [Rank(node, 0), Rank(node, 1)]
    os.mkfifo(node.proc.folder / "pipe_2.pipe")  # nobody reads it any more
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        if not sleeps:
            node.writes(rank=0)
        sleeps.append(seconds)
        node.clock.advance(seconds)

    asked = request_dumps(
        (dumps, stuck, gone, unset),
        2.0,
        Environments(node.proc.path),
        monotonic_s=node.clock.monotonic_s,
        sleep=sleep,
    )
    assert asked.answered == (dumps,)
    assert asked.silent == {
        stuck: "asked, but wrote no dump within 2 s",
        gone: f"{node.proc.folder}/pipe_2.pipe: nobody reads it",
        unset: "no pipe: set TORCH_NCCL_DEBUG_INFO_PIPE_FILE for the job",
    }
    assert [rank.asked() for rank in ranks] == [True, True]
    assert sum(sleeps) == pytest.approx(2.0, abs=2 * POLL_S)
    for rank in ranks:
        rank.close()


def test_asking_ends_as_soon_as_all_have_answered(node: Node) -> None:
    node.runs(process())
    rank = Rank(node, 0)
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 1:
            node.writes()

    asked = request_dumps([process()], 60.0, Environments(node.proc.path), monotonic_s=lambda: 0.0, sleep=sleep)
    assert (asked.answered, asked.silent, len(sleeps)) == ((process(),), {}, 2)
    rank.close()


def test_a_pipe_that_is_full_does_not_hold_the_agent_up(node: Node) -> None:
    node.runs(process())
    rank = Rank(node, 0)
    full = os.open(rank.path, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(full, b"1" * 4096):
            pass
    asked = request_dumps([process()], 1.0, Environments(node.proc.path))
    assert asked.silent == {process(): f"{rank.path}: full: its process does not read it"}
    os.close(full)
    rank.close()


def test_a_file_in_the_pipes_place_is_not_written_to(node: Node) -> None:
    node.runs(process())
    path = node.proc.folder / "pipe_0.pipe"
    path.write_bytes(b"keep")
    asked = request_dumps([process()], 1.0, Environments(node.proc.path))
    assert asked.silent == {process(): f"{path}: not a named pipe"}
    assert path.read_bytes() == b"keep"


def test_dumps_may_be_asked_for_from_another_thread(node: Node) -> None:
    agent = FlightRecorderCollector(published(), node.drops, proc=node.proc.path)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(agent.request(1.0)))
    thread.start()
    thread.join(timeout=5.0)
    assert len(found) == 1


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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
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
            found = read((node.proc.folder / f"{name}_{rank}").read_bytes(), rank)
            assert found.enqueued == 5
            assert found.completed is not None
            assert 1 <= found.completed <= 5  # gloo's threads note ends in any order, and the last one stays
            kept = {entry["collective_seq_id"]: entry["state"] for entry in json.loads(found.reduced)["entries"]}
            open_ones = dict.fromkeys(range(found.completed + 1, 6), "scheduled")
            assert kept == (open_ones or {5: "completed"})
