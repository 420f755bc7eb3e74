"""The engine on a fake clock: what it says when, and what it must not say."""

from __future__ import annotations

import math

import msgspec
import pytest

from eagle_eye.detectors.types import Verdict, Window
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import block
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.detector_schedule import DetectorSchedule, build_detectors
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.routing import FORGET_JOB_S
from eagle_eye.server.model.records import Job
from tests.server.engine.frames import START_S, Fleet


def faults(judgements: list[Judgement]) -> list[tuple[str, str | None]]:
    return [(v.fault, v.node) for j in judgements for v in j.verdicts]


def test_a_healthy_job_raises_nothing() -> None:
    assert faults(Fleet().run(120)) == []


def test_a_hang_is_reported_when_a_step_is_overdue_and_sure_after_the_floor() -> None:
    fleet = Fleet()
    fleet.run(30)
    fleet.stopped, fleet.silent_s = True, {"n1": 9.0}
    assert faults(fleet.run(2)) == []
    early = [v for j in fleet.run(4) for v in j.verdicts]
    assert {(v.fault, v.node, v.confidence) for v in early} == {("hang", "n1", 0.85)}
    late = [v for j in fleet.run(4) for v in j.verdicts]
    assert (late[-1].node, late[-1].confidence) == ("n1", 0.97)


def test_a_node_that_falls_silent_with_its_job_is_unreachable() -> None:
    fleet = Fleet()
    fleet.run(30)
    fleet.stopped, fleet.mute = True, {"n2"}
    assert faults(fleet.run(12))[-1] == ("node_unreachable", "n2")


def test_a_stopped_agent_of_a_running_job_is_only_silent() -> None:
    fleet = Fleet()
    fleet.run(30)
    fleet.mute = {"n2"}
    said = [v for j in fleet.run(20) for v in j.verdicts]
    assert {v.kinds for v in said} == {frozenset({"silence"})}


def test_late_frames_heal_a_silence() -> None:
    fleet = Fleet()
    fleet.run(30)
    fleet.mute = {"n2"}
    fleet.run(20)
    fleet.mute = set()
    assert faults(fleet.run(5)) == []


def test_nothing_is_said_about_a_job_that_was_cancelled() -> None:
    fleet = Fleet()
    fleet.run(30)
    fleet.declare(0, state="cancelled")
    fleet.stopped, fleet.mute = True, {"n1"}
    assert faults(fleet.run(30)) == []


def test_what_the_launcher_says_of_the_pace_without_a_node_is_known_until_it_says_otherwise() -> None:
    fleet = Fleet()
    fleet.declare(0, pace_left_ratio=0.75)
    assert fleet.run(3)[-1].pace_left_ratio == 0.75
    fleet.declare(0)
    assert fleet.run(3)[-1].pace_left_ratio is None


def test_the_ends_of_the_last_attempts_ranks_are_no_crash_of_the_next() -> None:
    fleet = Fleet()
    fleet.run(30)
    fleet.declare(1)
    fleet.happens("n0", "process_exit", exit_code=-9, rank=0, attempt=0, job="j")
    assert faults(fleet.run(20)) == []


def test_a_gpu_lost_while_its_node_still_names_ranks_of_the_last_attempt_is_lost_to_the_next() -> None:
    fleet = Fleet()
    fleet.run(30)
    fleet.declare(1)
    fleet.attempt = 0
    fleet.now_s += 0.5
    fleet.happens("n1", "xid", code=79)
    assert faults(fleet.run(1)) == [("gpu_lost", "n1")]


def test_what_struck_the_node_before_an_attempt_began_is_not_of_it_on_the_word_of_such_a_frame() -> None:
    fleet = Fleet()
    fleet.run(30)
    fleet.happens("n1", "xid", code=79)
    fleet.now_s += 1.0
    fleet.declare(1)
    fleet.attempt = 0
    assert faults(fleet.run(2)) == []


@pytest.mark.parametrize(("age_s", "found"), [(20.0, []), (-1.0, [("gpu_lost", "n1")])])
def test_what_struck_a_node_before_the_attempt_is_not_of_it_when_a_restarted_server_reads_it_again(
    age_s: float, found: list[tuple[str, str]]
) -> None:
    fleet = Fleet()
    fleet.declare(2)
    fleet.run(5)
    reported = Event(1.0 + fleet.now_s - 5.0 - age_s, "xid", 0, {"code": 79})
    late = msgspec.structs.replace(fleet.frame("n1"), ranks=[], blocks=[], events=[reported])
    fleet.engine.observe(late, fleet.now_s)
    assert faults(fleet.run(1)) == found


