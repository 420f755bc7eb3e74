"""``eagle-eye check``: loads the node for a minute and reports whether it is sick. Runs only on request."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from eagle_eye.agent import external_tool as tool
from eagle_eye.checks import corruption, gpus, runner
from eagle_eye.checks.catalogue import CHECKS, SDC
from eagle_eye.checks.check import Check, CheckResult, Host, Site, printable
from eagle_eye.checks.dcgm import LEVELS
from eagle_eye.checks.lock import PATH, LockTaken, held
from eagle_eye.checks.report import Lines, document, reason, table
from eagle_eye.checks.thresholds import BadThreshold, by_the_site
from eagle_eye.checks.verdict import EXIT_CODES, judge
from eagle_eye.schema.configuration import ConfigurationError

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
    parser.add_argument("--dcgm-level", type=int, choices=LEVELS, default=1, help="dcgmi diag -r (1)")
    parser.add_argument("--all-reduce-perf", metavar="PATH", default="all_reduce_perf", help="of nccl-tests (on PATH)")
    parser.add_argument("--gemm-seconds", type=float, metavar="S", help="how long gemm loads (8): heat takes a minute")
    parser.add_argument("--torch-python", metavar="PATH", default=sys.executable, help="a Python with torch (this one)")
    parser.add_argument("--force", action="store_true", help="even while a process computes on the GPUs: disturbs it")
    parser.add_argument("--list", action="store_true", help="say what there is to check, and check nothing")
    parser.add_argument("--json", action="store_true", help="the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the checks and report. Raises ConfigurationError for wrong usage; all other errors give "cannot tell"."""
    if args.list:
        table(CHECKS, sys.stdout)
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
        with held(PATH):
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
    verdict = judge(outcomes)
    if args.json:
        took_s = time.monotonic() - begin_s
        lines.write(document(socket.gethostname(), began_s, took_s, verdict, outcomes, refused) + "\n")
    else:
        lines.verdict(verdict, reason(verdict, outcomes, refused))
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
