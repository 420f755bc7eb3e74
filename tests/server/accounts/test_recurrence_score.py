"""Recurrence scores: what raises them, what does not, and when nobody can tell."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eagle_eye.server.accounts.node_records import (
    DAY_S,
    FLEET_MIN,
    SIGNALS,
    NodeRecord,
    score,
    scores,
    usual,
)

NOTHING = {signal.field: 0.0 for signal in SIGNALS}


def past(**more: Any) -> NodeRecord:
    return NodeRecord(**{"known_s": 60 * DAY_S, **more})


def test_a_node_with_a_clean_past_scores_nothing() -> None:
    clean = score(past(), NOTHING)
    assert (clean.score, clean.contributions, clean.is_recurrent) == (0.0, (), False)


def test_a_node_that_is_hardly_known_cannot_be_told() -> None:
    young = score(past(known_s=3 * DAY_S, tickets=9), NOTHING)
    assert (young.score, young.is_recurrent) == (None, False)
    assert young.reason == "known for 3.0 days, failures: 0; 7 days or 3 failures are needed"


def test_a_node_that_failed_often_is_told_however_young() -> None:
    assert score(past(known_s=DAY_S, multi_node_failures=3), NOTHING).score == pytest.approx(0.6)


def test_failures_that_other_jobs_confirm_make_a_recurrent_node() -> None:
    found = score(past(multi_node_failures=3, excluding_jobs=3, taken_out=3), NOTHING)
    assert found.is_recurrent
    assert [c.signal for c in found.contributions] == ["multi_node_failures", "excluding_jobs", "taken_out"]


@pytest.mark.parametrize("signal", [s for s in SIGNALS if "ratio" not in s.field], ids=lambda signal: signal.field)
def test_no_single_kind_of_evidence_makes_a_recurrent_node(signal: Any) -> None:
    found = score(past(**{signal.field: 1_000}), NOTHING)
    assert found.score == pytest.approx(signal.weight)
    assert not found.is_recurrent


def test_a_share_of_failures_rests_on_failures_and_makes_no_recurrent_node_with_them_alone() -> None:
    found = score(past(single_node_attempts=10, single_node_failures=10), NOTHING)
    assert [c.signal for c in found.contributions] == ["single_node_failures", "single_node_failure_ratio"]
    assert not found.is_recurrent


def test_a_rate_needs_enough_attempts() -> None:
    assert past(single_node_attempts=4, single_node_failures=4).single_node_failure_ratio == 0
    assert past(single_node_attempts=8, single_node_failures=2).single_node_failure_ratio == 0.25


def test_what_half_of_the_fleet_has_is_the_fleets() -> None:
    fleet = {f"n{i}": past(driver_errors=2) for i in range(FLEET_MIN)}
    fleet["n0"] = past(driver_errors=5)
    made = scores(fleet, 0.0)
    assert made.by_node["n1"].score == 0
    (own,) = made.by_node["n0"].contributions
    assert (own.signal, own.value, own.usual) == ("driver_errors", 5, 2)


def test_in_a_small_fleet_nothing_is_usual() -> None:
    assert usual([past(tickets=2)] * (FLEET_MIN - 1))["tickets"] == 0


def test_recurrent_nodes_come_worst_first() -> None:
    bad = {"multi_node_failures": 3, "excluding_jobs": 3}
    made = scores({"a": past(**bad), "b": past(**bad, tickets=2), "c": past(), "d": past(known_s=0)}, 0.0)
    assert [node for node, _ in made.recurrent_by_score()] == ["b", "a"]


COUNTED = (
    "multi_node_failures",
    "single_node_failures",
    "single_node_attempts",
    "excluding_jobs",
    "taken_out",
    "driver_errors",
    "tickets",
    "inherited_failures",
)
pasts = st.builds(NodeRecord, known_s=st.floats(0, 400 * DAY_S), **dict.fromkeys(COUNTED, st.integers(0, 20)))


@given(one=pasts, more=st.sampled_from(["multi_node_failures", "taken_out", "tickets", "driver_errors"]))
def test_a_worse_past_never_scores_less(one: NodeRecord, more: str) -> None:
    before = score(one, NOTHING).score
    setattr(one, more, getattr(one, more) + 1)
    after = score(one, NOTHING).score
    assert before is None or (after is not None and before <= after + 1e-12 < 1)


@given(one=pasts)
def test_each_contribution_is_what_the_score_would_lack_without_it(one: NodeRecord) -> None:
    found = score(one, NOTHING)
    assume(found.contributions)
    for part in found.contributions:
        without = score(one, {**NOTHING, part.signal: part.value}).score
        assert found.score is not None
        assert without is not None
        assert part.adds == pytest.approx(found.score - without)
