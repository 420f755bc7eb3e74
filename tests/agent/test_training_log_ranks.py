from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.training_logs.followed_logs import LogOrigin, Missing, writer_of
from eagle_eye.agent.training_logs.last_words import SETTLED_S, EndedByError, LastWords
from eagle_eye.agent.training_logs.lines import LineWriter, LogLine, LogReading
from eagle_eye.agent.training_logs.rank_courses import ARRIVAL_S_MIN, LINGER_S, RankCourse, RankCourses


def process(rank: int, size: int = 16, job: str = "j", attempt: int = 0, local: int | None = None) -> TrainingProcess:
    local = rank % 8 if local is None else local
    return TrainingProcess(100 + rank + 1_000 * attempt, job, rank, size, local, local, attempt)


FIRST_NODE = [process(rank) for rank in range(8)]
LAST_NODE = [process(rank) for rank in range(8, 16)]


def whose(
    line: LogLine = LogLine(""),  # noqa: B008 - frozen
    writer: LineWriter = LineWriter.ANY,
    here: Sequence[TrainingProcess] = FIRST_NODE,
    origin: LogOrigin = LogOrigin(),  # noqa: B008 - frozen
    rank: int | None = None,
    tasks: dict[int, int] | None = None,
) -> int | Missing:
    found = writer_of(line, rank, writer, origin, here, tasks or {})
    return found if isinstance(found, Missing) else found.rank


def test_the_rank_that_a_line_names_is_its_writer_on_one_node_alone() -> None:
    assert whose(LogLine("", rank=3)) == 3
    assert whose(LogLine("", rank=3), here=LAST_NODE) is Missing.ELSEWHERE
    assert whose(rank=9, here=LAST_NODE) == 9


def test_a_line_of_the_job_is_told_by_the_node_of_the_rank_that_writes_such_lines() -> None:
    assert whose(writer=LineWriter.FIRST) == 0
    assert whose(writer=LineWriter.FIRST, here=LAST_NODE) is Missing.ELSEWHERE
    assert whose(writer=LineWriter.LAST) is Missing.ELSEWHERE
    assert whose(writer=LineWriter.LAST, here=LAST_NODE) == 15


def test_the_one_process_that_writes_to_a_file_is_the_lines_writer() -> None:
    own = LogOrigin((FIRST_NODE[5],))
    assert whose(origin=own) == 5
    assert whose(origin=own, writer=LineWriter.LAST) == 5
    assert whose(LogLine("", rank=4), origin=own) is Missing.ELSEWHERE


def test_of_several_that_write_to_a_file_the_frameworks_rule_or_the_line_decides() -> None:
    shared = LogOrigin(tuple(LAST_NODE))
    assert whose(origin=shared) is Missing.UNKNOWN
    assert whose(origin=shared, writer=LineWriter.LAST) == 15
    assert whose(LogLine("", local_rank=2), origin=shared) == 10


def test_what_the_path_says_counts() -> None:
    assert whose(origin=LogOrigin(rank=6)) == 6
    assert whose(origin=LogOrigin(rank=6), here=LAST_NODE) is Missing.ELSEWHERE
    assert whose(origin=LogOrigin(job="other"), writer=LineWriter.FIRST) is Missing.ELSEWHERE


def test_a_local_rank_alone_is_no_rank_of_a_job_on_several_nodes() -> None:
    assert whose(LogLine("", local_rank=2)) is Missing.UNKNOWN
    assert whose(LogLine("", local_rank=2), here=[process(rank, size=8) for rank in range(8)]) == 2


def test_a_schedulers_task_is_a_rank_or_a_node_as_the_processes_say() -> None:
    one_a_rank = {item.pid: item.rank for item in LAST_NODE}
    assert whose(LogLine("", task=9), here=LAST_NODE, tasks=one_a_rank) == 9
    assert whose(LogLine("", task=1), here=LAST_NODE, tasks=one_a_rank) is Missing.ELSEWHERE
    one_a_node = {item.pid: 1 for item in LAST_NODE}
    assert whose(LogLine("", task=1), LineWriter.LAST, here=LAST_NODE, tasks=one_a_node) == 15
    assert whose(LogLine("", task=0), LineWriter.LAST, here=LAST_NODE, tasks=one_a_node) is Missing.ELSEWHERE


def test_two_jobs_of_one_node_leave_a_shared_line_open() -> None:
    here = [process(0, size=1, job="a"), process(0, size=1, job="b", attempt=1)]
    assert whose(writer=LineWriter.FIRST, here=here) is Missing.UNKNOWN
    assert whose(writer=LineWriter.FIRST, here=here, origin=LogOrigin(job="b")) == 0


def test_of_two_attempts_the_newest_writes() -> None:
    here = [process(0, attempt=1), process(0)]
    found = writer_of(LogLine("", rank=0), None, LineWriter.ANY, LogOrigin(), here, {})
    assert isinstance(found, TrainingProcess)
    assert found.attempt == 1


