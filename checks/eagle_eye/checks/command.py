"""``eagle-eye check``: loads the node for a minute and reports whether it is sick. Runs only on request."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import TextIO

from eagle_eye.agent import external_tool as tool
from eagle_eye.checks import corruption, gpus, runner
from eagle_eye.checks.check import (
    EXIT_CODES,
    BadThreshold,
    Check,
    CheckResult,
    Host,
    Site,
    Verdict,
    by_the_site,
    host_verdict,
    printable,
)
from eagle_eye.checks.runner import CHECKS, SDC
from eagle_eye.checks.tools import DCGM_LEVELS
from eagle_eye.schema.configuration import ConfigurationError

LOCK_PATH = Path("/tmp/eagle-eye-check.lock")  # noqa: S108 - the same for all users; nothing is written into it


class LockTaken(Exception):
    """Another check runs, or the lock is unavailable; the message says which."""


@contextlib.contextmanager
def host_lock(path: Path = LOCK_PATH) -> Iterator[None]:
    """Hold the host's lock; the kernel releases it when the process exits in any way. Raises Taken."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(path, flags | os.O_CREAT, 0o644)
        except PermissionError:
            # Another user's file in a sticky folder may be opened, but not as if to make it (fs.protected_regular).
            descriptor = os.open(path, flags)
    except OSError as error:
        raise LockTaken(f"{path} cannot be opened: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise LockTaken(f"{path} is no file; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LockTaken(f"another check runs on this host (it holds {path})") from None
        yield
    finally:
        os.close(descriptor)


_COLOURS = {"passed": "32", "sick": "31", "could_not_check": "33", "healthy": "32", "cannot_tell": "33"}
_WORDS = {"could_not_check": "could not check", "cannot_tell": "cannot tell"}
_NAME_CHARS = 14


class Lines:
    """One line per check. On a terminal its beginning is shown while it runs."""

    def __init__(self, out: TextIO, *, terminal: bool, colours: bool) -> None:
        self._out = out
        self._terminal = terminal
        self._colours = colours

    def begins(self, check: Check) -> None:
        """Show which check runs now."""
        if self._terminal:
            self.write(f"{check.name:<{_NAME_CHARS}} …")

    def ended(self, outcome: CheckResult) -> None:
        """Show the check's outcome."""
        back = "\r" if self._terminal else ""
        state = self._coloured(outcome.state, f"{_WORDS.get(outcome.state, outcome.state):<15}")
        self.write(f"{back}{outcome.name:<{_NAME_CHARS}} {state} {outcome.duration_s:5.1f} s  {outcome.reason}\n")

    def verdict(self, verdict: Verdict, reason: str) -> None:
        """Show the verdict."""
        self.write(f"{self._coloured(verdict, _WORDS.get(verdict, verdict))}: {reason}\n")

    def write(self, text: str) -> None:
        """Write the text; after the reader (head, grep -q) has closed its end, output is discarded."""
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())

    def _coloured(self, state: str, text: str) -> str:
        return f"\033[{_COLOURS[state]}m{text}\033[0m" if self._colours else text


def write_table(checks: Sequence[Check], out: TextIO) -> None:
    """Write the available checks, and what each needs."""
    indent = " " * (_NAME_CHARS + 1)
    out.writelines(f"{each.name:<{_NAME_CHARS}} {each.measures}\n{indent}needs {each.needs}\n" for each in checks)


def verdict_reason(verdict: Verdict, outcomes: Sequence[CheckResult], refused: str) -> str:
    """Return the verdict's reason in one line."""
    if refused:
        return refused
    open_questions = [each.name for each in outcomes if each.state == "could_not_check" and each.expected]
    if verdict == "sick":
        return ", ".join(each.name for each in outcomes if each.state == "sick")
    if verdict == "healthy":
        ran = [each for each in outcomes if each.state == "passed"]
        if all(each.name in SDC for each in ran):
            return "; ".join(each.reason for each in ran) + "; beyond that it says nothing"
        return f"nothing stands against this host ({', '.join(each.name for each in ran)})"
    return f"could not check {', '.join(open_questions)}" if open_questions else "nothing could be checked"


