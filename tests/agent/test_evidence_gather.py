"""Gathering from real processes: blocked, stopped, hostile, gone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.evidence import gather as gathering
from eagle_eye.agent.evidence.gather import (
    BUG_REPORT,
    EVIDENCE,
    BugReport,
    CannotGather,
    EvidenceGatherer,
    FlightDumps,
    KernelLog,
    ProcessStates,
    Stacks,
    gather_now,
)
from eagle_eye.agent.evidence.source import BundleManifest, EvidenceSource, Scene, Task
from eagle_eye.agent.external_tool import find
from eagle_eye.agent.processes.process_registry import TrainingProcess
from tests.agent.fakes import script, until
from tests.agent.test_evidence_bundle import unpacked

BLOCKED = """
    import threading
    lock = threading.Lock()
    def waits_for_the_lock():
        lock.acquire()
        print("ready", flush=True)
        lock.acquire()
    waits_for_the_lock()
"""


@contextlib.contextmanager
def rank(text: str = BLOCKED, *arguments: str, **environment: str) -> Iterator[TrainingProcess]:
    """A real process that is rank 0 of job "j", once it has said that it is ready."""
    with script(text, *arguments, **environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield TrainingProcess(process.pid, "j", 0, 2, 0)


def stop(process: TrainingProcess) -> None:
    """Stop the process, and return once it stands still."""
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: "T (stopped)" in Path(f"/proc/{process.pid}/status").read_text())


def gather(
    sources: Sequence[EvidenceSource], *processes: TrainingProcess, within_s: float = 10.0, **more: object
) -> tuple[BundleManifest, dict[str, bytes]]:
    gatherer = EvidenceGatherer("n1", "0", {EVIDENCE: sources})
    reported, content = gatherer.gather(EVIDENCE, processes, within_s, **more)  # type: ignore[arg-type]
    return reported, unpacked(content)


def test_a_blocked_process_shows_where_it_waits() -> None:
    with rank() as process:
        until(lambda: "S (sleeping)" in Path(f"/proc/{process.pid}/status").read_text())
        _, files = gather([ProcessStates()], process)
    state = files[f"n1/processes/rank-0-pid-{process.pid}.txt"].decode()
    assert "State:\tS (sleeping)" in state
    assert "futex" in state


def test_a_stopped_process_is_looked_at_like_any_other() -> None:
    with rank() as process:
        stop(process)
        reported, files = gather([ProcessStates()], process)
        os.kill(process.pid, signal.SIGCONT)
    assert "T (stopped)" in files[f"n1/processes/rank-0-pid-{process.pid}.txt"].decode()
    assert reported.missing == []


def test_neither_command_line_nor_environment_gives_a_secret_away() -> None:
    arguments = ("--password", "hunter2", "--lr", "0.1")
    with rank(BLOCKED, *arguments, HF_TOKEN="hf-sekret", MY_OWN="sekret-too", NCCL_DEBUG="INFO") as process:
        _, files = gather([ProcessStates()], process)
    everything = b"".join(files.values())
    assert b"hunter2" not in everything
    assert b"sekret" not in everything
    command = json.loads(files[f"n1/processes/rank-0-pid-{process.pid}.command.json"])
    assert command["arguments"][-4:] == ["--password", "[redacted]", "--lr", "0.1"]
    assert command["environment"]["NCCL_DEBUG"] == "INFO"
    assert {"HF_TOKEN", "MY_OWN"} <= set(command["other_variables"])


def test_a_huge_environment_is_cut_and_says_so() -> None:
    huge = {f"NCCL_{number}": "x" * 100_000 for number in range(15)}
    with rank(BLOCKED, **huge) as process:
        reported, files = gather([ProcessStates()], process)
    name = f"n1/processes/rank-0-pid-{process.pid}.command.json"
    assert len(files[name]) < 200_000
    assert [piece.cut for piece in reported.files if piece.name == name] == [True]


def test_children_of_a_rank_are_looked_at_and_nobody_else() -> None:
    parent = """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(100)"])
        import time; time.sleep(100)
    """
    with rank() as other, rank(parent) as process:
        reported, _ = gather([ProcessStates()], process)
        children = [seen for seen in reported.processes if seen.rank is None]
        assert [seen.label for seen in children] == [f"rank-0-child-pid-{children[0].pid}"]
        assert {seen.pid for seen in reported.processes} == {process.pid, children[0].pid}
        assert other.pid not in {seen.pid for seen in reported.processes}
        os.kill(children[0].pid, signal.SIGKILL)


def test_only_the_jobs_attempt_is_looked_at() -> None:
    with rank() as process:
        reported, _ = gather([ProcessStates()], process, job="j", attempt=1)
        assert reported.processes == []
        assert reported.missing[0].why == "not on this node; there are: j attempt 0"
        reported, _ = gather([ProcessStates()], process, job="other")
        assert reported.processes == []
        reported, _ = gather([ProcessStates()], process, job="j", attempt=0)
        assert [seen.pid for seen in reported.processes] == [process.pid]


def test_a_process_that_is_gone_is_not_looked_at() -> None:
    with rank() as process:
        pass
    reported, files = gather([ProcessStates()], process)
    assert reported.processes == []
    assert list(files) == ["n1/manifest.json"]


def kernel_log(*records: bytes) -> KernelLog:
    """A kernel's log that holds these records."""
    left = iter([*records, b""])
    return KernelLog(opener=lambda _path: os.open(os.devnull, os.O_RDONLY), read=lambda _descriptor, _size: next(left))