def test_where_no_rank_runs_every_line_is_elsewheres() -> None:
    assert whose(LogLine("", rank=0), here=[]) is Missing.ELSEWHERE


def test_values_are_means_over_the_steps_since_the_last_row_and_repeat() -> None:
    course = RankCourse(16)
    course.read_line(LogReading(step=10, step_s=9.0, loss=9.0), "log", 0.0)
    course.row()
    course.read_line(LogReading(step=20, step_s=1.0, loss=4.0, grad_norm=0.5), "log", 10.0)
    course.read_line(LogReading(step=50, step_s=2.0, loss=2.0), "log", 70.0)
    row = course.row()
    assert row == {"train_step": 50.0, "train_step_seconds": 1.75, "train_loss": 2.5, "train_grad_norm": 0.5}
    assert course.row() == row


def test_a_value_that_was_not_finite_once_is_infinite() -> None:
    course = RankCourse(1)
    course.read_line(LogReading(step=1, loss=math.nan, grad_norm=-math.inf), "log", 0.0)
    course.read_line(
        LogReading(step=2, loss=1.0, grad_norm=1.0, step_s=math.nan, tokens_per_second=math.inf), "log", 1.0
    )
    assert course.row() == {"train_step": 2.0, "train_loss": math.inf, "train_grad_norm": math.inf}
    course.read_line(LogReading(step=3, loss=1.0), "log", 2.0)
    assert course.row()["train_loss"] == 1.0


def test_a_jobs_tokens_are_shared_among_its_ranks() -> None:
    course = RankCourse(16)
    course.read_line(LogReading(step=1, job_tokens_per_second=1_600.0), "log", 0.0)
    assert course.row()["train_tokens_per_second"] == 100.0


def test_lines_own_times_say_how_long_steps_take_where_no_line_does() -> None:
    course = RankCourse(1)
    course.read_line(LogReading(step=10, stamp_s=1_000.0), "log", 0.0)
    assert "train_step_seconds" not in course.row()
    course.read_line(LogReading(step=20, stamp_s=1_025.0), "log", 25.4)
    assert course.row()["train_step_seconds"] == pytest.approx(2.5)


def test_a_checkpoint_between_two_lines_makes_no_step_longer() -> None:
    course = RankCourse(1)
    course.read_line(LogReading(step=10, stamp_s=1_000.0), "log", 0.0)
    course.pause(10.0, 1_010.0)
    course.pause(325.0, 1_325.0)
    course.read_line(LogReading(step=20, stamp_s=1_325.0), "log", 325.0)
    assert "train_step_seconds" not in course.row()
    course.read_line(LogReading(step=30, stamp_s=1_350.0), "log", 350.0)
    assert course.row()["train_step_seconds"] == pytest.approx(2.5)


def test_steps_after_an_evaluation_are_timed_from_its_end() -> None:
    course = RankCourse(1)
    course.read_line(LogReading(step=10, stamp_s=1_000.0), "log", 0.0)
    course.pause(0.0, 1_000.0)
    course.pause(60.0, 1_060.0)
    course.read_line(LogReading(step=20, stamp_s=1_085.0), "log", 85.4)
    assert course.row()["train_step_seconds"] == pytest.approx(2.5)


def test_a_clock_that_was_set_makes_no_step_longer() -> None:
    course = RankCourse(1)
    course.read_line(LogReading(step=10, stamp_s=1_000.0), "log", 0.0)
    course.read_line(LogReading(step=20, stamp_s=4_625.0), "log", 25.0)
    course.read_line(LogReading(step=30, stamp_s=1_050.0), "log", 50.0)
    assert "train_step_seconds" not in course.row()


def test_without_any_times_the_arrivals_tell_once_they_are_far_enough_apart() -> None:
    course = RankCourse(1)
    for step in range(1, 20):
        course.read_line(LogReading(step=step), "log", float(step))
        assert ("train_step_seconds" in course.row()) == (step > ARRIVAL_S_MIN)
    assert course.row()["train_step_seconds"] == pytest.approx(1.0)


def test_two_logs_of_one_rank_do_not_disturb_each_other() -> None:
    course = RankCourse(1)
    course.read_line(LogReading(step=10), "structured", 0.0)
    course.read_line(LogReading(step=9, loss=2.0), "text", 0.0)
    assert course.row()["train_step"] == 10.0
    assert not course.read_line(LogReading(step=10, loss=3.0), "text", 1.0)
    assert course.row() == {"train_step": 10.0, "train_loss": 3.0}


def test_a_program_that_begins_again_from_an_earlier_step_is_there() -> None:
    course = RankCourse(1)
    course.read_line(LogReading(step=500), "log", 0.0)
    assert course.read_line(LogReading(step=400), "log", 1.0)
    assert course.row()["train_step"] == 400.0


