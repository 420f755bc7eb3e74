"""The failure storm of torchft's authors, with Eagle Eye and with torchft alone: what is committed all the same.

    python -m benchmarks.torchft --seconds 600 --calm 60 --out benchmarks/results/torchft.json

Needs torchft (tests/full.lock). A real lighthouse, replica groups on gloo in steps of a fixed length; on average every
``--every`` seconds (evenly from 0 to twice that, by ``--seed``) a group drawn by chance is ended. Two arms, one after
the other, on the same lighthouse settings:

- torchft_alone: the lighthouse kills the group, whose launcher starts it again, as torchrun does, from nothing;
- eagle_eye: a signed action excludes the group's node, the real subscriber has the lighthouse kill the group, and it
  is forked from a standby on a node that is not excluded. Nodes are readmitted after a while.

Before the storm each arm trains undisturbed, for what its storm is compared with. Exit code 1: an action was not
carried out, or more was killed than asked for.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.torchft.figures import costs, ratio, span, spread
from benchmarks.torchft.processes import (
    STEP_S,
    TIMING,
    Group,
    Reports,
    Starts,
    Timing,
    cold,
    ended,
    lighthouse,
    standby,
    subscriber,
)
from benchmarks.torchft.storm import SECRET, ByAction, ByLighthouse, Storm

ARMS = ("torchft_alone", "eagle_eye")
LAST_WORD_S = 90.0
TRIES_BEFORE = 10


def main() -> int:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torchft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--groups", type=int, default=4)
    add("--every", type=float, default=15.0, help="seconds between failures on average (15)")
    add("--seconds", type=float, default=600.0, help="of storm, in each arm (600)")
    add("--calm", type=float, default=60.0, help="seconds before it (60)")
    add("--seed", type=int, default=1)
    add("--heartbeat", type=float, default=TIMING.heartbeat_s, help="seconds until a silent replica is dead (0.3)")
    add("--join", type=float, default=TIMING.join_s, help="seconds that a quorum waits for one that is not (2)")
    add("--ports", type=int, default=21400, help="the first of two (21400)")
    add("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {
        "groups": args.groups,
        "every_s": args.every,
        "seed": args.seed,
        "step_s": STEP_S,
        "lighthouse": {"heartbeat_s": args.heartbeat, "join_s": args.join, "tick_s": TIMING.tick_s},
        "arms": {arm: measured(arm, args) for arm in args.arms},
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "load_average": os.getloadavg()},
    }
    text = msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
    if args.out:
        args.out.write_bytes(text)
    sys.stdout.buffer.write(text)
    return 0 if all(map(_is_right, found["arms"].values())) else 1


def measured(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the storm left of the training."""
    with tempfile.TemporaryDirectory(prefix="torchft-") as name, ExitStack() as stack:
        folder = Path(name)
        url = stack.enter_context(running_lighthouse(args.ports, folder, Timing(args.heartbeat, args.join)))
        hand = None
        if arm == "eagle_eye":
            hand = stack.enter_context(_subscriber(args, folder, url))
            storm = Storm(_groups(args, folder, url, standby()), hand.end_group, hand.excluded, hand.readmit)
        else:
            killer = ByLighthouse(url)
            stack.callback(killer.close)
            storm = Storm(_groups(args, folder, url, cold()), killer.end_group)
        for group in storm.groups:
            stack.callback(group.end)
        await_groups(storm)
        calm_s = time.time()
        storm.run(calm_s + args.calm)
        storm_s = time.time()
        storm.run(storm_s + args.seconds, random.Random(args.seed), args.every)
        end_s = time.time()
        _settle(storm, hand)
        figures = _figures(storm, (calm_s, storm_s, end_s))
        if hand is not None:
            outcome = hand.outcome()
            figures["actions"] = {**outcome, "seconds_until_done": spread(outcome["seconds_until_done"])}
    figures["killed_beyond_the_failures"] = storm.started - args.groups - len(storm.failures)
    return figures


def _figures(storm: Storm, times: tuple[float, float, float]) -> dict[str, Any]:
    calm_s, storm_s, end_s = times
    tries = {group.name: group.tries() for group in storm.groups}
    everybody = [one for some in tries.values() for one in some]
    calm, wild = span(everybody, calm_s, storm_s), span(everybody, storm_s, end_s)
    return {
        "calm": calm,
        "storm": wild,
        "steps_of_calm_ratio": ratio(wild, calm, "steps"),
        "samples_of_calm_ratio": ratio(wild, calm, "samples"),
        "failures": costs(storm.failures, tries, storm.groups),
    }


def _settle(storm: Storm, hand: ByAction | None) -> None:
    """The last groups that were ended are back, and their actions over, if that comes in time."""
    until_s = time.time() + LAST_WORD_S
    settled = False
    while not settled and time.time() < until_s:
        storm.run(time.time() + 1.0)
        back = all(group.tries()[-1].at_s > group.started_s[-1] for group in storm.groups)
        settled = back and (hand is None or len(hand.outcome()["seconds_until_done"]) == len(hand.asked))


def _is_right(arm: dict[str, Any]) -> bool:
    actions = arm.get("actions", {"asked": 0, "done": 0})
    return actions["done"] == actions["asked"] and not arm["killed_beyond_the_failures"]


def _groups(args: argparse.Namespace, folder: Path, url: str, starts: Starts) -> list[Group]:
    hosts = [f"127.0.1.{number}" for number in range(1, args.groups * 4)]
    return [Group(f"group_{number}", hosts, folder, url, starts) for number in range(args.groups)]


def await_groups(storm: Storm) -> None:
    """All groups train."""
    storm.run(time.time() + 1.0)
    _await(lambda: all(len(group.tries()) > TRIES_BEFORE for group in storm.groups), 180.0, "all groups' steps")


@contextmanager
def running_lighthouse(port: int, folder: Path, timing: Timing = TIMING) -> Iterator[str]:
    """A real lighthouse runs; yields its URL."""
    url = f"http://127.0.0.1:{port}"
    process = lighthouse(port, folder, timing)
    try:
        _await(lambda: _answers(f"{url}/status"), 60.0, "the lighthouse")
        yield url
    finally:
        ended(process)


@contextmanager
def _subscriber(args: argparse.Namespace, folder: Path, url: str) -> Iterator[ByAction]:
    (folder / "secret").write_text(SECRET)
    target = f"http://127.0.0.1:{args.ports + 1}/"
    reports = Reports()
    process = subscriber(args.ports + 1, reports.url, url, folder)
    try:
        _await(lambda: _answers(f"{target}healthz"), 60.0, "the subscriber")
        yield ByAction(target, reports, folder / "state" / "excluded")
    finally:
        ended(process)
        reports.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _await(met: Callable[[], bool], within_s: float, what: str) -> None:
    until_s = time.monotonic() + within_s
    while not met():
        if time.monotonic() > until_s:
            raise SystemExit(f"{what} did not come within {within_s:g} s")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
