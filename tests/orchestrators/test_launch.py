"""The launcher on real processes: gloo on the CPU, local "nodes", webhooks over loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from eagle_eye.orchestrators.launch.messages import (
    Alive,
    Configure,
    FromRunner,
    Logs,
    Ping,
    Ready,
    Start,
    Started,
    Stop,
    Stopped,
    ToRunner,
    decode_from_runner,
    line,
)
from eagle_eye.planning.plan import LAYOUT_VARIABLE, RankLayout, rank_layout
from eagle_eye.schema.action import NODE_READMITTED
from tests.orchestrators.builders import StubServer, action, deliver, event_body, signed_headers, stub_server
from tests.planning.jobs import plan

pytest.importorskip("torch", reason="torch is not installed: pip install 'eagle-eye[ml]'")

from eagle_eye.orchestrators.launch.store import AttemptStore

SCRIPT = Path(__file__).with_name("tiny_training.py")
MAIN = (
    "import argparse, sys; from eagle_eye.orchestrators.launch import command as c; "
    "p = argparse.ArgumentParser(); c.configure(p); sys.exit(c.run(p.parse_args()))"
)
# Three ranks import torch at once, on a machine that may have one core to spare.
PATIENCE_S = 90.0
REPORTS = "/api/v1/actions/act-1/reports"


class Launched:
    """A launcher in a process of its own; ``events`` are the lines it has written so far."""

    def __init__(
        self,
        folder: Path,
        nodes: str,
        *words: str,
        steps: int,
        env: dict[str, str] | None = None,
        script: Path = SCRIPT,
    ) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self._arrived = threading.Condition()
        command = (str(script), str(folder / "checkpoints"), str(steps), "0.05", "5")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", MAIN, "--job", "j", "--nodes", nodes, "--json"),
                *("--checkpoint-dir", str(folder / "checkpoints"), "--state-dir", str(folder / "state")),
                *("--env", "OMP_NUM_THREADS=1", *words, "--", *command),
            ],
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                with self._arrived:
                    self.events.append(json.loads(line))
                    self._arrived.notify_all()

    def wait(self, event: str, attempt: int | None = None) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            wanted = (e for e in self.events if e["event"] == event and attempt in (None, e["attempt"]))
            return next(wanted, None)

        with self._arrived:
            assert self._arrived.wait_for(lambda: found() is not None, PATIENCE_S), self.events
            seen = found()
        assert seen is not None
        return seen

    def ends(self, within_s: float = PATIENCE_S) -> int:
        code = self.process.wait(within_s)
        self._thread.join()
        return code

    def progress(self, attempt: int, rank: int) -> list[list[str]]:
        path = self.folder / "checkpoints" / f"progress-{attempt}-{rank}.txt"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def reaches(self, attempt: int, step: int) -> None:
        eventually(lambda: any(words == ["step", str(step)] for words in self.progress(attempt, 0)))


def eventually(what: Callable[[], object]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@contextlib.contextmanager
def launched(
    folder: Path, nodes: str, *words: str, steps: int, env: dict[str, str] | None = None, script: Path = SCRIPT
) -> Iterator[Launched]:
    launcher = Launched(folder, nodes, *words, steps=steps, env=env, script=script)
    try:
        yield launcher
    finally:
        if launcher.process.poll() is None:
            launcher.process.terminate()
        launcher.ends()


def send_action(server: StubServer, launcher: Launched, **changes: Any) -> float:
    """A signed request to exclude n2, as the server would send it; returns when it was sent."""
    return send(server, event_body(action(time.time(), report_to=server.url + REPORTS, **changes)))


def send(server: StubServer, body: bytes, event_id: str = "evt-1") -> float:
    (subscription,) = server.wait("POST", "/api/v1/subscriptions", 1)
    sent_s = time.time()
    headers = signed_headers(body, sent_s, event_id, subscription["secret"])
    assert deliver(subscription["url"], body, headers).is_success
    return sent_s


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_node_with_a_stopped_rank_is_excluded_and_the_job_finishes_without_it(tmp_path: Path) -> None:
    with (
        stub_server() as server,
        launched(tmp_path, "n1,n2,n3", "--nnodes", "2", "--server", server.url, steps=24) as launcher,
    ):
        first = launcher.wait("running", 1)
        assert [rank["node"] for rank in first["ranks"]] == ["n1", "n2"]
        launcher.reaches(1, 12)
        victim = next(rank["pid"] for rank in first["ranks"] if rank["node"] == "n2")
        os.kill(victim, signal.SIGSTOP)
        sent_s = send_action(server, launcher)
        second = launcher.wait("running", 2)
        assert [rank["node"] for rank in second["ranks"]] == ["n1", "n3"]
        assert second["resumed_step"] >= 10
        print(f"from the action to all ranks spawned: {second['time'] - sent_s:.2f} s")
        eventually(lambda: not running(victim))
        reports = server.wait("POST", REPORTS, 3)
        assert [report["state"] for report in reports] == ["accepted", "running", "done"]
        assert f"attempt 2 runs on n1, n3 from step {second['resumed_step']}" in reports[2]["detail"]
        assert launcher.ends() == 0
        updates = server.reported("PUT", "/api/v1/jobs/j")
        assert updates[0]["attempt"] == 1
        last = updates[-1]
        assert (last["attempt"], last["state"]) == (2, "finished")
        assert [rank["node"] for rank in last["ranks"]] == ["n1", "n3"]
        assert server.reported("DELETE", "/api/v1/subscriptions/sub-1")
    assert launcher.progress(2, 0)[0][1:3] == ["n1", str(second["resumed_step"])]
    assert launcher.progress(2, 1)[-1] == ["end"]
    assert {words[1] for words in launcher.progress(2, 1) if words[0] == "start"} == {"n3"}
    assert json.loads((tmp_path / "state" / "launch.json").read_text())["excluded"] == ["n2"]


@pytest.mark.slow
def test_without_a_spare_ranks_start_in_the_next_layout_and_the_server_knows_what_a_node_is_worth(
    tmp_path: Path,
) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode(plan(3, job="j")))
    words = ("--nnodes", "3", "--layouts", str(file))
    with (
        stub_server() as server,
        launched(tmp_path, "n1,n2,n3", *words, "--server", server.url, steps=10_000) as launcher,
    ):
        first = launcher.wait("running", 1)
        assert [layout_of(rank) for rank in first["ranks"]] == [rank_layout(plan(3), 3)] * 3
        launcher.reaches(1, 6)
        os.kill(next(rank["pid"] for rank in first["ranks"] if rank["node"] == "n2"), signal.SIGSTOP)
        send_action(server, launcher)
        second = launcher.wait("running", 2)
        assert {rank["node"] for rank in second["ranks"]} == {"n1", "n3"}
        assert [layout_of(rank) for rank in second["ranks"]] == [rank_layout(plan(3), 2)] * 2
        assert "no spare: 2 nodes by plan" in server.wait("POST", REPORTS, 3)[-1]["detail"]
        left = {update["attempt"]: update["pace_left_ratio"] for update in server.reported("PUT", "/api/v1/jobs/j")}
        assert 0.5 < left[1] < 1
        assert left[2] == 0  # two nodes are the fewest


@pytest.mark.slow
def test_a_job_that_no_layout_is_left_for_waits_and_goes_on_with_a_readmitted_node(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode(plan(2)))
    words = ("--nnodes", "2", "--layouts", str(file))
    with (
        stub_server() as server,
        launched(tmp_path, "n1,n2", *words, "--server", server.url, steps=10_000) as launcher,
    ):
        ranks = launcher.wait("running", 1)["ranks"]
        launcher.reaches(1, 6)
        os.kill(next(rank["pid"] for rank in ranks if rank["node"] == "n2"), signal.SIGSTOP)
        send_action(server, launcher)
        reason = "1 node is usable, and the plan's layouts need 2: the job waits for a spare"
        assert launcher.wait("waiting")["reason"] == reason
        report = server.wait("POST", REPORTS, 3)[-1]
        assert (report["state"], report["detail"]) == ("failed", reason)
        eventually(lambda: not any(running(rank["pid"]) for rank in ranks))
        send(server, event_body({"node": "n2"}, NODE_READMITTED, "evt-2"), "evt-2")
        second = launcher.wait("running", 2)
        assert {rank["node"] for rank in second["ranks"]} == {"n1", "n2"}
        assert second["resumed_step"] == 5


def layout_of(rank: dict[str, Any]) -> RankLayout:
    process = psutil.Process(rank["pid"])
    eventually(lambda: LAYOUT_VARIABLE in process.environ())  # a standby shows it once it is a rank
    return msgspec.json.decode(process.environ()[LAYOUT_VARIABLE], type=RankLayout)


@pytest.mark.slow
def test_training_goes_on_without_its_server_and_the_launcher_says_so_once_and_when_it_is_back(tmp_path: Path) -> None:
    with stub_server() as server:
        server.answer = lambda *_: (503, None)
        words = ("--nnodes", "2", "--server", server.url)
        with launched(tmp_path, "n1,n2", *words, steps=80) as launcher:
            lost = launcher.wait("server_lost")
            assert "503" in lost["reason"]
            assert "training goes on" in lost["meanwhile"]
            launcher.reaches(1, 2)
            server.answer = StubServer.agreeable
            assert launcher.wait("server_back")["away_s"] > 0.0
            assert launcher.ends() == 0
        assert [said["event"] for said in launcher.events].count("server_lost") == 1


@pytest.mark.slow
def test_the_server_is_told_which_rank_a_signal_has_ended(tmp_path: Path) -> None:
    with (
        stub_server() as server,
        launched(tmp_path, "n1,n2", "--nnodes", "2", "--server", server.url, steps=10_000) as launcher,
    ):
        ranks = launcher.wait("running", 1)["ranks"]
        os.kill(next(rank["pid"] for rank in ranks if rank["node"] == "n2"), signal.SIGKILL)
        launcher.wait("attempt_failed", 1)
        eventually(lambda: server.reported("PUT", "/api/v1/jobs/j")[-1]["exits"])
        update = server.reported("PUT", "/api/v1/jobs/j")[-1]
        assert (update["attempt"], update["exits"]) == (1, [{"rank": 1, "exit_code": -9}])


@pytest.mark.slow
def test_without_a_server_a_failed_job_is_restarted_from_its_checkpoint(tmp_path: Path) -> None:
    words = ("--nnodes", "2", "--without-server")
    with launched(tmp_path, "n1,n2", *words, steps=15, env={"FAIL_AT": "7"}) as launcher:
        failure = launcher.wait("ranks_failed", 1)
        assert "failing as I was told to" in failure["detail"]
        second = launcher.wait("running", 2)
        assert (second["nodes"], second["resumed_step"]) == (["n1", "n2"], 5)
        assert launcher.ends() == 0


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_rank_its_successor_goes_on_and_a_terminated_one_says_cancelled(
    tmp_path: Path,
) -> None:
    with stub_server() as server:
        words = ("--nnodes", "2", "--server", server.url)
        with launched(tmp_path, "n1,n2", *words, steps=10_000) as launcher:
            ranks = launcher.wait("running", 1)["ranks"]
            launcher.reaches(1, 11)
            os.kill(ranks[0]["pid"], signal.SIGSTOP)
            launcher.process.kill()
            launcher.ends()
            eventually(lambda: not any(running(rank["pid"]) for rank in ranks))
        with launched(tmp_path, "n1,n2", *words, steps=10_000) as launcher:
            assert "in the midst of attempt 1" in launcher.wait("resuming")["reason"]
            second = launcher.wait("running")
            assert second["attempt"] == 2
            assert second["resumed_step"] >= 10
            assert launcher.wait("verified")["resumed_step"] == second["resumed_step"]
            launcher.process.terminate()
            assert launcher.ends() == 143
            assert server.reported("PUT", "/api/v1/jobs/j")[-1]["state"] == "cancelled"
            assert not any(running(rank["pid"]) for rank in second["ranks"])


@pytest.mark.slow
def test_a_killed_runner_takes_its_ranks_with_it_and_its_node_is_replaced(tmp_path: Path) -> None:
    words = ("--nnodes", "2", "--without-server", "--verdict-wait", "0")
    with launched(tmp_path, "n1,n2,n3", *words, steps=10_000) as launcher:
        ranks = launcher.wait("running", 1)["ranks"]
        eventually(lambda: any(e["event"] == "node_ready" and e["node"] == "n3" for e in launcher.events))
        above = psutil.Process(ranks[1]["pid"]).parents()
        # The furthest above: what it forks for an attempt has its command line.
        *_, runner = (process for process in above if process.cmdline()[-1].endswith("launch.runner"))
        os.kill(ranks[1]["pid"], signal.SIGSTOP)
        runner.kill()
        lost = launcher.wait("node_lost")
        assert lost["node"] == "n2"
        second = launcher.wait("running", 2)
        assert second["nodes"] == ["n1", "n3"]
        eventually(lambda: not running(ranks[1]["pid"]))


@pytest.mark.slow
def test_a_runner_answers_while_it_gets_ready_brings_its_logs_and_ends_with_its_lease(tmp_path: Path) -> None:
    script = tmp_path / "forever.py"
    script.write_text("import time; print('rank here', flush=True); time.sleep(1000)")
    log = tmp_path / "logs" / "attempt-1" / "n1" / "rank1.stdout.log"
    with contextlib.closing(AttemptStore("127.0.0.1", 0)) as store:
        start = Start(
            attempt=1, run_id="j-1", node="n1", node_rank=0, nodes=1, ranks_per_node=2, store_host=store.host,
            store_port=store.port, env={}, command=[str(script)], log_dir=str(log.parent),
        )  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "eagle_eye.orchestrators.launch.runner"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with process, process.stdin, process.stdout, process.stderr:

            def say(message: ToRunner) -> None:
                assert process.stdin is not None
                process.stdin.write(line(message))
                process.stdin.flush()

            def hears() -> FromRunner:
                assert process.stdout is not None
                word: FromRunner = decode_from_runner(process.stdout.readline())
                return word

            say(Configure({}, lease_s=2.0))
            doing = set()
            while isinstance(word := hears(), Alive):
                doing.add(word.doing)
                time.sleep(0.1)
                say(Ping())
            assert "importing torch" in doing
            assert word == Ready(process.pid, "not checked")
            say(start)
            while not isinstance(word := hears(), Started):
                assert isinstance(word, Alive)
            assert [rank.rank for rank in word.ranks] == [0, 1]
            assert all(running(rank.pid) for rank in word.ranks)

            def written() -> bool:
                say(Ping())
                return log.exists() and log.read_text() == "rank here\n"

            eventually(written)
            say(Stop())
            while isinstance(brought := hears(), Alive):
                pass
            assert isinstance(brought, Logs)
            assert brought.files["rank1.stdout.log"] == "rank here\n"
            assert isinstance(hears(), Stopped)
            assert not any(running(rank.pid) for rank in word.ranks)
            say(msgspec.structs.replace(start, attempt=2))
            while not isinstance(word := hears(), Started):
                assert isinstance(word, Alive)
            assert process.wait(PATIENCE_S) == 0
            assert not any(running(rank.pid) for rank in word.ranks)
            assert b"nothing heard for 2 s" in process.stderr.read()
