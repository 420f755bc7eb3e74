from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from eagle_eye.agent.collector import Observed
from eagle_eye.agent.training_logs.followed_logs import (
    ACTIVE_S,
    FILES_MAX,
    LINES_MAX,
    LINGER_S,
    LOOK_S,
    UNKNOWN_BYTES,
    UNKNOWN_EVERY,
)
from tests.agent.fakes import REPOSITORY, FakeClock
from tests.agent.training_log_site import FRAME, HEADER, Site, append, iteration, kinds


@pytest.fixture
def site(tmp_path: Path, clock: FakeClock) -> Site:
    return Site(tmp_path, clock)


def test_a_ranks_own_output_is_followed_without_any_configuration(site: Site) -> None:
    site.runs(*range(8))
    log = site.log()
    site.writes_to(7, log)
    agent = site.agent()
    assert site.collect(agent) == Observed()
    append(log, iteration(10))
    row = {"train_step": 10.0, "train_step_seconds": 2.0, "train_loss": 4.0, "train_grad_norm": 1.5}
    assert site.collect(agent).devices == {7: row}
    assert site.collect(agent).devices == {7: row}
    assert agent.steps.keys() == {7}


def test_what_a_log_held_before_us_is_not_told(site: Site) -> None:
    log = site.log(text=iteration(500, "1.0E+00") + HEADER + FRAME + "ValueError: of the attempt before\n")
    site.runs(0, size=1)
    site.writes_to(0, log)
    agent = site.agent("*.log")
    site.alive.clear()
    assert site.collect(agent) == Observed()
    append(log, iteration(400))
    assert site.collect(agent).devices[0]["train_step"] == 400.0


def test_logs_that_waited_for_a_job_to_start_are_not_new(site: Site) -> None:
    log = site.log(text=iteration(500))
    agent = site.agent("*.log")
    site.collect(agent)
    site.runs(0, size=1)
    assert site.collect(agent).devices == {}
    append(log, iteration(400))
    assert site.collect(agent).devices[0]["train_step"] == 400.0


def test_the_next_attempt_in_the_same_log_is_the_next_attempts(site: Site) -> None:
    site.runs(7)
    log = site.log()
    site.writes_to(7, log)
    agent = site.agent("*.log")
    site.collect(agent)
    append(log, iteration(10))
    site.collect(agent)
    site.ends()
    site.collect(agent, LINGER_S + LOOK_S)
    site.runs(7, attempt=1)
    site.collect(agent)
    append(log, iteration(4))
    assert site.collect(agent).devices[7]["train_step"] == 4.0


def test_a_log_that_appears_later_is_read_from_its_beginning(site: Site) -> None:
    site.runs(0, size=1)
    agent = site.agent("*.log")
    site.collect(agent)
    log = site.log("new.log", iteration(1))
    assert site.collect(agent, LOOK_S).devices[0]["train_step"] == 1.0
    log.rename(site.folder / "old.txt")
    append(site.folder / "old.txt", iteration(2))
    site.log("new.log", iteration(3))
    assert site.collect(agent, 1.0).devices[0]["train_step"] == 2.0
    assert site.collect(agent, LOOK_S).devices[0]["train_step"] == 3.0


def test_a_log_on_a_shared_filesystem_is_told_by_one_node(site: Site, tmp_path: Path, clock: FakeClock) -> None:
    (tmp_path / "second").mkdir()
    other = Site(tmp_path / "second", clock)
    other.folder = site.folder
    site.runs(*range(8), size=16)
    other.runs(*range(8, 16), size=16)
    log = site.log()
    agents = [site.agent("*.log"), other.agent("*.log")]
    for place, agent in zip((site, other), agents, strict=True):
        place.collect(agent)
    append(log, iteration(10) + "saving checkpoint at iteration      10 to /ckpt\n")
    append(log, "[rank12]: " + HEADER)
    for line in (FRAME + "ValueError: of rank 12\n").splitlines():
        append(log, f"[rank12]: {line}\n")
    other.alive.clear()
    first, second = site.collect(agents[0]), other.collect(agents[1])
    assert (first.devices, kinds(first.events)) == ({}, ["checkpoint_begin"])
    assert second.devices.keys() == {7}
    assert [(event.kind, event.device) for event in second.events] == [("training_error", 4)]
    assert first.problem == second.problem == ""


def test_logs_of_other_jobs_are_left_aside_where_the_pattern_names_the_job(site: Site) -> None:
    site.runs(0, size=1, job="ours")
    ours, theirs = site.log("ours/a.log"), site.log("theirs/a.log")
    agent = site.agent("{job}/*.log")
    site.collect(agent)
    append(ours, iteration(5))
    append(theirs, iteration(900))
    assert site.collect(agent).devices[0]["train_step"] == 5.0


