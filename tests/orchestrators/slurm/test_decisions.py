"""What may be done with a job: pure, from what Slurm says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.orchestrators.protocol import CannotCarryOutError, Cause
from eagle_eye.orchestrators.slurm.answers import SlurmJob, SlurmNode
from eagle_eye.orchestrators.slurm.decisions import (
    Capacity,
    capacity_of,
    foreign,
    hold_for_room,
    phase_of,
    reason_of,
    refusal_for_room,
    way_of,
)

JOB = SlurmJob(
    id=17, array_id=0, task=-1, het_id=0, words=("RUNNING",), restarts=0, requeues=True, batch=True, nodes_wanted=2,
    nodes="n[1-2]", required="", partitions=frozenset({"all"}), user="ann", held=False, preempted=False, why="None",
)  # fmt: skip


def node(name: str, *words: str, partition: str = "all", reason: str = "") -> SlurmNode:
    return SlurmNode(name, frozenset(words or ("idle",)), frozenset({partition}), reason)


def test_a_running_or_failed_batch_job_is_requeued() -> None:
    assert way_of([JOB], ("n1",), ()) == "requeue"
    assert way_of([replace(JOB, words=("NODE_FAIL",))], (), ()) == "requeue"


def test_a_job_whose_nodes_still_boot_is_requeued_like_one_that_runs() -> None:
    assert way_of([replace(JOB, words=("RUNNING", "CONFIGURING"))], ("n1",), ()) == "requeue"


@pytest.mark.parametrize(
    ("words", "phase"),
    [
        ("COMPLETING", "completing"), ("FAILED COMPLETING", "completing"), ("PENDING COMPLETING", "completing"),
        ("COMPLETED STAGE_OUT", "completing"), ("CANCELLED COMPLETING", "cancelled"), ("FAILED", "failed"),
    ],
)  # fmt: skip
def test_a_job_is_ending_while_its_processes_are_unless_it_is_left_alone_anyway(words: str, phase: str) -> None:
    assert phase_of([replace(JOB, words=tuple(words.split()))]) == phase


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"words": ("CANCELLED",)}, "somebody meant it to stop"),
        ({"words": ("TIMEOUT",)}, "time limit"),
        ({"words": ("PREEMPTED",)}, "preempted"),
        ({"preempted": True}, "preempted"),
        ({"words": ("COMPLETED",)}, "has finished"),
        ({"words": ("SUSPENDED",)}, "is suspended"),
        ({"words": ("COMPLETING",)}, "still ending"),
        ({"words": ("PENDING",)}, "waits in the queue"),
        ({"words": ("BRAND_NEW",)}, "not known here"),
        ({"batch": False}, "interactive"),
        ({"requeues": False, "array_id": 15, "task": 2}, "a task of an array cannot be submitted again"),
        ({"requeues": False, "words": ("FAILED",)}, "has ended"),
    ],
)
def test_a_job_that_is_not_ours_to_start_is_refused_with_the_reason(changes: dict[str, object], why: str) -> None:
    with pytest.raises(CannotCarryOutError, match=re.escape(why)):
        way_of([replace(JOB, **changes)], ("n1",), ())  # type: ignore[arg-type]


def test_a_job_that_asks_for_the_node_by_name_is_refused() -> None:
    with pytest.raises(CannotCarryOutError, match="asks for n1 by name"):
        way_of([JOB], ("n1",), ("n1", "n2"))


def test_a_job_that_may_not_be_requeued_is_submitted_again_unless_it_is_heterogeneous() -> None:
    alone = replace(JOB, requeues=False)
    assert way_of([alone], (), ()) == "resubmit"
    with pytest.raises(CannotCarryOutError, match="heterogeneous"):
        way_of([replace(alone, het_id=17), replace(alone, id=18, het_id=17)], (), ())


def test_a_heterogeneous_job_runs_only_where_all_of_it_does() -> None:
    assert phase_of([JOB, replace(JOB, words=("PENDING",))]) == "pending"
    assert phase_of([JOB, replace(JOB, words=("CANCELLED",))]) == "cancelled"


def test_room_counts_what_can_be_used_in_the_jobs_partitions_and_its_own_nodes_as_free() -> None:
    nodes = [
        node("n1", "allocated"), node("n2", "allocated"), node("n3"), node("n4", "mixed"), node("n5", "idle", "drain"),
        node("n6", "down"), node("n7", partition="other"),
    ]  # fmt: skip
    assert capacity_of([JOB], nodes, ("n1",), ("n1", "n2")) == Capacity(wanted=2, usable=3, free=2)


@pytest.mark.parametrize(
    ("room", "when_full", "held"),
    [
        (Capacity(2, 1, 1), "queue", True), (Capacity(2, 3, 1), "queue", False), (Capacity(2, 3, 1), "hold", True),
        (Capacity(2, 2, 2), "hold", False),
    ],
)  # fmt: skip
def test_a_job_is_held_only_where_nothing_can_take_it(room: Capacity, when_full: str, held: bool) -> None:
    assert bool(hold_for_room(room, when_full)) == held  # type: ignore[arg-type]


def test_a_job_that_is_only_slow_is_not_stopped_where_it_would_not_run_again() -> None:
    assert "only slows it" in refusal_for_room("straggler", Capacity(3, 2, 2), "queue")
    assert refusal_for_room("gpu_lost", Capacity(3, 2, 2), "queue") == ""
    assert refusal_for_room("straggler", Capacity(3, 3, 0), "queue") == ""
    assert "--when-full refuse" in refusal_for_room("gpu_lost", Capacity(3, 3, 0), "refuse")


def test_only_a_drain_of_ours_as_we_wrote_it_is_ours() -> None:
    reason = reason_of(Cause("inc-1", "act-1", "gpu_lost", "XID 79"), "eagle-eye")
    assert foreign(node("n1", "idle", "drain", reason=reason), "eagle-eye") == ""
    assert "drained by eagle-eye, and we are other" in foreign(node("n1", reason=reason), "other")
    assert "not as we wrote it" in foreign(node("n1", reason=f"{reason}!"), "eagle-eye")
    assert "not by us: bad fan" in foreign(node("n1", reason="bad fan"), "eagle-eye")
    assert "no reason given" in foreign(node("n1"), "eagle-eye")


@given(
    st.lists(st.sampled_from(["RUNNING", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "SUSPENDED", "PENDING", "X"]),
        min_size=1, max_size=3),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_nothing_that_was_stopped_by_somebody_is_ever_started(words: list[str], requeues: bool, batch: bool) -> None:
    jobs = [
        replace(JOB, id=17 + n, het_id=17, words=(word,), requeues=requeues, batch=batch)
        for n, word in enumerate(words)
    ]
    try:
        way_of(jobs, (), ())
    except CannotCarryOutError:
        return
    assert set(words) <= {"RUNNING", "FAILED"}
