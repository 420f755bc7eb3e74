"""Runs work in a child process, so that a hung device or a crashing driver affects nothing else.

Touches: processes, /proc/pressure.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from eagle_eye.agent import external_tool as tool
from eagle_eye.checks.check import State, printable

LINES_BYTES_MAX = 8 << 20  # NVML's output for 16 GPUs twice a second for a minute
LINES_MAX = 20_000
GRACE_S = 5.0  # beyond the deadline, at which the parent kills; for a missing parent
WORKERS_MAX = 64  # no host has more GPUs
# A child silent for this long, without a lack of CPU, is hung. Opening a GPU takes a second or two each without a
# persistence daemon; each step of the work takes milliseconds. Loading torch from a slow filesystem may take any time,
# and says nothing about the device.
STALL_S: Mapping[str, float] = MappingProxyType({"opening": 20.0, "working": 4.0})
STARVED_RATIO = 0.5  # of the time some process waited for a CPU: then a delay means nothing

_FOLDER = Path(__file__).parent / "work"
# The folder becomes a separate package: a training environment's Python, which has torch, need not have ours.
_START = (
    "import importlib, sys, types; package = types.ModuleType('work'); package.__path__ = [sys.argv[1]];"
    " sys.modules['work'] = package; importlib.import_module('work.' + sys.argv[2]).main(sys.argv[3])"
)
# Variables for finding libraries. The child gets nothing else of our environment, which may hold tokens.
_KEPT = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_DEVICE_ORDER", "TMPDIR")
_KEPT_PREFIXES = ("NCCL_", "UCX_", "GLOO_")
_PRESSURE = re.compile(r"^some .*\btotal=(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class WorkerProgress:
    """A worker's progress: its last phase, when it was last heard, and its answer or error."""

    phase: str = ""
    at_s: float = -math.inf
    values: Mapping[str, float] | None = None
    error: str = ""
    hardware: bool = False


@dataclass(frozen=True, kw_only=True)
class Children:
    """The outcome of a child with its workers. ``status`` None: it was killed at the deadline."""

    courses: tuple[WorkerProgress, ...]
    status: int | None
    ended_s: float
    starved: bool = False
    complaint: str = ""
    answers: tuple[dict[str, Any], ...] = ()  # all lines, unchanged


def run(work: str, job: Mapping[str, object], workers: int, until_s: float, python: str = sys.executable) -> Children:
    """Run a module of the folder ``work`` with so many workers. Raises OSError when it cannot be started."""
    asked = json.dumps({**job, "workers": workers, "parent": os.getpid(), "until_s": until_s})
    begin_s, waited_s = time.monotonic(), cpu_waited_s()
    ran = tool.run(
        (*kept_environment(), python, "-c", _START, str(_FOLDER), work, asked),
        until_s,
        LINES_BYTES_MAX,
        folder=Path("/"),  # Python looks for modules where it is started: not in a user's folder
    )
    ended_s = time.monotonic()
    starved = cpu_waited_s() - waited_s > STARVED_RATIO * (ended_s - begin_s)
    answers = tuple(lines(ran.output))
    return Children(
        courses=courses(answers, workers),
        status=ran.status,
        ended_s=ended_s,
        starved=starved,
        complaint=_last_line(ran.complaint),
        answers=answers,
    )


def bounded_command(path: str, arguments: Sequence[str], until_s: float) -> tuple[str, ...]:
    """Return the command line for a site's tool: it ends soon after ``until_s`` even if we are killed before."""
    seconds = max(until_s - time.monotonic(), 0.0) + GRACE_S
    return (*kept_environment(), "timeout", "-s", "KILL", f"{seconds:.0f}", path, *arguments)


def kept_environment() -> tuple[str, ...]:
    """Return the start of a command line that passes only the permitted variables to a program."""
    kept = [f"{name}={value}" for name, value in os.environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)]
    return ("env", *sorted(kept))


def lines(output: bytes) -> list[dict[str, Any]]:
    """Return the lines that are JSON objects; other output of libraries, and partial lines, are dropped."""
    found = []
    for line in output.split(b"\n", LINES_MAX)[:LINES_MAX]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def courses(answers: tuple[dict[str, Any], ...], workers: int) -> tuple[WorkerProgress, ...]:
    """Return each worker's progress; invalid lines are dropped."""
    found = [WorkerProgress() for _ in range(min(workers, WORKERS_MAX))]
    for line in answers:
        worker, at_s, phase = line.get("worker"), line.get("at_s"), line.get("phase")
        values, error = line.get("values"), line.get("error")
        if not isinstance(worker, int) or not 0 <= worker < len(found) or not is_number(at_s):
            continue
        before = found[worker]
        if isinstance(phase, str):
            found[worker] = WorkerProgress(phase[:20], float(at_s))
        elif isinstance(values, dict) and values and all(is_number(value) for value in values.values()):
            found[worker] = WorkerProgress(
                before.phase, float(at_s), {str(name): float(values[name]) for name in values}
            )
        elif isinstance(error, str):
            found[worker] = WorkerProgress(
                before.phase, float(at_s), None, printable(error), line.get("hardware") is True
            )
    return tuple(found)


def without_answer(course: WorkerProgress, children: Children) -> tuple[State, str]:
    """Return the state for a worker without values: the device is broken, or unknown.

    It is broken when it says so itself, or when it stopped in the middle of work that takes milliseconds.
    """
    if course.error:
        return ("sick" if course.hardware else "could_not_check"), course.error
    if children.status is not None:
        ended = f"the child ended with {children.status} and without an answer"
        return "could_not_check", f"{ended}: {children.complaint}" if children.complaint else ended
    silent_s = children.ended_s - course.at_s
    where = f"while {course.phase}" if course.phase else "before it began"
    if course.phase in STALL_S and silent_s >= STALL_S[course.phase]:
        late = f"did not finish: nothing for {silent_s:.0f} s {where}"
        if children.starved:
            return "could_not_check", f"{late}, but the host's CPUs are overloaded"
        return "sick", late
    return "could_not_check", f"did not finish in time ({where})"


def cpu_waited_s(proc: Path = Path("/proc")) -> float:
    """Return for how long, since boot, some process has waited for a CPU; 0 where the kernel does not report it."""
    try:
        found = _PRESSURE.search((proc / "pressure/cpu").read_text(encoding="ascii", errors="replace"))
    except OSError:
        return 0.0
    return int(found[1]) * 1e-6 if found else 0.0


def is_number(value: object) -> TypeGuard[float]:
    """Whether a child's value is a finite number that a device could have given."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _last_line(text: str) -> str:
    kept = [line for line in text.splitlines() if line.strip()]
    return printable(kept[-1]) if kept else ""