def test_a_line_that_nobody_can_attribute_is_counted_and_named(site: Site) -> None:
    site.runs(0, 1, size=2)
    log = site.log("shared.log")
    agent = site.agent("*.log")
    site.collect(agent)
    append(log, HEADER + FRAME + "ValueError: of whom?\n")
    observed = site.collect(agent)
    assert site.drops.snapshot() == {"training_log_unattributed": 1}
    assert "shared.log: nothing says which rank wrote a line" in observed.problem
    assert site.collect(agent, 61.0).problem == ""


def test_checkpoints_and_evaluations_have_a_beginning_and_an_end(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    append(log, iteration(10) + "saving checkpoint at iteration      10 to /ckpt in torch_dist format\n")
    (begin,) = site.collect(agent).events
    assert (begin.kind, begin.attributes) == ("checkpoint_begin", {"step": 10})
    append(log, "  successfully saved checkpoint from iteration      10 to /ckpt [ t 1/2, p 1/4 ]\n")
    assert kinds(site.collect(agent).events) == ["checkpoint_end"]
    append(log, "saving checkpoint at iteration      20 to /ckpt in torch_dist format\n")
    assert kinds(site.collect(agent).events) == ["checkpoint_begin"]
    append(log, iteration(21))
    assert kinds(site.collect(agent).events) == ["checkpoint_end"]
    append(log, iteration(22))
    assert site.collect(agent).events == []


def test_stdout_and_stderr_of_one_process_are_one_programs(site: Site) -> None:
    raw = (REPOSITORY / "tests/data/training_logs/hugging_face_4.57.log").read_text(encoding="utf-8")
    lines = raw.replace("\r", "\n").splitlines(keepends=True)
    site.runs(0, size=1)
    out, errors = site.log("out"), site.log("err")
    site.writes_to(0, out)
    site.writes_to(0, errors, 2)
    agent = site.agent()
    site.collect(agent)
    reported: list[str] = []
    for line in lines:
        append(out if line.startswith("{") else errors, line)
        reported += kinds(site.collect(agent).events)
    assert reported == ["eval", "train", "checkpoint_begin", "checkpoint_end"]
    row = site.collect(agent).devices[0]
    assert (row["train_step"], row["train_loss"]) == (60.0, math.inf)


def test_a_bars_rate_is_not_taken_for_the_pace(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    append(log, "  2%|#  | 10/500 [00:20<15:00, 80.00s/it]\n{'loss': 2.3, 'learning_rate': 4.5e-05, 'epoch': 0.1}\n")
    for step in range(11, 31):
        append(log, f"  5%|#  | {step}/500 [01:40<15:00, 80.00s/it]\n")
        row = site.collect(agent, 2.0).devices[0]
    assert row["train_step_seconds"] == pytest.approx(2.0)


def test_an_evaluation_between_bars_makes_no_step_longer(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    append(log, "  2%|#  | 10/500 [00:20<15:00, 2.00s/it]\n{'loss': 2.3, 'learning_rate': 4.5e-05, 'epoch': 0.1}\n")
    seen = set()
    for step in range(11, 41):
        if step % 10 == 1:
            append(log, " 12%|#  | 1/8 [00:01<00:07, 1.00s/it]\n")
            site.collect(agent, 100.0)
        append(log, f"  5%|#  | {step}/500 [01:40<15:00, 2.00s/it]\n")
        row = site.collect(agent, 2.0).devices[0]
        seen.add(round(row.get("train_step_seconds", 2.0), 3))
    assert seen == {2.0}


def test_batches_of_a_bar_are_no_steps_and_their_loss_is_told(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    for batch in range(238, 244):
        total, bar = (240, "100%|##|") if batch <= 240 else ("?", "|  |")
        append(log, f"Epoch 0: {bar} {batch}/{total} [00:45<00:00,  5.33it/s, v_num=0, train_loss=0.0497]\r")
    row = {"train_loss": pytest.approx(0.0497), "train_log_lines_since_step": 6.0}
    assert site.collect(agent).devices == {0: row}


def test_collectives_of_the_widest_group_are_told(site: Site) -> None:
    site.runs(*range(8))
    log = site.log()
    agent = site.agent("*.log")
    site.collect(agent)
    for group, last in (("PG ID 0 PG GUID 0(default_pg)", 78), ("PG ID 3 PG GUID 5(tensor)", 9_000)):
        said = f"last enqueued NCCL work: {last}, last completed NCCL work: {last - 1}."
        append(log, f"[rank2]:[E302 08:15:02.1 ProcessGroupNCCL.cpp:1895] [{group} Rank 2] Exception, {said}\n")
    assert site.collect(agent).devices[2] == {"nccl_sequence": 78.0, "nccl_completed_sequence": 77.0}


def test_too_many_logs_are_counted_and_named(site: Site) -> None:
    site.runs(0, size=1)
    for number in range(FILES_MAX + 3):
        site.log(f"{number}.log")
    agent = site.agent("*.log")
    assert "3 logs more than 64" in site.collect(agent).problem
    assert site.drops.snapshot() == {"training_log_files_over_limit": 3}
    agent.close()


def test_logs_of_runs_that_ended_long_ago_are_not_opened(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log("old.log")
    site.clock.advance(ACTIVE_S + 1.0)
    agent = site.agent("*.log")
    assert site.collect(agent).problem == ""
    assert agent._logs.all() == []
    append(log, iteration(500))
    os.utime(log, (site.clock.now_s(), site.clock.now_s()))
    assert site.collect(agent, LOOK_S).devices == {}  # it is not new either: who knows which of its lines are
    append(log, iteration(400))
    assert site.collect(agent).devices[0]["train_step"] == 400.0


def test_a_pattern_without_any_file_is_named_while_ranks_run(site: Site) -> None:
    agent = site.agent("none/*.log")
    assert site.collect(agent).problem == ""
    site.runs(0, size=1)
    assert "no file matches" in site.collect(agent).problem


def test_a_configured_log_of_which_nothing_is_understood_is_named(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log("own_trainer.log")
    agent = site.agent("*.log")
    site.collect(agent)
    append(log, "my own words, which nobody knows\n" * 12_300)
    observed = site.collect(agent)
    assert "own_trainer.log: 12,300 lines, none with a step that is understood" in observed.problem
    assert observed.devices == {0: {"train_log_lines_since_step": 12_300.0}}


def test_a_log_that_stops_being_understood_is_named_with_its_last_step(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    append(log, iteration(799) + iteration(800) + "other words\n" * 12_300)
    observed = site.collect(agent)
    assert ": 12,300 lines, none read since step 800; " in observed.problem
    assert observed.devices[0]["train_log_lines_since_step"] == 12_300.0
    append(log, iteration(900))
    observed = site.collect(agent)
    assert (observed.problem, observed.devices[0]["train_log_lines_since_step"]) == ("", 0.0)


def test_a_log_that_names_a_step_seldom_is_understood(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    for step in range(3):
        append(log, iteration(step) + "other words\n" * 2_000)
    site.collect(agent)
    append(log, "other words\n" * 2_000)
    assert site.collect(agent).problem == ""


def test_warnings_beside_a_log_with_steps_are_no_unread_log(site: Site) -> None:
    site.runs(0, size=1)
    out, errors = site.log("out"), site.log("err")
    site.writes_to(0, out)
    site.writes_to(0, errors, 2)
    agent = site.agent()
    site.collect(agent)
    append(out, iteration(1) + iteration(2))
    append(errors, "a warning\n" * 12_300)
    observed = site.collect(agent)
    assert (observed.problem, observed.devices[0].get("train_log_lines_since_step", 0.0)) == ("", 0.0)


def test_a_log_that_is_understood_late_is_still_understood(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    for _ in range(2):
        append(log, "my own words, which nobody knows\n" * (UNKNOWN_BYTES // 40))
        site.collect(agent)
    for step in range(UNKNOWN_EVERY):
        append(log, iteration(step))
        if "train_step" in site.collect(agent).devices[0]:
            break
    append(log, iteration(100))
    assert site.collect(agent).devices[0]["train_step"] == 100.0


def test_more_lines_than_are_parsed_are_counted_and_the_newest_count(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent()
    site.collect(agent)
    append(log, "".join(iteration(step) for step in range(LINES_MAX + 500)))
    assert site.collect(agent).devices[0]["train_step"] == LINES_MAX + 499
    assert site.drops.snapshot() == {"training_log_lines_skipped": 500}


def test_a_log_of_anything_harms_nothing(site: Site) -> None:
    site.runs(0, size=1)
    log = site.log()
    site.writes_to(0, log)
    agent = site.agent("*.log")
    site.collect(agent)
    with log.open("ab") as file:
        file.write(b"\xff\xfe\0" * 10_000 + b"\n" + b"x" * 10_000_000 + b"\n" + os.urandom(100_000) + b"\n")
        file.write(iteration(5).encode())
    assert site.collect(agent).devices[0]["train_step"] == 5.0
    assert site.drops.snapshot()["training_log_bytes_skipped"] > 9_000_000