def test_what_was_learned_from_before_is_not_shown() -> None:
    course = RankCourse(1)
    course.learn(LogReading(step=100, loss=1.0), "log", 0.0)
    assert course.row() == {}
    course.read_line(LogReading(step=110, loss=2.0, step_s=1.0), "log", 1.0)
    course.read_line(LogReading(step=111, loss=13.0, step_s=1.0), "log", 2.0)
    assert course.row()["train_loss"] == pytest.approx(3.0)


numbers = st.none() | st.floats(width=32) | st.sampled_from([math.nan, math.inf, 1e308])
said = st.builds(
    LogReading,
    step=st.none() | st.integers(-5, 10**13),
    step_s=numbers,
    loss=numbers,
    tokens_per_second=numbers,
    job_tokens_per_second=numbers,
    stamp_s=st.none() | st.floats(-1e12, 1e12),
)


@given(st.lists(st.tuples(said, st.integers(0, 30)), max_size=40))
def test_any_readings_make_rows_without_nan(items: list[tuple[LogReading, int]]) -> None:
    course = RankCourse(8)
    for at, (reading, source) in enumerate(items):
        course.read_line(reading, source, float(at))
        if at % 3 == 0:
            assert not any(math.isnan(value) for value in course.row().values())
    assert not any(math.isnan(value) for value in course.row().values())


def test_who_is_gone_says_once_more_what_is_new() -> None:
    ranks, rank = RankCourses(), process(0)
    ranks.update_processes([rank], 0.0)
    course = ranks.of(rank)
    assert course is not None
    course.read_line(LogReading(step=1), "log", 0.0)
    assert ranks.rows(set(), Drops()) == {0: {"train_step": 1.0}}
    course.read_line(LogReading(step=2, loss=1.0), "log", 1.0)
    ranks.update_processes([], 1.0)
    assert ranks.rows(set(), Drops()) == {0: {"train_step": 2.0, "train_loss": 1.0}}
    assert ranks.rows(set(), Drops()) == {}
    ranks.update_processes([], LINGER_S + 0.1)
    assert ranks.of(rank) is None


def test_where_two_claim_a_device_the_newest_attempt_has_it() -> None:
    ranks, drops = RankCourses(), Drops()
    for attempt in (1, 0):
        ranks.update_processes([process(0), process(0, attempt=1)], 0.0)
        course = ranks.of(process(0, attempt=attempt))
        assert course is not None
        course.read_line(LogReading(step=10 + attempt), "log", 0.0)
    assert ranks.rows(set(), drops) == {0: {"train_step": 11.0}}
    assert drops.snapshot() == {"rank_device_conflicts": 1}
    assert ranks.rows({0}, drops) == {}


def words(text: str) -> LastWords:
    return LastWords(LogLine(""), "traceback", lines=[text])


def test_an_error_is_told_once_and_only_when_it_has_ended_the_program() -> None:
    alive = {100}
    errors, rank = EndedByError(lambda pid: pid in alive), process(0)
    errors.record_error(rank, words("ValueError: first"), 5.0, 0.0, uncaught=False)
    assert errors.ended([rank], SETTLED_S + 1.0) == []
    errors.record_error(rank, words("RuntimeError: token=abcdef " + "x" * 5_000), 6.0, 1.5, uncaught=False)
    alive.clear()
    (event,) = errors.ended([rank], 2.0)
    assert (event.time_s, event.kind, event.device) == (6.0, "training_error", 0)
    assert event.attributes["text"].startswith("RuntimeError: token=[redacted]")
    assert len(event.attributes["text"]) == 2_048
    errors.record_error(rank, words("another"), 7.0, 3.0, uncaught=False)
    assert errors.ended([rank], 4.0) == []


def test_an_error_and_what_it_was_raised_for_fit_together() -> None:
    errors, rank = EndedByError(lambda _pid: False), process(0)
    errors.record_error(rank, words("ConnectionError: " + "x" * 5_000), 5.0, 0.0, uncaught=False)
    errors.record_error(rank, words("ValueError: " + "y" * 5_000), 5.0, 0.0, uncaught=False)
    (event,) = errors.ended([rank], 1.0)
    before, after = event.attributes["text"].split("\nTraceback (most recent call last):\n")
    assert (before[:17], after[:12]) == ("ConnectionError: ", "ValueError: ")
    assert len(event.attributes["text"]) <= 2_048


def test_an_error_that_was_caught_is_not_told() -> None:
    errors, rank = EndedByError(lambda _pid: False), process(0)
    errors.record_error(rank, words("ValueError: caught"), 5.0, 0.0, uncaught=False)
    errors.note_step(rank)
    assert errors.ended([rank], 1.0) == []


def test_an_uncaught_error_of_a_process_that_lives_on_is_told_after_a_while() -> None:
    errors, rank = EndedByError(lambda _pid: True), process(0)
    errors.record_error(rank, words("ValueError: hangs at exit"), 5.0, 0.0, uncaught=True)
    assert errors.ended([rank], SETTLED_S - 1.0) == []
    assert len(errors.ended([rank], SETTLED_S)) == 1
