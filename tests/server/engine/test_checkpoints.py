"""Checkpoints in memory as the engine sees them, and what policy makes of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from eagle_eye.detectors.types import Verdict
from eagle_eye.schema.action import MemberRank, ResumeFrom
from eagle_eye.server.delivery.events import request_data
from eagle_eye.server.engine.judgement import (
    NOTHING_REPORTED,
    OLDER_MAX,
    AttemptCheckpoints,
    CheckpointLog,
    Judgement,
    StepInMemory,
)
from eagle_eye.server.engine.policy import decide, weigh
from eagle_eye.server.engine.respond import Book, respond
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Action
from tests.server.engine.frames import START_S, Fleet
from tests.server.engine.situations import NOW_S, incident, situation

ACT = PolicySettings(mode="act")
NODES = ("n0", "n1", "n2")
RANKS = [MemberRank(rank, node, 0) for rank, node in enumerate(NODES)]
# Three ranks, each with a copy at home and one elsewhere.
WHOLE = AttemptCheckpoints(step=40, since_s=NOW_S - 1, at_risk_steps=1.0, copies=6, copies_wanted=6, nodes=NODES)


def tells(step: float, age: float = 0.0, copies: float = 2.0, **more: float) -> dict[str, float]:
    """A node's row; two copies are wanted."""
    row = {"step": step, "age_steps": age, "copies": copies, "copies_wanted": 2.0, "bytes": 1e6, **more}
    return {f"memory_checkpoint_{name}": value for name, value in row.items()}


def reported(log: CheckpointLog, time_s: float, column: int, row: dict[str, float]) -> None:
    log.record_rows(time_s, tuple(row), slice(column, column + 1), np.array([[value] for value in row.values()]))


# What is known.


def test_a_job_whose_nodes_tell_nothing_has_no_checkpoint() -> None:
    fleet = Fleet()
    assert fleet.run(3)[-1].checkpoints is NOTHING_REPORTED


def test_what_nodes_tell_is_what_the_judgement_has() -> None:
    fleet = Fleet()
    for seconds in range(1, 6):
        fleet.node_rows = {node: tells(seconds, age=1.0, persisted_step=0.0) for node in fleet.nodes}
        judgement = fleet.run(1)[-1]
    found = judgement.checkpoints
    assert (found.step, found.since_s, found.at_risk_steps) == (5, START_S + 5, 1.0)
    assert (found.copies, found.copies_wanted, found.nodes, found.thin_since_s) == (6, 6, ("n0", "n1", "n2"), None)
    assert found.persisted == ((0, START_S + 1),)


def test_what_was_told_before_the_job_stopped_stays_known() -> None:
    fleet = Fleet()
    fleet.node_rows = {node: tells(7) for node in fleet.nodes}
    fleet.run(3)
    fleet.node_rows, fleet.stopped = {}, True
    assert fleet.run(60)[-1].checkpoints.step == 7


def test_a_step_is_known_since_the_first_node_reported_it() -> None:
    log = CheckpointLog()
    reported(log, 1.0, 0, tells(5))
    reported(log, 2.0, 1, tells(5))
    reported(log, 3.0, 0, tells(5))
    assert log.stand(NODES).since_s == 1.0


def test_a_node_that_is_a_tick_behind_takes_nothing_back() -> None:
    log = CheckpointLog()
    reported(log, 1.0, 0, tells(6))
    reported(log, 1.1, 1, tells(5))
    found = log.stand(NODES)
    assert (found.step, found.since_s, found.copies, found.lacking) == (6, 1.0, 4, ())


def test_a_program_that_began_anew_from_an_earlier_step_is_where_it_says() -> None:
    log = CheckpointLog()
    reported(log, 1.0, 0, tells(100))
    reported(log, 50.0, 0, tells(60))
    found = log.stand(NODES)
    assert (found.step, found.since_s) == (60, 50.0)


def test_a_node_that_has_said_nothing_for_long_holds_no_copies() -> None:
    log = CheckpointLog()
    reported(log, 1.0, 0, tells(5))
    reported(log, 1.0, 1, tells(5))
    reported(log, 100.0, 1, tells(6))
    found = log.stand(NODES)
    assert (found.nodes, found.lacking, found.copies, found.copies_wanted) == (("n1",), ("n0",), 2, 4)


