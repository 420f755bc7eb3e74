"""Policy by properties and by cases: never more than allowed, every hold with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.detectors.faults import FAULTS
from eagle_eye.server.engine.policy import Situation, decide
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.records import Action, Incident

NOW_S = 1_000_000.0


def incident(**changes: Any) -> Incident:
    fields: dict[str, Any] = {
        "id": "inc",
        "job": "j",
        "attempt": 1,
        "fault": "hang",
        "nodes": ["n1"],
        "node": "n1",
        "device": 0,
        "confidence": 0.97,
        "state": "open",
        "onset_s": NOW_S - 5,
        "detected_s": NOW_S,
        "updated_s": NOW_S,
        "ended_s": None,
        "detectors": ["hang"],
        "summary": "",
        "evidence": [],
        "action": "none",
        "family": "stop",
        "kinds": ["standstill", "rank_silence"],
    }
    return Incident(**{**fields, **changes})


def past(**changes: Any) -> Action:
    fields: dict[str, Any] = {
        "id": "act",
        "incident_id": "old",
        "kind": "exclude_node",
        "job": "j",
        "attempt": 0,
        "exclude": ["n9"],
        "restart": True,
        "fault": "hang",
        "confidence": 1.0,
        "onset_s": NOW_S - 100,
        "detected_s": NOW_S - 100,
        "expires_s": NOW_S + 100,
        "repair": "none",
        "summary": "",
        "evidence": [],
        "ranks": [],
        "state": "done",
        "created_s": NOW_S - 100,
        "updated_s": NOW_S - 100,
    }
    return Action(**{**fields, **changes})


def situation(**changes: Any) -> Situation:
    fields: dict[str, Any] = {
        "settings": PolicySettings(mode="act"),
        "actions": (),
        "fleet_size": 100,
        "members": 8,
        "job_state": "running",
        "restart_owner": "",
        "blind": "",
        "now_s": NOW_S,
    }
    return Situation(**{**fields, **changes})


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


def test_a_crash_of_another_node_does_not_count_as_a_repetition() -> None:
    crash = incident(fault="process_crash", fact=True, kinds=["exit"])
    before = past(kind="restart_job", exclude=[], node="n2")
    assert decide(crash, situation(actions=(before,))).kind == "restart_job"


def test_slowness_that_costs_less_than_a_restart_only_notifies() -> None:
    slow = incident(fault="straggler", kinds=["compute_time", "collective_arrival"], slowdown_ratio=0.2)
    settings = PolicySettings(mode="act", remaining_s=1200, restart_cost_s=600)
    assert "a restart costs" in decide(slow, situation(settings=settings)).hold
    assert decide(slow, situation()).kind == "exclude_node"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"blind": "no storage"}, "blind"),
        ({"job_state": "completing"}, "meant to stop"),
        ({"members": 1}, "would leave none"),
        ({"actions": (past(attempt=1, state="running"),)}, "already"),
        ({"actions": tuple(past(id=str(i)) for i in range(4))}, "of this job were excluded"),
        ({"actions": tuple(past(id=str(i), job=str(i)) for i in range(5))}, "the limit for 100 nodes"),
        ({"actions": tuple(past(id=str(i), exclude=[]) for i in range(10))}, "restarted 10 times"),
    ],
)
def test_every_hold_gives_its_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in decide(incident(), situation(**changes)).hold


def test_a_job_that_somebody_else_restarts_is_only_excluded_from() -> None:
    decision = decide(incident(), situation(restart_owner="slurm"))
    assert (decision.exclude, decision.restart) == (("n1",), False)


actions = st.builds(
    past,
    id=st.uuids().map(str),
    job=st.sampled_from(["j", "k"]),
    attempt=st.integers(0, 2),
    exclude=st.lists(st.sampled_from(["a", "b", "c"]), max_size=2),
    state=st.sampled_from(["requested", "done", "failed", "expired", "would_act", "withdrawn"]),
    created_s=st.floats(NOW_S - 200_000, NOW_S),
)
incidents = st.builds(
    incident,
    fault=st.sampled_from([fault.name for fault in FAULTS]),
    node=st.sampled_from([None, "n1"]),
    confidence=st.floats(0, 1),
    fact=st.booleans(),
    kinds=st.lists(st.sampled_from(["a", "b", "c"]), unique=True),
    slowdown_ratio=st.floats(0, 3),
)


@given(incidents, st.lists(actions, max_size=12), st.integers(1, 500), st.booleans())
def test_never_excludes_more_than_the_budget_nor_while_blind(
    what: Incident, history: list[Action], fleet: int, blind: bool
) -> None:
    settings = PolicySettings(mode="act")
    where = situation(settings=settings, actions=history, fleet_size=fleet, blind="dark" if blind else "")
    decision = decide(what, where)
    if decision.hold or decision.kind != "exclude_node":
        return
    assert not blind
    counted = [
        a for a in history if a.created_s >= NOW_S - settings.window_s and a.state in ("requested", "done", "would_act")
    ]
    limit = max(settings.exclusions_fleet_floor, int(settings.exclusions_fleet_ratio * fleet))
    assert sum(len(a.exclude) for a in counted) + len(decision.exclude) <= limit
    assert set(decision.exclude) <= {"n1"}


@given(incidents, st.lists(actions, max_size=12))
def test_is_deterministic(what: Incident, history: list[Action]) -> None:
    assert decide(what, situation(actions=history)) == decide(what, situation(actions=history))
