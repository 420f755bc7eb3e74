"""Logs of healthy training runs, as an agent reads them while they are written: nothing may be said about them.

Each log is written line by line at its lines' own times and read once a second by the agent's log collector; what that
reports becomes a trace of one node. Nothing else is known of the runs: no hook, no GPU, no host. Two sources, both with
the lines of MLCommons' training results (Apache-2.0): ``mlperf_logs`` and ``mlperf_v5_llm/rawlogs`` hold result logs as
they were written; ``mlperf_v5_llm/steps_give.parquet`` holds step times and losses of 411 runs without the lines about
evaluations, of which ``--every N`` takes every Nth.

    python -m benchmarks.detection.real.training_logs --data FOLDER [--logs OTHER_FOLDER] [--every 8]
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.detection.real.convert import blind_ratios, judge, write_trace
from benchmarks.detection.real.sets import VARIABLE, Figures, data_folder
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.collectors.training_log import TrainingLogCollector
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.agent.training_logs.followed_logs import Pattern
from eagle_eye.schema.events import Event

Line = tuple[float, str]  # Unix seconds, text
INTERVAL_S = 1.0
PIDS = range(1_001, 1_009)
LINES_MIN = 4  # with a step, of a log that is counted
AFTER_S = 5.0  # the log's end is the job's
_TIME_MS = re.compile(r'"time_ms": ?([0-9]{12,14})')


def lines_of(path: Path) -> list[Line]:
    """Return the log's lines with their times: MLPerf's own; a line without one has the time of the line before."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", "replace")
    lines: list[Line] = []
    waiting: list[str] = []
    at_s = 0.0
    for line in text.splitlines():
        found = _TIME_MS.search(line)
        if found is not None:
            at_s = max(at_s, int(found[1]) / 1e3)
            lines += [(at_s, one) for one in waiting]
            waiting.clear()
        if at_s:
            lines.append((at_s, line))
        else:
            waiting.append(line)
    return lines


def lines_of_runs(path: Path, every: int) -> Iterator[tuple[str, list[Line]]]:
    """Yield every Nth run of a table of step times and losses as lines of MLPerf's format."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(path).to_pylist():
        name = "/".join(str(row[key]) for key in ("submitter", "system", "benchmark", "run"))
        runs.setdefault(name, []).append(row)
    for name in sorted(runs)[::every]:
        rows = sorted(runs[name], key=lambda row: row["time_ms"])
        lines = [_line(rows[0]["time_ms"], "global_batch_size", rows[0]["global_batch_size"], None)]
        for row in rows:
            kept = ("train_loss", "train_step_time", "reduced_train_loss", "throughput")
            stats = {key: row[key] for key in kept if row[key] is not None}
            if row["eval"] is not None:
                lines.append(_line(row["time_ms"], "eval_accuracy", row["eval"], row["step"]))
            elif stats:
                lines.append(_line(row["time_ms"], "tracked_stats", stats, row["step"]))
        yield name, lines


def _line(time_ms: int, key: str, value: object, step: float | None) -> Line:
    entry = {"time_ms": time_ms, "key": key, "value": value, "metadata": {} if step is None else {"step": step}}
    return time_ms / 1e3, f":::MLLOG {json.dumps(entry)}"


def read(lines: Sequence[Line], folder: Path) -> tuple[list[float], list[dict[str, float]], list[Event]]:
    """Return what the agent reports of the log, second by second: times, rank 0's rows, events."""
    log = folder / "train.log"
    now_s = begun_s = lines[0][0] - 2 * INTERVAL_S
    ranks = [TrainingProcess(pid, "job", rank, len(PIDS), rank, rank) for rank, pid in enumerate(PIDS)]
    processes = TrainingProcesses()
    processes.publish(ranks)
    patterns = [Pattern(str(log), "n0")]
    agent = TrainingLogCollector(
        processes, Drops(), patterns, proc=folder, monotonic_s=lambda: now_s - begun_s, running=lambda pid: pid in PIDS
    )
    log.touch()
    times_s, rows, events, written = [], [], [], 0
    with log.open("a", encoding="utf-8") as file:
        while now_s < lines[-1][0] + AFTER_S:
            now_s += INTERVAL_S
            while written < len(lines) and lines[written][0] <= now_s:
                file.write(lines[written][1] + "\n")
                written += 1
            file.flush()
            observed = agent.collect(now_s)
            events += observed.events
            times_s.append(now_s)
            rows.append(observed.devices.get(0, {}))
    agent.close()
    return times_s, rows, events