def test_the_copies_of_a_node_that_fell_silent_are_elsewhere_and_outlive_its_exclusion() -> None:
    log = CheckpointLog()
    for column in range(3):
        reported(log, 1.0, column, reaches(5, ("previous", 4, 1.0)))
    for column in (0, 2):
        reported(log, 100.0, column, reaches(5, ("previous", 4, 100.0)))
    found = log.stand(NODES)
    assert found.resume_from(3, ["n1"]) == ResumeFrom(5, "memory", ["n0", "n2"])
    assert found.resume_from(3, ["n1"], before_s=1.0) == ResumeFrom(4, "memory", ["n0", "n2"])
    assert found.resume_from(3, ["n0"]) is None


def test_copies_are_thin_from_when_a_node_lacks_some_until_it_has_them() -> None:
    log = CheckpointLog()
    reported(log, 1.0, 0, tells(5, copies=1.0))
    reported(log, 2.0, 0, tells(6, copies=1.0))
    assert log.stand(NODES).thin_since_s == 1.0
    reported(log, 3.0, 0, tells(7))
    assert log.stand(NODES).thin_since_s is None


@pytest.mark.parametrize("spoilt", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_none_say_nothing(spoilt: float) -> None:
    log = CheckpointLog()
    reported(log, 1.0, 0, tells(5, persisted_step=3.0))
    reported(log, 2.0, 0, tells(spoilt, age=spoilt, copies=spoilt, persisted_step=spoilt))
    found = log.stand(NODES)
    assert (found.step, found.at_risk_steps, found.copies, found.persisted) == (5, 0.0, 2, ((3, 1.0),))


def test_rows_of_many_nodes_at_once_say_the_same_as_one_by_one() -> None:
    alone, together = CheckpointLog(), CheckpointLog()
    rows = [tells(5), tells(6, age=2.0), tells(6, copies=1.0)]
    for column, row in enumerate(rows):
        reported(alone, 1.0, column, row)
    values = np.array([list(row.values()) for row in rows]).T
    together.record_rows(1.0, tuple(rows[0]), np.arange(3), values)
    assert alone.stand(NODES) == together.stand(NODES)


def older_of(log: CheckpointLog) -> list[tuple[int, float, tuple[str, ...], tuple[str, ...]]]:
    """Return the older steps that are known: step, captured, nodes that have it, nodes that lack it."""
    return [(one.step, one.captured_s, one.nodes, one.lacking) for one in log.stand(NODES).older]


def reaches(step: float, *older: tuple[str, float, float], **more: float) -> dict[str, float]:
    """A node's row with older steps: which, step and age."""
    row = {f"{which}_step": kept for which, kept, _ in older}
    return tells(step, **row, **{f"{which}_age_seconds": age_s for which, _, age_s in older}, **more)


def test_older_steps_are_known_by_when_the_last_node_captured_them() -> None:
    log = CheckpointLog()
    reported(log, 1000.0, 0, reaches(50, ("previous", 49, 3.0), ("second_oldest", 20, 300.0), ("oldest", 10, 700.0)))
    reported(log, 1001.0, 1, reaches(50, ("previous", 49, 3.0), ("second_oldest", 20, 301.5), ("oldest", 10, 701.0)))
    assert older_of(log) == [
        (49, 998.0, ("n0", "n1"), ()),
        (20, 700.0, ("n0", "n1"), ()),
        (10, 300.0, ("n0", "n1"), ()),
    ]


def test_a_node_that_does_not_tell_of_an_older_step_lacks_it() -> None:
    log = CheckpointLog()
    reported(log, 1000.0, 0, reaches(50, ("oldest", 10, 700.0)))
    reported(log, 1000.0, 1, reaches(50, ("oldest", 20, 300.0)))
    reported(log, 1000.0, 2, tells(50))
    assert older_of(log) == [(20, 700.0, ("n1",), ("n0", "n2")), (10, 300.0, ("n0",), ("n1", "n2"))]


def test_the_newest_step_of_a_node_that_is_a_tick_behind_is_the_others_previous() -> None:
    log = CheckpointLog()
    reported(log, 1000.0, 0, reaches(50, ("previous", 49, 3.0)))
    reported(log, 999.0, 1, reaches(49, ("previous", 48, 3.0)))
    reported(log, 999.0, 2, reaches(49, ("previous", 48, 3.0), copies=1.0))
    assert older_of(log)[0] == (49, 997.0, ("n0", "n1"), ("n2",))


def test_an_older_step_is_known_no_longer_than_a_node_tells_of_it() -> None:
    log = CheckpointLog()
    reported(log, 1000.0, 0, reaches(50, ("previous", 49, 3.0), ("oldest", 10, 700.0)))
    reported(log, 1001.0, 0, reaches(50, ("previous", 49, 4.0)))
    assert older_of(log) == [(49, 997.0, ("n0",), ())]
    reported(log, 1002.0, 0, {"memory_checkpoint_bytes": 1e6})  # another job has ranks on the node, too
    assert older_of(log) == []


def test_a_row_without_checkpoints_takes_no_older_step_away() -> None:
    log = CheckpointLog()
    reported(log, 1000.0, 0, reaches(50, ("oldest", 10, 700.0)))
    reported(log, 1001.0, 0, {"memory_checkpoint_bytes": math.nan})
    assert older_of(log) == [(10, 300.0, ("n0",), ())]


@pytest.mark.parametrize("step", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("age_s", [math.nan, math.inf, -1.0, 5.0])
def test_older_steps_that_are_none_are_not_known(step: float, age_s: float) -> None:
    log = CheckpointLog()
    reported(log, 1000.0, 0, reaches(50, ("previous", step, age_s), ("oldest", 10, 700.0)))
    assert older_of(log) == [(10, 300.0, ("n0",), ())]


def test_of_more_older_steps_than_a_job_keeps_those_are_known_that_most_nodes_have() -> None:
    log, many = CheckpointLog(), 40
    for column in range(many):
        reported(log, 1000.0, column, reaches(500, ("previous", 400.0 + column, 3.0), ("oldest", 10, 700.0)))
    found = log.stand([f"n{column}" for column in range(many)]).older
    assert (len(found), found[-1].step, found[-1].lacking) == (OLDER_MAX, 10, ())


# Where a job goes on.


def test_a_restart_goes_on_from_memory_and_names_who_has_copies() -> None:
    assert WHOLE.resume_from(3) == ResumeFrom(40, "memory", ["n0", "n1", "n2"])


def test_a_node_that_leaves_takes_its_copies_along() -> None:
    assert WHOLE.resume_from(3, ["n1"]) == ResumeFrom(40, "memory", ["n0", "n2"])


@pytest.mark.parametrize(
    ("changes", "leaving"),
    [
        ({}, ["n1", "n2"]),  # both holders of a shard may be among them
        ({"copies": 5, "lacking": ("n0",)}, ["n1"]),  # the copy that is missing may be the other one
        ({"copies": 3, "copies_wanted": 3}, ["n1"]),  # there is but one of each
        ({"step": None}, []),
    ],
)
def test_where_a_shard_may_have_no_copy_left_storage_is_named(changes: dict[str, Any], leaving: list[str]) -> None:
    fields: dict[str, Any] = {
        "step": 40,
        "since_s": 1.0,
        "copies": 6,
        "copies_wanted": 6,
        "nodes": NODES,
        "persisted": ((30, 1.0),),
    }
    found = AttemptCheckpoints(**(fields | changes)).resume_from(3, leaving)
    assert found == ResumeFrom(30, "storage", [])


def test_where_neither_is_known_nothing_is_named() -> None:
    assert NOTHING_REPORTED.resume_from(3) is None
    assert AttemptCheckpoints(step=4, since_s=1.0, copies=3, copies_wanted=3).resume_from(3, ["n1"]) is None


def test_how_many_copies_there_are_of_each_shard_is_not_guessed_where_ranks_are_not_known() -> None:
    assert WHOLE.resume_from(0) is not None
    assert WHOLE.resume_from(0, ["n1"]) is None


def test_what_was_whole_before_the_damage_is_the_newest_that_is_named() -> None:
    kept = AttemptCheckpoints(
        step=40, since_s=9.0, copies=6, copies_wanted=6, nodes=NODES, persisted=((10, 1.0), (20, 4.0), (30, 8.0))
    )
    assert kept.resume_from(3, before_s=9.5) == ResumeFrom(40, "memory", list(NODES))
    assert kept.resume_from(3, before_s=5.0) == ResumeFrom(20, "storage", [])
    assert kept.resume_from(3, before_s=1.0) is None


REACHING = replace(
    WHOLE,
    since_s=9000.0,
    older=(
        StepInMemory(39, 8990.0, NODES, ()),
        StepInMemory(30, 8700.0, NODES, ("n0",)),
        StepInMemory(20, 8300.0, ("n0", "n1"), ("n2",)),
        StepInMemory(10, 7500.0, ("n0",), ("n1", "n2")),
    ),
    persisted=((8, 7000.0), (15, 8200.0), (25, 8500.0)),
)


@pytest.mark.parametrize(
    ("before_s", "leaving", "found"),
    [
        (9001.0, ["n1"], ResumeFrom(40, "memory", ["n0", "n2"])),
        (9000.0, ["n1"], ResumeFrom(39, "memory", ["n0", "n2"])),
        (8990.0, [], ResumeFrom(30, "memory", list(NODES))),
        (
            8990.0,
            ["n2"],
            ResumeFrom(25, "storage", []),
        ),  # both holders of a shard may be gone: one lacks it, one leaves
        (8400.0, [], ResumeFrom(20, "memory", ["n0", "n1"])),
        (8400.0, ["n2"], ResumeFrom(20, "memory", ["n0", "n1"])),  # who leaves is who lacks it
        (8400.0, ["n1"], ResumeFrom(15, "storage", [])),
        (8000.0, [], ResumeFrom(8, "storage", [])),  # two nodes lack it
        (7000.0, [], None),
    ],
)
def test_before_the_damage_the_newest_older_step_that_all_ranks_have_is_named(
    before_s: float, leaving: list[str], found: ResumeFrom | None
) -> None:
    assert REACHING.resume_from(3, leaving, before_s) == found


def test_an_older_step_with_all_its_copies_outlives_what_the_newest_would_not() -> None:
    thin = replace(REACHING, copies=5, lacking=("n0",))
    assert thin.resume_from(3, ["n1"]) == ResumeFrom(39, "memory", ["n0", "n2"])


# What policy makes of it.


def asked(fault: str, checkpoints: AttemptCheckpoints, onset_s: float = 95.0, **changes: Any) -> Action | None:
    """Return what is asked for because of a fact about n1; None for nothing."""
    verdict = Verdict(
        detector="d",
        fault=fault,
        job="j",
        nodes=("n1",),
        node="n1",
        device=0,
        confidence=0.99,
        onset_s=onset_s,
        summary="",
        evidence=(),
        kinds=frozenset({"one", "two"}),
        fact=True,
        **changes,
    )
    members: dict[str, Any] = {"members": 3, "heard": 3, "stepping": True, "ranks": tuple(RANKS)}
    judgement = Judgement("j", 0, 100.0, (verdict,), checkpoints=checkpoints, **members)
    numbers = itertools.count()
    actions = respond(judgement, Book((), ()), ACT, 10, "", lambda: f"ev{next(numbers)}", str, str).actions
    return actions[0] if actions else None


def test_a_restart_says_where_it_goes_on() -> None:
    action = asked("gpu_lost", replace(WHOLE, since_s=99.0))
    assert action is not None
    assert (action.kind, action.resume_from) == ("exclude_node", ResumeFrom(40, "memory", ["n0", "n2"]))


def test_what_restarts_nothing_says_nothing_of_it() -> None:
    action = asked("gpu_lost", WHOLE, asks="drain_node")
    assert action is not None
    assert (action.restart, action.resume_from) == (False, None)


@pytest.mark.parametrize(("since_s", "step"), [(94.0, 40), (96.0, 30)])
def test_where_numbers_are_wrong_nothing_from_after_the_onset_is_named(since_s: float, step: int) -> None:
    kept = replace(WHOLE, since_s=since_s, persisted=((30, 90.0), (35, 97.0)))
    action = asked("loss_not_finite", kept, asks="restart_job")
    assert action is not None
    assert action.resume_from is not None
    assert action.resume_from.step == step


@pytest.mark.parametrize("fault", ["loss_not_finite", "loss_divergence", "silent_data_corruption"])
def test_a_fault_that_is_seen_late_goes_on_at_an_older_step_in_memory(fault: str) -> None:
    kept = replace(WHOLE, since_s=99.0, older=(StepInMemory(20, 40.0, NODES, ()),), persisted=((10, 30.0),))
    action = asked(fault, kept, onset_s=60.0, asks="restart_job")
    assert action is not None
    assert action.resume_from == ResumeFrom(20, "memory", list(NODES))


def test_a_webhook_has_it_only_where_it_is_known() -> None:
    action = asked("gpu_lost", WHOLE)
    assert action is not None
    data = request_data(action, "https://server")
    assert data["restart_scope"] == "job"
    assert data["resume_from"] == {"step": 40, "where": "memory", "nodes": ["n0", "n2"]}
    assert "resume_from" not in request_data(msgspec.structs.replace(action, resume_from=None), "https://server")


SLOW = incident(fault="pcie_degraded", slowdown_ratio=0.3)


def cost(**changes: Any) -> dict[str, Any]:
    """Return what the rule of costs weighed of a slow node."""
    words = {word.rule: word for word in weigh(SLOW, situation(settings=ACT, ranks=RANKS, **changes)).words}
    return words["cost"].values


def test_what_a_restart_costs_goes_by_the_steps_that_are_at_risk() -> None:
    weighed = cost(checkpoints=replace(WHOLE, step_s=2.5))
    assert (weighed["steps_at_risk"], weighed["lost_work_s"]) == (1.0, 2.5)


def test_where_only_an_older_step_would_be_left_the_steps_since_are_at_risk_too() -> None:
    kept = replace(WHOLE, copies=5, lacking=("n0",), step_s=2.5, older=(StepInMemory(37, 1.0, NODES, ()),))
    weighed = cost(checkpoints=kept)
    assert (weighed["steps_at_risk"], weighed["lost_work_s"]) == (4.0, 10.0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpoints": WHOLE},
        {"checkpoints": replace(WHOLE, copies=3, copies_wanted=3, step_s=2.5)},
        {"checkpoints": AttemptCheckpoints(persisted=((30, 1.0),), step_s=2.5)},
    ],
    ids=["nothing told", "no pace", "the node's own copy is the only one", "only on storage"],
)
def test_where_the_steps_at_risk_are_not_known_the_operators_word_counts(changes: dict[str, Any]) -> None:
    weighed = cost(**changes)
    assert ("steps_at_risk" in weighed, weighed["lost_work_s"]) == (False, ACT.lost_work_s)


def thin(age_s: float) -> AttemptCheckpoints:
    return replace(WHOLE, copies=5, thin_since_s=NOW_S - age_s)


@pytest.mark.parametrize(("age_s", "held"), [(0.0, True), (29.0, True), (30.0, False), (-5.0, False)])
def test_what_can_wait_waits_for_copies_but_not_for_ever(age_s: float, held: bool) -> None:
    decision = decide(SLOW, situation(settings=ACT, ranks=RANKS, checkpoints=thin(age_s)))
    assert (decision.rule == "copies_first", decision.kind) == (held, "exclude_node")
    assert ("5 of 6 copies of step 40" in decision.hold) == held


def test_a_drain_waits_for_copies_too() -> None:
    early = incident(fault="recurrent_node", kinds=["history"])
    assert decide(early, situation(settings=ACT, ranks=RANKS, checkpoints=thin(1.0))).rule == "copies_first"


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoints": WHOLE},
        {"checkpoints": NOTHING_REPORTED},
        {"checkpoints": thin(1.0), "settings": PolicySettings(mode="act", copies_wait_s=0)},
        {"checkpoints": thin(1.0), "settings": PolicySettings(mode="approve")},
    ],
    ids=["all are there", "none are kept", "switched off", "a person decides"],
)
def test_nothing_waits_for_copies_without_need(changes: dict[str, Any]) -> None:
    assert decide(SLOW, situation(**({"settings": ACT, "ranks": RANKS} | changes))).rule != "copies_first"


def test_what_has_stopped_does_not_wait_for_copies() -> None:
    lost = incident(fault="gpu_lost", fact=True)
    assert decide(lost, situation(settings=ACT, ranks=RANKS, checkpoints=thin(1.0))).hold == ""
