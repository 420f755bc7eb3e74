"""Numenta Anomaly Benchmark, AWS and known-cause series: change points of one series. For orientation only.

The labelled windows hold anomalies of all kinds, of which a change of level is one; so a low figure is no surprise.
The first 15% of a series, in which NAB lets detectors learn, do not count. An alarm inside a window finds it; others
are false.

    python -m benchmarks.detection.real.nab --data FOLDER
"""

from __future__ import annotations

import csv
import datetime as dt
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.detection.baselines.bocd import Bocd
from benchmarks.detection.matrix import Floats
from benchmarks.detection.real.sets import Figures, main

NEEDS = "real/nab"
FOLDERS = ("realAWSCloudwatch", "realKnownCause")
PROBATION_SHARE = 0.15
CHANGE_RATIO = 0.10  # as Greyhound verifies a change of the iteration time
DAY_S = 86_400.0


def measure(folder: Path) -> Figures:
    """Return windows found and false alarms a day of Bayesian online change points with a verified change of mean."""
    windows = json.loads((folder / "labels" / "combined_windows.json").read_text(encoding="utf-8"))
    figures: Figures = {}
    for name in FOLDERS:
        labelled = found = false = 0
        days = 0.0
        for path in sorted((folder / "data" / name).glob("*.csv")):
            times_s, values = _read(path)
            counted_s = times_s[int(PROBATION_SHARE * len(times_s))]
            spans = [(_unix(a), _unix(b)) for a, b in windows[f"{name}/{path.name}"]]
            spans = [(a, b) for a, b in spans if b >= counted_s]
            alarms_s = [t for t in _alarms(times_s, values) if t >= counted_s]
            labelled += len(spans)
            found += sum(any(a <= t <= b for t in alarms_s) for a, b in spans)
            false += sum(not any(a <= t <= b for a, b in spans) for t in alarms_s)
            days += (times_s[-1] - counted_s) / DAY_S
        figures[name] = {"windows": labelled, "found": found, "false_alarms_a_day": round(false / days, 3)}
    return figures


def _alarms(times_s: Floats, values: Floats) -> list[float]:
    """Return the times of verified change points; values are shifted to be positive, as durations are."""
    positive = values - values.min() + max(float(np.ptp(values)), 1e-9)
    alarms, before = [], 0
    for change in Bocd().changes(positive):
        usual = float(np.mean(values[before : change.began]))
        now = float(np.mean(values[change.began : change.found + 1]))
        if abs(now - usual) >= CHANGE_RATIO * max(abs(usual), 1e-9):
            alarms.append(float(times_s[change.found]))
        before = change.began
    return alarms


def _read(path: Path) -> tuple[Floats, Floats]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(_unix(row["timestamp"]), float(row["value"])) for row in csv.DictReader(file)]
    times_s, values = np.array(rows).T
    return times_s, values


def _unix(text: str) -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.timezone.utc).timestamp()


if __name__ == "__main__":
    sys.exit(main(measure, NEEDS, __doc__))