def test_frames_of_an_older_attempt_change_nothing() -> None:
    fleet = Fleet()
    fleet.run(10)
    fleet.declare(1)
    fleet.attempt = 0
    fleet.run(10)
    track = next(fleet.engine.tracks())
    assert track.attempt == 1
    assert track.last_step is None
    assert fleet.engine.stale_rows_total > 0


def test_a_new_attempt_begins_with_the_first_rank_that_shows_it() -> None:
    fleet = Fleet()
    fleet.run(10)
    fleet.attempt = 1
    assert fleet.run(1)[0].attempt == 1


def test_a_declared_job_ignores_the_ranks_of_strangers() -> None:
    fleet = Fleet(nodes=3)
    fleet.declare(0, nodes=["n0", "n1"])
    stranger = Fleet(nodes=3)
    stranger.engine = fleet.engine
    stranger.engine.observe(stranger.frame("n2"), START_S)
    assert next(fleet.engine.tracks()).nodes == ("n0", "n1")


def test_a_stranger_cannot_end_a_declared_attempt() -> None:
    fleet = Fleet(nodes=3)
    fleet.declare(0, nodes=["n0", "n1"])
    stranger = Fleet(nodes=3)
    stranger.attempt = 7
    fleet.engine.observe(stranger.frame("n2"), START_S)
    assert next(fleet.engine.tracks()).attempt == 0
    assert fleet.engine.drops()["not_member"] == 1


def of_node(name: str, state: str = "running") -> Job:
    return Job(job=name, attempt=0, state=state, ranks=[], restart_owner="", updated_s=START_S, nodes=["n0"])


def test_a_job_that_begins_may_push_out_an_older_one_of_the_same_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.server.engine.engine.JOBS_MAX", 1)
    fleet = Fleet()
    frame = msgspec.structs.replace(fleet.frame("n0"), ranks=[])
    for name in ("older", "newer"):
        fleet.engine.observe_job(of_node(name))
        fleet.engine.observe(frame, START_S)
    assert [track.job for track in fleet.engine.tracks()] == ["newer"]


def test_a_job_that_no_agent_ever_spoke_of_is_forgotten_a_day_after_its_end() -> None:
    fleet = Fleet()
    fleet.engine.observe_job(of_node("again", state="completed"))
    frame = msgspec.structs.replace(fleet.frame("n0"), ranks=[], job="again")
    fleet.engine.tick(START_S + FORGET_JOB_S)
    fleet.engine.observe(frame, START_S)
    assert not list(fleet.engine.tracks()), "its scheduler says that it is over"
    fleet.engine.tick(START_S + FORGET_JOB_S + 1)
    fleet.engine.observe(msgspec.structs.replace(frame, job="other"), START_S)
    fleet.engine.observe(frame, START_S)
    assert {track.job for track in fleet.engine.tracks()} == {"other", "again"}


def test_an_observer_that_did_not_watch_blames_nobody() -> None:
    fleet = Fleet()
    fleet.run(30)
    fleet.now_s += 600
    fleet.engine.resume_watching(fleet.now_s)
    assert faults(fleet.engine.tick(fleet.now_s)) == []


def test_order_of_arrival_does_not_matter() -> None:
    reported, shuffled = Fleet(), Fleet()
    frames = []
    for _ in range(30):
        reported.now_s += 1
        reported.step += 1
        frames += [(reported.frame(node), reported.now_s) for node in reported.nodes]
    for frame, received_s in frames:
        reported.engine.observe(frame, received_s)
    for frame, received_s in reversed(frames):
        shuffled.engine.observe(frame, received_s)
    here = reported.engine.window(next(reported.engine.tracks()), reported.now_s, 0.0)
    there = shuffled.engine.window(next(shuffled.engine.tracks()), reported.now_s, 0.0)
    assert here.times_s.tolist() == there.times_s.tolist()
    names = [s.node for s in there.series]
    for i, series in enumerate(here.series):
        column = names.index(series.node)
        assert here.device["train_step"][:, i].tolist() == there.device["train_step"][:, column].tolist()


def test_a_straggler_and_its_onset() -> None:
    fleet = Fleet(nodes=4)
    fleet.run(40)
    fleet.compute_s = {"n1": 0.95}
    began_s = fleet.now_s
    verdicts = [v for j in fleet.run(25) for v in j.verdicts]
    assert verdicts[0].node == "n1"
    assert abs(verdicts[0].onset_s - began_s) <= 2


