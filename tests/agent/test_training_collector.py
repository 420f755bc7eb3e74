from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.collector import CollectFailed, Drops, Observed
from eagle_eye.agent.collectors.training import TrainingCollector
from eagle_eye.agent.hook import attach
from eagle_eye.agent.training_hook.message import MESSAGE_BYTES_MAX, Totals, encode
from eagle_eye.schema.events import Event
from tests.agent.fakes import message, script, until

RANK = """
    import os, signal, sys, time
    from eagle_eye.agent.hook import attach
    training = attach()
    training.step(loss=1.0)
    training._sender.send()
    print("ready", flush=True)
    sys.stdin.readline()
    {end}
"""


class Node:
    """A collector and everything it has seen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.drops = Drops()
        self.woken = threading.Event()
        self.collector = TrainingCollector(path, self.drops, self.woken.set, {"GPU-5": 5})
        self.collector.open()
        self.seen = Observed()
        self.events: list[Event] = []

    def look(self) -> Observed:
        self.seen = self.collector.collect(time.time())
        self.events.extend(self.seen.events)
        return self.seen

    def sees(self, kind: str) -> bool:
        self.look()
        return any(event.kind == kind for event in self.events)

    def the(self, kind: str) -> Event:
        (event,) = [event for event in self.events if event.kind == kind]
        return event

    def send(self, *datagrams: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for datagram in datagrams:
                sender.sendto(datagram, str(self.path))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "agent.sock")
    yield made
    made.collector.close()


def environment(node: Node, **more: str) -> dict[str, str]:
    return {"EAGLE_EYE_HOOK_SOCKET": str(node.path), "EAGLE_EYE_JOB": "j", **more}


def test_a_rank_is_seen_with_its_job_and_its_row(node: Node) -> None:
    with script(RANK.format(end=""), **environment(node, RANK="3", WORLD_SIZE="8", LOCAL_RANK="1")) as rank:
        until(lambda: 1 in node.look().devices and "train_step" in node.seen.devices[1])
        (seen,) = node.seen.ranks
        assert (seen.job, seen.rank, seen.world_size, seen.device, seen.attempt) == ("j", 3, 8, 1, 0)
        assert (seen.pid, seen.silent_s) == (rank.pid, 0.0)
        assert node.seen.devices[1]["train_loss"] == 1.0


@pytest.mark.parametrize(
    ("end", "code", "goodbye"),
    [
        ("sys.exit(0)", 0, True),
        ("sys.exit(9)", 9, True),
        ("os._exit(9)", 9, False),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11, False),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, False),
    ],
)
def test_an_end_is_reported_once_with_its_code(node: Node, end: str, code: int, goodbye: bool) -> None:
    with script(RANK.format(end=end), **environment(node, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")) as rank:
        until(lambda: bool(node.look().ranks))
        node.events.clear()
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        until(lambda: node.sees("process_exit"))
        assert [r.rank for r in node.seen.ranks] == [1], "the frame that tells of the end still names the rank"
        assert node.the("process_exit").device == 1
        assert node.the("process_exit").attributes == {
            "exit_code": code,
            "rank": 1,
            "pid": rank.pid,
            "goodbye": goodbye,
            "job": "j",
            "attempt": 0,
        }
        assert node.look().ranks == []
        node.the("process_exit")


def test_steps_between_the_last_row_and_the_end_are_not_lost(node: Node) -> None:
    end = "training.step(loss=float('nan')); training._sender.send(); os._exit(1)"
    with script(RANK.format(end=end), **environment(node)) as rank:
        until(lambda: bool(node.look().devices))
        node.woken.clear()
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert node.woken.wait(10)
        node.collector.happened()
        assert node.look().devices[0]["train_loss"] == float("inf")
        assert [(rank.rank, rank.attempt) for rank in node.seen.ranks] == [(0, 0)], "the row says whose it is"


def test_the_last_row_of_a_rank_yields_to_the_next_attempt_on_its_device(node: Node) -> None:
    end = "training.step(loss=float('nan')); training._sender.send(); os._exit(1)"
    with script(RANK.format(end=end), **environment(node)) as rank:
        until(lambda: bool(node.look().devices))
        with script(RANK.format(end=""), **environment(node, EAGLE_EYE_ATTEMPT="1")):
            until(lambda: {r.attempt for r in node.look().ranks} == {0, 1})
            node.woken.clear()
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
            assert node.woken.wait(10)
            until(lambda: node.look().devices.get(0, {}).get("train_loss") == 1.0)


def test_a_training_error_wakes_the_agent_and_carries_its_text(node: Node) -> None:
    with script(RANK.format(end="raise RuntimeError('no such expert')"), **environment(node)) as rank:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        until(lambda: node.sees("training_error"))
        assert "no such expert" in node.the("training_error").attributes["text"]
        assert node.woken.is_set()


def test_a_stopped_process_is_silent_and_of_its_columns_only_that_it_is_stopped_stays(node: Node) -> None:
    with script(RANK.format(end=""), **environment(node)) as rank:
        until(lambda: bool(node.look().devices))
        rank.send_signal(signal.SIGSTOP)
        until(lambda: bool(node.look().ranks) and node.seen.ranks[0].silent_s > 2.0)
        assert node.seen.devices == {0: {"rank_stopped_ratio": 1.0}}
        assert node.events[-1].kind != "process_exit"
        rank.send_signal(signal.SIGCONT)
        until(lambda: node.look().ranks[0].silent_s == 0.0 and bool(node.seen.devices))


def test_garbage_is_counted_by_its_reason_and_nothing_else(node: Node) -> None:
    bad = (b"garbage", b"EEHK\x09", bytes(MESSAGE_BYTES_MAX + 100), encode(message(totals=Totals(steps=-1.0))))
    node.send(*bad)
    until(lambda: sum(node.drops.snapshot().values()) == len(bad))
    assert node.drops.snapshot() == {"hook_magic": 1, "hook_version": 1, "hook_oversized": 1, "hook_range": 1}
    assert node.look() == Observed()


def test_an_event_of_a_newer_hook_is_counted_and_its_process_heard(node: Node) -> None:
    node.send(encode(message(), b'{"job":"j","events":[[1,2.0,"party","x"]]}'))
    until(lambda: len(node.look().ranks) == 1)
    assert node.drops.snapshot().get("hook_unknown_event") == 1
    assert node.events == []


def test_a_flood_of_one_process_is_cut_and_counted(node: Node) -> None:
    for number in range(1, 1001):
        node.send(encode(message(number)))
    until(lambda: node.drops.snapshot().get("hook_flood", 0) > 0)
    assert len(node.look().ranks) == 1


def test_an_overtaken_message_changes_nothing(node: Node) -> None:
    node.send(encode(message(5, totals=Totals(steps=5.0), step=5)))
    node.send(encode(message(4, totals=Totals(steps=4.0), step=4)))
    until(lambda: bool(node.look().devices))
    assert node.seen.devices[0]["train_step"] == 5.0


def test_troubles_of_the_hook_are_passed_on(node: Node) -> None:
    node.send(encode(message(1)), encode(message(2, failures=2, unread=3, unsent=4)))
    until(lambda: len(node.drops.snapshot()) == 3)
    assert node.drops.snapshot() == {"hook_failures": 2, "hook_unread_values": 3, "hook_unsent": 4}


def test_a_gpu_is_known_by_its_uuid(node: Node) -> None:
    node.send(encode(message(1, gpu="GPU-5", sequence=1)))
    until(lambda: bool(node.look().ranks))
    assert node.seen.ranks[0].device == 5


def test_attaching_anew_in_the_same_process_is_the_same_rank(node: Node) -> None:
    first = attach(socket=node.path)
    until(lambda: bool(node.look().ranks))
    second = attach(socket=node.path)
    second.step(loss=4.0)
    until(lambda: node.look().devices.get(0, {}).get("train_loss") == 4.0)
    assert len(node.seen.ranks) == 1
    assert first is not second
    second.detach()


def test_a_stale_socket_is_replaced(node: Node, tmp_path: Path) -> None:
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
        gone.bind(str(stale))
    collector = TrainingCollector(stale, Drops())
    collector.collect(1.0)
    assert stat_mode(stale) == 0o666
    collector.close()
    assert not stale.exists()


def stat_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_socket_in_use_is_not_taken_over(node: Node) -> None:
    other = TrainingCollector(node.path, Drops())
    with pytest.raises(CollectFailed, match="another process listens"):
        other.collect(1.0)
    assert node.path.exists()


def test_an_agent_that_was_stopped_calls_nobody_silent(tmp_path: Path) -> None:
    program = f"""
