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
from eagle_eye.server.engine.fusion import CONFIDENCE_MAX, Finding, family_of, fuse


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


def test_uneven_work_is_told_of_beside_a_racks_power_cap() -> None:
    rack = verdict("power_throttle", None, nodes=("n1", "n2", "n3"), asks="notify")
    assert "pace" in findings_of([rack, verdict("workload_imbalance", None)])


def test_a_learned_score_supports_what_a_rule_named() -> None:
    (finding,) = findings_of([verdict("straggler"), verdict("node_anomaly", kinds=frozenset({"learned"}))]).values()
    assert finding.verdict.fault == "straggler"
    assert "learned" in finding.verdict.kinds


def test_an_early_sign_is_kept_apart_from_the_fault() -> None:
    assert family_of(verdict("gpu_memory_error", asks="drain_node")) == "early:n1"


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
