"""Two production timelines of ByteDance: one with a slowed worker, one with a last stage that is longer by design.

Published with "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25; repository
ByteDance-Seed/StragglerAnalysis, Apache-2.0), converted to eagle-eye-trace/1, one row a step. Asked for: in AR exactly
dp0-pp0 is excluded, within five rows; in ST nobody is.

    python -m benchmarks.detection.real.traces --data FOLDER
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from benchmarks.detection.real.convert import blind_ratios, counts, judge
from benchmarks.detection.real.sets import Figures, main
from eagle_eye.server.backtest.run import DISRUPTIVE_ACTIONS
from eagle_eye.server.backtest.trace import Trace

NEEDS = "traces"
ROWS_MAX = 5


def measure(folder: Path) -> Figures:
    """Return who was excluded in each timeline and after how many rows."""
    figures: Figures = {}
    for name in ("AR", "ST"):
        header = Trace(folder / name).header
        blind = Counter[str]()
        lines = judge(folder / name, blind)
        done = [line for line in lines if line.action in DISRUPTIVE_ACTIONS]
        figures[name] = {
            "disruptive": [
                {
                    "action": line.action,
                    "nodes": line.nodes,
                    "fault": line.fault,
                    "rows": round((line.time - header.start) / header.interval_s, 2),
                }
                for line in done
            ],
            "verdicts": counts(lines),
            "blind_ratio": blind_ratios(blind),
        }
    slow = figures["AR"]["disruptive"]
    figures["AR"]["as_asked"] = (
        {tuple(item["nodes"]) for item in slow} == {("dp0-pp0",)}
        and slow[0]["action"] == "exclude_node"
        and slow[0]["rows"] <= ROWS_MAX
    )
    figures["ST"]["as_asked"] = not figures["ST"]["disruptive"]
    return figures


if __name__ == "__main__":
    sys.exit(main(measure, NEEDS, __doc__))