def test_the_kernels_log_is_readable_and_without_secrets() -> None:
    records = (b"6,1,1000000,-;first\n SUBSYSTEM=x\n", b"no record", b"4,2,2500000,-;api_key=abc NVRM: Xid\n")
    _, files = gather([kernel_log(*records)])
    assert files["n1/kernel.log"] == b"[    1.000000] first\n[    2.500000] api_key=[redacted] NVRM: Xid\n"


def test_of_a_long_kernels_log_the_newest_part_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.agent.evidence.gather.LOG_BYTES_MAX", 80)
    reported, files = gather([kernel_log(b"6,1,1000000,-;" + b"x" * 60, b"6,2,2000000,-;" + b"y" * 60)])
    assert b"x" not in files["n1/kernel.log"]
    assert b"y" * 60 in files["n1/kernel.log"]
    assert reported.files[0].cut


def test_a_kernels_log_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    reported, _ = gather([KernelLog(tmp_path / "none")])
    assert [(gap.source, gap.why) for gap in reported.missing[1:]] == [("kernel_log", "No such file or directory")]


def fake_pyspy(folder: Path, text: str) -> Callable[[], str]:
    program = folder / "py-spy"
    program.write_text(f"#!{sys.executable}\nimport sys, time\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return lambda: str(program)


@pytest.mark.skipif(find("py-spy") is None, reason="py-spy is not installed: pip install py-spy")
def test_py_spy_shows_the_function_that_hangs_also_of_a_stopped_process() -> None:
    with rank() as process:
        stop(process)
        _, files = gather([Stacks()], process)
        os.kill(process.pid, signal.SIGCONT)
    assert b"waits_for_the_lock" in files[f"n1/stacks/rank-0-pid-{process.pid}.txt"]


def test_py_spy_is_told_not_to_pause_the_process_and_its_copy_of_the_command_line_is_dropped(tmp_path: Path) -> None:
    pyspy = fake_pyspy(tmp_path, "print('Process 1: train.py --x sekret'); print(sys.argv[1:])")
    with rank() as process:
        _, files = gather([Stacks(pyspy)], process)
    reported = files[f"n1/stacks/rank-0-pid-{process.pid}.txt"].decode()
    assert reported == f"['dump', '--nonblocking', '--pid', '{process.pid}']\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("time.sleep(100)", "py-spy did not end in time"),
        ("sys.exit('Permission denied')", "py-spy failed: Permission denied"),
    ],
)
def test_a_py_spy_that_fails_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    # Two seconds for the program, and two to tell what came of it: a busy machine takes neither.
    monkeypatch.setattr("eagle_eye.agent.evidence.source.TOOLS_EARLIER_S", 2.0)
    with rank() as process:
        reported, _ = gather([Stacks(fake_pyspy(tmp_path, text))], process, within_s=4.0)
    assert [why in gap.why for gap in reported.missing] == [True]


