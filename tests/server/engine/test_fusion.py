"""Many verdicts, one finding for each trouble."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.detectors.faults import FAULTS
from eagle_eye.detectors.signs.slow_share import Slowness
from eagle_eye.detectors.types import Evidence, Verdict
from eagle_eye.server.engine.incidents import CONFIDENCE_MAX, Finding, family_of, fuse


def verdict(fault: str, node: str | None = "n1", **changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "detector": fault,
        "fault": fault,
        "job": "j",
        "nodes": (node,) if node else (),
        "node": node,
        "device": None,
        "confidence": 0.8,
        "onset_s": 100.0,
        "summary": f"{fault} on {node}",
        "evidence": (Evidence(fault, node, None, 1.0),),
        "kinds": frozenset({fault}),
    }
    return Verdict(**{**fields, **changes})


def findings_of(verdicts: Iterable[Verdict]) -> dict[str, Finding]:
    return fuse(verdicts).findings


def test_a_throttling_straggler_is_a_thermal_throttle_with_both_kinds_of_evidence() -> None:
    slow = verdict("straggler", kinds=frozenset({"compute_time", "collective_arrival"}), slowdown_ratio=0.2)
    (finding,) = findings_of([slow, verdict("thermal_throttle", slowdown_ratio=0.1)]).values()
    assert finding.verdict.fault == "thermal_throttle"
    assert finding.verdict.kinds == {"compute_time", "collective_arrival", "thermal_throttle"}
    assert finding.verdict.slowdown_ratio == 0.2  # what was measured, not what was expected


def test_what_it_costs_is_said_once_as_measured() -> None:
    hot = f"n1 throttles; {Slowness(0.666, measured=False)}"
    slow = f"n1 computes 1.66 times as long; {Slowness(0.66, measured=True)}"
    given = [
        verdict("straggler", kinds=frozenset({"compute_time"}), slowdown_ratio=0.66, summary=slow),
        verdict("thermal_throttle", slowdown_ratio=0.666, summary=hot),
    ]
    (finding,) = findings_of(given).values()
    assert finding.verdict.summary == (
        "n1 throttles; n1 computes 1.66 times as long; the job's steps are 66.0% longer for it"
    )


@pytest.mark.parametrize("cost", [Slowness(0.0, measured=True), Slowness(0.0, measured=False)])
def test_a_cost_that_one_says_stays_where_the_other_says_none(cost: Slowness) -> None:
    given = [verdict("straggler"), verdict("thermal_throttle", summary=f"n1 throttles; {cost}")]
    (finding,) = findings_of(given).values()
    assert finding.verdict.summary == f"n1 throttles; {cost}; straggler on n1"


def test_independent_kinds_make_a_claim_surer() -> None:
    (finding,) = findings_of([verdict("straggler"), verdict("thermal_throttle")]).values()
    assert finding.verdict.confidence == pytest.approx(0.96)


def test_the_same_kind_seen_twice_makes_nothing_surer() -> None:
    twice = [verdict(name, kinds=frozenset({"clock"})) for name in ("thermal_throttle", "power_throttle")]
    (finding,) = findings_of(twice).values()
    assert finding.verdict.confidence == 0.8


def test_slowness_of_two_nodes_is_two_findings() -> None:
    assert len(findings_of([verdict("straggler", "n1"), verdict("straggler", "n2")])) == 2


def test_a_lost_gpu_explains_the_crash_and_the_hang() -> None:
    said = [verdict("hang", None), verdict("process_crash", "n2"), verdict("gpu_lost", "n1", fact=True)]
    (finding,) = findings_of(said).values()
    assert (finding.verdict.fault, finding.verdict.node) == ("gpu_lost", "n1")


def test_a_switch_explains_the_silence_of_its_nodes() -> None:
    silent = [verdict("node_unreachable", n, kinds=frozenset({"silence", "standstill"})) for n in ("n1", "n2")]
    found = findings_of([*silent, verdict("switch_down", None, nodes=("n1", "n2"))])
    assert [f.verdict.fault for f in found.values()] == ["switch_down"]


def test_a_hang_without_culprit_that_the_storage_explains_is_none() -> None:
    stalled = verdict("storage_stall", None, kinds=frozenset({"io", "standstill"}))
    assert set(findings_of([verdict("hang", None), stalled])) == {"pace"}


def test_a_hang_with_culprit_is_not_the_storages() -> None:
    stalled = verdict("storage_stall", None, kinds=frozenset({"io", "standstill"}))
    assert set(findings_of([verdict("hang", "n1"), stalled])) == {"stop"}


def test_a_rack_explains_its_nodes() -> None:
    rack = verdict("power_throttle", None, nodes=("n1", "n2", "n3"), asks="notify")
    found = findings_of([rack, verdict("straggler", "n1"), verdict("straggler", "n9")])
    assert {f.verdict.nodes for f in found.values()} == {("n1", "n2", "n3"), ("n9",)}


def test_a_drop_in_pace_is_the_slow_nodes() -> None:
    drop = verdict("throughput_drop", None, slowdown_ratio=0.2)
    assert set(findings_of([drop, verdict("straggler", slowdown_ratio=0.18)])) == {"slow:n1"}


def test_uneven_work_is_reported_beside_a_racks_power_cap() -> None:
    rack = verdict("power_throttle", None, nodes=("n1", "n2", "n3"), asks="notify")
    assert "pace" in findings_of([rack, verdict("workload_imbalance", None)])


def test_a_learned_score_supports_what_a_rule_named() -> None:
    (finding,) = findings_of([verdict("straggler"), verdict("node_anomaly", kinds=frozenset({"learned"}))]).values()
    assert finding.verdict.fault == "straggler"
    assert "learned" in finding.verdict.kinds


def test_an_early_sign_is_kept_apart_from_the_fault() -> None:
    assert family_of(verdict("gpu_memory_error", asks="drain_node")) == "early:n1"


def test_a_silent_node_whose_job_goes_on_is_kept_apart_from_what_stops_it() -> None:
    assert family_of(verdict("node_unreachable", kinds=frozenset({"silence"}))) == "silence:n1"
    assert family_of(verdict("node_unreachable", kinds=frozenset({"silence", "standstill"}))) == "stop"


def test_gpus_that_failed_on_two_nodes_are_two_findings() -> None:
    lost = [verdict("gpu_lost", "n1", fact=True), verdict("gpu_lost", "n2", fact=True)]
    assert {family: f.verdict.node for family, f in findings_of(lost).items()} == {"stop": "n1", "stop:n2": "n2"}


def test_once_the_first_of_two_that_stopped_the_job_is_over_a_hang_is_the_laters() -> None:
    lost = [verdict("gpu_lost", node, fact=True) for node in ("n2", "n3")]
    found = fuse([*lost, verdict("hang", None)], {"n2": "stop:n2", "n3": "stop:n3"}).findings
    assert {family: f.detectors for family, f in found.items()} == {
        "stop:n2": ("gpu_lost", "hang"),
        "stop:n3": ("gpu_lost",),
    }


def test_a_cause_without_a_culprit_names_no_trouble_that_has_one() -> None:
    (finding,) = findings_of([verdict("process_crash", None), verdict("hang", "n1")]).values()
    assert (finding.verdict.fault, finding.verdict.node) == ("hang", "n1")


def test_of_two_equal_claims_the_name_decides() -> None:
    corrupt = [verdict("silent_data_corruption", node) for node in ("n2", "n1")]
    for said in (corrupt, corrupt[::-1]):
        (finding,) = findings_of(said).values()
        assert finding.verdict.node == "n1"


def test_a_summary_says_the_cause_and_its_first_symptom() -> None:
    (finding,) = findings_of([verdict(name) for name in ("straggler", "pcie_degraded", "thermal_throttle")]).values()
    assert finding.verdict.summary == "thermal_throttle on n1; pcie_degraded on n1"


@pytest.mark.parametrize(
    ("pace", "kinds", "explained"),
    [
        (verdict("storage_stall", None), {"data_wait"}, {"slow:n1": "pace"}),
        (verdict("storage_stall", None), {"data_wait", "compute_time"}, {}),
        (verdict("storage_stall", "n2"), {"data_wait"}, {}),
        (verdict("network_congestion", None), {"data_wait"}, {}),
    ],
    ids=["stalls", "computes-longer", "one-host", "network"],
)
def test_nodes_that_only_wait_for_data_while_the_storage_stalls_for_all_are_its_victims(
    pace: Verdict, kinds: set[str], explained: dict[str, str]
) -> None:
    fused = fuse([pace, verdict("straggler", kinds=frozenset(kinds))])
    assert fused.explained == explained
    assert set(fused.findings) == {"pace", "slow:n1"} - set(explained)


@pytest.mark.parametrize(("slowdown", "explained"), [(0.1, {"pace": "slow:n1"}), (0.09, {}), (0.0, {})])
def test_a_slow_node_explains_a_drop_of_which_it_makes_half(slowdown: float, explained: dict[str, str]) -> None:
    drop = verdict("throughput_drop", None, slowdown_ratio=0.2)
    assert fuse([drop, verdict("straggler", slowdown_ratio=slowdown)]).explained == explained


def test_a_slow_node_of_unknown_cost_explains_no_drop_of_unknown_size() -> None:
    assert fuse([verdict("throughput_drop", None), verdict("straggler")]).explained == {}


@pytest.mark.parametrize(("confidence", "explained"), [(0.9, {"slow:n2": "slow:n1"}), (0.89, {})])
def test_one_node_that_is_surely_slow_explains_doubtful_slowness_of_others(
    confidence: float, explained: dict[str, str]
) -> None:
    slow = [verdict("straggler", "n1", confidence=confidence), verdict("straggler", "n2", confidence=0.8)]
    assert fuse(slow).explained == explained


@given(
    st.lists(
        st.builds(
            verdict,
            st.sampled_from([f.name for f in FAULTS]),
            st.sampled_from(["n1", "n2", None]),
            confidence=st.floats(0, 1),
            kinds=st.frozensets(st.sampled_from("abc"), min_size=1),
        ),
        max_size=8,
    )
)
def test_order_does_not_matter_and_confidence_stays_a_probability(said: list[Verdict]) -> None:
    here, there = findings_of(said), findings_of(list(reversed(said)))
    assert {(n, f.verdict.fault, f.verdict.node) for n, f in here.items()} == {
        (n, f.verdict.fault, f.verdict.node) for n, f in there.items()
    }
    strongest = max((v.confidence for v in said), default=0.0)
    assert all(0 <= f.verdict.confidence <= max(CONFIDENCE_MAX, strongest) for f in here.values())


def test_replica_groups_that_stop_are_troubles_of_their_own() -> None:
    found = fuse(
        [
            verdict("hang", "n1", kinds=frozenset({"quorum"})),
            verdict("node_unreachable", "n2", kinds=frozenset({"quorum"})),
        ]
    )
    assert set(found.findings) == {"stop:n1", "stop:n2"}
