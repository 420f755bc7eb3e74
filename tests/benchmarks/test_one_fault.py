"""The benchmark of a single fault: its traces, what it counts, and what so few of them bound."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.detection import one_fault
from benchmarks.detection.one_fault import cases, counted, lower_bound, main, situation
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import simulate
from eagle_eye.simulator.story import Place, Story


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


def test_a_corruption_is_one_of_three_kinds_and_two_replicas_are_one() -> None:
    drawn = cases("silent_data_corruption", 40, 92_000_000, "own")
    found = counted(drawn)
    assert set(found) == {"gradient", "parameters", "parameters of two replicas"}
    assert sum(kind["traces"] for kind in found.values()) == len(drawn)


def test_which_of_two_ranks_has_the_wrong_parameters_shows_in_no_metric_but_its_checksum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = Scenario(fault="silent_data_corruption", variant="checksum", nodes=2, gpus=2, seed=5, minutes=2.0)
    one = simulate(scenario)
    drawn = Story.culprit

    def the_other(story: Story) -> Place:
        place = drawn(story)
        return Place(1 - place.node, place.device)

    monkeypatch.setattr(Story, "culprit", the_other)
    other = simulate(scenario)
    assert one.labels[0].nodes != other.labels[0].nodes
    differ = [
        name
        for mine, theirs in ((one.device, other.device), (one.node, other.node), (one.link, other.link))
        for name in mine
        if not np.array_equal(mine[name], theirs[name], equal_nan=True)
    ]
    assert differ == ["train_parameter_checksum"]


def test_a_hang_is_told_apart_by_who_is_waited_for() -> None:
    found = counted(cases("hang", 40, 120_000_000, "second"))
    assert set(found) == {"in a collective", "rank that may work for others", "rank that only trains"}


def test_of_slow_nodes_it_is_counted_how_long_two_slow_steps_take() -> None:
    drawn = [case for case in cases("straggler", 40, 95_000_000, "second") if situation(case) == "slow"]
    longest_s = 2.5 * max(case.step_s for case in drawn)
    assert counted(drawn)["slow"]["two_slow_steps_p95_s"] > 0.9 * longest_s
