"""Successful LLM training runs on 8 to 8,192 GPUs: nothing may be said about their loss, hardly anything about pace.

MLCommons training results v5.0 (Apache-2.0): step time and loss of 411 runs. Every run becomes a job of one node with
one row for each log line that carries a step time or a loss. Where a line has no step time, the time since the
line before, divided by the steps between, stands for it, evaluations and checkpoints included: so the job looks to
a monitor that hears of no phases. Asked for: no loss alert, at most one step-time alert a run.

    python -m benchmarks.detection.real.mlperf --data FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.detection.real.convert import Floats, blind_ratios, judge, write_trace
from benchmarks.detection.real.sets import Figures, main
from eagle_eye.server.backtest.run import DISRUPTIVE_ACTIONS

NEEDS = "real/mlperf_v5_llm"
FILE = "steps_give.parquet"
LOSS_FAULTS = frozenset({"loss_not_finite", "loss_divergence", "loss_spike"})
LINES_MIN = 8  # of a run that says less, nothing can be judged


def measure(folder: Path) -> Figures:
    """Return how many runs had loss alerts, step-time alerts and disruptive actions."""
    loss, pace, disruptive = Counter[str](), Counter[str](), Counter[str]()
    judged, most_pace = 0, 0
    too_many: list[str] = []
    skipped, blind = 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="eagle-eye-mlperf-") as scratch:
        for number, (name, rows) in enumerate(_runs(folder / FILE).items()):
            times_s, columns = _series(rows)
            if len(times_s) < LINES_MIN:
                skipped += 1
                continue
            interval_s = float(np.median(np.diff(times_s)))
            trace = write_trace(Path(scratch) / str(number), name, interval_s, {"job": (times_s, columns)})
            lines = judge(trace, blind)
            judged += 1
            alerts = {line.id: line.fault for line in lines if line.action != "none"}
            loss.update(fault for fault in alerts.values() if fault in LOSS_FAULTS)
            slow = [fault for fault in alerts.values() if fault not in LOSS_FAULTS]
            pace.update(slow)
            most_pace = max(most_pace, len(slow))
            if len(slow) > 1:
                too_many.append(name)
            disruptive.update(line.fault for line in lines if line.action in DISRUPTIVE_ACTIONS)
    return {
        "runs": judged,
        "runs_with_too_few_lines": skipped,
        "loss_alerts": dict(loss),
        "step_time_alerts": dict(pace),
        "step_time_alerts_a_run": round(sum(pace.values()) / max(judged, 1), 4),
        "most_step_time_alerts_in_a_run": most_pace,
        "runs_with_more_than_one": too_many,
        "disruptive": dict(disruptive),
        "blind_ratio": blind_ratios(blind),
        "as_asked": not loss and most_pace <= 1,
    }


def _runs(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the log lines of each run, in order of time."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(path).to_pylist():
        name = "/".join(str(row[key]) for key in ("submitter", "system", "benchmark", "run"))
        runs.setdefault(name, []).append(row)
    return {name: sorted(rows, key=lambda row: (row["time_ms"], row["step"] or 0)) for name, rows in runs.items()}


def _series(rows: list[dict[str, Any]]) -> tuple[Floats, dict[str, Floats]]:
    """Return (K,) times and what was logged at them: last step, seconds a step, loss."""
    lines: dict[float, dict[str, float]] = {}
    for row in rows:
        loss = row["train_loss"] if row["train_loss"] is not None else row["reduced_train_loss"]
        seconds = row["train_step_time"]
        if row["step"] is None or (loss is None and seconds is None):
            continue
        line = lines.setdefault(row["step"] / row["global_batch_size"], {})
        line["time_s"] = max(row["time_ms"] / 1000.0, line.get("time_s", 0.0))
        if loss is not None:
            line["loss"] = loss
        if seconds is not None:
            line["seconds"] = seconds
    steps = np.array(sorted(lines))
    times_s = np.array([lines[step]["time_s"] for step in steps])
    loss_of = np.array([lines[step].get("loss", np.nan) for step in steps])
    logged_s = np.array([lines[step].get("seconds", np.nan) for step in steps])
    between_s = np.full(len(steps), np.nan)
    between_s[1:] = np.diff(times_s) / np.diff(steps)
    seconds_of = np.where(np.isfinite(logged_s), logged_s, between_s)
    # Lines of one moment stand for the same interval: the last of them counts.
    fresh = np.diff(times_s, append=np.inf) > 0
    columns = {"train_step": steps, "train_step_seconds": seconds_of, "train_loss": loss_of}
    return times_s[fresh], {metric: values[fresh] for metric, values in columns.items()}


if __name__ == "__main__":
    sys.exit(main(measure, NEEDS, __doc__))
