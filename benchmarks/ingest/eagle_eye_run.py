"""Eagle Eye under its own load test: what it costs, how soon it acknowledges, whether all is in the history."""

from __future__ import annotations

import contextlib
import json
import resource
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from benchmarks.ingest.processes import GENERATOR_CORE, Course, Look, bytes_in, free_port, on_core, program
from eagle_eye.schema import metrics as catalogue
from eagle_eye.server.history.embedded_history import HISTORY_FILE, HISTORY_FOLDER, EmbeddedHistory
from eagle_eye.server.history.segment_tables import RAW_FOLDER
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.clock import SystemClock

WARM_UP_S = 30.0  # of a fleet that the server never heard of and that comes all at once; measured apart
WARM_UP_SHARE = 0.2  # of a short run


class Plan(NamedTuple):
    """One run."""

    nodes: int
    duration_s: float
    interval_s: float = 1.0
    gpus: int = 8
    warm_up_s: float | None = None  # None: 30 s, a fifth of a short run


def measure(folder: Path, plan: Plan) -> dict[str, Any]:
    """Return the figures of one run in an empty folder; the server has its defaults but for address and folder."""
    folder.mkdir(parents=True)
    data = folder / "data"
    address = f"127.0.0.1:{free_port()}"
    url = f"http://{address}"
    eagle_eye = [sys.executable, "-m", "eagle_eye.cli.main"]
    server = [*eagle_eye, "server", "--listen", address, "--data", str(data)]
    load = [*eagle_eye, "loadtest", "--server", url, "--nodes", str(plan.nodes), "--gpus", str(plan.gpus), "--json"]
    warm_s = min(WARM_UP_S, WARM_UP_SHARE * plan.duration_s) if plan.warm_up_s is None else plan.warm_up_s
    load += [
        "--warm-up",
        str(warm_s),
        "--interval",
        str(plan.interval_s),
        "--duration",
        str(plan.duration_s),
        "--drain",
        "60",
    ]
    with program(server, folder / "server.log", f"{url}/healthz") as pid:
        course = Course(pid)
        done = subprocess.run([*on_core(GENERATOR_CORE), *load], stdout=subprocess.PIPE, check=False)
        time.sleep(1.0)
        looks = course.stop()
        if not done.stdout:
            raise RuntimeError(f"the load test failed with {done.returncode}")
        sent = json.loads(done.stdout)
        disk_running = bytes_in(data)
    held, compaction_cpu_s = count(data)
    samples = sent["samples_acknowledged"]
    whole_cpu_s = looks[-1].cpu_s - max((one.cpu_s for one in looks if one.time_s < sent["begin"]), default=0.0)
    return {
        **{name: sent[name] for name in ("nodes", "gpus", "metrics", "interval_seconds", "seconds")},
        "samples_per_second": sent["samples_per_second"],
        "warm_up_seconds": warm_s,
        **_cost(looks, sent["begin"] + warm_s, sent["begin"] + sent["seconds"], sent["samples_per_second"]),
        "cpu_seconds_per_million_samples_with_compaction": 1e6 * (whole_cpu_s + compaction_cpu_s) / max(samples, 1),
        "acknowledged_seconds": sent["acknowledged_seconds_settled"],
        "acknowledged_seconds_with_warm_up": sent["acknowledged_seconds"],
        "acknowledged_seconds_goodbye": sent["acknowledged_seconds_goodbye"],
        "acknowledged_seconds_by_part": sent["acknowledged_seconds_by_part"],
        "generator": {name: sent[name] for name in ("generator_cpu_ratio", "sends_late", "errors", "asked_to_wait")},
        "frames_sent": sent["frames_sent"],
        "frames_acknowledged": sent["frames_acknowledged"],
        "samples_acknowledged": samples,
        **held,
        "lost": _lost(sent, held),
        "disk_bytes_while_running": disk_running,
        "segment_bytes_per_sample": held["segment_bytes"] / max(samples, 1),
    }


def _lost(sent: dict[str, Any], held: dict[str, int]) -> str:
    """Return "nothing", or what is missing."""
    missing = {
        "frames were not acknowledged": sent["frames_lost"],
        "acknowledged frames are not in the history": sent["frames_acknowledged"] - held["frames_in_history"],
        "acknowledged samples are not in the history": sent["samples_acknowledged"] - held["samples_in_history"],
    }
    return "; ".join(f"{count} {what}" for what, count in missing.items() if count) or "nothing"


def _cost(looks: list[Look], begin_s: float, end_s: float, samples_per_s: float) -> dict[str, Any]:
    window = [one for one in looks if begin_s <= one.time_s <= end_s]
    if len(window) < 2:
        raise RuntimeError(f"{end_s - begin_s:.0f} s are too short to be measured")
    first, last = window[0], window[-1]
    busy = (last.cpu_s - first.cpu_s) / (last.time_s - first.time_s)
    times = np.array([one.time_s for one in window])
    rss = np.array([one.rss_bytes for one in window], dtype=np.float64)
    half = len(window) // 2
    slope = float(np.polyfit(times[half:] - times[half], rss[half:], 1)[0]) if len(window) - half > 1 else 0.0
    per_second = np.diff([one.cpu_s for one in window]) / np.diff(times)
    return {
        "core_busy_ratio": busy,
        "core_busy_ratio_p99_of_seconds": float(np.quantile(per_second, 0.99)),
        "cpu_seconds_per_million_samples": 1e6 * busy / max(samples_per_s, 1e-9),
        "rss_bytes_max": int(rss.max()),
        "rss_bytes_by_quarter": [int(part.max()) for part in np.array_split(rss, 4) if len(part)],
        "rss_bytes_per_hour_second_half": 3_600.0 * slope,
    }


def count(data: Path) -> tuple[dict[str, int], float]:
    """Return what the history of a server that has stopped holds, once all of it is in segments.

    With it how many seconds of CPU it took to write those that were still to be written. Frames are counted by node,
    stream and sequence, so that one that is there twice counts once.
    """
    history = EmbeddedHistory(data, HistorySettings(), 1 << 30, SystemClock(), 0.0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        history.compaction.compact()
    finally:
        history.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    known = {spec.name for spec in catalogue.METRICS}
    frames = samples = 0
    # What the manifest names: what was merged into longer segments stays beside them until nobody reads it.
    with contextlib.closing(sqlite3.connect(f"file:{data / HISTORY_FILE}?mode=ro", uri=True)) as manifest:
        names = [name for (name,) in manifest.execute("SELECT name FROM segments ORDER BY name")]
    folders = [data / HISTORY_FOLDER / RAW_FOLDER / name for name in names]
    for folder in folders:
        table = pq.read_table(folder / "frames.parquet", columns=["node", "stream", "sequence"])
        frames += table.group_by(["node", "stream", "sequence"]).aggregate([]).num_rows
        if not (folder / "samples.parquet").exists():
            continue
        with pq.ParquetFile(folder / "samples.parquet") as file:
            for name in known & set(file.schema_arrow.names):
                for group in range(file.metadata.num_row_groups):
                    column = file.read_row_group(group, columns=[name])[name]
                    values = column.to_numpy()
                    samples += int(np.count_nonzero(values == values))
    held = {
        "frames_in_history": frames,
        "samples_in_history": samples,
        "segment_bytes": bytes_in(*folders),
        "journal_bytes": bytes_in(data / HISTORY_FILE),
    }
    return held, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
