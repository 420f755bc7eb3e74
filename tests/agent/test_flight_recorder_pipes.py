"""Dumps asked for through the pipes that PyTorch's recorder reads."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from eagle_eye.agent.collectors.flight_recorder import POLL_S, FlightRecorderCollector, request_dumps
from eagle_eye.agent.processes.process_files import Environments
from tests.agent.fakes import FakeClock
from tests.agent.flight_node import Node
from tests.agent.nccl_fakes import process, published


@pytest.fixture
def node(tmp_path: Path, clock: FakeClock) -> Node:
    return Node(tmp_path, clock)


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
    asked = request_dumps([process()], 1.0, Environments(node.proc.path), drops=node.drops)
    assert asked.silent == {process(): f"{path}: not a named pipe"}
    assert node.drops.snapshot() == {"flight_recorder_refused": 1}
    assert path.read_bytes() == b"keep"


def test_dumps_may_be_asked_for_from_another_thread(node: Node) -> None:
    agent = FlightRecorderCollector(published(), node.drops, proc=node.proc.path)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(agent.request(1.0)))
    thread.start()
    thread.join(timeout=5.0)
    assert len(found) == 1
