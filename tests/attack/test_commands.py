"""Commands as careless hands type them: options of every command with values that cannot be meant, drawn by seed.

``EAGLE_EYE_TEST_CASES=100000`` tries all, ``EAGLE_EYE_TEST_SEED`` draws others.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.cli import main as cli
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import simulate
from eagle_eye.simulator.writer import write
from tests.cli.wrong_values import Runner, cases, complaint

SEED = int(os.environ.get("EAGLE_EYE_TEST_SEED", "1"))
CASES_MAX = int(os.environ.get("EAGLE_EYE_TEST_CASES", "16"))  # of one command: all take half an hour
SOON_S = 20.0  # for a process to end on a machine that has other things to do
AT_WORK_S = 3.0  # of a core: what a backtest takes before it judges is less
NO_VALUES = ("doctor", "launch", "orchestrate", "agent", "check", "demo")  # that are refused before they do anything


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    started = Runner(tmp_path_factory.mktemp("commands"))
    yield started
    started.close()


@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS])
def test_no_value_of_any_option_gives_more_than_an_exit_code_and_one_line(command: str, runner: Runner) -> None:
    known = [case for case in cases() if case.words[0] == command]
    assert known or command in NO_VALUES
    wrong = []
    for case in random.Random(SEED).sample(known, min(len(known), CASES_MAX)):
        outcome = runner.run(case.words)
        if said := complaint(case, outcome):
            wrong.append((said, [word[:60] for word in case.words], outcome.code, outcome.err[:300]))
    assert wrong == []


@pytest.fixture(scope="module")
def long_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "t"
    write(simulate(Scenario(fault="none", nodes=16, gpus=8, minutes=60, seed=1)), folder)
    return folder


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_ends_a_backtest_at_once_and_without_a_traceback(
    number: signal.Signals, code: int, long_trace: Path, tmp_path: Path
) -> None:
    with (tmp_path / "err").open("w+") as err:
        # A test run in the background ignores SIGINT, and so would this.
        command = [
            "env",
            "--default-signal=INT",
            sys.executable,
            "-m",
            "eagle_eye.cli.main",
            "backtest",
            str(long_trace),
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err)
        while process.poll() is None and _cpu_s(process.pid) < AT_WORK_S:
            time.sleep(0.05)
        assert process.poll() is None, "the trace is too short for this test"
        process.send_signal(number)
        assert process.wait(SOON_S) == code
        err.seek(0)
        assert err.read() == ""


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
