"""Jobs of which nothing is seen but the lines of a log: each is judged by its own habit of lines."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from eagle_eye.detectors.progress.hang import REPORTS_MIN, Hang
from eagle_eye.detectors.signs.progress import Patience
from eagle_eye.detectors.signs.unread_log import LINES_MIN
from eagle_eye.detectors.types import Blind, Verdict, Window, WindowEvent
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.job_track import JobTrack

FLOOR_S = 60.0
PATIENCE = Patience(floor_s=FLOOR_S, typical_steps=3, start_deadline_s=1800, warmup_steps=3)
DETECTOR = Hang(patience=PATIENCE, rank_silent_s=10, silent_node_s=10)


class Logged:
    """A job of one node whose log is read once a second; a line tells of ``steps`` steps."""

    def __init__(self, steps: int = 10) -> None:
        self.track = JobTrack("j", 0, 1.0, 900.0, 0.0)
        self.now_s = 0.0
        self.said: list[Verdict] = []
        self._steps = steps
        self._step = 0
        self._column = self.track.add_series("n0", 0, 0)

    def lines(self, *gaps_s: float) -> Logged:
        """Write a line after each of these times."""
        for gap_s in gaps_s:
            self.silent(gap_s - 1)
            self._step += self._steps
            self._row()
        return self

    def silent(self, seconds: float) -> Logged:
        for _ in range(int(seconds)):
            self._row()
        return self

    def enters(self, phase: str) -> Logged:
        self.track.add_event(WindowEvent(self.now_s, "n0", 0, "phase", {"name": phase, "rank": 0}))
        return self

    def also(self, metric: str, value: float) -> None:
        """Report a value of the rank's row of this second."""
        columns = np.array([self._column])
        self.track.write(self.now_s, Scope.DEVICE, [metric], columns, np.array([[value]]), more=True)

    def blind(self) -> str:
        """Return why the detector cannot tell now."""
        with pytest.raises(Blind) as caught:
            DETECTOR.detect(self._window())
        return str(caught.value)

    def _row(self) -> None:
        self.now_s += 1.0
        if self._step:
            values = np.array([[float(self._step)]])
            self.track.write(self.now_s, Scope.DEVICE, ["train_step"], np.array([self._column]), values)
        with contextlib.suppress(Blind):
            self.said += DETECTOR.detect(self._window())

    def _window(self) -> Window:
        return self.track.window(self.now_s, np.array([self.now_s]), np.array([False]), 0.0)


@pytest.mark.parametrize("gap_s", [10, 70, 126, 430])
def test_a_log_with_lines_far_apart_is_no_hang(gap_s: int) -> None:
    assert Logged().lines(*[gap_s] * (2 * REPORTS_MIN)).said == []


def test_an_evaluation_between_two_lines_that_nobody_announced_is_no_hang() -> None:
    assert Logged().lines(*[126] * 6, 240, *[126] * 4, 252, 126).said == []


def test_short_lines_before_the_first_unannounced_pause_are_no_hang() -> None:
    assert Logged().lines(*[10] * 30, 200, 10).said == []


@pytest.mark.parametrize(("gap_s", "within_s"), [(1, 301), (10, 301), (126, 380), (430, 1_300)])
def test_a_log_silent_far_beyond_its_habit_is_a_hang(gap_s: int, within_s: int) -> None:
    job = Logged().lines(*[gap_s] * (REPORTS_MIN + 4))
    assert job.said == []
    (verdict, *_) = job.silent(within_s).said
    assert (verdict.fault, verdict.asks, verdict.nodes) == ("hang", "notify", ())


def test_longer_pauses_of_the_log_itself_are_its_patience() -> None:
    job = Logged().lines(*[10] * 10, 280, *[10] * 10)
    assert job.silent(400).said == []
    assert job.silent(40).said != []


def test_before_a_log_has_a_habit_its_silence_tells_nothing() -> None:
    job = Logged().lines(*[60] * (REPORTS_MIN - 1)).silent(1_000)
    assert job.said == []
    assert f"known after {REPORTS_MIN} times" in job.blind()


def test_an_evaluation_in_the_row_of_the_last_step_leaves_the_habit_known() -> None:
    job = Logged(384)
    for _ in range(6):
        job.lines(420).enters("eval").silent(10).enters("train")
    assert job.track.course.reports.usual_s == 420.0
    assert job.said == []


def unread(lines: float, *, before: float = 0.0) -> Logged:
    """A job whose log went on for ``lines`` lines after its last step, in five minutes."""
    job = Logged()
    for _ in range(REPORTS_MIN + 2):
        job.lines(10)
        job.also("train_log_lines_since_step", before)
    for second in range(300):
        job.silent(1)
        job.also("train_log_lines_since_step", lines * (second + 1) / 300)
    return job


def test_a_log_that_stops_being_understood_is_no_standstill() -> None:
    job = unread(12_300)
    assert job.said == []
    assert job.blind() == "12,300 lines of the job's log, none read since step 80"


def test_a_few_last_words_of_a_log_are_a_standstill() -> None:
    assert [verdict.fault for verdict in unread(LINES_MIN - 1).silent(1).said][:1] == ["hang"]


def test_a_log_with_many_lines_between_steps_is_understood() -> None:
    assert [verdict.fault for verdict in unread(110, before=100.0).silent(1).said][:1] == ["hang"]


def test_a_log_of_which_no_step_was_ever_understood_is_no_failed_start() -> None:
    job = Logged()
    for second in range(2_000):
        job.silent(1)
        job.also("train_log_lines_since_step", float(second))
    assert job.said == []
    assert job.blind() == "1,999 lines of the job's log, none with a step that is understood"
