"""The detection suite on the second physics: cases of its own, never those that are tuned on, and what was missed."""

from __future__ import annotations

from typing import Any

from benchmarks.detection import judge
from benchmarks.detection.findings import findings
from benchmarks.detection.plan import REPORT_SEEDS, Case, Plan
from benchmarks.detection.report import markdown
from benchmarks.detection.score import Outcome, figures
from eagle_eye.server.backtest.run import VerdictLine
from eagle_eye.server.backtest.trace import Label


def plan(**changes: Any) -> Plan:
    """Return the plan of a run with 200 faults and 20 quiet node-days."""
    usual: dict[str, Any] = {
        "faults": 200, "node_days": 20.0, "profiles": ["full"], "situations": ["checkpoint"], "tuning_faults": 5,
        "tuning_quiet": 5, "gpus": 8, "quiet_nodes": 64, "quiet_minutes": 30.0, "quiet_interval_s": 5.0,
    }  # fmt: skip
    return Plan(**usual | {"physics": "second"} | changes)


def test_its_jobs_differ_in_size_steps_and_intervals() -> None:
    cases = plan().reporting()
    assert {case.physics for case in cases} == {"second"}
    assert {case.gpus for case in cases} == {4, 8}
    assert min(case.nodes for case in cases) == 2
    assert 60 <= max(case.nodes for case in cases) <= 64
    assert min(case.step_s for case in cases) < 0.5 < 50 < max(case.step_s for case in cases)
    assert {case.interval_s for case in cases} == {1.0, 2.0, 3.0, 5.0, 10.0, 15.0}
    assert all(case.minutes * 60 >= 59 * case.step_s for case in cases)


def test_quiet_jobs_are_as_large_as_is_asked_for_and_those_with_faults_are_not() -> None:
    cases = plan(quiet_nodes=1024, node_days=400.0).reporting()
    assert max(case.nodes for case in cases if case.kind == "fault") <= 64
    quiet = [case for case in cases if case.kind != "fault"]
    assert 900 <= max(case.nodes for case in quiet) <= 1024
    assert sum(case.node_days for case in quiet) >= 400.0


def test_smaller_jobs_are_watched_for_as_many_node_days() -> None:
    quiet = [case.node_days for case in plan().reporting() if case.kind != "fault"]
    assert 20.0 <= sum(quiet) < 20.0 + max(quiet)


def test_what_is_tuned_on_is_of_own_physics_and_other_seeds() -> None:
    tuning, own = plan().tuning(), plan(physics="own").reporting()
    assert {case.physics for case in (*tuning, *own)} == {"own"}
    assert {case.seed for case in (*tuning, *own)}.isdisjoint(case.seed for case in plan().reporting())


def test_another_first_seed_draws_other_traces() -> None:
    moved = plan(first_seed=90_000_000).reporting()
    assert min(case.seed for case in moved) == 90_000_000 != REPORT_SEEDS["second"]


def test_a_tiny_run_is_judged_scored_and_written() -> None:
    tiny = plan(faults=1, node_days=0.0)
    case = Case("k", "fault", "gpu_lost", 80_900_001, 2, 4, 3.0, 1.0, 1.0, "medium", False, None, "second")
    outcomes = judge.outcomes(case, ["full", "no_hook"])
    assert [outcome.labels[0].fault for outcome in outcomes] == ["gpu_lost"] * 2
    results = {
        "judged": 2, "planned": 2, "plan": {"faults": 1, "node_days": 0.0, "physics": tiny.physics}, "seeds": {},
        "profiles": figures(outcomes), "promptness": {"full": {}, "no_hook": {}}, "tuned": {},
        "findings": findings([case], outcomes),
    }  # fmt: skip
    assert "Physics: second" in markdown(results)


def outcome(lines: list[VerdictLine]) -> dict[str, Any]:
    """Return what is found in a trace whose node "a" was to be excluded from second 100 on."""
    case = Case("k", "fault", "straggler", 7, 4, 8, 10.0, 2.0, 1.0, "medium", False, None, "second")
    judged = Outcome(
        key="k", profile="full", kind="fault", fault="straggler", nodes=4, seconds=600.0, accusations={}, cost_s={},
        labels=[Label(100.0, 400.0, ["a"], "straggler", "exclude")], lines=lines,
    )  # fmt: skip
    return findings([case], [judged])


def line(node: str, action: str) -> VerdictLine:
    """Return a verdict on a node at second 130."""
    return VerdictLine(
        id=f"v-{node}", trace="t", time=130.0, nodes=[node], node=node, device=None, job="j", fault="straggler",
        confidence=0.6, onset=100.0, action=action, detectors=[], summary="slow", evidence=[],
    )  # fmt: skip


def test_a_miss_says_what_was_said_instead() -> None:
    (missed,) = outcome([line("a", "notify")])["missed"]
    assert missed["seed"] == 7
    assert [(t["action"], t["right_nodes"], t["after_s"]) for t in missed["said"]] == [("notify", True, 30.0)]


def test_a_wrong_action_is_reported_with_its_seed_beside_a_right_one() -> None:
    found = outcome([line("a", "exclude_node"), line("b", "exclude_node")])
    assert found["missed"] == []
    assert [(w["seed"], w["action"], w["right_nodes"]) for w in found["wrong"]] == [(7, "exclude_node", False)]


def test_what_was_met_is_no_finding() -> None:
    assert outcome([line("a", "exclude_node")]) == {"missed": [], "wrong": []}
