"""Attempts followed look by look: when they began, how far they came, why they ended, and what nobody saw."""

from __future__ import annotations

from itertools import count

from eagle_eye.server.accounts.goodput import (
    GAPS_KEPT,
    GONE_S,
    UNWATCHED_S,
    WRITE_S,
    Witness,
    follow,
    forsaken,
    worth_writing,
)
from eagle_eye.server.model.records import Attempt
from eagle_eye.server.monitor.watcher import JobProgress
from tests.server.accounts.past import attempt, course
from tests.server.builders import NOW


class Looks:
    """A job looked at again and again; agents are heard and speak of it unless told otherwise."""

    def __init__(self) -> None:
        self.records: dict[str, Attempt] = {}
        self.newest: Attempt | None = None
        self._ids = count()

    def look(self, at: float, seen: JobProgress, heard: float | None = None, spoken: float | None = None) -> Attempt:
        witness = Witness(NOW + (at if heard is None else heard), NOW + (at if spoken is None else spoken))
        for changed in follow(self.newest, seen, witness, NOW + at, lambda: f"att_{next(self._ids)}"):
            self.records[changed.id] = self.newest = changed
        assert self.newest is not None
        return self.newest


def test_the_first_step_is_dated_back_from_where_the_look_found_the_job() -> None:
    looks = Looks()
    looks.look(0, course())
    found = looks.look(40, course(step=5, at=38))
    assert (found.first_step, found.first_step_s) == (1, NOW + 30)  # four steps of 2 s before the fifth
    assert (found.last_step, found.last_step_s) == (5, NOW + 38)


def test_a_next_attempt_ends_the_one_before_and_knows_what_was_done() -> None:
    looks = Looks()
    looks.look(10, course(step=100, at=8))
    second = looks.look(60, course(1, started_s=NOW + 50))
    first = looks.records["att_0"]
    assert (first.end, first.ended_s) == ("superseded", NOW + 50)
    assert (second.run, second.prior_step, second.started_s) == ("att_0", 100, NOW + 50)


def test_catching_up_is_dated_to_the_first_step_that_is_new() -> None:
    looks = Looks()
    looks.look(10, course(step=100, at=8))
    looks.look(60, course(1, started_s=NOW + 50))
    redoing = looks.look(100, course(1, step=95, at=99, first_step=90.0, started_s=NOW + 50))
    assert redoing.caught_up_s is None
    done = looks.look(130, course(1, step=105, at=125, first_step=90.0, started_s=NOW + 50))
    assert done.caught_up_s == NOW + 115  # step 105 at 125, five steps of 2 s after the hundredth


def test_what_begins_after_the_job_was_finished_is_another_run() -> None:
    looks = Looks()
    looks.look(0, course(step=100))
    assert looks.look(10, course(step=100, state="finished")).end == "finished"
    again = looks.look(20, course(started_s=NOW + 20))
    assert (again.run, again.prior_step) == (again.id, None)


def test_a_failed_attempt_and_its_successor_are_one_run() -> None:
    looks = Looks()
    looks.look(0, course(step=100))
    looks.look(10, course(step=100, state="failed"))
    assert looks.look(20, course(1, started_s=NOW + 20)).run == "att_0"


def test_time_without_a_look_is_a_gap() -> None:
    looks = Looks()
    looks.look(0, course(step=1))
    found = looks.look(500, course(step=200, at=499))
    assert [(gap.start_s - NOW, gap.end_s - NOW) for gap in found.gaps] == [(0, 500)]


def test_time_in_which_no_node_was_heard_is_a_gap_though_the_server_looked() -> None:
    looks = Looks()
    looks.look(0, course(step=1))
    for at in range(10, 300, 10):
        looks.look(at, course(step=1), heard=0)
    found = looks.look(300, course(step=100, at=299))
    # For UNWATCHED_S after the last word the nodes still counted as heard.
    assert [(gap.start_s - NOW, gap.end_s - NOW) for gap in found.gaps] == [(UNWATCHED_S, 300)]


def test_of_too_many_gaps_the_nearest_are_joined() -> None:
    looks = Looks()
    for at in range(GAPS_KEPT + 5):
        looks.look(at * 100, course(step=at + 1, at=at * 100))
    assert looks.newest is not None
    assert len(looks.newest.gaps) <= GAPS_KEPT
    assert looks.newest.gaps[-1].end_s == NOW + (GAPS_KEPT + 4) * 100


def test_a_job_that_nobody_declared_is_gone_once_no_agent_speaks_of_it() -> None:
    looks = Looks()
    looks.look(0, course(step=9, declared=False))
    assert looks.look(GONE_S - 1, course(step=9, declared=False), spoken=0).ended_s is None
    over = looks.look(GONE_S + 1, course(step=9, declared=False), spoken=0)
    assert (over.end, over.ended_s) == ("gone", NOW)


def test_a_job_that_was_gone_and_speaks_again_is_the_same_attempt() -> None:
    looks = Looks()
    looks.look(0, course(step=9, declared=False))
    looks.look(GONE_S + 1, course(step=9, declared=False), spoken=0)
    back = looks.look(600, course(step=200, at=599, declared=False))
    assert (back.id, back.end, back.ended_s) == ("att_0", "", None)


def test_the_memory_of_a_job_that_is_over_begins_nothing() -> None:
    assert follow(None, course(declared=False), Witness(NOW, None), NOW, lambda: "x") == []
    assert follow(None, course(state="finished"), Witness(NOW, NOW), NOW, lambda: "x") == []


def test_a_forgotten_attempt_ends_when_it_was_last_seen() -> None:
    known = attempt(0, 0)
    assert forsaken(known, NOW + GONE_S - 1) is None
    over = forsaken(known, NOW + GONE_S)
    assert over is not None
    assert (over.end, over.ended_s) == ("gone", NOW)


def test_the_newest_step_alone_is_written_now_and_then() -> None:
    old = attempt(0, 0, last_step=1.0, last_step_s=0)
    new = attempt(0, 0, last_step=2.0, last_step_s=2)
    assert not worth_writing(old, new, NOW, NOW + WRITE_S - 1)
    assert worth_writing(old, new, NOW, NOW + WRITE_S)
    assert worth_writing(old, attempt(0, 0, last_step=1.0, last_step_s=0, nodes=3), NOW, NOW)
    assert not worth_writing(old, old, NOW, NOW + 1_000)
