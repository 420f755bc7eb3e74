"""A trace's tables as data frames."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_eye import traces
from eagle_eye.schema.frame import values_of
from eagle_eye.server.backtest.recorder import TraceWriter
from eagle_eye.server.backtest.trace import FORMAT, Header, Label, TraceEvent, TraceNode
from eagle_eye.server.backtest.trace import Trace as EngineTrace
from tests.docs.pages import blocks

START_S = 1_700_000_000.0
COUNT = 2.0**53


def at(second: float) -> pd.Timestamp:
    return pd.Timestamp(START_S + second, unit="s", tz="UTC")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace with rows out of order, twice, without a node, with a column that nobody knows, and a port."""
    nodes = [TraceNode("n1", 2), TraceNode("n2", 1)]
    header = Header(FORMAT, "j", 1.0, START_S, START_S + 10, nodes)
    events = [TraceEvent(START_S + 4, "xid", "n1", 1, {"code": 79}), TraceEvent(START_S + 3, "job_state", None, None)]
    with TraceWriter(tmp_path / "trace") as writer:
        writer.links({"time": [START_S + 1], "node": ["n1"], "link": ["mlx5_0"], "link_up": [1.0]})
        writer.finish(header, events, labels=[Label(START_S + 4, START_S + 9, ["n1"], "gpu_lost", "exclude")])
    rows: dict[str, Any] = {
        "time": [START_S + second for second in (2, 1, 1, 1, 1, 3)],
        "node": ["n2", "n1", "n1", "n1", "n1", None],
        "device": pa.array([0, 1, 0, -1, 0, 0], pa.int16()),
        "gpu_power_watts": pa.array([200.0, None, 100.0, None, 101.0, 5.0], pa.float32()),
        "gpu_ecc_corrected_total": [None, None, None, None, COUNT, None],
        "train_loss": pa.array([math.inf, None, None, None, None, None], pa.float32()),
        "node_iowait_ratio": pa.array([None, None, None, 0.0, None, None], pa.float32()),
        "gpu_mood": ["fine"] * 6,
    }
    pq.write_table(pa.table(rows), tmp_path / "trace" / "samples.parquet")
    return tmp_path / "trace"


def test_samples_are_a_frame_in_order_of_time_node_and_device(folder: Path) -> None:
    found = traces.read(folder).samples
    keys = [at(1), at(1), at(1), at(2)], ["n1", "n1", "n1", "n2"], [-1, 0, 1, 0]
    assert (list(found["time"]), list(found["node"]), list(found["device"])) == keys
    assert {name: str(kind) for name, kind in found.dtypes.items()} == {
        "time": "datetime64[us, UTC]",
        "node": "category",
        "device": "int16",
        "gpu_power_watts": "float32",
        "gpu_ecc_corrected_total": "float64",
        "train_loss": "float32",
        "node_iowait_ratio": "float32",
    }


def test_what_was_not_observed_is_nan_and_what_was_not_finite_infinite(folder: Path) -> None:
    found = traces.read(folder).samples
    np.testing.assert_array_equal(found["gpu_power_watts"], [math.nan, 101.0, math.nan, 200.0])
    np.testing.assert_array_equal(found["gpu_ecc_corrected_total"], [math.nan, COUNT, math.nan, math.nan])
    np.testing.assert_array_equal(found["train_loss"], [math.nan] * 3 + [math.inf])
    np.testing.assert_array_equal(found["node_iowait_ratio"], [0.0] + [math.nan] * 3)


def test_what_is_left_out_is_counted(folder: Path) -> None:
    ignored = traces.read(folder).samples.attrs["ignored"]
    assert ignored == {"duplicate row": 1, "row without time, node or device": 1}


def test_events_and_faults_are_frames(folder: Path) -> None:
    trace = traces.read(str(folder))
    assert trace.header.job == "j"
    assert trace.events.to_dict("list") == {
        "time": [at(3), at(4)],
        "node": [None, "n1"],
        "device": [-1, 1],
        "kind": ["job_state", "xid"],
        "attributes": [{}, {"code": 79}],
    }
    assert trace.faults is not None
    assert trace.faults.to_dict("list") == {
        "start": [at(4)],
        "end": [at(9)],
        "nodes": [["n1"]],
        "fault": ["gpu_lost"],
        "expect": ["exclude"],
    }


def test_a_trace_without_labels_is_none_of_a_healthy_job(folder: Path) -> None:
    (folder / "faults.jsonl").write_text("")
    healthy = traces.read(folder).faults
    assert healthy is not None
    assert list(healthy.columns) == ["start", "end", "nodes", "fault", "expect"]
    assert healthy.empty
    (folder / "faults.jsonl").unlink()
    assert traces.read(folder).faults is None


def test_links_are_a_frame_and_an_empty_one_without_their_file(folder: Path) -> None:
    (row,) = traces.read(folder).links.to_dict("records")
    known = {key: value for key, value in row.items() if pd.notna(value)}
    assert known == {"time": at(1), "node": "n1", "link": "mlx5_0", "link_up": 1.0}
    (folder / "links.parquet").unlink()
    empty = traces.read(folder).links
    assert list(empty.columns) == ["time", "node", "link"]
    assert empty.empty


def test_a_folder_that_is_none_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(traces.BadTrace, match=r"a trace is a folder with trace\.json"):
        traces.read(tmp_path / "none")
    (folder / "samples.parquet").write_bytes(b"PAR1")
    with pytest.raises(traces.BadTrace, match=r"samples\.parquet"):
        _ = traces.read(folder).samples
    (folder / "trace.json").write_text(json.dumps({"format": "eagle-eye-trace/2"}))
    with pytest.raises(traces.BadTrace):
        traces.read(folder)


def test_the_frame_has_the_values_that_the_engine_sees(folder: Path) -> None:
    seen = {
        (frame.time_s, frame.node, int(key), metric): value
        for frame in (step.frame for step in EngineTrace(folder).steps() if step.frame is not None)
        for block in frame.blocks
        if block.scope != "link"
        for (metric, key), value in zip(
            [(metric, key) for metric in block.metrics for key in block.keys], values_of(block), strict=True
        )
        if not math.isnan(value)
    }
    tidy = traces.read(folder).samples.melt(["time", "node", "device"]).dropna()
    found = {
        (row.time.timestamp(), row.node, row.device, row.variable): row.value for row in tidy.itertuples(index=False)
    }
    assert found == seen


def test_the_document_shows_how(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/reference/traces.md"""
    monkeypatch.chdir(folder.parent)
    folder.rename("OUT")
    (block,) = (one for one in blocks("docs/reference/traces.md") if one.mark == "run by tests/traces/test_read.py")
    found: dict[str, Any] = {}
    exec(block.text, found)
    assert found["highest"].to_dict() == {"n1": 101.0, "n2": 200.0}
    assert list(found["trace"].faults["fault"]) == ["gpu_lost"]


def test_without_pandas_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['pandas'] = None\nfrom eagle_eye import traces\n"
        "try:\n    traces.read\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == 'traces need: pip install "eagle-eye[client]" (no module pandas)\n'
