"""Which gaps between steps are kept as pauses, and which of them had a node accused."""

from __future__ import annotations

from eagle_eye.detectors.types import Pause, Verdict
from eagle_eye.server.engine.job_track import PAUSES_KEPT, STEPS_FOR_PACE, JobTrack, PauseLog, inherited


def steady(steps: int = 10, pace_s: float = 2.0) -> PauseLog:
    log = PauseLog()
    for _ in range(steps):
        log.note_steps(pace_s, 1.0, interval_s=1.0)
    return log


def verdict(fault: str, *nodes: str) -> Verdict:
    return Verdict(
        detector=fault,
        fault=fault,
        job="j",
        nodes=nodes,
        node=nodes[0] if nodes else None,
        device=None,
        confidence=0.9,
        onset_s=0.0,
        summary="",
        evidence=(),
        kinds=frozenset({"standstill"}),
    )


def test_a_gap_of_many_steps_is_a_pause_and_an_ordinary_step_is_none() -> None:
    log = steady()
    log.note_steps(20.0, 1.0, interval_s=1.0)
    assert log.pauses == (Pause("", 20.0),)
    assert log.pace_s == 2.0


def test_steps_that_nobody_saw_one_by_one_are_no_pause() -> None:
    log = steady()
    log.note_steps(40.0, 18.0, interval_s=1.0)
    assert log.pauses == ()


def test_a_pause_among_several_steps_is_as_long_as_what_they_leave() -> None:
    log = steady()
    log.note_steps(40.0, 5.0, interval_s=1.0)
    assert log.pauses == (Pause("", 32.0),)


def test_where_steps_are_long_a_pause_shorter_than_two_of_them_is_one_too() -> None:
    log = steady(pace_s=28.0)
    log.note_steps(38.0, 1.0, interval_s=15.0)
    log.note_steps(66.0, 1.0, interval_s=15.0)
    assert log.pauses == (Pause("", 66.0),)


def test_before_the_pace_is_known_nothing_is_a_pause() -> None:
    log = steady(STEPS_FOR_PACE - 1)
    log.note_steps(100.0, 1.0, interval_s=1.0)
    assert log.pauses == ()


def test_a_pause_remembers_that_a_node_was_reported_and_the_next_one_does_not() -> None:
    log = steady()
    log.note_verdicts([verdict("network_hang", "n1")])
    log.note_verdicts([])
    log.note_steps(20.0, 1.0, interval_s=1.0)
    log.note_steps(20.0, 1.0, interval_s=1.0)
    assert log.pauses == (Pause("", 20.0, accused=True), Pause("", 20.0))


def test_a_phase_that_ends_takes_the_accusation_with_it() -> None:
    log = steady()
    log.note_verdicts([verdict("hang", "n1")])
    log.note_phase("checkpoint", 30.0)
    log.note_phase("eval", 30.0)
    assert log.pauses == (Pause("checkpoint", 30.0, accused=True), Pause("eval", 30.0))


def test_other_faults_and_hangs_without_a_culprit_accuse_nobody_of_the_standstill() -> None:
    log = steady()
    log.note_verdicts([verdict("straggler", "n1"), verdict("hang")])
    log.note_steps(20.0, 1.0, interval_s=1.0)
    assert log.pauses == (Pause("", 20.0),)


def test_only_the_newest_pauses_are_kept() -> None:
    log = steady()
    for seconds in range(PAUSES_KEPT + 5):
        log.note_phase("eval", float(seconds))
    assert [pause.seconds for pause in log.pauses] == [float(s) for s in range(5, PAUSES_KEPT + 5)]


def test_a_restart_does_not_change_how_long_a_job_pauses() -> None:
    first = JobTrack("j", 0, 1.0, 120.0, 0.0)
    first.course.note_phase("eval", 30.0)
    second = JobTrack("j", 1, 1.0, 120.0, 100.0, inherited(first, 100.0, 1800.0))
    second.course.note_phase("eval", 40.0)
    third = JobTrack("j", 2, 1.0, 120.0, 200.0, inherited(second, 200.0, 1800.0))
    assert third.course.pauses == (Pause("eval", 30.0), Pause("eval", 40.0))
