"""A trace folder becomes the arrays that it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.detection.matrix import TraceMatrix, read_matrix
from tests.benchmarks.matrices import START_S

POWER, CPU, COMPUTE = "gpu_power_watts", "node_cpu_utilization_ratio", "train_compute_seconds"


@pytest.fixture
def trace(tmp_path: Path) -> TraceMatrix:
    rows: list[dict[str, Any]] = []
    for second in range(1, 4):
        for node in ("b", "a"):
            for device in (0, 1):
                watts = 100.0 * second + device * 10
                rows.append(
                    {
                        "time": START_S + second + 0.1,
                        "node": node,
                        "device": device,
                        POWER: watts,
                        CPU: None,
                        COMPUTE: watts,
                    }
                )
            rows.append({"time": START_S + second + 0.1, "node": node, "device": -1, CPU: 0.25})
    rows = [r for r in rows if not (r["node"] == "b" and r["time"] > START_S + 3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "samples.parquet")
    header = {
        "format": "eagle-eye-trace/1",
        "job": "j",
        "interval_s": 1.0,
        "start": START_S,
        "end": START_S + 3,
        "nodes": [{"node": "a", "gpus": 2}, {"node": "b", "gpus": 2}],
        "ranks": [{"rank": 0, "node": "a", "device": 0, "pp": 0}, {"rank": 1, "node": "b", "device": 0, "pp": 1}],
    }
    (tmp_path / "trace.json").write_text(json.dumps(header))
    return read_matrix(tmp_path)


def test_a_nodes_value_is_the_mean_over_its_gpus(trace: TraceMatrix) -> None:
    assert trace.values[POWER][:, 0].tolist() == [105.0, 205.0, 305.0]


def test_the_slowest_rank_of_a_node_is_kept_beside_the_mean(trace: TraceMatrix) -> None:
    assert trace.slowest_compute_s is not None
    assert trace.slowest_compute_s[0].tolist() == [110.0, 110.0]
    assert trace.values[COMPUTE][0].tolist() == [105.0, 105.0]


def test_node_rows_are_taken_as_they_are(trace: TraceMatrix) -> None:
    assert trace.values[CPU][0].tolist() == [0.25, 0.25]


def test_what_was_not_sent_is_not_observed(trace: TraceMatrix) -> None:
    assert np.isnan(trace.values[POWER][2, 1])


def test_metrics_that_the_trace_lacks_are_absent(trace: TraceMatrix) -> None:
    assert "train_step" not in trace.values
    assert trace.held("train_step") is None


def test_nodes_of_different_stages_are_of_different_groups(trace: TraceMatrix) -> None:
    assert trace.role_of.tolist() == [0, 1]
