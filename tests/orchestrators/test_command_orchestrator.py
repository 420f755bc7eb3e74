from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.orchestrators import site_program
from eagle_eye.orchestrators.protocol import (
    CannotCarryOutError,
    Exclusion,
    JobState,
    Orchestrator,
    OrchestratorError,
    Restart,
)
from eagle_eye.orchestrators.site_program import (
    OUTPUT_BYTES_MAX,
    CommandOrchestrator,
    Programs,
    ProgramTimeouts,
)
from eagle_eye.schema.action import JobUpdate, MemberRank
from tests.orchestrators.contract import OrchestratorContract, cause

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "orchestrate-command.md"


def documented_program(folder: Path) -> Path:
    """The example of the docs, as somebody who copied it has it; with this Python, without site-packages."""
    found = re.search(r"```python\n#!/usr/bin/env python3\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return script(folder / "jobs.py", found[1])


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable} -IS\n{text}", encoding="utf-8")
    path.chmod(0o755)
    return path


class JobFolders:
    """The world of the docs' example: a job of two nodes and a spare that sleeps."""

    job = "llm"
    node = "n2"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs = folder / "jobs"
        (self.jobs / "llm").mkdir(parents=True)
        start = self.jobs / "llm" / "start"
        start.write_text("#!/bin/sh\nexec sleep 600\n")
        start.chmod(0o755)
        # As the program itself starts it, without a run of the program for each test.
        with (self.jobs / "llm" / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._first = subprocess.Popen([start], pass_fds=[lock.fileno()], start_new_session=True)
        record = {"attempt": 1, "nodes": ["n1", "n2"], "spares": ["n3"], "out": [], "process": self._first.pid}
        (self.jobs / "llm" / "job.json").write_text(json.dumps(record))
        self.program = documented_program(folder)
        self.orchestrator: CommandOrchestrator = self.reopened()

    def reopened(self) -> CommandOrchestrator:
        programs = Programs({"PATH": os.environ["PATH"], "JOBS": str(self.jobs)}, str(self.folder))
        return CommandOrchestrator([str(self.program)], programs, self.folder / "excluded.json", resumes=True)

    def record(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.jobs / "llm" / "job.json").read_text())
        return found

    def runs_on(self) -> frozenset[str]:
        state = self.orchestrator.state("llm")
        nodes = self.record()["nodes"]
        assert isinstance(nodes, list)
        return frozenset(nodes) if state is not None and state.running else frozenset()

    def out(self) -> frozenset[str]:
        nodes = self.record()["out"]
        assert isinstance(nodes, list)
        return frozenset(nodes)

    def snapshot(self) -> str:
        return json.dumps(self.record(), sort_keys=True)

    def close(self) -> None:
        for process in {self._first.pid, self.record()["process"]}:
            assert isinstance(process, int)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        self._first.wait()


class TestDocumentedProgram(OrchestratorContract):
    @pytest.fixture
    def world(self, tmp_path: Path) -> Iterator[JobFolders]:
        made = JobFolders(tmp_path)
        yield made
        made.close()


def test_the_documented_program_refuses_what_would_leave_too_few_nodes(tmp_path: Path) -> None:
    world = JobFolders(tmp_path)
    before = world.snapshot()
    with pytest.raises(CannotCarryOutError, match=r"exclude: exit code 1: no spare node left for job llm"):
        world.orchestrator.exclude(Exclusion("llm", 1, ("n1", "n2"), True, cause()))
    assert world.snapshot() == before
    world.close()


class Playing:
    """A program of one test, and the orchestrator over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = Programs({"PATH": os.environ["PATH"]}, str(folder))

    def program(self, text: str, limits: ProgramTimeouts | None = None, **how: object) -> CommandOrchestrator:
        path = script(self.folder / "program", text)
        return CommandOrchestrator([str(path), "--site", "A"], self.programs, self.folder / "out.json", limits, **how)  # type: ignore[arg-type]


@pytest.fixture
def playing(tmp_path: Path) -> Iterator[Playing]:
    made = Playing(tmp_path)
    yield made
    made.programs.close()


ECHO = """
import json, os, sys
asked = json.load(sys.stdin)
if asked["verb"] == "state":
    print(json.dumps({"attempt": 1, "nodes": ["n1", "n2"], "running": True}))
