"""The demonstration's job of pipelines, whose steps take as long as each layout's would on machines of their own.

The ranks share a machine: with fewer of them the others would have more of it, and be faster. So a step takes at least
``--step-seconds`` on all of the plan's nodes, and on fewer as much longer as the plan says.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from eagle_eye.demo import pipeline_train
from eagle_eye.planning.files import read_plan
from eagle_eye.planning.plan import Plan


def pace_s(plan: Plan, nodes: int, step_s: float) -> float:
    """Return the least that a step takes on so many nodes."""
    return step_s * plan.layout(nodes).step_s / plan.layouts[-1].step_s


def main() -> None:
    """Train at this pace."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    args, others = parser.parse_known_args()
    step_s = pace_s(read_plan(args.plan), int(os.environ["WORLD_SIZE"]), args.step_seconds)
    sys.argv = [sys.argv[0], *others, "--step-seconds-min", str(step_s)]
    pipeline_train.main()


if __name__ == "__main__":
    main()
