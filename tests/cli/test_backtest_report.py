"""A report on judged traces: scores, verdicts with their evidence drawn, and what could not be told."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'eagle-eye[reports]'")

from eagle_eye.cli.main import main


@pytest.fixture(scope="module")
def lost_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = tmp_path_factory.mktemp("traces") / "lost-gpu"
    words = ("--fault", "gpu_lost", "--nodes", "4", "--minutes", "3", "--seed", "1")
    assert main(["simulate", str(trace), *words]) == 0
    return trace


@pytest.fixture(scope="module")
def text(lost_gpu: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "report.html"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["backtest", str(lost_gpu), "--html", str(file)]) == 0
    return file.read_text()


def test_the_verdict_is_drawn_beside_the_label(text: str) -> None:
    assert "gpu lost: " in text
    assert "→ exclude node</h3>" in text
    assert text.count("<svg") >= 1
    assert "label: gpu lost" in text
    assert "4 nodes, 180 s." in text


def test_the_score_and_its_bound_come_first(text: str) -> None:
    assert "false exclusions: 0 in 0.008 node-days (too short to bound their rate" in text


def test_detectors_that_could_not_tell_are_listed(text: str) -> None:
    assert "could not tell in" in text.partition("What could not be told")[2]


def test_the_page_loads_and_runs_nothing(text: str) -> None:
    assert "<script" not in text
    assert 'href="http' not in text
    assert " src=" not in text


def test_a_trace_without_labels_is_not_scored(lost_gpu: Path, tmp_path: Path) -> None:
    (lost_gpu / "faults.jsonl").rename(tmp_path / "away")
    try:
        assert main(["backtest", str(lost_gpu), "--html", str(tmp_path / "report.html")]) == 0
    finally:
        (tmp_path / "away").rename(lost_gpu / "faults.jsonl")
    found = (tmp_path / "report.html").read_text()
    assert "The traces have no labels: what was found is not scored." in found
    assert "No labels." in found


def test_a_trace_that_cannot_be_judged_leaves_no_report(tmp_path: Path) -> None:
    assert main(["backtest", str(tmp_path / "nowhere"), "--html", str(tmp_path / "report.html")]) == 1
    assert not (tmp_path / "report.html").exists()