import sys, time
from eagle_eye.agent.collectors.training import TrainingCollector
from eagle_eye.agent.collector import Drops
collector = TrainingCollector(__import__("pathlib").Path({str(tmp_path / "a.sock")!r}), Drops())
collector.open()
print("open", flush=True)
while True:
    time.sleep(0.02)
    print(max([r.silent_s for r in collector.collect(time.time()).ranks], default=-1.0), flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "open\n"
        training = attach(socket=tmp_path / "a.sock")
        while float(agent.stdout.readline()) < 0.0:
            pass
        agent.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        agent.send_signal(signal.SIGCONT)
        silences = [float(agent.stdout.readline()) for _ in range(40)]
        training.detach()
        agent.kill()
    assert max(silences) == 0.0


def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes a folder of another user")
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(CollectFailed, match="belongs to user 65534"):
        TrainingCollector(tmp_path / "hook.sock", Drops()).collect(1.0)


def test_whether_a_rank_s_process_is_stopped_is_asked_only_while_it_is_silent(node: Node) -> None:
    with script(RANK.format(end=""), **environment(node)) as rank:
        until(lambda: 0 in node.look().devices)
        assert "rank_stopped_ratio" not in node.seen.devices[0]
        rank.send_signal(signal.SIGSTOP)
        until(lambda: "rank_stopped_ratio" in node.look().devices[0])
        rank.send_signal(signal.SIGCONT)
        until(lambda: "rank_stopped_ratio" not in node.look().devices[0])
