"""What each detector finds, and what it must not take for a fault: fires and quiet in pairs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eagle_eye.detectors.types import Blind, Detector, Pause, Verdict, Window
from eagle_eye.server.engine.detector_schedule import build_detectors
from eagle_eye.server.engine.settings import DetectionSettings
from tests.detectors.windows import NOW_S, Story

SETTINGS = DetectionSettings(
    silent_floor_s=5,
    silent_alone_s=15,
    rank_silent_floor_s=5,
    hang_floor_s=10,
    straggler_floor_s=10,
    crash_settle_s=1,
)
DETECTORS: dict[str, Detector] = {d.name: d for d in build_detectors(SETTINGS)}
ECHO = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41524"


def detect(name: str, window: Window) -> list[Verdict]:
    return DETECTORS[name].detect(window)


def only(verdicts: list[Verdict]) -> Verdict:
    assert len(verdicts) == 1, verdicts
    return verdicts[0]


class TestNodeSilent:
    def test_names_a_silent_node_of_a_stopped_job(self) -> None:
        story = Story().standstill(20)
        story.heard_s[2] = NOW_S - 20
        verdict = only(detect("node_silent", story.window()))
        assert (verdict.node, verdict.fault) == ("n2", "node_unreachable")
        assert verdict.kinds == {"silence", "standstill"}

    def test_what_is_not_sure_yet_is_already_of_the_stop(self) -> None:
        story = Story().standstill(8)  # of steps of half a second: longer than a pause only from 10 s on
        story.heard_s[2] = NOW_S - 8
        verdict = only(detect("node_silent", story.window()))
        assert (verdict.confidence, sorted(verdict.kinds)) == (0.5, ["silence", "standstill"])
        assert verdict.summary == "n2 has been silent for 8.0 s without a goodbye, and the job makes no step"

    def test_a_silence_apart_from_the_stop_does_not_say_that_the_job_goes_on(self) -> None:
        story = Story().standstill(50)
        story.heard_s[2] = NOW_S - 16
        assert only(detect("node_silent", story.window())).summary.endswith("but the job stopped at another time")

    def test_the_others_may_wait_for_a_rank_that_is_heard(self) -> None:
        story = Story().standstill(14)
        story.heard_s[2] = NOW_S - 14
        story.device["nccl_sequence"][-14:, 1] -= 1  # n1 has not entered what n0 and n3 wait in
        assert detect("node_silent", story.window()) == []
        story.heard_s[2] = NOW_S - 20  # SETTINGS.silent_alone_s is over
        assert "standstill" in only(detect("node_silent", story.window())).kinds

    def first_steps(self, still: int) -> Story:
        """Two steps, and then none, with n2 silent and all others in a collective."""
        story = Story(rows=still + 2).standstill(still)
        story.heard_s[2] = NOW_S - still
        return story

    def test_a_node_that_falls_silent_in_the_first_steps_has_stopped_the_job_from_the_floor_on(self) -> None:
        verdict = only(detect("node_silent", self.first_steps(12).window()))
        assert (verdict.node, verdict.confidence) == ("n2", 0.97)
        assert verdict.kinds == {"silence", "standstill"}
        assert detect("node_silent", self.first_steps(9).window()) == []

    def test_while_a_rank_may_compile_in_the_first_steps_a_silent_node_is_not_the_reason(self) -> None:
        story = self.first_steps(30)
        for name in ("nccl_sequence", "nccl_completed_sequence"):
            story.device[name][:, 1] = 8  # n1 is in no collective
        assert only(detect("node_silent", story.window())).kinds == {"silence"}

    def test_pauses_as_long_as_the_jobs_own_excuse_a_silent_node_in_the_first_steps(self) -> None:
        story = self.first_steps(14)
        story.pauses = [Pause("", 12.0)]
        assert detect("node_silent", story.window()) == []

    @pytest.mark.parametrize(("power_watts", "found"), [(230.0, 1), (90.0, 0)])
    def test_a_stage_that_waits_for_the_silent_one_lags_too_and_its_gpu_spins_as_the_others_do(
        self, power_watts: float, found: int
    ) -> None:
        story = Story().hardware().standstill(14).waiting(14)
        story.heard_s[2] = NOW_S - 14
        story.device["nccl_sequence"][-14:, 1] -= 1
        story.device["gpu_power_watts"][-14:, 1] = power_watts
        assert len(detect("node_silent", story.window())) == found

    @pytest.mark.parametrize(("utilization", "found"), [(0.0, 0), (0.99, 1)])
    def test_where_no_collectives_are_counted_a_gpu_that_idles_while_all_others_wait_holds_the_job_up(
        self, utilization: float, found: int
    ) -> None:
        story = Story(nodes=8).hardware().standstill(14).waiting(14)
        story.heard_s[2] = NOW_S - 14
        for name in ("nccl_sequence", "nccl_completed_sequence"):
            del story.device[name]
        story.device["gpu_utilization_ratio"][-14:, 1] = utilization
        story.device["gpu_power_watts"][-14:, 1] = 72.0 if utilization == 0 else 230.0
        assert len(detect("node_silent", story.window())) == found

    def gappy(self, nodes: tuple[int, ...], silent_s: int) -> Window:
        """Nodes that gave nothing for 10 s, half a minute ago; then n2 falls silent with the job."""
        story = Story().standstill(silent_s)
        story.heard_s[2] = NOW_S - silent_s
        for values in story.device.values():
            values[20:29, list(nodes)] = np.nan
        return story.window()

    def test_a_silence_no_longer_than_those_that_just_passed_is_no_news(self) -> None:
        assert detect("node_silent", self.gappy((0, 1), 13)) == []
        assert "standstill" in only(detect("node_silent", self.gappy((0, 1), 16))).kinds

    def test_what_nobody_listened_to_was_no_silence_of_the_nodes(self) -> None:
        gappy = self.gappy((0, 1), 13)
        window = dataclasses.replace(gappy, watching_since_s=float(gappy.times_s[29]))
        assert "standstill" in only(detect("node_silent", window)).kinds

    @pytest.mark.parametrize(("node", "found"), [(0, 1), (2, 0)])
    def test_one_silence_that_passed_elsewhere_is_chance_and_its_own_is_not(self, node: int, found: int) -> None:
        assert len(detect("node_silent", self.gappy((node,), 13))) == found

    def test_silence_alone_is_one_kind_of_evidence(self) -> None:
        story = Story()
        story.heard_s[2] = NOW_S - 20
        assert only(detect("node_silent", story.window())).kinds == {"silence"}

    def paused(self, pause: int) -> Story:
        """No step for 60 s, of which the first was a pause; n2 falls silent in it, 50 s ago."""
        story = Story(rows=120).hardware().standstill(60).waiting(60)
        for name in ("nccl_sequence", "nccl_completed_sequence"):
            story.device[name][-60 : -60 + pause] = story.device[name][-61]
        story.heard_s[2] = NOW_S - 50
        return story

    def test_a_node_that_falls_silent_in_a_pause_is_missed_in_the_next_collective(self) -> None:
        assert "standstill" in only(detect("node_silent", self.paused(20).window())).kinds

    def test_one_that_falls_silent_long_after_all_others_began_to_wait_is_not(self) -> None:
        assert only(detect("node_silent", self.paused(1).window())).kinds == {"silence"}

    def test_a_node_that_was_silent_when_a_rank_elsewhere_died_of_its_own_has_not_stopped_the_job(self) -> None:
        story = Story().exit("n0", 1, 3, "ValueError: bad sample")
        story.heard_s[2] = NOW_S - 7
        assert detect("node_silent", story.window()) == []

    def test_a_node_that_falls_silent_while_the_others_compute_has_not_stopped_them(self) -> None:
        story = Story().hardware().standstill(20)
        story.heard_s[2] = NOW_S - 20
        assert only(detect("node_silent", story.window())).kinds == {"silence"}

    def test_a_node_that_falls_silent_while_the_others_wait_has_stopped_them(self) -> None:
        story = Story().hardware().standstill(20).waiting(19)
        story.heard_s[2] = NOW_S - 20
        assert only(detect("node_silent", story.window())).kinds == {"silence", "standstill"}

    @pytest.mark.parametrize("interval_s", [1.0, 10.0])
    def test_nor_does_memory_that_the_others_poll_while_they_wait(self, interval_s: float) -> None:
        story = Story().hardware().standstill(20).waiting(19)
        story.device["gpu_dram_active_ratio"] = np.full(story.device["gpu_power_watts"].shape, 0.4)
        story.device["gpu_dram_active_ratio"][-19:] = 0.12
        story.heard_s[2] = NOW_S - 20 * interval_s
        window = story.window()
        times_s = NOW_S + interval_s * (window.times_s - NOW_S)
        slower = dataclasses.replace(
            window,
            interval_s=interval_s,
            times_s=times_s,
            node_times_s=times_s,
            advanced_s=NOW_S - 20 * interval_s,
            started_s=float(times_s[0]),
        )
        verdict = only(detect("node_silent", slower))
        assert verdict.node == "n2"
        assert verdict.kinds == {"silence", "standstill"}

    def test_a_silence_that_may_pass_by_itself_is_not_reported_while_the_job_goes_on(self) -> None:
        story = Story()
        story.heard_s[2] = NOW_S - 10
        assert detect("node_silent", story.window()) == []

    def test_a_goodbye_is_not_silence(self) -> None:
        story = Story().standstill(20)
        story.heard_s[2] = NOW_S - 20
        story.farewell[2] = True
        assert detect("node_silent", story.window()) == []

    def test_is_blind_when_most_nodes_are_silent(self) -> None:
        story = Story(nodes=3).standstill(20)
        story.heard_s[:2] = NOW_S - 20
        with pytest.raises(Blind, match="2 of 3 nodes"):
            detect("node_silent", story.window())

    def test_no_silence_is_older_than_our_own_watch(self) -> None:
        story = Story().standstill(20)
        story.heard_s[2] = NOW_S - 3600
        story.watching_since_s = NOW_S - 2
        assert detect("node_silent", story.window()) == []

    def test_a_node_that_died_while_nobody_listened_may_have_made_the_steps_that_were_made_then(self) -> None:
        story = Story().standstill(20)
        story.heard_s[2] = NOW_S - 50  # the others' steps until 20 s ago came late, from their spools
        story.watching_since_s = NOW_S - 15
        assert only(detect("node_silent", story.window())).kinds == {"silence", "standstill"}

    def test_one_that_was_silent_when_the_watch_began_has_not_made_the_steps_after_it(self) -> None:
        story = Story().standstill(20)
        story.heard_s[2] = NOW_S - 50
        story.watching_since_s = NOW_S - 40
        assert only(detect("node_silent", story.window())).kinds == {"silence"}

    def test_dead_peers_count_as_a_stopped_job(self) -> None:
        story = Story().exit("n0", 1, 6, ECHO).exit("n1", 1, 6, ECHO)
        story.heard_s[2] = NOW_S - 6
        assert "standstill" in only(detect("node_silent", story.window())).kinds

    def test_a_job_that_went_on_after_its_silence_had_the_node_with_it(self) -> None:
        story = Story().exit("n0", -11, 2.0)
        story.heard_s[2] = NOW_S - 20
        assert only(detect("node_silent", story.window())).kinds == {"silence"}

    def test_a_node_that_fell_silent_long_after_the_stop_has_not_caused_it(self) -> None:
        story = Story().standstill(50)
        story.heard_s[2] = NOW_S - 16
        assert only(detect("node_silent", story.window())).kinds == {"silence"}

    def hookless(self, idle_rows: int) -> Story:
        story = Story(rows=200).hardware()
        story.device = {name: values for name, values in story.device.items() if name.startswith("gpu_")}
        story.heard_s[2] = NOW_S - max(idle_rows, 16)
        return story.waiting(idle_rows)

    def test_gpus_that_have_stopped_tell_of_a_job_that_reports_nothing_itself(self) -> None:
        verdict = only(detect("node_silent", self.hookless(90).window()))
        assert (verdict.node, "standstill" in verdict.kinds) == ("n2", True)

    def test_gpus_that_rest_for_a_moment_do_not(self) -> None:
        assert only(detect("node_silent", self.hookless(8).window())).kinds == {"silence"}


class TestProcessExit:
    def test_names_the_rank_that_a_signal_killed_among_its_peers_echoes(self) -> None:
        story = Story().exit("n0", 1, 5.0, ECHO).exit("n2", -11, 4.9).exit("n1", 1, 5.1, ECHO)
        verdict = only(detect("process_exit", story.window()))
        assert (verdict.node, verdict.fault) == ("n2", "process_crash")
        assert "SIGSEGV" in verdict.summary

    def test_names_the_rank_whose_program_failed_by_itself(self) -> None:
        story = Story().exit("n0", 1, 5, ECHO).exit("n3", 1, 5, "ValueError: bad sample", goodbye=True)
        assert only(detect("process_exit", story.window())).node == "n3"

    def test_the_same_error_everywhere_accuses_nobody(self) -> None:
        story = Story()
        for node in story.nodes:
            story.exit(node, 1, 5, "TypeError: unsupported operand")
        assert only(detect("process_exit", story.window())).node is None

    def test_a_device_error_names_its_node_among_echoes(self) -> None:
        unavailable = "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
        verdict = only(detect("process_exit", Story().exit("n0", 1, 5, ECHO).exit("n2", 1, 5, unavailable).window()))
        assert (verdict.node, verdict.application) == ("n2", False)
        assert verdict.summary.endswith("its GPU is busy or unavailable")

    def test_a_device_error_everywhere_is_not_the_programs(self) -> None:
        story = Story()
        for node in story.nodes:
            story.exit(node, 1, 5, "RuntimeError: CUDA error: system not yet initialized")
        verdict = only(detect("process_exit", story.window()))
        assert (verdict.node, verdict.application) == (None, False)

    def test_what_nccl_warned_of_is_shown_and_accuses_nobody(self) -> None:
        story = Story().exit("n0", 1, 5, ECHO)
        warned = {"text": "NET/IB: Got completion from peer 10.0.0.7<44206> with status=12"}
        story.events.append(type(story.events[0])(NOW_S - 6, "n2", 4, "nccl_warning", warned))
        verdict = only(detect("process_exit", story.window()))
        assert verdict.node is None
        assert [item.node for item in verdict.evidence if item.metric == "nccl_warning"] == ["n2"]

    def test_waits_for_the_other_ends(self) -> None:
        assert detect("process_exit", Story().exit("n0", -11, 0.5).window()) == []

    def test_waits_for_a_node_that_may_be_silent_before_it_blames_nobody(self) -> None:
        story = Story().exit("n0", 1, 3, ECHO).exit("n1", 1, 3, ECHO).exit("n3", 1, 3, ECHO)
        story.heard_s[2] = NOW_S - 3
        assert detect("process_exit", story.window()) == []

    def test_an_oom_kill_is_out_of_memory(self) -> None:
        story = Story().exit("n1", -9, 5)
        story.events.append(type(story.events[0])(NOW_S - 5, "n1", -1, "oom_kill", {"process": "python"}))
        assert only(detect("process_exit", story.window())).fault == "out_of_memory"

    @pytest.mark.parametrize("code", [0, -15, -2])
    def test_a_planned_end_is_no_crash(self, code: int) -> None:
        assert detect("process_exit", Story().exit("n0", code, 5).window()) == []

    def test_ranks_of_several_nodes_killed_at_once_were_stopped_by_somebody(self) -> None:
        assert detect("process_exit", Story().exit("n0", -9, 5).exit("n2", -9, 5).window()) == []

    def test_one_killed_rank_is_a_crash(self) -> None:
        assert only(detect("process_exit", Story().exit("n2", -9, 5).window())).node == "n2"

    def test_a_goodbye_without_a_readable_exit_code_is_no_crash(self) -> None:
        assert detect("process_exit", Story().exit("n0", None, 5, goodbye=True).window()) == []


class TestHang:
    def test_names_the_node_whose_process_says_nothing(self) -> None:
        story = Story().standstill(20)
        story.silent_s[1] = 20
        verdict = only(detect("hang", story.window()))
        assert verdict.node == "n1"
        assert "rank_silence" in verdict.kinds

    def test_names_the_node_that_lags_in_collectives(self) -> None:
        story = Story().standstill(20)
        story.device["nccl_sequence"][-20:, 3] -= 1
        verdict = only(detect("hang", story.window()))
        assert verdict.node == "n3"
        assert "collective_sequence" in verdict.kinds

    def test_all_waiting_in_the_same_collective_has_no_known_culprit(self) -> None:
        assert only(detect("hang", Story().standstill(20).window())).node is None

    def test_two_lagging_nodes_are_no_culprit(self) -> None:
        story = Story().hardware().standstill(20).waiting(19)
        story.device["nccl_sequence"][-20:, 2:] -= 1
        assert only(detect("hang", story.window())).node is None

    def test_a_standstill_below_the_floor_is_no_hang(self) -> None:
        assert detect("hang", Story().standstill(8).window()) == []

    def test_an_evaluation_is_no_hang(self) -> None:
        story = Story().standstill(20)
        story.phase = ["eval"] * 4
        assert detect("hang", story.window()) == []

    def test_an_evaluation_longer_than_the_jobs_own_is_a_hang(self) -> None:
        story = Story().standstill(20)
        story.phase = ["eval"] * 4
        story.pauses = [Pause("eval", 5.0)]
        assert only(detect("hang", story.window())).fault == "hang"

    def test_the_time_of_an_evaluation_does_not_count_once_it_is_over(self) -> None:
        story = Story().standstill(20)
        story.phase_since_s[:] = NOW_S - 5
        assert detect("hang", story.window()) == []

    def test_a_pause_such_as_the_job_made_before_is_no_hang(self) -> None:
        story = Story().standstill(20)
        story.pauses = [Pause("", 18.0)]
        assert detect("hang", story.window()) == []

    def test_is_blind_while_the_job_starts(self) -> None:
        with pytest.raises(Blind, match="pace"):
            detect("hang", Story(rows=30).standstill(28).window())

    def test_a_start_that_never_ends_is_a_hang_after_its_deadline(self) -> None:
        story = Story()
        story.device["train_step"] = np.full((60, 4), np.nan)
        story.device["nccl_sequence"] = np.ones((60, 4))
        story.started_s = NOW_S - SETTINGS.start_deadline_s - 1
        assert only(detect("hang", story.window())).node is None
        story.started_s = NOW_S - SETTINGS.start_deadline_s + 1
        with pytest.raises(Blind, match="starting"):
            detect("hang", story.window())

    def test_leaves_a_job_that_lost_a_process_to_others(self) -> None:
        assert detect("hang", Story().standstill(20).exit("n0", -11, 15).window()) == []

    def test_is_blind_while_a_node_is_unheard(self) -> None:
        story = Story().standstill(20)
        story.heard_s[1] = NOW_S - 20
        with pytest.raises(Blind, match="not been heard"):
            detect("hang", story.window())

    def test_a_stopped_rank_that_its_peers_wait_for_is_named_beside_a_silent_node(self) -> None:
        story = Story(nodes=6).standstill(20)
        story.device["nccl_sequence"][-20:, 1] -= 1
        story.silent_s[1] = 20
        story.heard_s[2] = NOW_S - 20
        verdict = only(detect("hang", story.window()))
        assert (verdict.node, verdict.confidence) == ("n1", 0.97)

    @pytest.mark.parametrize(("mute_s", "lag"), [(20, 0), (0, 1)])
    def test_one_kind_of_evidence_names_no_rank_beside_a_silent_node(self, mute_s: float, lag: int) -> None:
        story = Story(nodes=6).standstill(20)
        story.device["nccl_sequence"][-20:, 1] -= lag
        story.silent_s[1] = mute_s
        story.heard_s[2] = NOW_S - 20
        with pytest.raises(Blind, match="not been heard"):
            detect("hang", story.window())

    def test_what_a_silent_node_last_said_hides_no_stopped_rank(self) -> None:
        story = Story(nodes=6).standstill(20)
        story.device["nccl_sequence"][-20:, 1] -= 1
        story.silent_s[1] = 20
        story.heard_s[2] = NOW_S - 20
        for name in ("nccl_sequence", "nccl_completed_sequence"):
            story.device[name][-20:, 2] -= 8
        assert only(detect("hang", story.window())).node == "n1"

    def first_steps(self, still: int, mute_s: float = 20, lag: int = 1) -> Story:
        """Two steps, and then none; n1 has not entered the collective that its peers wait in."""
        story = Story(rows=still + 2).standstill(still)
        story.device["nccl_sequence"][-still:, 1] -= lag
        story.silent_s[1] = mute_s
        return story

    def test_a_rank_that_stops_in_the_first_steps_is_named_at_the_floor(self) -> None:
        assert only(detect("hang", self.first_steps(12).window())).node == "n1"
        with pytest.raises(Blind, match="pace"):
            detect("hang", self.first_steps(9).window())

    @pytest.mark.parametrize(("mute_s", "lag"), [(20, 0), (0, 1)])
    def test_one_kind_of_evidence_names_no_rank_in_the_first_steps(self, mute_s: float, lag: int) -> None:
        with pytest.raises(Blind, match="pace"):
            detect("hang", self.first_steps(30, mute_s, lag).window())

    def test_a_rank_that_computes_in_the_first_steps_may_compile(self) -> None:
        story = self.first_steps(30)
        story.device["rank_cpu_seconds_total"] = np.cumsum(np.ones((32, 4)), axis=0)
        with pytest.raises(Blind, match="pace"):
            detect("hang", story.window())


class TestStraggler:
    def slow(self, factor: float, rows: int, late: bool = True) -> Story:
        story = Story()
        story.device["train_compute_seconds"][-rows:, 1] *= factor
        story.device["train_step_seconds"][-rows:] += 0.3 * (factor - 1)
        if late:
            story.device["nccl_collective_seconds"][-rows:, 1] *= 0.1
        return story

    def test_names_a_node_that_computes_longer_and_arrives_last(self) -> None:
        verdict = only(detect("straggler", self.slow(1.5, 20).window()))
        assert verdict.node == "n1"
        assert verdict.kinds == {"compute_time", "collective_arrival", "step_time", "own_history"}
        assert verdict.slowdown_ratio == pytest.approx(0.3, rel=0.2)

    def test_knows_when_it_began(self) -> None:
        verdict = only(detect("straggler", self.slow(2.0, 20).window()))
        assert abs(verdict.onset_s - (NOW_S - 20)) <= 1.0

    def test_without_late_arrival_it_must_last_longer(self) -> None:
        verdict = only(detect("straggler", self.slow(1.5, 20, late=False).window()))
        assert verdict.kinds == {"compute_time", "step_time", "own_history"}
        assert verdict.confidence < 0.9

    def test_a_few_slow_rows_are_no_straggler(self) -> None:
        assert detect("straggler", self.slow(2.0, 4).window()) == []

    def test_a_victim_that_waits_is_no_straggler(self) -> None:
        story = Story()
        story.device["nccl_collective_seconds"][:, 2] *= 5
        assert detect("straggler", story.window()) == []

    def test_noisy_peers_are_no_straggler(self) -> None:
        story = Story()
        noise = np.random.default_rng(1).lognormal(0.0, 0.4, (60, 4))
        story.device["train_compute_seconds"] = 0.3 * noise
        assert detect("straggler", story.window()) == []

    def test_is_blind_without_compute_time(self) -> None:
        story = Story()
        del story.device["train_compute_seconds"]
        with pytest.raises(Blind, match="hook"):
            detect("straggler", story.window())

    def test_is_blind_with_too_few_peers(self) -> None:
        with pytest.raises(Blind, match="comparable"):
            detect("straggler", Story(nodes=2).window())
