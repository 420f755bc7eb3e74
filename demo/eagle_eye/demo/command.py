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
from pathlib import Path

from eagle_eye.demo.faults import FAULTS, NO_SPARE
from eagle_eye.demo.postgresql import missing
from eagle_eye.demo.site import DemoSite, open_site
from eagle_eye.demo.stack import Stack, StageFailed
from eagle_eye.demo.story import play
from eagle_eye.demo.takeover import FAULT, play_takeover
from eagle_eye.demo.timeline import DemoTimeline
from eagle_eye.demo.two_servers import TwoServers

HEALTHY_S_MAX = 86_400.0


def _healthy_s(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 1.0 <= found <= HEALTHY_S_MAX:
        raise argparse.ArgumentTypeError(f"expected seconds from 1 to {HEALTHY_S_MAX:g}, got {text[:80]!r}")
    return found


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
        type=_healthy_s,
        default=45.0,
        metavar="S",
        help="how long --fault none watches a healthy job (default 45)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when everything promised was seen, 1 with the stage that failed, 2 where it cannot begin."""
    if args.ha and (problem := _problem(args.fault)):
        sys.stderr.write(f"eagle-eye demo: --ha: {problem}\n")
        return 2
    timeline = DemoTimeline(args.json)
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
        timeline.finish(False, f"{failure}. Logs: {folder / 'logs'}")
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.write("eagle-eye demo: interrupted\n")
        return 130
    finally:
        if success:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if success else 1


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
