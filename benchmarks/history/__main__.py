"""What the history costs: bytes and CPU a sample in the journal and in segments, and how fast one node is found.

``python -m benchmarks.history --nodes 64 --minutes 5 --out FILE``. The frames are simulated, in the resolution of their
sources (simulator/telemetry.py), with 39 metrics a GPU, 23 a node and 7 a port. A sample is a value that is not NaN.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from eagle_eye.schema.frame import Frame, encode_frame
from eagle_eye.schema.metrics import BY_NAME
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.history.embedded_history import HISTORY_FILE, HISTORY_FOLDER, EmbeddedHistory
from eagle_eye.server.history.journal_reader import live_bytes
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.batch import Batch, StreamRef
from eagle_eye.server.model.clock import SystemClock

COMMIT_FRAMES = 1_250  # what a fleet of 12,500 nodes sends in 100 ms
COLLECTORS = dict.fromkeys(("host", "mounts", "fabric", "nvml", "kernel_log", "processes", "training"), "ok")
FLEET_FRAMES_PER_S = 12_500


def main() -> None:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history", description=__doc__)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--minutes", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), args.nodes, args.minutes)
    text = msgspec.json.format(msgspec.json.encode({"nodes": args.nodes, "minutes": args.minutes, **figures}), indent=1)
    sys.stdout.buffer.write(text + b"\n")
    if args.out:
        args.out.write_bytes(text + b"\n")


def measure(folder: Path, nodes: int, minutes: int) -> dict[str, float]:
    """Return the figures of one run in an empty folder."""
    frames = encoded_frames(folder / "trace", nodes, minutes)
    samples = sum(samples_of(frame) for frame, _ in frames)
    settings = HistorySettings(segment_s=3_600.0)
    history = EmbeddedHistory(folder, settings, 1 << 30, SystemClock(), 900.0)
    try:
        journal_s = _cpu_s(lambda: submit(history, frames))
        journal_bytes = history.journal.change(live_bytes).result()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        history.compaction.compact()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        compactor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        node = frames[0][0].node
        list(history.runs(BY_NAME["gpu_power_watts"], [node], 0.0, 4e9, None))  # imports
        query_s = _cpu_s(lambda: list(history.runs(BY_NAME["gpu_power_watts"], [node], 0.0, 4e9, None)))
        read_s = _cpu_s(lambda: sum(1 for _ in history.query([], 0.0, 4e9)))
        segment_bytes = sum(path.stat().st_size for path in (folder / HISTORY_FOLDER).rglob("*") if path.is_file())
    finally:
        history.close()
    assert (folder / HISTORY_FILE).exists()
    count = len(frames)
    return {
        "frames": count,
        "samples_per_frame": samples / count,
        "encoded_bytes_per_sample": sum(len(raw) for _, raw in frames) / samples,
        "journal_bytes_per_sample": journal_bytes / samples,
        "journal_us_per_frame": 1e6 * journal_s / count,
        "segment_bytes_per_sample": segment_bytes / samples,
        "compactor_us_per_frame": 1e6 * compactor_s / count,
        "fleet_share_of_a_core": FLEET_FRAMES_PER_S * (journal_s + compactor_s) / count,
        "query_of_a_node_ms": 1e3 * query_s,
        "read_back_us_per_frame": 1e6 * read_s / count,
    }


def encoded_frames(trace: Path, nodes: int, minutes: int) -> list[tuple[Frame, bytes]]:
    """Return the frames of a simulated fleet, in order of time; ``trace`` is a new folder for it."""
    command = ["simulate", str(trace), "--fault", "none", "--seed", "3"]
    command += ["--nodes", str(nodes), "--minutes", str(minutes)]
    subprocess.run([sys.executable, "-m", "eagle_eye.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
    return [(frame, encode_frame(frame)) for frame in _frames(trace)]


def _frames(trace: Path) -> Iterator[Frame]:
    sequences: dict[str, int] = {}
    for step in Trace(trace).steps():
        if step.frame is not None:
            node = step.frame.node
            sequences[node] = sequences.get(node, 0) + 1
            own = {"stream": f"stream-{node}", "sequence": sequences[node], "collectors": COLLECTORS}
            yield msgspec.structs.replace(step.frame, **own)


def samples_of(frame: Frame) -> int:
    """Return how many values the frame has."""
    return sum(int(np.count_nonzero(~np.isnan(np.frombuffer(block.values, "<f8")))) for block in frame.blocks)


def submit(history: EmbeddedHistory, frames: list[tuple[Frame, bytes]]) -> None:
    """Have the frames durable, as a fleet sends them."""
    for first in range(0, len(frames), COMMIT_FRAMES):
        lines = (
            (StreamRef(frame.node, frame.stream), frame.sequence, frame.time_s, time.time(), 0.0, raw)
            for frame, raw in frames[first : first + COMMIT_FRAMES]
        )
        history.submit(Batch.of(lines)).result()


def _cpu_s(work: Callable[[], Any]) -> float:
    begin_s = time.process_time()
    work()
    return time.process_time() - begin_s


if __name__ == "__main__":
    main()
