"""What Eagle Eye asks for when nothing is wrong: a healthy job with checkpoints, evaluations and restless agents.

In each run of three minutes one agent is restarted (by SIGTERM and by SIGKILL in turn) and another is stopped
for 20 s in the middle. Nothing may be asked of anybody.

    python benchmarks/healthy.py --runs 10 --out benchmarks/results/healthy.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from eagle_eye.demo.site import open_site
from eagle_eye.demo.stack import Stack

STOPPED_S = 20.0


def main() -> int:
    """Run, print a line for each run, write the results; 1 when anything was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for number in range(args.runs):
        result = once(args.seconds, signal.SIGTERM if number % 2 == 0 else signal.SIGKILL)
        results.append(result)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(result["actions"] or result["attempts"] != 1 for result in results))


def once(seconds: float, how: signal.Signals) -> dict[str, Any]:
    """Return what one run of a healthy job brought."""
    folder = Path(tempfile.mkdtemp(prefix="eagle-eye-healthy-"))
    try:
        arguments = {"evaluate-every": "40"}
        with contextlib.closing(open_site()) as site, contextlib.closing(Stack(site, folder, arguments)) as stack:
            stack.start()
            stack.wait("the job trains", lambda: len(stack.steps()) >= 1 or None, 120.0)
            began_s = time.monotonic()
            _until(began_s + seconds / 3)
            stack.kill("agent-node2", how)
            stack.start_agent("node2")
            _until(began_s + seconds / 2)
            os.kill(stack.pid("agent-node3"), signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(stack.pid("agent-node3"), signal.SIGCONT)
            _until(began_s + seconds)
            steps, incidents = stack.steps(), stack.items("incidents")
            return {
                "agent_restarted_by": how.name,
                "steps": len(steps),
                "attempts": len({step["attempt"] for step in steps}),
                "actions": [f"{a['kind']} {a['exclude']} {a['summary']}" for a in stack.items("actions")],
                "incidents": [f"{i['fault']} {i['node']} {i['action']}: {i['summary']}" for i in incidents],
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
