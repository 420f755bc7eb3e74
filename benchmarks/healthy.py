"""What Eagle Eye asks for when nothing is wrong: a healthy job with checkpoints, evaluations and restless agents.

In each run of three minutes one agent is restarted (by SIGTERM and by SIGKILL in turn) and another is stopped
for 20 s in the middle. Nothing may be asked of anybody.

    python benchmarks/healthy.py --runs 10 --out benchmarks/results/healthy.json

With ``--short-steps`` nothing is disturbed: small jobs with steps of .05 to .5 s, on two to four nodes, agents and
server with a site's defaults. There may be no incident at all, on a busy machine too.

    python benchmarks/healthy.py --short-steps --runs 10 --out benchmarks/results/healthy-short-steps.json

With ``--step-times`` the same job takes steps of .3 to 2 s, and what the server says a step takes may be off by 5%:

    python benchmarks/healthy.py --step-times --seconds 60 --runs 4 --out benchmarks/results/step-times.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from eagle_eye.demo.stack import DemoNode, DemoSite, Stack, open_site

STOPPED_S = 20.0
TRAINS_WITHIN_S = 300.0  # on a busy machine
# What a site writes to let Eagle Eye act; everything else are defaults.
SITE_CONFIG = """\
[policy]
mode = "act"

[webhooks]
allow_private = true
"""
CALM_NODES = ("calm1", "calm2", "calm3", "calm4")  # no other job's nodes on this machine are called so
SHORT_STEPS_SCRIPT = Path(__file__).with_name("short_steps.py")
# How many nodes, and the job's arguments: taken in turn.
SHORT_STEPS: tuple[tuple[int, dict[str, str]], ...] = (
    (3, {"step-seconds-min": "0.05"}),
    (2, {"batch": "256", "passes": "4"}),
    (4, {"step-seconds-min": "0.2", "evaluate-every": "50"}),
    (3, {"width": "2048", "batch": "128", "workers": "1"}),
    (3, {"step-seconds-min": "0.5", "passes": "2", "batch": "512", "evaluate-every": "30"}),
    (2, {"step-seconds-min": "0.1", "workers": "1", "evaluate-every": "100"}),
    (4, {"batch": "256", "passes": "2", "evaluate-every": "200"}),
)
STEP_TIMES: tuple[tuple[int, dict[str, str]], ...] = tuple(
    (2, {"step-seconds-min": seconds}) for seconds in ("0.3", "0.708", "1.407", "2.0")
)
NEWEST_STEPS = 64
OFF_MAX = 0.05


class ShortSteps(Stack):
    """The demo's processes with the job of short steps, and agents with their default interval."""

    def __init__(self, site: DemoSite, folder: Path, nodes: int, arguments: Mapping[str, str]) -> None:
        super().__init__(site, folder, arguments, config=SITE_CONFIG, launch_flags=("--nnodes", str(nodes)))
        self.script = SHORT_STEPS_SCRIPT

    def _agent_extras(self, node: DemoNode) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
        prefix, flags, more = super()._agent_extras(node)
        return prefix, (*flags, "--interval", "1"), more


def main() -> int:
    """Run, print a line for each run, write the results; 1 when anything was asked for, told of short steps, or off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--short-steps", action="store_true")
    parser.add_argument("--step-times", action="store_true")
    parser.add_argument("--first", type=int, default=0, help="number of the first run, which decides its kind")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="record each run's trace in a folder of this one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing of it may be left running
    results = []
    for number in range(args.first, args.first + args.runs):
        folder = Path(tempfile.mkdtemp(prefix="eagle-eye-healthy-"))
        try:
            kept = None if args.keep is None else args.keep / f"run-{number}"
            if args.short_steps or args.step_times:
                kinds = STEP_TIMES if args.step_times else SHORT_STEPS
                result = short_steps(folder, kinds[number % len(kinds)], args.seconds, kept)
            else:
                result = restless(folder, number, args.seconds, kept)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        results.append(result)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    wrong = [r for r in results if r["actions"] or r["attempts"] != 1 or (args.short_steps and r["incidents"])]
    off = [r for r in results if args.step_times and abs(r["step_seconds_said"] / r["step_seconds"] - 1) > OFF_MAX]
    return int(bool(wrong or off))


def restless(folder: Path, number: int, seconds: float, kept: Path | None) -> dict[str, Any]:
    """Return what a run of a healthy job brought whose agents are restarted and stopped."""
    how = signal.SIGTERM if number % 2 == 0 else signal.SIGKILL
    arguments = {"evaluate-every": "40"}
    with contextlib.closing(open_site()) as site, contextlib.closing(Stack(site, folder, arguments)) as stack:
        began_s = _training_since_s(stack)
        _until(began_s + seconds / 3)
        stack.kill("agent-node2", how)
        stack.start_agent("node2")
        _until(began_s + seconds / 2)
        os.kill(stack.pid("agent-node3"), signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(stack.pid("agent-node3"), signal.SIGCONT)
        _until(began_s + seconds)
        return {"agent_restarted_by": how.name, **_outcome(stack, kept)}


def short_steps(folder: Path, kind: tuple[int, dict[str, str]], seconds: float, kept: Path | None) -> dict[str, Any]:
    """Return what a run of a healthy job with short steps brought, which nobody disturbs."""
    nodes, arguments = kind
    with (
        contextlib.closing(open_site(CALM_NODES)) as site,
        contextlib.closing(ShortSteps(site, folder, nodes, arguments)) as stack,
    ):
        _until(_training_since_s(stack) + seconds)
        (said,) = [job["progress"]["step_seconds"] for job in stack.items("jobs") if job["job"] == stack.job]
        ends_s = [step["time_s"] for step in stack.steps()[-NEWEST_STEPS - 1 :]]
        took = {
            "step_seconds": round(median(end - before for before, end in pairwise(ends_s)), 4),
            "step_seconds_said": round(said, 4),
        }
        outcome = _outcome(stack, kept)
        return {"nodes": nodes, "job": arguments, "load_average": os.getloadavg()[1], **took, **outcome}


def _training_since_s(stack: Stack) -> float:
    """Start everything and return when the job trains."""
    stack.start()
    stack.wait("the job trains", lambda: len(stack.steps()) >= 1 or None, TRAINS_WITHIN_S)
    return time.monotonic()


def _outcome(stack: Stack, kept: Path | None) -> dict[str, Any]:
    steps = stack.steps()
    # Agents see all that runs on this machine on nodes of these names, perhaps another benchmark's job.
    actions, incidents = (
        [one for one in stack.items(kind) if one["job"] in (stack.job, None)] for kind in ("actions", "incidents")
    )
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        words = ("record", str(kept), "--job", stack.job, "--since", "-1h", "--server", stack.url)
        token = ("--token-file", str(stack.token_file("admin")))
        subprocess.run([sys.executable, "-m", "eagle_eye.cli.main", *words, *token], check=True, capture_output=True)
    return {
        "steps": len(steps),
        "attempts": len({step["attempt"] for step in steps}),
        "actions": [f"{a['kind']} {a['exclude']} {a['summary']}" for a in actions],
        "incidents": [f"{i['fault']} {i['node']} {i['action']}: {i['summary']}" for i in incidents],
    }


def _until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
