from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given

from eagle_eye.agent.processes.exit_watcher import is_running
from eagle_eye.checks import child
from eagle_eye.checks.child import WorkerProgress, courses, lines, run, without_answer
from tests.agent.fakes import until
from tests.checks.builders import children, output_with

SAY = """import json, os, signal, time
def say(**what):
    print(json.dumps(dict(at_s=time.monotonic(), **what)), flush=True)
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(child, "_FOLDER", tmp_path)
    monkeypatch.setattr(child, "STALL_S", {"working": 0.3})
    monkeypatch.setattr(child, "cpu_waited_s", lambda: 0.0)  # this machine's own load is no matter here
    return tmp_path


def program(folder: Path, text: str) -> None:
    (folder / "job.py").write_text(f"{SAY}def main(text):\n    asked = json.loads(text)\n    {text}\n")


def test_a_child_that_stops_in_the_middle_of_its_work_is_sick_and_is_killed(work: Path) -> None:
    program(work, f"open({str(work / 'pid')!r}, 'w').write(str(os.getpid())); say(worker=0, phase='working');"
                  " os.kill(os.getpid(), signal.SIGSTOP)")  # fmt: skip
    begin_s = time.monotonic()
    made = run("job", {}, 1, begin_s + 3.0)
    assert time.monotonic() - begin_s < 10.0
    state, reason = without_answer(made.courses[0], made)
    assert state == "sick"
    assert reason.startswith("did not finish: nothing for")
    assert not is_running(int((work / "pid").read_text()))


def test_a_child_that_ends_in_time_gives_its_values(work: Path) -> None:
    program(work, "say(worker=asked['workers'] - 1, values={'speed': 2})")
    made = run("job", {}, 2, time.monotonic() + 10.0)
    assert [course.values for course in made.courses] == [None, {"speed": 2.0}]


def test_a_child_that_crashes_says_nothing_of_the_host(work: Path) -> None:
    program(work, "say(worker=0, phase='working'); raise SystemExit('no such thing')")
    made = run("job", {}, 1, time.monotonic() + 10.0)
    assert without_answer(made.courses[0], made) == (
        "could_not_check",
        "the child ended with 1 and without an answer: no such thing",
    )


def test_a_child_does_not_outlive_whoever_asked(work: Path, tmp_path: Path) -> None:
    (work / "lines.py").write_text((Path(child.__file__).parent / "work" / "lines.py").read_text())
    (work / "job.py").write_text(
        "import json, os, time\nfrom .lines import bounded\n"
        "def main(text):\n    asked = json.loads(text)\n    bounded(asked['parent'], asked['until_s'])\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()) + ' ')\n    time.sleep(60)\n"
    )
    asking = os.fork()
    if asking == 0:
        run("job", {}, 1, time.monotonic() + 60.0)
        os._exit(0)
    until(lambda: (tmp_path / "pid").exists() and " " in (tmp_path / "pid").read_text(), 20.0)
    os.kill(asking, 9)
    os.waitpid(asking, 0)
    until(lambda: not is_running(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize(
    ("course", "starved", "state", "said"),
    [
        (WorkerProgress("working", 90.0), False, "sick", "nothing for 10 s while working"),
        (WorkerProgress("working", 90.0), True, "could_not_check", "the host's CPUs are overloaded"),
        (WorkerProgress("working", 98.0), False, "could_not_check", "in time (while working)"),
        (WorkerProgress("opening", 90.0), False, "could_not_check", "in time (while opening)"),
        (WorkerProgress("opening", 75.0), False, "sick", "nothing for 25 s while opening"),
        (WorkerProgress("loading", 10.0), False, "could_not_check", "in time (while loading)"),
        (WorkerProgress(), False, "could_not_check", "in time (before it began)"),
        (WorkerProgress("working", 1e200), False, "could_not_check", "in time"),
    ],
)
def test_only_silence_in_work_that_takes_no_time_makes_a_device_sick(
    course: WorkerProgress, starved: bool, state: str, said: str
) -> None:
    found, reason = without_answer(course, children(course, status=None, starved=starved))
    assert found == state
    assert said in reason


def test_an_error_makes_a_device_sick_only_when_it_is_the_hardware_s() -> None:
    ecc = WorkerProgress("working", 1.0, None, "RuntimeError: uncorrectable ECC error encountered", hardware=True)
    full = WorkerProgress("working", 1.0, None, "OutOfMemoryError: CUDA out of memory")
    assert without_answer(ecc, children(ecc))[0] == "sick"
    assert without_answer(full, children(full))[0] == "could_not_check"


@pytest.mark.parametrize(
    "line",
    [
        {"worker": 1, "at_s": 1.0, "phase": "working"},  # there is one worker, 0
        {"worker": True, "at_s": 1.0, "phase": "working"},
        {"worker": 0, "at_s": "now", "phase": "working"},
        {"worker": 0, "at_s": 1.0, "values": {"speed": "fast"}},
        {"worker": 0, "at_s": 1.0, "values": {"speed": float("nan")}},
        {"worker": 0, "at_s": 1.0, "values": {}},
    ],
)
def test_what_no_worker_of_ours_would_say_is_left_out(line: dict[str, object]) -> None:
    reported = tuple(lines(json.dumps(line).encode()))
    assert courses(reported, 1) == (WorkerProgress(),)


def test_half_a_line_and_a_library_s_own_words_are_left_out() -> None:
    said = b'NCCL version 2.21\n{"worker": 0, "at_s": 1, "phase": "working"}\n{"worker": 0, "at_s": 2, "pha'
    assert courses(tuple(lines(said)), 1) == (WorkerProgress("working", 1.0),)


@given(output_with("worker", "at_s", "phase", "values", "error"))
def test_any_output_is_read_without_an_error(output: bytes) -> None:
    assert len(courses(tuple(lines(output)), 3)) == 3


def test_a_child_gets_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_EYE_TOKEN", "ee_secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/nccl/lib")
    kept = child.kept_environment()
    assert "LD_LIBRARY_PATH=/opt/nccl/lib" in kept
    assert not any("ee_secret" in each for each in kept)
