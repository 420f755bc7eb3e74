"""Which actions are refused before anything is changed."""

from __future__ import annotations

from eagle_eye.orchestrators.protocol import JobState
from eagle_eye.orchestrators.receiver import refusal
from eagle_eye.schema.action import MemberRank
from tests.orchestrators.builders import action

HERE = JobState(1, frozenset({"n1", "n2"}), running=True)


def restart_on(*nodes: str) -> str | None:
    ranks = [MemberRank(at, node, 0) for at, node in enumerate(nodes)]
    return refusal(action(0.0, kind="restart_job", exclude=[], ranks=ranks), HERE, 1.0)


def test_a_job_of_the_same_name_on_other_nodes_is_left_alone() -> None:
    assert restart_on("m1", "m2") == "job 'j' runs on other nodes here: it is not the one that is meant"


def test_a_job_that_shares_a_node_with_the_action_is_meant() -> None:
    assert restart_on("m1", "n2") is None