def json_document(
    node: str, began_s: float, duration_s: float, verdict: Verdict, outcomes: Sequence[CheckResult], refused: str
) -> str:
    """Return the report as JSON. A figure that is not finite is null."""
    checks = [asdict(outcome) for outcome in outcomes]
    for check in checks:
        for figure in check["values"]:
            figure["value"] = figure["value"] if math.isfinite(figure["value"]) else None
    return json.dumps(
        {
            "verdict": verdict,
            "reason": verdict_reason(verdict, outcomes, refused),
            "refused": bool(refused),
            "node": node,
            "began": datetime.fromtimestamp(began_s, timezone.utc).isoformat(timespec="seconds"),
            "duration_s": round(duration_s, 3),
            "checks": checks,
        },
        indent=2,
        ensure_ascii=False,
        allow_nan=False,
    )


DEADLINE_S = 110.0  # plus start and end, under two minutes
QUICK_DEADLINE_S = 18.0  # under 20 s
SDC_STARTS_S = 90.0  # beyond --seconds, for loading torch twice and computing results
DEADLINE_S_MIN, DEADLINE_S_MAX = 5.0, 3_600.0
GEMM_S_MIN, GEMM_S_MAX = 1.0, 60.0  # as much as is looked at meanwhile (child.py, LINES_BYTES_MAX)
LOOK_RATIO = 0.3  # of the deadline at most for the first look at the GPUs
FOLDER = Path("/var/tmp")  # noqa: S108 - on a disk where /tmp may be memory; our file there has no name


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    names = [check.name for check in CHECKS]
    parser.description = (
        "Puts this node to work and says whether it is sick: the site's own tools where they are installed, else small"
        " ones of ours. Never begins while a process computes on the GPUs."
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=f"only these: {', '.join(names)}")
    parser.add_argument("--skip", nargs="+", metavar="NAME", choices=names, default=[], help="all but these")
    parser.add_argument("--sdc", action="store_true", help=f"look for silent data corruption: --only {' '.join(SDC)}")
    parser.add_argument("--seconds", type=float, metavar="S", help=f"how long --sdc looks ({corruption.WORK_S:g})")
    parser.add_argument("--quick", action="store_true", help="less work and no tools: under 20 s instead of 2 minutes")
    parser.add_argument("--deadline", type=float, metavar="S", help="end after so many seconds, whatever happens")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many GPUs the host should have; fewer is sick")
    parser.add_argument("--folder", type=Path, metavar="DIR", help=f"where the disk is tried ({FOLDER})")
    parser.add_argument("--threshold", action="append", metavar="NAME=VALUE", default=[], help="judge by this figure")
    parser.add_argument("--dcgm-level", type=int, choices=DCGM_LEVELS, default=1, help="dcgmi diag -r (1)")
    parser.add_argument("--all-reduce-perf", metavar="PATH", default="all_reduce_perf", help="of nccl-tests (on PATH)")
    parser.add_argument("--gemm-seconds", type=float, metavar="S", help="how long gemm loads (8): heat takes a minute")
    parser.add_argument("--torch-python", metavar="PATH", default=sys.executable, help="a Python with torch (this one)")
    parser.add_argument("--force", action="store_true", help="even while a process computes on the GPUs: disturbs it")
    parser.add_argument("--list", action="store_true", help="say what there is to check, and check nothing")
    parser.add_argument("--json", action="store_true", help="the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the checks and report. Raises ConfigurationError for wrong usage; all other errors give "cannot tell"."""
    if args.list:
        write_table(CHECKS, sys.stdout)
        return 0
    began_s, begin_s = time.time(), time.monotonic()
    checks = _chosen(args)
    site = _site(args, checks)
    deadline_s = begin_s + _deadline_s(args)
    os.nice(max(0, tool.NICENESS - os.nice(0)))
    signal.signal(signal.SIGTERM, _stop)  # so that running work is ended, too
    terminal = sys.stdout.isatty()
    lines = Lines(sys.stdout, terminal=terminal, colours=terminal and "NO_COLOR" not in os.environ)
    outcomes: list[CheckResult] = []
    refused = ""
    try:
        with host_lock(LOCK_PATH):
            host = _host(args, begin_s + LOOK_RATIO * (deadline_s - begin_s))
            refused = "" if args.force else _in_use(checks, host)
            if not refused:
                runner.run(
                    checks,
                    host,
                    site,
                    deadline_s,
                    outcomes,
                    quick=args.quick,
                    unavailable=(lambda: "") if args.force else lambda: _unavailable(deadline_s),
                    begins=_nothing if args.json else lines.begins,
                    ended=_nothing if args.json else lines.ended,
                )
    except LockTaken as taken:
        refused = str(taken)
    except Exception as error:  # noqa: BLE001 - a defect of ours says nothing of the host
        refused = f"the command itself failed: {type(error).__name__}: {printable(str(error))}"
    verdict = host_verdict(outcomes)
    if args.json:
        took_s = time.monotonic() - begin_s
        lines.write(json_document(socket.gethostname(), began_s, took_s, verdict, outcomes, refused) + "\n")
    else:
        lines.verdict(verdict, verdict_reason(verdict, outcomes, refused))
    _complain(outcomes, refused)
    return EXIT_CODES[verdict]


def _host(args: argparse.Namespace, until_s: float) -> Host:
    host = gpus.host(until_s)
    if args.gpus and not host.has_gpus:
        # Nor is the CPU tried in their place.
        return dataclasses.replace(host, gpu_problem=f"none of {args.gpus} GPUs is seen, by NVML or on the PCI bus")
    return host


def _in_use(checks: Sequence[Check], host: Host) -> str:
    """Return why nothing is started: a process uses the GPUs that the checks would load. "" if none does."""
    if not any(check.loads_gpus for check in checks):
        return ""
    user = gpus.occupied(host)
    return f"{user}; nothing was begun, so as not to disturb it (--force begins nevertheless)" if user else ""


def _unavailable(deadline_s: float) -> str:
    return gpus.unavailable(min(deadline_s, time.monotonic() + gpus.LOOK_S))


def _nothing(_what: object) -> None:
    """Say nothing."""


def _chosen(args: argparse.Namespace) -> list[Check]:
    if args.sdc and (args.only or args.quick):
        raise ConfigurationError("--sdc: expected neither --only nor --quick beside it")
    only = SDC if args.sdc else args.only or [check.name for check in CHECKS if not check.on_request]
    chosen = [check for check in CHECKS if check.name in only and check.name not in args.skip]
    if not chosen:
        raise ConfigurationError("--only, --skip: they leave nothing to check")
    return chosen


def _site(args: argparse.Namespace, checks: Sequence[Check]) -> Site:
    if args.seconds is not None:
        if not any(check.name in SDC for check in checks):
            raise ConfigurationError("--seconds: expected --sdc beside it; --gemm-seconds is gemm's")
        if not corruption.WORK_S_MIN <= args.seconds <= corruption.WORK_S_MAX:
            least, most = corruption.WORK_S_MIN, corruption.WORK_S_MAX
            raise ConfigurationError(f"--seconds: expected {least:g} to {most:g}, got {args.seconds:g}")
    if args.gpus is not None and args.gpus < 0:
        raise ConfigurationError(f"--gpus: expected 0 or more, got {args.gpus}")
    if args.gemm_seconds is not None and not GEMM_S_MIN <= args.gemm_seconds <= GEMM_S_MAX:
        raise ConfigurationError(
            f"--gemm-seconds: expected {GEMM_S_MIN:g} to {GEMM_S_MAX:g}, got {args.gemm_seconds:g}"
        )
    folder = args.folder or (FOLDER if FOLDER.is_dir() else Path(tempfile.gettempdir()))
    if not folder.is_dir():
        raise ConfigurationError(f"--folder: expected a folder, got {printable(str(folder))}")
    try:
        thresholds = by_the_site(args.threshold)
    except BadThreshold as error:
        raise ConfigurationError(f"--threshold: {error}") from None
    return Site(
        thresholds=thresholds,
        folder=folder.absolute(),
        torch_python=str(Path(args.torch_python).absolute()) if "/" in args.torch_python else args.torch_python,
        gpus_expected=args.gpus,
        dcgm_level=args.dcgm_level,
        all_reduce_perf=args.all_reduce_perf,
        gemm_s=args.gemm_seconds,
        sdc_s=args.seconds or corruption.WORK_S,
    )


def _deadline_s(args: argparse.Namespace) -> float:
    given: float = args.deadline if args.deadline is not None else QUICK_DEADLINE_S if args.quick else DEADLINE_S
    if args.sdc and args.deadline is None:
        given = (args.seconds or corruption.WORK_S) + SDC_STARTS_S
    if not DEADLINE_S_MIN <= given <= DEADLINE_S_MAX:
        raise ConfigurationError(f"--deadline: expected {DEADLINE_S_MIN:g} to {DEADLINE_S_MAX:g} s, got {given:g}")
    return given


def _complain(outcomes: Sequence[CheckResult], refused: str) -> None:
    """Report on stderr what could not be checked."""
    missing = [each for each in outcomes if each.state == "could_not_check" and each.expected]
    with contextlib.suppress(OSError):  # nobody listens there; the report has it all
        for text in [refused, *(f"{each.name}: {each.reason}" for each in missing)]:
            if text:
                print(f"eagle-eye check: could not check: {text}", file=sys.stderr)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
