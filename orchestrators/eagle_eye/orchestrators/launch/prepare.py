"""Prepares a node before it joins: ends an earlier launcher's leftovers, and checks the node.

Touches processes. Runs in a thread of the runner, which keeps answering its coordinator.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

LAUNCH_VARIABLE = "EAGLE_EYE_LAUNCH"
ENDED_WITHIN_S = 10.0
OUTPUT_BYTES_MAX = 1 << 20
REASON_CHARS_MAX = 500
DEADLINE_S_MIN = 5.0
GRACE_S = 2.0  # beyond the check's own deadline, which it should keep by itself
SICK_EXIT_CODE = 3
_GPUS = ("/proc/driver/nvidia/gpus", "/dev/nvidia0", "/dev/kfd")


class Checked(NamedTuple):
    """A check's result for the node. ``text`` is for people; "cannot tell" keeps no node from joining."""

    state: Literal["healthy", "sick", "cannot tell", "not checked"]
    text: str = ""

    def __str__(self) -> str:
        """Return both in one line."""
        return f"{self.state}: {self.text}" if self.text else self.state


def end_leftovers(launch: str, node: str) -> list[int]:
    """Kill this node's ranks of earlier launchers with this id; return those that cannot be killed.

    Ranks of a launcher that was killed end by themselves with its runner's lease; until then they might write a
    checkpoint over that of the next attempt. They are recognized by their environment, which no other job's ranks
    share.
    """
    until_s = time.monotonic() + ENDED_WITHIN_S
    while (left := _leftovers(launch, node)) and time.monotonic() < until_s:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    return [process.pid for process in left]


def check_node(how: str, within_s: float) -> Checked:
    """Return the result of ``eagle-eye check``: "quick" or "full", "auto" is quick where there are GPUs."""
    if how == "off":
        return Checked("not checked")
    if how == "auto":
        if not any(map(os.path.exists, _GPUS)):
            return Checked("not checked", "no GPUs here")
        how = "quick"
    deadline_s = max(DEADLINE_S_MIN, within_s - GRACE_S)
    command = [sys.executable, "-m", "eagle_eye.cli.main", "check", "--json", "--deadline", f"{deadline_s:g}"]
    if how == "quick":
        command.append("--quick")
    return run_check(command, deadline_s + GRACE_S)


def run_check(command: list[str], within_s: float) -> Checked:
    """Return the result of a command that checks like ``eagle-eye check --json``, in time or not."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=Path("/"), start_new_session=True
        )
    except OSError as error:
        return Checked("cannot tell", f"the check cannot be started: {error.strerror}")
    try:
        output, _ = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        return Checked("cannot tell", f"the check had not ended after {within_s:g} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    report = _report(output[:OUTPUT_BYTES_MAX])
    # Both: 1 and 2 also come from other failures, and 0 from a child whose exit was collected elsewhere.
    if process.returncode == SICK_EXIT_CODE and report.get("verdict") == "sick":
        return Checked("sick", _reason(report))
    if process.returncode == 0 and report.get("verdict") == "healthy":
        return Checked("healthy")
    return Checked("cannot tell", _reason(report) or f"the check ended with {process.returncode}")


def _report(output: bytes) -> dict[str, object]:
    try:
        report = json.loads(output)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _reason(report: dict[str, object]) -> str:
    checks = report.get("checks")
    sick = [one for one in checks if _is_sick(one)] if isinstance(checks, list) else []
    text = "; ".join(f"{one.get('name')}: {one.get('reason')}" for one in sick) or str(report.get("reason", ""))
    return "".join(c if c.isprintable() else " " for c in text)[:REASON_CHARS_MAX]


def _is_sick(check: object) -> bool:
    return isinstance(check, dict) and check.get("state") == "sick"


def _leftovers(launch: str, node: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environ = process.environ()
            mine = environ.get(LAUNCH_VARIABLE) == launch and environ.get("EAGLE_EYE_NODE") == node
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
