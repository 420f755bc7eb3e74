"""``eagle-eye demo``: the closed loop on a real training job on this machine; ends by itself."""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from eagle_eye.demo.faults import FAULTS, NO_SPARE
from eagle_eye.demo.load import PER_CORE_MAX, PER_CORE_TOLD, MachineLoad, TooBusy, load_average, measured_load
from eagle_eye.demo.postgresql import missing
from eagle_eye.demo.site import DemoSite, open_site
from eagle_eye.demo.stack import Stack, StageFailed
from eagle_eye.demo.story import play
from eagle_eye.demo.takeover import FAULT, play_takeover
from eagle_eye.demo.timeline import DemoTimeline
from eagle_eye.demo.two_servers import TwoServers

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
            timeline.tell("start", f"{servers} and four nodes: {site.description}; no GPU here, so no GPU metrics")
            if load.per_core > PER_CORE_TOLD:
                timeline.tell("busy", f"{load}: all will take longer")
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
    if fault != FAULT:
        return f"expected --fault {FAULT}, got {fault!r}"
    return missing()


def _stack(args: argparse.Namespace, site: DemoSite, folder: Path, timeline: DemoTimeline) -> Stack:
    if args.ha:
        return TwoServers(site, folder, waiting=timeline.waiting)
    return Stack(site, folder, waiting=timeline.waiting, planned=args.fault == NO_SPARE)


def _keep(stack: Stack, timeline: DemoTimeline) -> None:
    """Leave everything running until Ctrl-C."""
    token_file = stack.token_file("admin")
    timeline.tell("kept", f"the page is at {stack.url}/ (token: {token_file}); Ctrl-C ends it")
    timeline.tell("kept", f"for commands: export EAGLE_EYE_SERVER={stack.url} EAGLE_EYE_TOKEN_FILE={token_file}")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(1.0)
