"""Replica groups of torchft that fail, or are sick and go on: with Eagle Eye and with torchft alone.

    python -m benchmarks.torchft --calm 60 --seconds 600 --out benchmarks/results/torchft.json
    python -m benchmarks.torchft --part sick --out benchmarks/results/torchft-sick.json

Needs torchft (tests/full.lock). A real lighthouse, replica groups on gloo in steps of a fixed length. Each arm trains
undisturbed first, for what comes then is compared with.

Part failing: on average every ``--every`` seconds (evenly from 0 to twice that, by ``--seed``) a group drawn by chance
is ended.

- torchft_alone: the lighthouse kills the group, whose launcher starts it again, as torchrun does, from nothing;
- eagle_eye: a signed action excludes the group's node, the real subscriber has the lighthouse kill the group, and it
  is forked from a standby on a node that is not excluded. Nodes are readmitted after a while.

Part sick: the host of one group gets slow, or wrong in its gradients (nan, corrupt), and nobody says so.

- torchft_alone: the groups train on as they can;
- eagle_eye: the real server judges what the groups' hooks tell an agent for each host, the real subscriber acts, and
  where its report asks for a restart from a checkpoint, that is done as an operator would.

Exit code 1: an action was not carried out, more was killed than asked for, a host that is well was excluded, or the
sick one was not found.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.torchft import failing, sick
from benchmarks.torchft.processes import STEP_S, TIMING, Timing

ARMS = ("torchft_alone", "eagle_eye")
CALM_S = {"failing": 60.0, "sick": 25.0}
SECONDS = {"failing": 600.0, "sick": 30.0}


def main() -> int:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torchft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", choices=CALM_S, default="failing")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--groups", type=int, default=4)
    add("--calm", type=float, help="seconds before anything happens (60; sick: 25)")
    add("--seconds", type=float, help="of storm in each arm (600), or after a host got sick (30)")
    add("--every", type=float, default=15.0, help="failing: seconds between failures on average (15)")
    add("--seed", type=int, default=1, help="failing: of what is drawn by chance (1)")
    add("--faults", nargs="+", choices=sick.FAULTS, default=list(sick.FAULTS), help="sick: what the host has (all)")
    add("--heartbeat", type=float, default=TIMING.heartbeat_s, help="seconds until a silent replica is dead (0.3)")
    add("--join", type=float, default=TIMING.join_s, help="seconds that a quorum waits for one that is not (2)")
    add("--ports", type=int, nargs=2, default=[21400, 21401], metavar=("LIGHTHOUSE", "SUBSCRIBER"))
    add("--out", type=Path)
    args = parser.parse_args()
    if args.part == "sick" and args.groups < sick.GROUPS_MIN:
        parser.error(f"--groups {args.groups}: of fewer than {sick.GROUPS_MIN} nobody can tell which one is sick")
    if args.calm is None:
        args.calm = CALM_S[args.part]
    if args.seconds is None:
        args.seconds = SECONDS[args.part]
    found, right = _failing(args) if args.part == "failing" else _sick(args)
    found = {
        "groups": args.groups,
        "step_s": STEP_S,
        "lighthouse": {"heartbeat_s": args.heartbeat, "join_s": args.join, "tick_s": TIMING.tick_s},
        **found,
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "load_average": os.getloadavg()},
    }
    text = msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
    if args.out:
        args.out.write_bytes(text)
    sys.stdout.buffer.write(text)
    return 0 if right else 1


def _failing(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    timing = Timing(args.heartbeat, args.join)
    plan = failing.Plan(args.groups, args.calm, args.seconds, args.every, args.seed, timing, *args.ports)
    arms = {arm: failing.measured(arm, plan) for arm in args.arms}
    found = {"every_s": args.every, "seed": args.seed, "arms": arms}
    return found, all(map(failing.is_right, arms.values()))


def _sick(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    plan = sick.Plan(args.groups, args.calm, args.seconds, Timing(args.heartbeat, args.join), *args.ports)
    faults = {fault: {arm: sick.measured(fault, arm, plan) for arm in args.arms} for fault in args.faults}
    right = all(sick.is_right(arm, found) for arms in faults.values() for arm, found in arms.items())
    return {"seconds": args.seconds, "faults": faults}, right


if __name__ == "__main__":
    sys.exit(main())
