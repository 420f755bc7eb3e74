"""Recorded series become traces that the engine reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.detection.matrix import read_matrix
from benchmarks.detection.real.convert import START_S, counts, judge, write_trace
from benchmarks.detection.real.sets import data_folder, measured

TIMES_S = START_S + np.arange(1.0, 61.0)
STEPS = np.arange(1.0, 61.0)


def worker(seconds: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    columns = {
        "train_step": STEPS,
        "train_step_seconds": np.full(60, seconds),
        "train_compute_seconds": np.full(60, seconds),
    }
    return TIMES_S, columns


def test_every_worker_becomes_a_node(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", "j", 1.0, {"w1": worker(0.5), "w0": worker(0.7)})
    trace = read_matrix(folder)
    assert trace.nodes == ("w0", "w1")
    assert trace.values["train_compute_seconds"][0].tolist() == pytest.approx([0.7, 0.5])


def test_a_steady_job_is_left_alone(tmp_path: Path) -> None:
    lines = judge(write_trace(tmp_path / "t", "j", 1.0, {f"w{i}": worker(0.5) for i in range(4)}))
    assert counts(lines) == {}


def test_without_the_data_a_set_is_skipped_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EAGLE_EYE_DATA", raising=False)
    assert data_folder(None) is None
    assert measured(lambda folder: {"at": str(folder)}, "traces", None) is None
    assert measured(lambda folder: {"at": str(folder)}, "traces", tmp_path) is None
    assert capsys.readouterr().err.count("skipped") == 2
