"""Claims against labels, the mix, the plan, the tables: what a figure counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.detection.baselines.protocol import Accusation
from benchmarks.detection.mix import MIX, draw
from benchmarks.detection.plan import Plan
from benchmarks.detection.promptness import promptness
from benchmarks.detection.report import markdown, table
from benchmarks.detection.score import NodeScore, Outcome, claims_of, figures
from eagle_eye.server.backtest.run import VerdictLine
from eagle_eye.server.backtest.trace import Label

SLOW = Label(100.0, 200.0, ["a"], "straggler", "exclude")


def score(labels: list[Label], *claims: tuple[float, str]) -> dict[str, Any]:
    result = NodeScore()
    result.add(labels, [Accusation(time_s, node) for time_s, node in claims], 10, 86_400)
    return result.report()


def line(action: str, nodes: list[str], node: str | None, time: float = 110.0) -> VerdictLine:
    return VerdictLine(
        id="v1",
        trace="t",
        time=time,
        nodes=nodes,
        node=node,
        device=None,
        job="j",
        fault="straggler",
        confidence=1.0,
        onset=100.0,
        action=action,
        detectors=[],
        summary="",
        evidence=[],
    )


class TestNodeScore:
    def test_the_labelled_node_in_time_is_a_hit(self) -> None:
        report = score([SLOW], (130.0, "a"))
        assert (report["hits"], report["false"], report["delay_p50_s"]) == (1, 0, 30.0)

    def test_a_minute_after_the_end_still_counts_and_later_is_false(self) -> None:
        assert score([SLOW], (260.0, "a"))["hits"] == 1
        assert score([SLOW], (261.0, "a"))["false"] == 1

    def test_before_the_onset_is_false(self) -> None:
        assert score([SLOW], (99.0, "a"))["false"] == 1

    def test_another_node_is_false_and_the_fault_is_missed(self) -> None:
        report = score([SLOW], (130.0, "b"))
        assert (report["hits"], report["false"], report["recall"]) == (0, 1, 0.0)

    def test_a_node_counts_once_however_often_it_is_named(self) -> None:
        assert score([], (130.0, "b"), (140.0, "b"))["false"] == 1

    def test_all_labelled_nodes_must_be_named(self) -> None:
        both = Label(100.0, 200.0, ["a", "b"], "cpu_contention", "exclude")
        assert score([both], (130.0, "a"))["hits"] == 0
        assert score([both], (130.0, "a"), (140.0, "b"))["hits"] == 1

    def test_naming_the_node_of_a_crash_is_a_hit_though_the_crash_only_restarts(self) -> None:
        assert score([Label(100.0, 200.0, ["a"], "process_crash", "restart")], (130.0, "a"))["hits"] == 1

    @pytest.mark.parametrize(("nodes", "expect"), [(["a"], "job"), ([], "restart"), (["a"], "none")])
    def test_where_nobody_is_to_be_named_every_claim_is_false(self, nodes: list[str], expect: str) -> None:
        report = score([Label(100.0, 200.0, nodes, "straggler", expect)], (130.0, "a"))
        assert (report["labelled"], report["false"]) == (0, 1)


class TestClaims:
    def test_an_exclusion_claims_its_nodes(self) -> None:
        assert claims_of([line("exclude_node", ["a"], "a")]) == [Accusation(110.0, "a")]

    def test_a_restart_claims_the_node_it_blames_and_none_where_it_blames_none(self) -> None:
        assert claims_of([line("restart_job", ["a", "b"], None), line("restart_job", ["c"], "c")]) == [
            Accusation(110.0, "c")
        ]

    def test_a_notice_claims_nobody(self) -> None:
        assert claims_of([line("notify", ["a"], "a")]) == []


def outcome(kind: str, labels: list[Label], lines: list[VerdictLine], said: list[Accusation]) -> Outcome:
    return Outcome(
        key=kind,
        profile="full",
        kind=kind,
        fault="straggler" if kind == "fault" else "hot_node",
        nodes=10,
        seconds=86_400.0,
        labels=labels,
        lines=lines,
        accusations={"z-score": said},
        cost_s={"Eagle Eye": 1.0, "z-score": 0.5},
    )


def test_figures_keep_quiet_traces_apart() -> None:
    found = figures(
        [
            outcome("fault", [SLOW], [line("exclude_node", ["a"], "a")], []),
            outcome("guilty", [], [], [Accusation(5.0, "b")]),
        ]
    )["full"]
    assert found["actions"]["overall"]["f1"] == 1.0
    assert found["quiet"]["false_exclusions"] == 0
    assert found["nodes"]["z-score"]["recall"] == 0.0
    assert found["nodes_on_quiet_traces"]["z-score"]["false"] == 1
    assert found["nodes_on_quiet_traces"]["Eagle Eye"]["node_days"] == 10.0


def test_the_tables_name_every_detector_and_fault() -> None:
    results = {
        "judged": 1,
        "planned": 1,
        "plan": {"faults": 1, "node_days": 0.0},
        "seeds": {"report": "1-1", "tuning": "9-9"},
        "tuned": {"full": {"z-score": {"setting": {"k": 3.0}}}},
        "promptness": {"full": promptness([], [])},
        "profiles": figures([outcome("fault", [SLOW], [line("exclude_node", ["a"], "a")], [])]),
    }
    text = markdown(results)
    assert "| `straggler` | 1 | 1.000 |" in text
    assert "| z-score |" in text
    assert "| hang with culprit | 3 steps + 5 s | 0 |" in text
    assert "k 3" in text


def test_a_table_shows_none_as_a_dash() -> None:
    assert table(("a", "b"), [(None, 0.25)]).splitlines()[-1] == "| - | 0.250 |"


class TestPlan:
    plan = Plan(
        faults=50,
        node_days=3.0,
        profiles=["full"],
        situations=["hot_node"],
        tuning_faults=20,
        tuning_quiet=4,
        gpus=8,
        quiet_nodes=32,
        quiet_minutes=30.0,
        quiet_interval_s=5.0,
    )

    def test_no_seed_is_tuned_on_and_reported(self) -> None:
        reported = {case.seed for case in self.plan.reporting()}
        assert not reported & {case.seed for case in self.plan.tuning()}
        assert len(reported) == len(self.plan.reporting())

    def test_the_same_plan_has_the_same_cases(self) -> None:
        assert self.plan.reporting() == self.plan.reporting()

    def test_at_least_the_node_days_asked_for_are_watched_without_a_fault(self) -> None:
        assert sum(c.node_days for c in self.plan.reporting() if c.kind != "fault") >= 3.0

    def test_half_of_the_quiet_traces_look_guilty(self) -> None:
        kinds = [c.kind for c in self.plan.tuning() if c.kind != "fault"]
        assert kinds == ["healthy", "guilty", "healthy", "guilty"]

    def test_the_mix_keeps_its_proportions(self) -> None:
        names = draw(1000, np.random.default_rng(0))
        total = sum(share.weight for share in MIX)
        for share in MIX:
            assert abs(names.count(share.fault) - 1000 * share.weight / total) < 1

    def test_minders_part_of_the_mix_adds_up_to_a_hundred(self) -> None:
        assert sum(s.weight for s in MIX if s.source.startswith("Minder")) == pytest.approx(100.0)
