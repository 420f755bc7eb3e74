"""Exits of ranks that only the launcher has seen: their agents had not yet heard of them, or cannot read the code."""

from __future__ import annotations

from eagle_eye.detectors.types import Verdict
from eagle_eye.schema.action import ReportedExit
from tests.server.engine.frames import Fleet


def crashes(fleet: Fleet, seconds: int = 5) -> list[Verdict]:
    """Return the crashes among the verdicts of the last moment."""
    return [verdict for verdict in fleet.run(seconds)[-1].verdicts if verdict.fault == "process_crash"]


def starting(nodes: int = 3) -> Fleet:
    """Return a fleet in an attempt that has made no step."""
    fleet = Fleet(nodes)
    fleet.stopped = True
    fleet.declare(1)
    fleet.run(1)
    return fleet


def test_a_rank_that_its_launcher_saw_killed_is_a_crash_of_its_node() -> None:
    fleet = starting()
    fleet.declare(1, exits=[ReportedExit(2, -9)])
    (crash,) = crashes(fleet)
    assert (crash.nodes, crash.summary) == (("n2",), "rank 2 on n2 was killed by SIGKILL")


def test_ranks_killed_on_several_nodes_were_killed_from_outside_and_accuse_none() -> None:
    fleet = starting()
    fleet.declare(1, exits=[ReportedExit(0, -9)])
    fleet.declare(1, exits=[ReportedExit(0, -9), ReportedExit(2, -9)])
    assert crashes(fleet) == []


def test_an_exit_that_launcher_and_agent_report_counts_once() -> None:
    fleet = starting()
    fleet.declare(1, exits=[ReportedExit(2, -11)])
    fleet.happens("n2", "process_exit", exit_code=-11, pid=102, rank=2, goodbye=False)
    (crash,) = crashes(fleet)
    counts = [item.value for item in crash.evidence if item.metric == "process_exits"]
    assert counts == [1.0]


def test_a_repeated_report_does_not_move_the_exit() -> None:
    fleet = starting()
    fleet.declare(1, exits=[ReportedExit(2, -9)])
    ended_s = fleet.now_s
    fleet.run(2)
    fleet.declare(1, exits=[ReportedExit(2, -9)])
    (crash,) = crashes(fleet, 2)
    assert crash.onset_s == ended_s


def test_an_exit_belongs_to_its_attempt() -> None:
    fleet = starting()
    fleet.declare(1, exits=[ReportedExit(2, -9)])
    assert crashes(fleet)
    fleet.declare(2)
    assert crashes(fleet) == []
