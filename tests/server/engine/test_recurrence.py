"""Nodes that fail again and again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from eagle_eye.schema.action import MemberRank
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.respond import HISTORY_S, recurrences
from eagle_eye.server.model.records import Incident
from tests.server.builders import incident

NOW_S = 5_000_000.0
JOB = Judgement("now", 0, NOW_S, (), ranks=tuple(MemberRank(i, f"n{i}", 0) for i in range(4)))


def past(culprit: str | None, job: str, **changes: Any) -> Incident:
    fields = {"node": culprit, "nodes": [culprit] if culprit else [], "job": job, "fault": "process_crash"}
    base = incident(action="restart_job", detected_s=NOW_S - 86_400, onset_s=NOW_S - 86_400)
    return msgspec.structs.replace(base, **{**fields, **changes})


def named(history: list[Incident], fleet_size: int = 64) -> list[str | None]:
    return [v.node for v in recurrences(JOB, history, fleet_size)]


def test_a_node_that_was_the_culprit_of_three_jobs_is_recurrent() -> None:
    (verdict,) = recurrences(JOB, [past("n1", f"j{i}") for i in range(3)], 64)
    assert (verdict.node, verdict.fault) == ("n1", "recurrent_node")
    assert verdict.confidence >= 0.9


def test_twice_may_be_one_fault_repaired_badly() -> None:
    assert named([past("n1", f"j{i}") for i in range(2)]) == []


def test_where_all_nodes_fail_alike_none_is_recurrent() -> None:
    assert named([past(f"n{n}", f"j{n}-{i}") for n in range(64) for i in range(3)]) == []


def test_incidents_of_one_attempt_count_once() -> None:
    assert named([past("n1", "j", fault=fault) for fault in ("process_crash", "hang", "straggler")]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"application": True},
        {"state": "false"},
        {"action": "notify"},
        {"detected_s": NOW_S - HISTORY_S - 1},
        {"node": None},
    ],
)
def test_what_was_not_the_nodes_fault_does_not_count(changes: dict[str, Any]) -> None:
    assert named([past("n1", f"j{i}", **changes) for i in range(5)]) == []


def test_a_node_that_is_not_in_the_job_is_left_to_the_jobs_that_use_it() -> None:
    assert named([past("n9", f"j{i}") for i in range(5)]) == []