def judged(name: str, lines: Sequence[Line], blind: Counter[str]) -> dict[str, Any] | None:
    """Return what was said of one log; None where the agent found hardly a step in it."""
    with tempfile.TemporaryDirectory(prefix="eagle-eye-logs-") as scratch:
        times_s, rows, events = read(lines, Path(scratch))
        steps = [row["train_step"] for row in rows if "train_step" in row]
        advances = sum(after > before for before, after in itertools.pairwise(steps)) + bool(steps)
        if advances < LINES_MIN:
            return None
        metrics = sorted({metric for row in rows for metric in row})
        columns = {metric: np.array([row.get(metric, np.nan) for row in rows]) for metric in metrics}
        trace = write_trace(Path(scratch) / "trace", name, INTERVAL_S, {"n0": (np.array(times_s), columns)})
        with (trace / "events.jsonl").open("w", encoding="utf-8") as file:
            for event in events:
                told = {"time": event.time_s, "node": "n0", "device": event.device}
                file.write(json.dumps({**told, "kind": event.kind, "attributes": dict(event.attributes)}) + "\n")
        said = judge(trace, blind)
    alerts = {line.id: line for line in said}
    seconds = columns.get("train_step_seconds")
    return {
        "log": name,
        "hours": round((times_s[-1] - times_s[0]) / 3600, 2),
        "steps": steps[-1] - steps[0] + 1,
        "step_s": None if seconds is None else round(float(np.nanmedian(seconds)), 4),
        "advances": advances,
        "notices": dict(Counter(line.fault for line in alerts.values())),
        "first": [f"{line.time - times_s[0]:.0f} s: {line.summary}" for line in alerts.values()][:3],
    }


def measure(folder: Path, more: Path | None, every: int) -> Figures:
    """Return for each log what was said of it, and over all of them how many there were."""
    logs = [*sorted((folder / "mlperf_logs").glob("*")), *sorted((folder / "mlperf_v5_llm/rawlogs").glob("*"))]
    if more is not None:
        logs = sorted(path for path in more.rglob("*") if path.is_file())
    sources: list[tuple[str, list[Line]]] = [(path.name, lines_of(path)) for path in logs]
    if every:
        sources += lines_of_runs(folder / "mlperf_v5_llm/steps_give.parquet", every)
    blind = Counter[str]()
    unread, found = [], []
    for name, lines in sources:
        one = judged(name, lines, blind) if lines else None
        if one is None:
            unread.append(name)
        else:
            found.append(one)
            sys.stderr.write(f"{json.dumps(one)}\n")
    hangs = [one["notices"].get("hang", 0) for one in found]
    return {
        "logs": len(found),
        "hours": round(sum(one["hours"] for one in found), 1),
        "without_steps": unread,
        "logs_with_hang": sum(count > 0 for count in hangs),
        "hang_notices": sum(hangs),
        "most_hang_notices_of_a_log": max(hangs, default=0),
        "notices": dict(sum((Counter(one["notices"]) for one in found), Counter[str]())),
        "hang_blind_ratio": blind_ratios(blind).get("hang", 0.0),
        "with_notices": [one for one in found if one["notices"]],
    }


def main() -> int:
    """Measure and print the figures as JSON; 1 where a healthy log was called a hang."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help=f"the folder with the recorded sets (default: {VARIABLE})")
    parser.add_argument("--logs", type=Path, help="logs of MLPerf runs in place of the folder's own, plain or .gz")
    parser.add_argument("--every", type=int, default=0, help="take every Nth run of the table as well (default: none)")
    parser.add_argument("--out", type=Path, help="write the figures here too")
    args = parser.parse_args()
    data = data_folder(args.data)
    if data is None or not (data / "real/mlperf_logs").exists():
        sys.stderr.write(f"skipped: no recorded set at {data or f'--data or {VARIABLE}'}\n")
        return 0
    figures = measure(data / "real", args.logs, args.every)
    text = json.dumps(figures, indent=1) + "\n"
    sys.stdout.write(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    return int(figures["logs_with_hang"] > 0)


if __name__ == "__main__":
    sys.exit(main())
