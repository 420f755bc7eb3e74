"""The benchmark of a single fault: its traces, what it counts, and what so few of them bound."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.detection import one_fault
from benchmarks.detection.one_fault import cases, lower_bound, main, situation


def test_every_trace_has_the_fault_and_a_seed_of_its_own() -> None:
    drawn = cases("silent_data_corruption", 20, 500, "own")
    assert {case.fault for case in drawn} == {"silent_data_corruption"}
    assert {case.seed for case in drawn} == set(range(500, 520))
    assert len({case.nodes for case in drawn}) > 2


@pytest.mark.parametrize(
    ("hits", "tried", "expected"), [(59, 59, 0.9505), (58, 59, 0.9222), (0, 5, 0.0), (5, 5, 0.5493)]
)
def test_so_many_hits_bound_the_share(hits: int, tried: int, expected: float) -> None:
    assert lower_bound(hits, tried) == pytest.approx(expected, abs=5e-4)


def test_a_run_of_one_trace_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr("benchmarks.detection.plan.FAULT_NODES", (4,))
    monkeypatch.setattr("benchmarks.detection.plan.FAULT_MINUTES", 4.0)
    monkeypatch.setattr(
        sys, "argv", ["one_fault", "silent_data_corruption", "--traces", "1", "--first-seed", "3", "--out", str(out)]
    )
    assert main() == 0
    figures = json.loads(out.read_text())
    assert (figures["labelled"], figures["found"] + len(figures["not_right"])) == (1, 1)
    assert figures["recall_lower_95"] == one_fault.lower_bound(figures["found"], 1)


def test_a_stragglers_trace_is_one_of_four_kinds_and_slow_ones_have_equal_work() -> None:
    drawn = cases("straggler", 40, 95_000_000, "second")
    kinds = {case.seed: situation(case) for case in drawn}
    assert kinds[95_000_000] == "slow"
    assert kinds[95_000_006] == "milder"  # 1.09 times
    assert kinds[95_000_011] == "uneven work"  # packed, and experts
    assert set(kinds.values()) <= {"slow", "milder", "uneven work", "no peers"}
