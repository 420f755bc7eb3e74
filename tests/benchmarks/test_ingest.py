"""The ingest benchmark's own parts: what the peers are sent, and how costs are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ingest.eagle_eye_run import _cost, _lost
from benchmarks.ingest.processes import Look, bytes_in, look
from benchmarks.ingest.remote_write import Bodies
from eagle_eye.server.ingest.remote_write.wire import announced_bytes, labels, read_v1, uncompressed
from eagle_eye.simulator.load.fleet import METRICS, PLAIN, FleetValues

NODES, GPUS, TIME_S = 4, 5, 1_700_000_123.0


def test_peers_are_sent_each_sample_once_with_its_labels_and_the_number_that_the_source_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.ingest.remote_write.SERIES_PER_REQUEST", 400)
    names = [f"n{node}" for node in range(NODES)]
    bodies = Bodies(names, GPUS)
    values = FleetValues(np.zeros(NODES, dtype=np.int64), GPUS, 1.0, 2.0, TIME_S - 100.0)
    list(bodies.of(values.read(0, NODES, TIME_S - 1.0), TIME_S - 1.0))  # a second interval leaves nothing of the first
    readings = values.read(0, NODES, TIME_S)
    found: dict[tuple[str, str, str], float] = {}
    sizes: list[int] = []
    wanted = {f"eagle_eye_{name}".encode() for name in METRICS}
    for body in bodies.of(readings, TIME_S):
        plain = uncompressed(body, announced_bytes(body))
        written = read_v1(plain, wanted, 1 << 20)
        sizes.append(written.samples)
        for series in written.series:
            reported = labels(series.key)
            (sample,) = series.samples
            assert sample.time_ms == round(1_000 * TIME_S)
            assert sample.value is not None
            found[reported["__name__"], reported["instance"], reported["gpu"]] = sample.value
    assert sizes == [400, 200]
    assert len(found) == NODES * GPUS * len(METRICS)
    at = PLAIN.index("gpu_utilization_ratio")
    for node in range(NODES):
        value = found["eagle_eye_gpu_utilization_ratio", f"n{node}", "3"]
        assert value == pytest.approx(float(readings.plain[node, at, 3]), abs=1e-6)
        assert value == float(f"{value:.2f}")  # 0.98, not float32's 0.9800000190734863


def test_peers_can_be_sent_a_request_for_each_node() -> None:
    bodies = Bodies([f"n{node}" for node in range(NODES)], GPUS, per_node=True)
    values = FleetValues(np.zeros(NODES, dtype=np.int64), GPUS, 1.0, 2.0, TIME_S - 100.0)
    wanted = {f"eagle_eye_{name}".encode() for name in METRICS}
    nodes: list[set[str]] = []
    for body in bodies.of(values.read(0, NODES, TIME_S), TIME_S):
        written = read_v1(uncompressed(body, announced_bytes(body)), wanted, 1 << 20)
        nodes.append({labels(series.key)["instance"] for series in written.series})
        assert written.samples == GPUS * len(METRICS)
    assert nodes == [{f"n{node}"} for node in range(NODES)]


def test_the_cost_of_children_that_have_ended_counts() -> None:
    burn = "import os\nwhile os.times().user < 0.1: pass"
    run = f"subprocess.run([sys.executable, '-Sc', {burn!r}])"
    program = f"import subprocess, sys; {run}; print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    seen = look(process.pid)
    process.communicate()
    assert seen.cpu_s >= 0.1
    assert seen.rss_bytes > 1 << 20


def test_the_core_is_as_busy_as_it_was_after_the_first_seconds() -> None:
    looks = [
        Look(1_000.0 + second, max(second - 20, 0) * 0.5, (100 if second < 50 else 50) << 20) for second in range(81)
    ]
    cost = _cost(looks, 1_024.0, 1_080.0, 1e6)
    assert cost["core_busy_ratio"] == pytest.approx(0.5)
    assert cost["cpu_seconds_per_million_samples"] == pytest.approx(0.5)
    assert cost["rss_bytes_max"] == 100 << 20
    assert cost["rss_bytes_per_hour_second_half"] <= 0.0


def test_what_is_missing_is_said_and_nothing_else() -> None:
    sent = {"frames_lost": 0, "frames_acknowledged": 10, "samples_acknowledged": 100}
    assert _lost(sent, {"frames_in_history": 10, "samples_in_history": 100}) == "nothing"
    assert _lost(sent, {"frames_in_history": 9, "samples_in_history": 100}).startswith("1 acknowledged frames")
    reported = _lost({**sent, "frames_lost": 2}, {"frames_in_history": 10, "samples_in_history": 100})
    assert reported == "2 frames were not acknowledged"


def test_files_are_counted_in_folders_and_alone(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(bytes(10))
    (tmp_path / "d").write_bytes(bytes(5))
    (tmp_path / "a" / "dangling").symlink_to(tmp_path / "missing")
    assert bytes_in(tmp_path / "a", tmp_path / "d", tmp_path / "nowhere") == 15