def test_corruption_before_the_reduction_names_the_node() -> None:
    fleet = Fleet()
    fleet.run(20)
    fleet.local_norm = {"n2": math.inf}
    fleet.run(1)
    fleet.loss, fleet.local_norm = math.inf, dict.fromkeys(fleet.nodes, math.nan)
    assert faults(fleet.run(5))[0] == ("silent_data_corruption", "n2")


def test_a_detector_with_a_bug_is_blind_and_silences_nobody() -> None:
    class Broken:
        name = "broken"

        def detect(self, window: Window) -> list[Verdict]:
            raise ZeroDivisionError("float division by zero")

    fleet = Fleet()
    fleet.run(30)
    window = fleet.engine.window(next(fleet.engine.tracks()), fleet.now_s, 0.0)
    verdicts, blind = DetectorSchedule((Broken(), *build_detectors(fleet.engine.settings))).judge_window(window)
    assert blind["broken"] == "failed: ZeroDivisionError: float division by zero"
    assert "straggler" not in blind
    assert verdicts == []


def test_a_frame_sent_early_does_not_change_the_interval() -> None:
    fleet = Fleet()
    fleet.run(5)
    early = msgspec.structs.replace(fleet.frame("n0"), blocks=[], interval_s=0.1)
    fleet.engine.observe(early, fleet.now_s)
    fleet.declare(1)
    fleet.run(5)
    assert next(fleet.engine.tracks()).interval_s == 1.0


def test_the_last_row_of_a_rank_that_is_gone_is_no_word_of_the_next_attempt() -> None:
    fleet = Fleet()
    fleet.run(20)
    fleet.declare(1)
    fleet.attempt, fleet.loss = 0, math.inf
    fleet.run(1)  # frames that name the ranks of attempt 0
    unnamed = msgspec.structs.replace(fleet.frame("n0"), ranks=[])
    fleet.engine.observe(unnamed, fleet.now_s)  # and one that names no rank at all
    fleet.attempt, fleet.loss = 1, 2.0
    assert faults(fleet.run(20)) == []


def test_hardware_metrics_need_no_rank() -> None:
    fleet = Fleet()
    fleet.run(2)
    idle = {0: {"gpu_temperature_celsius": 40.0, "train_loss": 1.0}}
    frame = msgspec.structs.replace(fleet.frame("n0"), ranks=[], blocks=[block(Scope.DEVICE, idle)])
    fleet.engine.observe(frame, fleet.now_s)
    latest = next(fleet.engine.tracks()).latest()
    assert latest["gpu_temperature_celsius"]["n0", 0] == 40.0
    assert latest["train_loss"]["n0", 0] == 2.0


def test_pauses_of_a_phase_are_learned() -> None:
    fleet = Fleet()
    fleet.run(30)
    fleet.happens("n0", "phase", name="eval", rank=0)
    fleet.stopped = True
    fleet.run(7)
    fleet.happens("n0", "phase", name="train", rank=0)
    fleet.stopped = False
    fleet.run(2)
    window = fleet.engine.window(next(fleet.engine.tracks()), fleet.now_s, 0.0)
    assert [pause.phase for pause in window.pauses] == ["eval"]


@pytest.mark.parametrize("state", ["completing", "suspended"])
def test_a_job_that_its_scheduler_stops_is_no_hang_until_it_runs_again_and_has_made_a_step(state: str) -> None:
    fleet = Fleet()
    fleet.run(30)
    fleet.declare(0)
    fleet.run(30)
    fleet.declare(0, state=state)
    fleet.stopped = True
    assert faults(fleet.run(60)) == []
    fleet.declare(0)
    assert faults(fleet.run(60)) == []  # it starts, and its rows repeat the last step
    fleet.stopped, fleet.step = False, 20.0  # from a checkpoint
    assert faults(fleet.run(30)) == []
    fleet.stopped, fleet.silent_s = True, {"n1": 9.0}
    assert "hang" in {fault for fault, _ in faults(fleet.run(15))}


def test_a_job_that_runs_again_and_never_makes_a_step_hangs_after_the_starts_deadline() -> None:
    fleet = Fleet()
    fleet.declare(0)
    fleet.run(60)
    fleet.declare(0, state="completing")
    fleet.stopped = True
    fleet.run(5)
    fleet.declare(0)
    assert "hang" in {fault for fault, _ in faults(fleet.run(140))}
