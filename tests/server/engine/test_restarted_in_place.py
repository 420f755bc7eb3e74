"""A job that its scheduler stops and runs again in the same attempt: what was seen before is not of its processes."""

from __future__ import annotations

import pytest

from eagle_eye.detectors.types import Verdict
from eagle_eye.schema.events import Event
from eagle_eye.server.model.records import Job
from tests.server.engine.frames import Fleet


def says(fleet: Fleet, state: str) -> None:
    job = Job(job="j", attempt=0, state=state, ranks=[], restart_owner="", updated_s=fleet.now_s)
    fleet.engine.observe_job(job)


def restarted(exit_code: int, late: bool = False) -> Fleet:
    """Return a fleet whose ranks have ended while the job was completing, n1 first, and that has just begun anew."""
    fleet = Fleet()
    fleet.run(30)
    says(fleet, "completing")
    fleet.stopped = True
    fleet.run(2)
    ended_s = fleet.now_s
    for rank, node in enumerate(["n1", "n0", "n2"]):
        attributes = {"exit_code": exit_code, "rank": rank, "pid": 100 + rank, "goodbye": False}
        event = Event(ended_s + 4.0 * rank, "process_exit", 0, attributes)
        fleet.events.append((node, event))
    held, fleet.events = (fleet.events, []) if late else ([], fleet.events)
    fleet.run(20)
    says(fleet, "running")
    fleet.events = [*fleet.events, *held]
    return fleet


def said(fleet: Fleet, seconds: int = 20) -> list[Verdict]:
    return [verdict for judgement in fleet.run(seconds) for verdict in judgement.verdicts]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("exit_code", [0, 1, 143, -15, -9])
def test_exits_of_the_processes_before_accuse_nobody(exit_code: int, late: bool) -> None:
    assert said(restarted(exit_code, late)) == []


def test_an_exit_after_the_restart_is_a_crash() -> None:
    fleet = restarted(-15)
    fleet.stopped = False
    fleet.run(10)
    fleet.happens("n2", "process_exit", exit_code=-11, rank=2, pid=202, goodbye=False)
    fleet.stopped = True
    assert {(verdict.fault, verdict.node) for verdict in said(fleet, 5)} == {("process_crash", "n2")}


def test_the_members_stay() -> None:
    fleet = restarted(-15)
    (judgement,) = fleet.engine.tick(fleet.now_s)
    assert judgement.members == 3


def test_a_phase_that_the_end_cut_short_is_over() -> None:
    fleet = Fleet()
    fleet.run(20)
    fleet.happens("n0", "checkpoint_begin")
    fleet.stopped = True
    fleet.run(2)
    says(fleet, "completing")
    fleet.run(5)
    says(fleet, "running")
    fleet.run(1)
    (track,) = fleet.engine.tracks()
    assert {*fleet.engine.window(track, fleet.now_s, fleet.now_s).phase} == {""}


def test_what_gpus_did_before_is_not_shown() -> None:
    fleet = restarted(-15)
    begun_s = fleet.now_s
    fleet.run(3)
    (track,) = fleet.engine.tracks()
    assert min(fleet.engine.window(track, fleet.now_s, begun_s).times_s) > begun_s


def test_a_job_that_was_suspended_goes_on_with_its_processes() -> None:
    fleet = Fleet()
    fleet.run(10)
    says(fleet, "suspended")
    says(fleet, "running")
    fleet.run(3)
    (track,) = fleet.engine.tracks()
    assert len(fleet.engine.window(track, fleet.now_s, fleet.now_s).times_s) == 13
