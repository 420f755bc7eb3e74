"""What downsampling costs: CPU a million samples, and bytes a sample in each level.

``python -m benchmarks.history.upkeep --nodes 64 --minutes 15 --runs 5 --out FILE``. The frames are those of
``python -m benchmarks.history``. They come in segments of five minutes, as a fleet's do, which are downsampled to
minutes and these to hours. Medians of all runs; of CPU the least and greatest too. The cost is that of the work itself:
a process that does it also takes about a second of CPU to start, for up to 200 windows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import pyarrow as pa

from benchmarks.history.__main__ import encoded_frames, samples_of, submit
from eagle_eye.schema.frame import Frame
from eagle_eye.server.history.embedded_history import EmbeddedHistory
from eagle_eye.server.history.segments import worker
from eagle_eye.server.history.segments.tasks import Downsample, TaskResult
from eagle_eye.server.history.segments.upkeep import Upkeep
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.clock import SystemClock

FLEET_SAMPLES_PER_S = 3e6
FOREVER_S = 4e9
SEGMENT_S = 300.0


def main() -> None:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history.upkeep", description=__doc__)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--minutes", type=int, default=15)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with tempfile.TemporaryDirectory() as folder:
        frames = encoded_frames(Path(folder) / "trace", args.nodes, args.minutes)
        samples = sum(samples_of(frame) for frame, _ in frames)
        runs = [_measure(Path(folder) / str(number), frames, samples) for number in range(args.runs)]
    figures: dict[str, object] = {"nodes": args.nodes, "minutes": args.minutes, "runs": args.runs, "samples": samples}
    for name in runs[0]:
        values = sorted(run[name] for run in runs)
        figures[name] = statistics.median(values)
        if "cpu" in name:
            figures[f"{name}_range"] = [values[0], values[-1]]
    figures["load_average"] = os.getloadavg()[0]
    text = msgspec.json.format(msgspec.json.encode(figures), indent=1)
    sys.stdout.buffer.write(text + b"\n")
    if args.out:
        args.out.write_bytes(text + b"\n")


def _measure(folder: Path, frames: list[tuple[Frame, bytes]], samples: int) -> dict[str, float]:
    """Return the figures of one run in a new folder."""
    levels_s, sizes = _kept_up(folder, frames, SEGMENT_S)
    million = samples / 1e6
    downsampling_s = (levels_s["1m"] + levels_s["1h"]) / million
    return {
        "minutes_cpu_s_per_million_samples": levels_s["1m"] / million,
        "hours_cpu_s_per_million_samples": levels_s["1h"] / million,
        "fleet_share_of_a_core_cpu": downsampling_s * FLEET_SAMPLES_PER_S / 1e6,
        "raw_bytes_per_sample": sizes["raw"] / samples,
        "minutes_bytes_per_sample": sizes["1m"] / samples,
        "hours_bytes_per_sample": sizes["1h"] / samples,
    }


def _kept_up(
    folder: Path, frames: list[tuple[Frame, bytes]], segment_s: float
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the CPU seconds of each kind of work, and the bytes of each level, with segments so long."""
    spent_s: dict[str, float] = defaultdict(float)

    def perform(task: Downsample) -> TaskResult:
        begin_s = time.process_time()
        answer = worker.perform(folder / "history", task)
        assert answer.outcome == "done", answer.reason
        spent_s[task.facts.level] += time.process_time() - begin_s
        return answer

    settings = HistorySettings(
        segment_s=3_600.0,
        minutes_retention_s=FOREVER_S,  # the simulated time is not now
        hours_retention_s=FOREVER_S,
    )
    folder.mkdir(parents=True)
    history = EmbeddedHistory(folder, settings, 1 << 30, SystemClock(), 900.0)
    try:
        history.upkeep.stop()  # or its process would do part of it
        first_s = frames[0][0].time_s
        parts: dict[int, list[tuple[Frame, bytes]]] = defaultdict(list)
        for frame, raw in frames:
            parts[int((frame.time_s - first_s) // segment_s)].append((frame, raw))
        for part in parts.values():
            submit(history, part)
            history.compaction.compact()
        Upkeep(history.journal, history.segment_store, settings, SystemClock()).work(perform)
        history.segment_store.measure()
        kept = history.segment_store.kept()
    finally:
        history.close()
    return spent_s, {level: one.bytes for level, one in kept.items()}


if __name__ == "__main__":
    main()
