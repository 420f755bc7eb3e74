from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from eagle_eye.agent.external_tool import COMPLAINT_BYTES_MAX, NICENESS, find, run
from eagle_eye.agent.processes.exit_watcher import is_running
from tests.agent.fakes import until


def shell(text: str, within_s: float = 10.0, output_bytes_max: int = 1_000) -> tuple[int | None, bytes, str, bool]:
    return tuple(run(["/bin/sh", "-c", text], time.monotonic() + within_s, output_bytes_max))  # type: ignore[return-value]


def test_a_tool_says_how_it_ended_and_what_it_said() -> None:
    assert shell("echo out; echo trouble >&2; exit 3") == (3, b"out\n", "trouble", False)


def test_a_tool_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    status, output, _, _ = shell(f"sleep 100 & echo $! > {tmp_path}/child; echo begun; wait", within_s=0.5)
    assert (status, output) == (None, b"begun\n")
    assert time.monotonic() - begin_s < 5.0
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_running(child))


def test_a_tool_whose_child_holds_its_output_is_waited_for_no_longer_than_allowed() -> None:
    begin_s = time.monotonic()
    shell("sleep 100 & exit 0", within_s=0.5)
    assert time.monotonic() - begin_s < 5.0


def test_a_tool_that_never_stops_talking_is_cut_and_killed() -> None:
    status, output, _, cut = shell("yes", output_bytes_max=10_000)
    assert (status, len(output), cut) == (None, 10_000, True)


def test_complaints_are_bounded() -> None:
    assert len(shell("yes >&2 | head -c 100000; head -c 100000 /dev/zero >&2", within_s=0.5)[2]) <= COMPLAINT_BYTES_MAX


def test_a_tool_learns_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_EYE_TOKEN", "ee_secret")
    assert b"ee_secret" not in shell("env")[1]


def test_a_tool_is_in_nobodys_way() -> None:
    begin = os.getpriority(os.PRIO_PROCESS, 0)
    assert int(shell("sleep 0.2; nice")[1]) == max(begin, NICENESS)


def test_a_tool_that_is_not_there_is_not_found() -> None:
    assert find("no-such-tool-of-anybody") is None
    with pytest.raises(FileNotFoundError):
        run(["/no/such/tool"], time.monotonic() + 1.0, 10)


def test_a_signal_that_comes_while_a_tool_is_started_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            begun.append(self.pid)
            signal.raise_signal(signal.SIGTERM)

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            shell("sleep 100")
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
    until(lambda: not is_running(begun[0]))
