"""Ten workers of a production job, unequally fast and steadily so: none of them is a straggler.

alibaba/clusterdata, mini-batch times of a job (research use). Every worker becomes a node, its batch time the compute
time of a step; the published times are normalised, so a unit stands for a millisecond. Asked for: no straggler alarm.

    python -m benchmarks.detection.real.alibaba --data FOLDER
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.detection.real.convert import START_S, Floats, blind_ratios, counts, judge, write_trace
from benchmarks.detection.real.sets import Figures, main
from eagle_eye.server.backtest.run import DISRUPTIVE_ACTIONS

NEEDS = "real/alibaba_minibatch"
FILE = "data/job_2_norm.csv"
SECONDS_PER_UNIT = 1e-3
# What a worker may be accused of for being slow; findings about the job as a whole are told apart.
SLOW_FAULTS = frozenset(
    {
        "straggler",
        "thermal_throttle",
        "power_throttle",
        "pcie_degraded",
        "nic_degraded",
        "nvlink_degraded",
        "cpu_contention",
    }
)


def measure(folder: Path) -> Figures:
    """Return the alarms, and how unequal the workers are."""
    rows: dict[str, list[tuple[float, float]]] = {}
    with (folder / FILE).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows.setdefault(f"worker{row['worker']}", []).append((float(row["time"]), float(row["batch_time_norm"])))
    workers: dict[str, tuple[Floats, dict[str, Floats]]] = {}
    for name, found in rows.items():
        times, units = np.array(sorted(found)).T
        seconds = units * SECONDS_PER_UNIT
        steps = np.arange(1.0, len(times) + 1)
        workers[name] = (
            START_S + times,
            {"train_step": steps, "train_step_seconds": seconds, "train_compute_seconds": seconds},
        )
    spacing_s = float(np.median(np.diff(next(iter(workers.values()))[0])))
    blind = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="eagle-eye-alibaba-") as scratch:
        lines = judge(write_trace(Path(scratch) / "t", "alibaba", spacing_s, workers), blind)
    medians = {name: float(np.median(columns["train_compute_seconds"])) for name, (_, columns) in workers.items()}
    typical = float(np.median(list(medians.values())))
    alarms = [line for line in lines if line.fault in SLOW_FAULTS and line.action != "none"]
    return {
        "workers": len(workers),
        "slowest_over_median": round(max(medians.values()) / typical, 4),
        "straggler_alarms": len({line.id for line in alarms}),
        "disruptive": len([line for line in lines if line.action in DISRUPTIVE_ACTIONS]),
        "verdicts": counts(lines),
        "blind_ratio": blind_ratios(blind),
        "as_asked": not alarms,
    }


if __name__ == "__main__":
    sys.exit(main(measure, NEEDS, __doc__))
