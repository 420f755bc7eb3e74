"""Policy by cases: what each presentation of a fault asks for, every hold with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_eye.server.engine.policy import decide
from eagle_eye.server.engine.settings import PolicySettings
from tests.server.engine.situations import NOW_S, incident, past, situation


def test_a_hang_with_two_kinds_of_evidence_excludes_its_node() -> None:
    decision = decide(incident(), situation())
    assert (decision.kind, decision.exclude, decision.restart, decision.hold) == ("exclude_node", ("n1",), True, "")


def test_a_hang_without_a_culprit_restarts_the_same_nodes() -> None:
    decision = decide(incident(node=None, nodes=[], confidence=0.8, kinds=["standstill"]), situation())
    assert (decision.kind, decision.exclude) == ("restart_job", ())


def test_one_kind_of_evidence_only_notifies() -> None:
    decision = decide(incident(fault="node_unreachable", kinds=["silence"], confidence=0.5), situation())
    assert decision.kind == "notify"
    assert "one kind of evidence" in decision.hold


def test_a_crash_restarts_and_its_repetition_on_the_node_excludes() -> None:
    crash = incident(fault="process_crash", fact=True, kinds=["exit"])
    assert decide(crash, situation()).kind == "restart_job"
    before = past(kind="restart_job", exclude=[], node="n1")
    assert decide(crash, situation(actions=(before,))).kind == "exclude_node"


def test_a_restart_is_as_small_as_is_safe_after_its_fault() -> None:
    crash = incident(fault="process_crash", fact=True, kinds=["exit"])
    assert decide(crash, situation()).restart_scope == "process_group"
    assert decide(incident(), situation()).restart_scope == "rank"
    assert decide(incident(fault="gpu_lost", fact=True), situation()).restart_scope == "job"


def test_every_process_is_new_where_what_a_smaller_restart_rests_on_is_not_so() -> None:
    crash = incident(fault="process_crash", fact=True, kinds=["exit"])
    again = situation(actions=(past(kind="restart_job", exclude=[], node="n1"),))
    assert decide(crash, again).restart_scope == "job"  # its node is held to be the cause
    unknown = incident(node=None, nodes=[], confidence=0.8, kinds=["standstill"])
    assert decide(unknown, situation()).restart_scope == "job"  # whose processes to end first?


def test_what_restarts_nothing_has_no_scope() -> None:
    assert decide(incident(kinds=["silence"], confidence=0.1), situation()).restart_scope is None


def test_a_crash_of_another_node_does_not_count_as_a_repetition() -> None:
    crash = incident(fault="process_crash", fact=True, kinds=["exit"])
    before = past(kind="restart_job", exclude=[], node="n2")
    assert decide(crash, situation(actions=(before,))).kind == "restart_job"


def test_a_node_that_is_slow_for_no_reason_leaves_only_for_what_a_drain_takes() -> None:
    kinds = ["compute_time", "collective_arrival"]
    for fault, ratio, kind in (
        ("straggler", 0.01, "notify"),
        ("straggler", 0.05, "exclude_node"),
        ("thermal_throttle", 0.01, "exclude_node"),
    ):
        assert decide(incident(fault=fault, kinds=kinds, slowdown_ratio=ratio), situation()).kind == kind


def test_slowness_that_costs_less_than_a_restart_only_notifies() -> None:
    slow = incident(fault="straggler", kinds=["compute_time", "collective_arrival"], slowdown_ratio=0.2)
    settings = PolicySettings(mode="act", remaining_s=1200, lost_work_s=300, restart_s=240, queue_s=60)
    assert "a restart costs" in decide(slow, situation(settings=settings)).hold
    assert decide(slow, situation()).kind == "exclude_node"


@pytest.mark.parametrize(
    ("slowdown", "left", "kind"), [(0.08, 0.75, "notify"), (0.5, 0.75, "exclude_node"), (0.5, 0.0, "notify")]
)
def test_without_a_spare_a_slow_node_leaves_only_where_the_job_is_faster_for_it(
    slowdown: float, left: float, kind: str
) -> None:
    slow = incident(fault="pcie_degraded", kinds=["compute_time", "collective_arrival"], slowdown_ratio=slowdown)
    assert decide(slow, situation()).kind == "exclude_node"
    decision = decide(slow, situation(members=4, pace_left_ratio=left))
    assert decision.kind == kind
    assert ("no spare: with n1 the job has" in decision.hold) is (kind == "notify")


def test_an_exclusion_without_a_spare_says_with_what_the_job_goes_on() -> None:
    notes = decide(incident(), situation(members=4, pace_left_ratio=0.75)).notes
    assert notes == ("no spare: 3 nodes go on at 75% of the job's pace by plan",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"blind": "no storage"}, "blind"),
        ({"job_state": "completing"}, "meant to stop"),
        ({"members": 1}, "would leave none"),
        ({"actions": (past(attempt=1, state="running"),)}, "already"),
        ({"actions": tuple(past(id=str(i)) for i in range(4))}, "of this job were excluded"),
        ({"actions": tuple(past(id=str(i), job=str(i)) for i in range(5))}, "the limit for 100 nodes"),
    ],
)
def test_every_hold_gives_its_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in decide(incident(), situation(**changes)).hold


@pytest.mark.parametrize(("onset_s", "rule"), [(NOW_S - 11, "under_way"), (NOW_S - 9, "")])
def test_only_what_began_before_a_restart_was_done_is_its_own_in_the_same_attempt(onset_s: float, rule: str) -> None:
    done = past(attempt=1, updated_s=NOW_S - 10)
    assert decide(incident(onset_s=onset_s), situation(actions=(done,))).rule == rule


def test_a_spent_budget_holds_a_restart_alone_and_says_so() -> None:
    spent = tuple(past(id=str(i), exclude=[]) for i in range(10))
    decision = decide(incident(fault="process_crash", node=None, nodes=[]), situation(actions=spent))
    assert (decision.kind, decision.restart) == ("restart_job", True)
    assert "restarted 10 times" in decision.hold


def test_a_job_that_somebody_else_restarts_is_only_excluded_from() -> None:
    decision = decide(incident(), situation(restart_owner="slurm"))
    assert (decision.exclude, decision.restart) == (("n1",), False)
