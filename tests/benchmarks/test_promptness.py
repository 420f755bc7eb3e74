"""How soon a verdict must come, by the kind of fault and the job's steps."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.detection.plan import Case
from benchmarks.detection.promptness import promptness
from benchmarks.detection.score import Outcome
from eagle_eye.server.backtest.run import VerdictLine
from eagle_eye.server.backtest.trace import Label


def judged(fault: str, delay_s: float | None, *, action: str = "exclude_node", **changes: Any) -> dict[str, Any]:
    """Return what is said of one trace with this fault on node "a", reported after a delay (None: never)."""
    case = Case(
        key="k", kind="fault", fault=fault, seed=1, nodes=4, gpus=8, minutes=10.0, step_s=2.0, interval_s=1.0,
        strength="strong", creeping=changes.pop("creeping", False), background=None,
    )  # fmt: skip
    line = VerdictLine(
        id="v1", trace="t", time=100.0 + (delay_s or 0.0), nodes=["a"], node="a", device=None, job="j", fault=fault,
        confidence=1.0, onset=100.0, action=action, detectors=[], summary="", evidence=[],
    )  # fmt: skip
    expect = "exclude" if action == "exclude_node" else "restart"
    outcome = Outcome(
        key="k", profile=changes.pop("profile", "full"), kind="fault", fault=fault, nodes=4, seconds=600.0,
        labels=[Label(100.0, 400.0, changes.pop("nodes", ["a"]), fault, expect)],
        lines=[] if delay_s is None else [line], accusations={}, cost_s={}, **changes,
    )  # fmt: skip
    return promptness([case], [outcome])


@pytest.mark.parametrize(("delay_s", "in_time"), [(3.0, 1), (3.5, 0)])
def test_a_fact_has_two_intervals_and_a_second(delay_s: float, in_time: int) -> None:
    assert judged("gpu_lost", delay_s)["facts"]["in_time"] == in_time


@pytest.mark.parametrize(("delay_s", "in_time"), [(31.0, 1), (31.5, 0)])
def test_exporters_have_two_of_their_own_intervals(delay_s: float, in_time: int) -> None:
    assert judged("gpu_lost", delay_s, profile="remote_write")["facts"]["in_time"] == in_time


@pytest.mark.parametrize(("delay_s", "in_time"), [(11.0, 1), (11.5, 0)])
def test_a_hang_with_a_culprit_has_three_steps_and_five_seconds(delay_s: float, in_time: int) -> None:
    assert judged("hang", delay_s)["hang with culprit"]["in_time"] == in_time


def test_a_hang_without_a_culprit_is_not_counted() -> None:
    assert judged("hang", 60.0, action="restart_job", nodes=[])["hang with culprit"]["labelled"] == 0


@pytest.mark.parametrize(("slowdown", "labelled"), [(0.1, 1), (0.05, 0)])
def test_slowness_counts_from_a_tenth_on(slowdown: float, labelled: int) -> None:
    assert judged("straggler", 10.0, slowdown=slowdown)["slower by 10%, fixed length"]["labelled"] == labelled


def test_packed_work_has_twenty_five_of_the_longer_steps() -> None:
    found = judged("straggler", 64.0, slowdown=0.3, packed=True)["slower by 20%, packed"]
    assert (found["labelled"], found["in_time"]) == (1, 1)
    assert found["beyond_bound_p95_s"] == pytest.approx(-1.0)


def test_what_creeps_has_no_moment_to_count_from() -> None:
    assert judged("straggler", 10.0, slowdown=0.3, creeping=True)["slower by 10%, fixed length"]["labelled"] == 0


def test_a_miss_is_labelled_and_not_found() -> None:
    found = judged("gpu_lost", None)["facts"]
    assert (found["labelled"], found["found"], found["delay_p95_s"]) == (1, 0, None)