else:
    print(json.dumps([sys.argv[1:], os.environ["EAGLE_EYE_VERB"], asked]))
"""


def test_the_program_gets_the_whole_request_and_its_arguments(playing: Playing) -> None:
    orchestrator = playing.program(ECHO)
    assert orchestrator.state("j") == JobState(1, frozenset({"n1", "n2"}), running=True)
    why = {
        "incident_id": "inc-1",
        "action_id": "act-1",
        "fault": "gpu_lost",
        "summary": "XID 79 on gpu 3",
        "repair": "replace",
    }
    head = {"format": "eagle-eye-command/1"}
    said = json.loads(orchestrator.exclude(Exclusion("j", 1, ("n2",), True, cause())))
    excluded = {**head, "verb": "exclude", "job": "j", "attempt": 1, "nodes": ["n2"], "now": True, "cause": why}
    assert said == [["--site", "A"], "exclude", excluded]
    said = json.loads(orchestrator.restart("j", Restart(1, 7.5, cause(), ("n2",), resume_from="memory:40")))
    assert said[2] == {
        **head, "verb": "restart", "job": "j", "over_attempt": 1, "without": ["n2"], "distrust_since_s": 7.5,
        "resume_from": "memory:40", "restart_scope": "job", "cause": why,
    }  # fmt: skip
    assert json.loads(orchestrator.readmit(["n2", "n9"]))[2] == {**head, "verb": "readmit", "nodes": ["n2"]}
    assert json.loads(orchestrator.stop("j", "why"))[2] == {**head, "verb": "stop", "job": "j", "reason": "why"}


def test_its_environment_is_what_it_was_given(playing: Playing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_EYE_TOKEN_FILE", "/secret")
    orchestrator = playing.program("import os, sys; sys.stdin.read(); print(sorted(os.environ))")
    assert orchestrator.stop("j", "") in ("['EAGLE_EYE_VERB', 'LC_CTYPE', 'PATH']", "['EAGLE_EYE_VERB', 'PATH']")


def test_of_no_job_the_program_is_not_asked(playing: Playing) -> None:
    assert playing.program("raise SystemExit(1)").state("") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit('no\\x1b[31m permission')", r"stop: exit code 1: no \[31m permission$"),
        ("print('only this'); raise SystemExit(7)", "stop: exit code 7: only this$"),
        ("import os; os.kill(os.getpid(), 9)", "stop: ended by SIGKILL$"),
    ],
)
def test_any_other_end_is_a_failure_in_its_own_words(playing: Playing, text: str, words: str) -> None:
    with pytest.raises(CannotCarryOutError, match=words):
        playing.program(text).stop("j", "")


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "{",
        "[]",
        '{"attempt": "3"}',
        '{"attempt": 1, "nodes": [], "running": true, "state": "asleep"}',
        '{"more": ' + "[" * 10_000,
    ],
)
def test_a_state_that_is_not_understood_is_not_taken_for_one(playing: Playing, answer: str) -> None:
    with pytest.raises(CannotCarryOutError):
        playing.program(f"print({answer!r})").state("j")


def test_too_long_a_run_is_killed_with_all_its_session(playing: Playing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_program, "KILL_AFTER_S", 0.3)
    slow = playing.program(
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open('child', 'w').write(str(child.pid))\n"
        "time.sleep(600)\n",
        ProgramTimeouts(verb_s=0.5),
    )
    with pytest.raises(CannotCarryOutError, match=r"stop: killed after 0\.5 s"):
        slow.stop("j", "")
    assert dead(int((playing.folder / "child").read_text()))


def dead(process: int, within_s: float = 5.0) -> bool:
    """Whether it is gone, or a zombie that nobody reaps here."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_what_it_leaves_in_the_background_goes_on_and_holds_nothing_up(playing: Playing) -> None:
    orchestrator = playing.program(
        "import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)", ProgramTimeouts(verb_s=20.0)
    )
    began_s = time.monotonic()
    left = int(orchestrator.stop("j", ""))
    assert time.monotonic() - began_s < 10.0
    os.kill(left, signal.SIGKILL)


