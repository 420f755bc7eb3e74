"""Jobs that are over: whose rows a node's are, what is kept of them, and for how long."""

from __future__ import annotations

import gc
import weakref

import pytest

from eagle_eye.server.engine.job_track import JobTrack
from eagle_eye.server.engine.judgement import FAILED_S
from eagle_eye.server.engine.routing import FORGET_JOB_S
from tests.server.engine.frames import START_S, Fleet

LATER_S = int(FAILED_S) + 5


def track(fleet: Fleet, job: str) -> JobTrack | None:
    return next((one for one in fleet.engine.tracks() if one.job == job), None)


def jobs(fleet: Fleet) -> set[str]:
    return {one.job for one in fleet.engine.tracks()}


def one_job_after_another(*, declared: bool, state: str = "finished") -> Fleet:
    """Return a fleet whose nodes ran job "j" and run "next" now, for as long as anything of "j" is still judged."""
    fleet = Fleet()
    if declared:
        fleet.declare(0)
    fleet.run(30)
    if declared:
        fleet.declare(0, state=state)
    fleet.job, fleet.step = "next", 0.0
    if declared:
        fleet.declare(0)
    fleet.run(LATER_S)
    return fleet


@pytest.mark.parametrize("declared", [True, False])
def test_rows_of_nodes_that_run_another_job_are_not_those_of_the_one_that_ended(declared: bool) -> None:
    fleet = one_job_after_another(declared=declared)
    ended = track(fleet, "j")
    assert ended is not None
    touched_s = ended.touched_s
    fleet.run(10)
    assert ended.touched_s == touched_s
    assert all(len(route.tracks) == 1 for route in fleet.engine._routes.values())


def test_all_jobs_that_agents_left_at_once_rest_at_once() -> None:
    fleet = Fleet(nodes=4)
    for pair in (("n0", "n1"), ("n2", "n3")):
        fleet.mute = set(fleet.nodes) - set(pair)
        fleet.job = f"of {pair[0]}"
        fleet.run(5)
    fleet.mute.clear()
    fleet.job = "next"
    fleet.run(LATER_S)
    assert {one.job for one in fleet.engine.tracks() if one.resting} == {"of n0", "of n2"}


def test_what_ended_takes_no_memory_for_rows_and_leaves_its_course_to_another_attempt() -> None:
    fleet = one_job_after_another(declared=True, state="preempted")
    ended = track(fleet, "j")
    assert ended is not None
    assert ended.bytes_per_line == 0
    assert ended.bytes_per_step == 0
    assert len(ended.curve.number) > 20
    fleet.job = "j"
    fleet.declare(1)
    again = track(fleet, "j")
    assert again is not None
    assert again.earlier.curve is not None
    assert len(again.earlier.curve.number) > 20


def test_a_job_that_finished_is_forgotten_once_its_rows_are_out_of_the_window() -> None:
    fleet = one_job_after_another(declared=True)
    window_s = fleet.engine.settings.window_s
    fleet.now_s = START_S + 40 + window_s
    fleet.run(1)
    assert jobs(fleet) == {"j", "next"}
    fleet.run(LATER_S)
    assert jobs(fleet) == {"next"}


def test_a_job_that_is_forgotten_is_kept_by_no_node_that_left_in_the_middle_of_it() -> None:
    fleet = one_job_after_another(declared=True)
    fleet.mute.add("n0")
    fleet.declare(0, state="finished")
    fleet.run(2)
    ended = [weakref.ref(one) for one in fleet.engine.tracks()]
    fleet.mute.update(fleet.nodes)
    fleet.now_s += 2 * fleet.engine.settings.window_s
    fleet.run(1)
    gc.collect()
    assert jobs(fleet) == set()
    assert [one() for one in ended] == [None, None]


def test_a_job_that_finished_is_kept_while_something_on_record_concerns_it() -> None:
    fleet = one_job_after_another(declared=True)
    now_s = fleet.now_s + 2 * fleet.engine.settings.window_s
    list(fleet.engine.judging(now_s, lambda job: job == "j"))
    assert "j" in jobs(fleet)
    list(fleet.engine.judging(now_s + FORGET_JOB_S, lambda job: job == "j"))
    assert "j" not in jobs(fleet)


def test_a_job_that_may_go_on_in_another_attempt_is_kept_for_a_day() -> None:
    fleet = one_job_after_another(declared=True, state="preempted")
    fleet.engine.tick(fleet.now_s + FORGET_JOB_S - 2 * LATER_S)
    assert "j" in jobs(fleet)
    fleet.engine.tick(fleet.now_s + FORGET_JOB_S)
    assert "j" not in jobs(fleet)


def test_a_job_that_is_said_to_run_again_has_its_silent_members_rows_again() -> None:
    fleet = one_job_after_another(declared=True, state="failed")
    ended = track(fleet, "j")
    assert ended is not None
    fleet.job = "j"
    fleet.declare(0)
    touched_s = ended.touched_s
    fleet.job = "next"
    fleet.run(3)
    assert ended.touched_s > touched_s


def test_a_job_that_only_agents_spoke_of_goes_on_when_they_name_it_again() -> None:
    fleet = one_job_after_another(declared=False)
    ended = track(fleet, "j")
    assert ended is not None
    assert ended.resting
    fleet.job = "j"
    fleet.run(3)
    assert [one.resting for one in fleet.engine.tracks() if one.job == "j"] == [False]
    assert ended.touched_s == fleet.now_s


def test_a_job_keeps_the_rows_of_members_that_say_nothing_of_any() -> None:
    fleet = Fleet()
    fleet.run(30)
    running = track(fleet, "j")
    assert running is not None
    for _ in range(2 * LATER_S):
        fleet.now_s += 1.0
        for node in fleet.nodes:
            frame = fleet.frame(node)
            frame.ranks.clear()
            fleet.engine.observe(frame, fleet.now_s)
        fleet.engine.tick(fleet.now_s)
    assert not running.resting
    assert running.touched_s == fleet.now_s
