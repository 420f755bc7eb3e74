"""GPUs that fail on several nodes of one job: an incident for each, and one restart for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.detectors.types import Verdict
from eagle_eye.server.engine.incidents import fuse
from eagle_eye.server.engine.policy import decide, weigh
from eagle_eye.server.engine.settings import JobTerms, ModeRule, PolicySettings
from eagle_eye.server.model.records import Incident
from tests.server.engine.frames import Fleet
from tests.server.engine.situations import incident, past, situation
from tests.server.engine.test_fusion import verdict
from tests.server.engine.test_incidents import reported
from tests.server.engine.test_respond import Office

LOST_GPU = {"fault": "gpu_lost", "fact": True, "summary": "a GPU is gone"}
FIRST = incident(**LOST_GPU)
SECOND = incident(**LOST_GPU, id="other", node="n2", nodes=["n2"], family="stop:n2")


def lost(node: str, **changes: Any) -> Verdict:
    return verdict("gpu_lost", node, fact=True, **changes)


def named(known: dict[str, Incident]) -> list[tuple[str, str | None, str]]:
    return [(i.fault, i.node, i.family) for i in known.values()]


def test_gpus_lost_on_two_nodes_are_two_incidents() -> None:
    assert named(reported([lost("n1"), lost("n2")])) == [("gpu_lost", "n1", "stop"), ("gpu_lost", "n2", "stop:n2")]


def test_the_first_to_be_known_stays_the_first() -> None:
    known = reported([lost("n2")], [lost("n1"), lost("n2")], [lost("n2"), lost("n1")])
    assert named(known) == [("gpu_lost", "n2", "stop"), ("gpu_lost", "n1", "stop:n1")]


def test_a_guess_at_the_culprit_gives_way_to_a_gpu_that_is_known_to_have_failed() -> None:
    known = reported([verdict("hang", "n3")], [verdict("hang", "n3"), lost("n2"), lost("n1")])
    assert [(i.node, i.family) for i in known.values()] == [("n1", "stop"), ("n2", "stop:n2")]


def test_what_the_other_nodes_show_is_a_symptom_of_the_first() -> None:
    crash = verdict("process_crash", "n3", fact=True)
    assert fuse([crash, lost("n1"), lost("n2")]).findings.keys() == {"stop", "stop:n2"}


def test_a_job_that_still_stands_when_the_first_is_over_does_so_for_the_second() -> None:
    found = fuse([verdict("hang", None), lost("n2")], {"n2": "stop:n2"}).findings
    assert found.keys() == {"stop:n2"}
    assert found["stop:n2"].detectors == ("gpu_lost", "hang")


def test_signs_of_a_node_whose_gpu_failed_second_belong_to_that() -> None:
    slow = replace(verdict("power_throttle", "n2"), slowdown_ratio=0.1)
    known = reported([slow], [slow, lost("n1"), lost("n2")])
    merged = {i.family: i.merged_into for i in known.values()}
    assert known[merged["slow:n2"]].family == "stop:n2"


@given(st.lists(st.sets(st.sampled_from(["n1", "n2", "n3"])), min_size=1, max_size=6))
def test_no_node_ever_has_two_incidents_or_another_ones_place(rounds: list[set[str]]) -> None:
    known = reported(*([lost(node) for node in sorted(nodes)] for nodes in rounds))
    assert sorted(i.node or "" for i in known.values()) == sorted(set().union(*rounds))
    assert sum(i.family == "stop" for i in known.values()) == bool(known)


def test_both_nodes_leave_with_one_restart_and_whoever_acts_is_told_why() -> None:
    decision = decide(FIRST, situation(incidents=[FIRST, SECOND]))
    assert (decision.exclude, decision.restart, decision.hold) == (("n1", "n2"), True, "")
    assert decision.notes == ("n2 leaves with it: a GPU is gone (incident other)",)


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": PolicySettings(mode="act", exclusions_per_job=1)},
        {"settings": PolicySettings(mode="act", jobs=[JobTerms(jobs=["j"], nodes_min=7)])},
        {"settings": PolicySettings(mode="act", exclusions_fleet_ratio=0, exclusions_fleet_floor=1)},
    ],
    ids=["exclusions_per_job", "nodes_min", "exclusions_fleet"],
)
def test_where_there_is_room_for_one_the_first_leaves_alone(changes: dict[str, Any]) -> None:
    decision = decide(FIRST, situation(incidents=[FIRST, SECOND], **changes))
    assert (decision.exclude, decision.hold) == (("n1",), "")


@pytest.mark.parametrize(
    "other",
    [
        incident(id="other", node="n2", fault="hang"),
        incident(**LOST_GPU, id="other", node="n2", attempt=0),
        incident(**LOST_GPU, id="other", node="n2", job="k"),
        incident(**LOST_GPU, id="other", node="n2", asks="drain_node"),
        incident(**LOST_GPU, id="other", node="n1"),
    ],
    ids=["a guess", "of another attempt", "of another job", "to be drained", "the same node"],
)
def test_nobody_else_is_taken_along(other: Incident) -> None:
    assert decide(FIRST, situation(incidents=[FIRST, other])).exclude == ("n1",)


def test_a_node_whose_own_exclusion_a_person_rejected_is_not_taken_along() -> None:
    rejected = past(incident_id="other", attempt=1, exclude=["n2"], node="n2", state="rejected")
    assert decide(FIRST, situation(incidents=[FIRST, SECOND], actions=[rejected])).exclude == ("n1",)


def test_a_fault_that_waits_for_a_person_is_not_taken_along_by_one_that_does_not() -> None:
    memory = incident(fault="gpu_memory_error", fact=True, id="other", node="n2", nodes=["n2"])
    settings = PolicySettings(mode="act", modes=[ModeRule(faults=["gpu_memory_error"], mode="approve")])
    assert decide(FIRST, situation(settings=settings, incidents=[FIRST, memory])).exclude == ("n1",)
    assert decide(memory, situation(settings=settings, incidents=[FIRST, memory])).exclude == ("n2", "n1")


def test_what_leaves_with_anothers_action_asks_for_none_of_its_own() -> None:
    asked = past(attempt=1, exclude=["n1", "n2"], node="n1", state="done", restart=False)
    weighing = weigh(SECOND, situation(incidents=[FIRST, SECOND], actions=[asked]))
    assert (weighing.decision.rule, weighing.decision.hold) == (
        "under_way",
        "action act because of incident old excludes n2 as well",
    )


@pytest.mark.parametrize(("mode", "state"), [("act", "requested"), ("approve", "awaiting"), ("observe", "would_act")])
def test_one_action_is_asked_for(mode: str, state: str) -> None:
    office = Office(mode=mode)
    fleet = Fleet(nodes=8)
    office.take(fleet.run(30))
    for node in ("n1", "n2"):
        fleet.happens(node, "xid", code=79)
    office.take(fleet.run(5))
    assert [(a.exclude, a.restart, a.state) for a in office.actions.values()] == [(["n1", "n2"], True, state)]
    assert [(i.node, i.hold_rule) for i in office.incidents.values()][1] == ("n2", "under_way")


def test_both_recover_when_the_next_attempt_steps_without_them() -> None:
    office = Office()
    fleet = Fleet(nodes=8)
    office.take(fleet.run(30))
    for node in ("n1", "n2"):
        fleet.happens(node, "xid", code=79)
    office.take(fleet.run(5))
    office.report("done")
    fleet.declare(1, nodes=[node for node in fleet.nodes if node not in ("n1", "n2")])
    office.take(fleet.run(5))
    assert [(i.node, i.state) for i in office.incidents.values()] == [("n1", "recovered"), ("n2", "recovered")]


def test_a_second_failure_that_is_known_later_waits_for_the_restart_that_is_under_way() -> None:
    office = Office()
    fleet = Fleet(nodes=8)
    office.take(fleet.run(30))
    fleet.happens("n1", "xid", code=79)
    office.take(fleet.run(2))
    fleet.happens("n2", "xid", code=79)
    office.take(fleet.run(2))
    assert [a.exclude for a in office.actions.values()] == [["n1"]]
    assert [(i.node, i.hold_rule) for i in office.incidents.values()] == [("n1", ""), ("n2", "under_way")]


SLOW = {"fault": "straggler", "kinds": ["compute_time", "own_history"], "confidence": 0.95, "slowdown_ratio": 0.3}
SLOW_FIRST = incident(**SLOW, family="slow:n1")


def slow_second(**changes: Any) -> Incident:
    return incident(**{**SLOW, "id": "other", "node": "n2", "nodes": ["n2"], "family": "slow:n2", **changes})


def test_two_nodes_that_are_surely_slow_leave_together() -> None:
    settings = PolicySettings(mode="act")
    known = situation(settings=settings, incidents=[SLOW_FIRST, slow_second()])
    assert decide(SLOW_FIRST, known).exclude == ("n1", "n2")
    doubtful = situation(settings=settings, incidents=[SLOW_FIRST, slow_second(confidence=0.6)])
    assert decide(SLOW_FIRST, doubtful).exclude == ("n1",)
