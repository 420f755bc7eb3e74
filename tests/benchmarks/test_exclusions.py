"""The benchmark of what becomes of slow and hanging nodes: what counts as right, and a run of one trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.detection.exclusions import GROUPS, SLOW_RATIO, explained_s, found, main, scenarios
from benchmarks.detection.generate import compute_ratio, work_is_equal
from eagle_eye.server.backtest.run import VerdictLine
from eagle_eye.server.engine.settings import DetectionSettings
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import Recording, simulate, tell

SLOW = Scenario(fault="straggler", nodes=2, gpus=2, seed=3, minutes=2.0, strength="strong", habits=False)


@pytest.fixture(scope="module")
def slow() -> Recording:
    return simulate(SLOW)


def line(run: Recording, node: str, action: str = "exclude_node") -> VerdictLine:
    return VerdictLine(
        id="v", trace="t", time=run.labels[0].start + 60.0, nodes=[node], node=node, device=None, job="j",
        fault="straggler", confidence=0.9, onset=run.labels[0].start, action=action, detectors=[], summary="slow",
        evidence=[],
    )  # fmt: skip


def test_exactly_the_node_out_is_right(slow: Recording) -> None:
    (culprit,) = slow.labels[0].nodes
    got = found(SLOW, slow, [line(slow, culprit)], after_pause=False)
    assert (got.right, got.wrong) == (True, 0)
    assert got.delay_s == pytest.approx(60.0)


def test_another_node_out_beside_it_is_wrong(slow: Recording) -> None:
    (culprit,) = slow.labels[0].nodes
    got = found(SLOW, slow, [line(slow, culprit), line(slow, "another")], after_pause=False)
    assert (got.right, got.wrong) == (False, 1)


def test_a_node_that_stays_is_not_right_and_nothing_is_wrong(slow: Recording) -> None:
    got = found(SLOW, slow, [line(slow, slow.labels[0].nodes[0], "notify")], after_pause=False)
    assert (got.right, got.wrong, got.delay_s) == (False, 0, None)


def test_a_job_that_never_paused_has_the_sites_floor(slow: Recording) -> None:
    assert explained_s(slow, slow.labels[0].start) == DetectionSettings().hang_floor_s


def test_in_no_trace_of_slow_nodes_is_the_slowness_mild_or_the_work_unequal() -> None:
    drawn = list(scenarios(GROUPS["slow"], 6, 500, "second"))
    assert len({case.seed for case in drawn}) == 6
    assert min(compute_ratio(tell(case)) for case in drawn) >= SLOW_RATIO
    assert all(work_is_equal(tell(case)) for case in drawn)


def test_every_group_has_all_its_faults_and_seeds_of_its_own() -> None:
    for group in GROUPS.values():
        asked = list(scenarios(group, 6, 500, "own"))
        assert {case.fault for case in asked} == {fault for fault, _ in group.cases}
        assert [case.seed for case in asked] == list(range(500, 506))


@pytest.mark.slow
def test_a_run_of_one_trace_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "exclusions.json"
    monkeypatch.setattr(sys, "argv", ["exclusions", "--traces", "1", "--groups", "slow", "--out", str(out)])
    assert main() == 0
    figures = json.loads(out.read_text())["groups"]["slow"]
    assert (figures["traces"], figures["right"] + len(figures["not_right"])) == (1, 1)