def test_without_py_spy_it_is_said_that_stacks_are_missing_and_why() -> None:
    with rank() as process:
        reported, _ = gather([Stacks(lambda: None)], process)
    assert "py-spy is not installed, and it was started without TORCH_WORKER_SERVER_SOCKET" in reported.missing[0].why


SERVER = """
    import http.server, os, socketserver, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = b"in hangs_here" if self.path == "/handler/dump_traceback" else b'{"entries": []}'
            self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
            self.wfile.write(body)
        def address_string(self): return "x"
        def log_message(self, *a): pass
    server = socketserver.UnixStreamServer(sys.argv[1], Handler)
    print("ready", flush=True)
    server.serve_forever()
"""


def test_a_worker_server_gives_stack_and_flight_recorder(tmp_path: Path) -> None:
    path = str(tmp_path / "rank.sock")
    with rank(SERVER, path, TORCH_WORKER_SERVER_SOCKET=path) as process:
        reported, files = gather([Stacks(lambda: None), FlightDumps()], process)
    assert files[f"n1/stacks/rank-0-pid-{process.pid}.txt"] == b"in hangs_here"
    assert files["flight-recorder/j/rank_0.json"] == b'{"entries": []}'
    assert reported.missing == []


def test_a_socket_that_belongs_to_another_process_is_not_spoken_to(tmp_path: Path) -> None:
    path = str(tmp_path / "docker.sock")
    with rank(SERVER, path), rank(BLOCKED, TORCH_WORKER_SERVER_SOCKET=path) as process:
        reported, files = gather([Stacks(lambda: None)], process)
    assert list(files) == ["n1/manifest.json"]
    assert "is answered by process" in reported.missing[0].why


def test_the_newest_dump_of_the_process_is_taken_as_it_is(tmp_path: Path) -> None:
    prefix = str(tmp_path / "rank_")
    (tmp_path / "rank_0").write_bytes(b"of an earlier job")
    os.utime(tmp_path / "rank_0", (1.0, 1.0))
    with rank(BLOCKED, TORCH_FR_DUMP_TEMP_FILE=prefix) as process:
        reported, files = gather([FlightDumps()], process, within_s=1.0)
        assert "older than the process" in reported.missing[0].why
        (tmp_path / "rank_0").write_bytes(b"\x80\x02}.")
        reported, files = gather([FlightDumps()], process, within_s=1.0)
    assert files["flight-recorder/j/rank_0"] == b"\x80\x02}."


def test_a_dump_that_leads_to_the_kernels_own_files_is_not_taken() -> None:
    with rank(BLOCKED, TORCH_FR_DUMP_TEMP_FILE="/proc/self/fdinfo/") as process:
        reported, files = gather([FlightDumps()], process, within_s=1.0)
    assert list(files) == ["n1/manifest.json"]
    assert [missing.why for missing in reported.missing] == ["the dump is empty"]


def test_what_is_no_pipe_of_the_process_is_counted(tmp_path: Path) -> None:
    (tmp_path / "pipe_0.pipe").write_bytes(b"keep")
    (tmp_path / "rank_0").mkdir()
    drops = Drops()
    places = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"}
    with rank(BLOCKED, **places) as process:
        reported, _ = gather([FlightDumps(drops=drops)], process, within_s=1.0)
    assert drops.snapshot() == {"flight_recorder_refused": 1}
    refused, missing = reported.missing
    assert (refused.what, "not a regular file" in refused.why) == (f"{tmp_path}/rank_0", True)
    assert "pipe_0.pipe: not a named pipe" in missing.why