def test_endless_output_and_unread_input_are_bounded(playing: Playing) -> None:
    ended = playing.programs.run(
        [sys.executable, "-ISc", "for n in range(200_000): print(n)"], b"x" * 1_000_000, 30.0, {}
    )
    assert (ended.exit_code, ended.late, ended.cut, len(ended.out)) == (0, False, True, OUTPUT_BYTES_MAX)
    assert ended.out.endswith("199999\n")


MANY = 'import json; print(json.dumps({"attempt": 1, "nodes": [f"n{i}" for i in range(20_000)], "running": True}))'


def test_a_job_of_many_nodes_is_told_whole(playing: Playing, monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = playing.program(MANY)
    state = orchestrator.state("j")
    assert state is not None
    assert len(state.nodes) == 20_000
    monkeypatch.setattr("eagle_eye.orchestrators.site_program.STATE_BYTES_MAX", 100_000)
    with pytest.raises(CannotCarryOutError, match="answer to 'state' has more than 100000 bytes"):
        orchestrator.state("j")


def test_closing_ends_what_runs_and_nothing_begins_after_it(playing: Playing) -> None:
    orchestrator = playing.program("import time\nopen('begun', 'w').close()\ntime.sleep(600)")
    ended: list[str] = []

    def stop() -> None:
        try:
            orchestrator.stop("j", "")
        except CannotCarryOutError as error:
            ended.append(str(error))

    thread = threading.Thread(target=stop)
    thread.start()
    while not (playing.folder / "begun").exists():
        time.sleep(0.01)
    orchestrator.close()
    thread.join(10.0)
    assert ended == ["stop: ended by SIGTERM"]
    with pytest.raises(CannotCarryOutError, match="ending"):
        orchestrator.stop("j", "")


def test_a_restart_is_not_asked_for_where_a_newer_attempt_runs(playing: Playing) -> None:
    orchestrator = playing.program(ECHO)
    assert orchestrator.restart("j", Restart(0, None, cause())) == "attempt 1 runs already"


def test_the_server_hears_what_the_program_says_of_the_jobs(playing: Playing) -> None:
    orchestrator = playing.program(
        """
import json, sys
job = json.load(sys.stdin)["job"]
print(json.dumps({
    "runs": {"attempt": 2, "nodes": ["n1"], "running": True, "ranks": [{"rank": 0, "node": "n1", "device": 3}]},
    "done": {"attempt": 1, "nodes": ["n1"], "running": False, "state": "finished", "restart_owner": "us"},
    "unsaid": {"attempt": 1, "nodes": ["n1"], "running": False},
}.get(job)))
""",
        reported=["runs", "done", "unsaid", "gone"],
    )
    assert orchestrator.jobs() == {
        "runs": JobUpdate(2, "running", [MemberRank(0, "n1", 3)]),
        "done": JobUpdate(1, "finished", [], "us"),
    }


def test_a_spoiled_memory_is_an_error_and_no_empty_one(playing: Playing) -> None:
    for content in (b"[", b'{"n1": "\xff"}'):
        (playing.folder / "out.json").write_bytes(content)
        with pytest.raises(OrchestratorError, match="repair or remove it"):
            playing.program(ECHO)


def test_it_is_an_orchestrator(playing: Playing) -> None:
    orchestrator: Orchestrator = playing.program(ECHO)
    assert orchestrator.resumes is False
