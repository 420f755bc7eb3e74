"""``eagle-eye demo``: the closed loop on a real training job on this machine; ends by itself."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from eagle_eye.demo.faults import FAULTS, NO_SPARE
from eagle_eye.demo.narration import DemoTimeline, play
from eagle_eye.demo.stack import DemoSite, Stack, StageFailed, open_site
from eagle_eye.demo.two_servers import TAKEOVER_FAULT, TwoServers, play_takeover, postgresql_missing

# How busy others keep this machine: beyond a limit no demo of a minute can promise anything, and it declines.
#
# What counts is how many processes want a processor at this moment: the ranks will compete with them. The machine's
# load average says the same of the last minute: it still counts a build that has just ended, and hardly one that has
# just begun. It is only told, beside what was measured.

PER_CORE_MAX = 2.0
PER_CORE_TOLD = 1.0  # above, it is said at the start: what follows takes longer
LOOK_EVERY_S, LOOKS = 0.05, 40  # two seconds of looks make one measurement...
WITHIN_S = 6.0  # ...and so long a burst may take to pass
LOADAVG = Path("/proc/loadavg")  # "0.20 0.18 0.12 1/80 11206": three averages, runnable and existing threads, last pid


class TooBusy(Exception):
    """Others keep this machine too busy for the demo; the message says how busy, the limit and the remedy."""


class MachineLoad(NamedTuple):
    """How many processes of others want one of ``cores`` processors, and the machine's load average of a minute."""

    runnable: float
    cores: int
    average: float

    @property
    def per_core(self) -> float:
        """How many of them want each processor."""
        return self.runnable / self.cores

    def __str__(self) -> str:
        """Return the load for people, as in "3.1 processes of others want this machine's 2 processors"."""
        return (
            f"{self.runnable:.1f} processes of others want this machine's {self.cores} processors"
            f" (load average {self.average:.1f})"
        )


def measured_load(
    per_core_max: float = PER_CORE_MAX,
    read: Callable[[], str] = LOADAVG.read_text,
    cores: int = os.cpu_count() or 1,
    sleep: Callable[[float], None] = time.sleep,
) -> MachineLoad:
    """Return how busy others keep this machine, before anything of the demo runs.

    Raises TooBusy where no two seconds of the next ``WITHIN_S`` are quiet enough.
    """
    looks: deque[int] = deque(maxlen=LOOKS)
    for _ in range(round(WITHIN_S / LOOK_EVERY_S)):
        average, runnable = _parsed(read())
        looks.append(max(runnable - 1, 0))  # this process, which reads, is one of them
        load = MachineLoad(sum(looks) / len(looks), cores, average)
        if len(looks) == LOOKS and load.per_core <= per_core_max:
            return load
        sleep(LOOK_EVERY_S)
    raise TooBusy(
        f"{load}; the demo shows what it promises up to {per_core_max * cores:g}, {per_core_max:g} a processor."
        " Wait, end some of them, or try all the same with --load-max N (processes a processor)"
    )


def load_average(read: Callable[[], str] = LOADAVG.read_text) -> float:
    """Return the machine's load average of the last minute, in which the demo's own processes count."""
    return _parsed(read())[0]


def _parsed(text: str) -> tuple[float, int]:
    average, _, _, threads, _ = text.split()
    return float(average), int(threads.split("/")[0])


HEALTHY_S_MAX = 86_400.0
LOAD_MAX = 1_000.0


def _number(what: str, least: float, most: float) -> Callable[[str], float]:
    """Return what reads an argument: ``what``, from ``least`` to ``most``."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"expected {what} from {least:g} to {most:g}, got {text[:80]!r}")
        return found

    return read


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Starts a server, four nodes with an agent each and a real training job on three of them, harms a node"
        " from outside, and shows what follows. Exit code 0 only if all of it truly happened."
    )
    parser.add_argument("--fault", choices=FAULTS, default="hang", help="what happens to node2 (default hang)")
    parser.add_argument(
        "--ha",
        action="store_true",
        help="two servers on one PostgreSQL, of which the leader is killed while node2 hangs (--fault hang alone)",
    )
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--healthy-seconds",
        type=_number("seconds", 1.0, HEALTHY_S_MAX),
        default=45.0,
        metavar="S",
        help="how long --fault none watches a healthy job (default 45)",
    )
    parser.add_argument(
        "--load-max",
        type=_number("processes a processor", 0.0, LOAD_MAX),
        default=PER_CORE_MAX,
        metavar="N",
        help=f"how many processes of others may want each processor at the start (default {PER_CORE_MAX:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when all was seen, 1 with the stage that failed or the load, 2 where it cannot begin."""
    if args.ha and (problem := _problem(args.fault)):
        sys.stderr.write(f"eagle-eye demo: --ha: {problem}\n")
        return 2
    timeline = DemoTimeline(args.json)
    try:
        load = measured_load(args.load_max)
    except TooBusy as problem:
        timeline.finish(False, str(problem))
        return 1
    folder = Path(tempfile.mkdtemp(prefix="eagle-eye-demo-"))
    success = False
    # SIGTERM ends the demo as Ctrl-C does: nothing of it may be left running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with (
            contextlib.closing(open_site()) as site,
            contextlib.closing(_stack(args, site, folder, timeline)) as stack,
        ):
            servers = "two servers on one PostgreSQL" if args.ha else "a server"
            timeline.report_stage(
                "start", f"{servers} and four nodes: {site.description}; no GPU here, so no GPU metrics"
            )
            if load.per_core > PER_CORE_TOLD:
                timeline.report_stage("busy", f"{load}: all will take longer")
            stack.start()
            if isinstance(stack, TwoServers):
                moral = play_takeover(stack, timeline)
            else:
                moral = play(args.fault, stack, timeline, args.healthy_seconds)
            success = True
            timeline.finish(success, moral)
            if args.keep:
                _keep(stack, timeline)
    except StageFailed as failure:
        timeline.finish(False, f"{failure}. {_busy(load)}. Logs: {folder / 'logs'}")
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.write("eagle-eye demo: interrupted\n")
        return 130
    finally:
        if success:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if success else 1


def _busy(before: MachineLoad) -> str:
    """Say under which load the demo failed."""
    return f"Before the start {before}; it is {load_average():.1f} with the demo"


def _problem(fault: str) -> str:
    """Return why the demo with two servers cannot be, "" where it can."""
    if fault != TAKEOVER_FAULT:
        return f"expected --fault {TAKEOVER_FAULT}, got {fault!r}"
    return postgresql_missing()


def _stack(args: argparse.Namespace, site: DemoSite, folder: Path, timeline: DemoTimeline) -> Stack:
    if args.ha:
        return TwoServers(site, folder, waiting=timeline.waiting)
    return Stack(site, folder, waiting=timeline.waiting, planned=args.fault == NO_SPARE)


def _keep(stack: Stack, timeline: DemoTimeline) -> None:
    """Leave everything running until Ctrl-C."""
    token_file = stack.token_file("admin")
    timeline.report_stage("kept", f"the page is at {stack.url}/ (token: {token_file}); Ctrl-C ends it")
    timeline.report_stage(
        "kept", f"for commands: export EAGLE_EYE_SERVER={stack.url} EAGLE_EYE_TOKEN_FILE={token_file}"
    )
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(1.0)
