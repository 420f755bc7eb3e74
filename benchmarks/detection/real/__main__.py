"""All recorded sets that are at hand: ``python -m benchmarks.detection.real --data FOLDER --out FILE``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.detection.real import alibaba, mlperf, nab, smd, traces
from benchmarks.detection.real.sets import VARIABLE, data_folder, measured

SETS = {
    "traces": (traces.measure, traces.NEEDS),
    "mlperf": (mlperf.measure, mlperf.NEEDS),
    "alibaba": (alibaba.measure, alibaba.NEEDS),
    "smd": (smd.measure, smd.NEEDS),
    "nab": (nab.measure, nab.NEEDS),
}


def main() -> int:
    """Measure every set, print the figures as JSON; 0 also where a figure is not as asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help=f"the folder with the recorded sets (default: {VARIABLE})")
    parser.add_argument("--out", type=Path, help="write the figures here too")
    args = parser.parse_args()
    data = data_folder(args.data)
    figures = {}
    progress = track(SETS.items(), "sets", console=Console(stderr=True), disable=not sys.stderr.isatty())
    for name, (measure, needs) in progress:
        found = measured(measure, needs, data)
        if found is not None:
            figures[name] = found
    text = json.dumps(figures, indent=1) + "\n"
    sys.stdout.write(text)
    if args.out is not None and figures:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