class Slow:
    """A source that hangs until it is let go."""

    name = "slow"

    def __init__(self) -> None:
        self.go = threading.Event()

    def tasks(self, scene: Scene) -> list[Task]:
        def wait() -> None:
            self.go.wait()
            scene.bundle.add(self.name, "n1/late", b"x")

        def fail() -> None:
            raise ValueError("no luck")

        def find_out() -> None:
            scene.bundle.add(self.name, "n1/quick", b"x")

        return [Task("late", wait), Task("broken", fail), Task("quick", find_out)]


def test_what_is_not_done_at_the_deadline_is_named_and_the_rest_is_there() -> None:
    slow = Slow()
    begin_s = time.monotonic()
    reported, files = gather([slow], within_s=0.3)
    assert time.monotonic() - begin_s < 3.0
    slow.go.set()
    assert sorted(files) == ["n1/manifest.json", "n1/quick"]
    reasons = {gap.what: gap.why for gap in reported.missing}
    assert reasons["late"] == "not done at the deadline"
    assert reasons["broken"] == "ValueError: no luck"


def test_threads_that_never_come_back_are_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "HANGING_MAX", 2)
    slow = Slow()
    gatherer = EvidenceGatherer("n1", "0", {EVIDENCE: [slow]})
    gatherer.gather(EVIDENCE, [], 0.05)
    until(lambda: gatherer.hanging() == 1)  # the other two end, if late
    gatherer.gather(EVIDENCE, [], 0.05)
    until(lambda: gatherer.hanging() == 2)
    with pytest.raises(CannotGather, match="2 threads of earlier gatherings hang"):
        gatherer.gather(EVIDENCE, [], 0.05)
    slow.go.set()
    until(lambda: gatherer.hanging() == 0)
    gatherer.gather(EVIDENCE, [], 0.5)


def fake_report(folder: Path, text: str) -> Callable[[], str]:
    program = folder / "nvidia-bug-report.sh"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o700)
    return lambda: str(program)


def test_the_vendors_report_is_taken_as_it_is(tmp_path: Path) -> None:
    program = fake_report(tmp_path, 'test "$1" = --safe-mode || exit 9; echo report > "$3.gz"')
    reported, content = EvidenceGatherer("n1", "0", {BUG_REPORT: [BugReport(program)]}).gather(BUG_REPORT, [], 10.0)
    assert unpacked(content)["n1/nvidia-bug-report.log.gz"] == b"report\n"
    assert [gap.source for gap in reported.missing] == ["processes"]


@pytest.mark.parametrize(
    ("text", "why"), [("sleep 100", "was killed"), ("echo broken >&2; exit 2", "ended with 2: broken")]
)
def test_a_report_that_is_not_made_is_named(tmp_path: Path, text: str, why: str) -> None:
    reported, _ = EvidenceGatherer("n1", "0", {BUG_REPORT: [BugReport(fake_report(tmp_path, text))]}).gather(
        BUG_REPORT, [], 1.0
    )
    assert [why in gap.why for gap in reported.missing if gap.source == "bug_report"] == [True]


def test_a_person_gets_a_file_of_his_own_that_replaces_none(tmp_path: Path) -> None:
    out = tmp_path / "evidence.tar.gz"
    gatherer = EvidenceGatherer("n1", "0", {EVIDENCE: [ProcessStates()]})
    with rank() as process:
        gather_now(out, gatherer, [process])
        assert f"n1/processes/rank-0-pid-{process.pid}.txt" in unpacked(out.read_bytes())
        assert out.stat().st_mode & 0o777 == 0o600
        with pytest.raises(FileExistsError):
            gather_now(out, gatherer, [process])
