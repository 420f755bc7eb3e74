"""From findings to incidents: what belongs to an incident that is open, and what is a new one."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from eagle_eye.detectors.types import Verdict
from eagle_eye.server.engine.incidents import fold
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Incident
from tests.server.engine.test_fusion import verdict

POLICY = PolicySettings(verdict_gone_s=30.0)


def reported(*rounds: list[Verdict]) -> dict[str, Incident]:
    """Return the incidents, by id, after judgements that are a second apart."""
    number = count(1)
    known: dict[str, Incident] = {}
    for second, verdicts in enumerate(rounds):
        judgement = Judgement("j", 0, 100.0 + second, tuple(verdicts))
        for incident in fold(known.values(), judgement, {}, POLICY, lambda _: f"i{next(number)}"):
            known[incident.id] = incident
    return known


def slow(fault: str, ratio: float, *nodes: str) -> Verdict:
    node = nodes[0] if len(nodes) == 1 else None
    return replace(verdict(fault, node), nodes=nodes, slowdown_ratio=ratio)


def test_a_cause_once_known_is_not_forgotten() -> None:
    known = reported([slow("power_throttle", 0.1, "n1")], [slow("straggler", 0.2, "n1")])
    assert [(i.fault, i.slowdown_ratio) for i in known.values()] == [("power_throttle", 0.2)]


@pytest.mark.parametrize(("confidence", "fault"), [(0.95, "pcie_degraded"), (0.6, "nic_degraded")])
def test_nor_is_it_taken_for_what_it_causes_unless_it_is_uncertain(confidence: float, fault: str) -> None:
    link = replace(slow("pcie_degraded", 0.0, "n1"), confidence=confidence)
    known = reported([link], [slow("nic_degraded", 0.2, "n1")])
    assert [(i.fault, i.slowdown_ratio) for i in known.values()] == [(fault, 0.2)]


def test_a_slow_node_gets_its_cause_when_it_is_known() -> None:
    known = reported([slow("straggler", 0.1, "n1")], [slow("power_throttle", 0.1, "n1")])
    assert [i.fault for i in known.values()] == ["power_throttle"]


def test_what_it_costs_becomes_part_of_the_story_once_it_is_known() -> None:
    before, after = slow("power_throttle", 0.0, "n1"), slow("power_throttle", 0.1, "n1")
    (incident,) = reported([before], [replace(after, summary="it costs 10%")]).values()
    assert incident.summary == "it costs 10%"


def test_what_a_symptom_says_of_the_cost_is_told_beside_the_cause() -> None:
    link = replace(slow("pcie_degraded", 0.0, "n1"), confidence=0.95, summary="x4; what it costs the job is not known")
    port = replace(slow("nic_degraded", 0.2, "n1"), summary="PFC pauses; the job's steps are 20% longer for it")
    (incident,) = reported([link], [port], [port]).values()
    assert incident.summary == "x4; PFC pauses; the job's steps are 20% longer for it"


@pytest.mark.parametrize(("ratio", "incidents"), [(0.05, 1), (0.5, 2)])
def test_the_last_of_a_rack_is_no_slow_node_unless_it_costs_far_more(ratio: float, incidents: int) -> None:
    rack = slow("power_throttle", 0.04, "n1", "n2")
    assert len(reported([rack], [slow("power_throttle", ratio, "n1")])) == incidents


def test_an_incident_whose_verdict_is_gone_recovers() -> None:
    rounds = [[slow("power_throttle", 0.1, "n1")], *([[]] * 40)]
    assert [i.state for i in reported(*rounds).values()] == ["recovered"]
