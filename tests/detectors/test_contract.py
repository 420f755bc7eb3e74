"""What holds for every detector: pure, deterministic, indifferent to order and clock, never sure of nothing."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.detectors.types import Blind, Detector, Series, Verdict, Window
from eagle_eye.server.engine.detectors import build_detectors
from eagle_eye.server.engine.settings import DetectionSettings
from tests.detectors import courses, slow_stories
from tests.detectors.tiny_model import tiny_model
from tests.detectors.windows import NOW_S, Story

SETTINGS = DetectionSettings(silent_floor_s=5, rank_silent_floor_s=5, hang_floor_s=10, straggler_floor_s=10)
ALL = build_detectors(SETTINGS, tiny_model())
PASS_S_MAX = 0.1  # of CPU for 4,096 series: many times what it takes, and far below what a loop over series would


def healthy() -> Story:
    return Story()


def hanging() -> Story:
    story = Story().standstill(20)
    story.silent_s[story.column("n1")] = 20.0
    return story


def unreachable() -> Story:
    story = Story().standstill(20)
    story.heard_s[1] = NOW_S - 20
    return story


def crashed() -> Story:
    return Story().exit("n1", -11, before_s=5).exit("n0", 1, 5, "RuntimeError: Connection closed by peer")


def slow() -> Story:
    story = Story()
    story.device["train_compute_seconds"][20:, 1] *= 2
    story.device["nccl_collective_seconds"][20:, 1] *= 0.1
    return story


def corrupt() -> Story:
    story = Story()
    story.device["train_local_grad_norm"][-5, 1] = np.inf
    story.device["train_loss"][-4:, :] = np.inf
    return story


def failing_port() -> Story:
    story = Story(nodes=8).complete()
    story.device["nccl_collective_seconds"][-20:] += 0.2
    story.device["train_step_seconds"][-20:] += 0.2
    story.link["link_pfc_tx_pause_packets_per_second"][-20:, 5] = 5_000
    return story


def congested() -> Story:
    story = Story(nodes=8).complete()
    story.device["nccl_collective_seconds"][-20:] += 0.2
    story.device["train_step_seconds"][-20:] += 0.2
    story.node["node_pfc_rx_pause_packets_per_second"][-20:] = 5_000
    return story


def cut_off() -> Story:
    story = Story(nodes=8).complete().standstill(20)
    story.link["link_up"][-20:, 5] = 0
    return story


def switch_lost() -> Story:
    story = Story(nodes=8).complete().standstill(20)
    story.link["link_up"][-20:, ::2] = 0
    return story


def starved() -> Story:
    story = Story(nodes=8).complete().standstill(20)
    story.node["node_iowait_ratio"][-20:] = 0.5
    return story


def throttling() -> Story:
    return slow_stories.hot(slow_stories.job(nodes=4, gpus=2, rows=60))


def power_capped() -> Story:
    return slow_stories.capped(slow_stories.job(nodes=4, gpus=2, rows=60))


def slow_memory() -> Story:
    story = slow_stories.job(nodes=4, gpus=2, rows=60)
    story.device["gpu_memory_clock_hertz"][-20:, 5] *= 0.7
    story.device["gpu_memory_temperature_celsius"][-20:, 5] = 99.0
    return story


def narrow_link() -> Story:
    story = slow_stories.longer_steps(slow_stories.job(nodes=4, gpus=2, rows=60))
    story.device["gpu_pcie_link_width"][-20:, 5] = 4
    return story


def lost_nvlinks() -> Story:
    story = slow_stories.longer_steps(slow_stories.job(nodes=4, gpus=2, rows=60))
    story.device["gpu_nvlinks_active"][-20:, 5] = 12
    return story


def contended() -> Story:
    story = slow_stories.job(nodes=4, gpus=2, rows=60)
    story.node["node_cpu_pressure_ratio"][-20:, 1] = 0.6
    story.device["gpu_utilization_ratio"][-20:, story.column("n1")] = 0.8
    return story


def lost_gpu() -> Story:
    return Story().complete().standstill(3).happened("xid", "n1", 3, 0, code=79)


def failing_memory() -> Story:
    story = Story().complete().standstill(3)
    story.device["gpu_ecc_uncorrected_total"][-2:, 1] = 1
    return story


def deaf_gpu() -> Story:
    story = Story(gpus=2).complete().standstill(20)
    for name, values in story.device.items():
        if name.startswith("gpu_"):
            values[-20:, 3] = np.nan
    return story


def lost_switch_port() -> Story:
    story = Story().complete().standstill(5).happened("sxid", "n1", 5, code=20034)
    return story.happened("xid", "n1", 5, 0, code=74)


def panicked() -> Story:
    story = Story().complete().standstill(20).happened("kernel_panic", "n1", 20)
    story.heard_s[1] = NOW_S - 20
    return story


def out_of_memory() -> Story:
    return Story().complete().standstill(20).happened("oom_kill", "n1", 20, process="python3")


def ageing() -> Story:
    story = Story().complete().happened("xid", "n2", 10, 0, code=136)
    story.device["gpu_remap_pending"][-10:, 1] = 1
    return story


FACTS = (lost_gpu, failing_memory, deaf_gpu, lost_switch_port, panicked, out_of_memory, ageing)
NETWORK = (failing_port, congested, cut_off, switch_lost, starved)
CAUSES = (throttling, power_capped, slow_memory, narrow_link, lost_nvlinks, contended)


def unlike() -> Story:
    story = Story(nodes=8).complete()
    story.node["node_memory_used_ratio"][-40:, 1] += 0.3
    story.device["gpu_power_watts"][-40:, 1] -= 150.0
    return story


STORIES = (unlike, healthy, hanging, unreachable, crashed, slow, corrupt, *FACTS, *NETWORK, *CAUSES, *courses.STORIES)


# Windows are read-only: one of each is enough for all detectors.
@cache
def plain(story: Callable[[], Story]) -> Window:
    return story().window()


@cache
def a_day_later(story: Callable[[], Story]) -> Window:
    later = story()
    later.times_s = later.times_s + 86_400.0
    later.heard_s = later.heard_s + 86_400.0
    later.started_s += 86_400.0
    later.watching_since_s += 86_400.0
    later.events = [type(e)(e.time_s + 86_400.0, e.node, e.device, e.kind, e.attributes) for e in later.events]
    return later.window(now_s=NOW_S + 86_400.0)


@cache
def turned(story: Callable[[], Story]) -> Window:
    turned = story()
    turned.device = {name: values[:, ::-1].copy() for name, values in turned.device.items()}
    turned.series = tuple(reversed(turned.series))
    turned.silent_s = turned.silent_s[::-1]
    turned.phase_since_s = turned.phase_since_s[::-1]
    return turned.window()


def say(detector: Detector, window: Window) -> list[Verdict] | str:
    try:
        return detector.detect(window)
    except Blind as reason:
        return str(reason)


def shape_of(said: list[Verdict] | str) -> object:
    return said if isinstance(said, str) else [(v.fault, v.node, round(v.confidence, 6)) for v in said]


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("detector", ALL, ids=lambda d: d.name)
class TestEveryDetector:
    def test_says_the_same_twice(self, detector: Detector, story: Callable[[], Story]) -> None:
        assert say(detector, plain(story)) == say(detector, plain(story))

    def test_does_not_depend_on_the_clock(self, detector: Detector, story: Callable[[], Story]) -> None:
        assert shape_of(say(detector, plain(story))) == shape_of(say(detector, a_day_later(story)))

    def test_does_not_depend_on_the_order_of_series(self, detector: Detector, story: Callable[[], Story]) -> None:
        assert shape_of(say(detector, turned(story))) == shape_of(say(detector, plain(story)))

    def test_accuses_only_members(self, detector: Detector, story: Callable[[], Story]) -> None:
        window = plain(story)
        said = say(detector, window)
        accused = {v.node for v in said if v.node} if not isinstance(said, str) else set()
        assert accused <= set(window.nodes)

    def test_says_only_documented_faults_with_evidence(self, detector: Detector, story: Callable[[], Story]) -> None:
        said = say(detector, plain(story))
        for verdict in [] if isinstance(said, str) else said:
            assert verdict.fault in BY_NAME
            assert verdict.evidence
            assert 0 <= verdict.confidence <= 1
            assert verdict.onset_s <= NOW_S


@pytest.mark.parametrize("story", [story for story in STORIES if story is not healthy])
def test_every_story_is_told_by_somebody(story: Callable[[], Story]) -> None:
    said = [say(detector, plain(story)) for detector in ALL]
    assert any(isinstance(one, list) and one for one in said)


@pytest.mark.parametrize("detector", ALL, ids=lambda d: d.name)
class TestEveryDetectorOnLittle:
    def test_a_healthy_job_is_healthy(self, detector: Detector) -> None:
        assert say(detector, Story().complete().window()) == []

    def test_a_pass_over_a_large_job_costs_little(self, detector: Detector) -> None:
        window = Story(nodes=512, gpus=8, rows=40).complete().window()
        say(detector, window)
        started_s = time.process_time()
        say(detector, window)
        assert time.process_time() - started_s < PASS_S_MAX

    def test_accuses_nobody_when_nothing_was_observed(self, detector: Detector) -> None:
        empty = Story(rows=1)
        empty.device = {}
        empty.times_s = empty.times_s[:0]
        said = say(detector, empty.window())
        assert said == [] or isinstance(said, str)

    def test_a_job_of_one_rank_is_never_accused_of_slowness(self, detector: Detector) -> None:
        said = say(detector, Story(nodes=1).window())
        assert said == [] or isinstance(said, str)

    def test_pickles(self, detector: Detector) -> None:
        assert pickle.loads(pickle.dumps(detector)) == detector


def test_a_series_of_another_role_is_no_peer() -> None:
    story = Story(nodes=4)
    story.device["train_compute_seconds"][:, 3] *= 2
    story.device["nccl_collective_seconds"][:, 3] *= 0.1
    straggler = next(d for d in ALL if d.name == "straggler")
    assert straggler.detect(story.window(role_of=np.array([0, 0, 0, 1]))) == []


def test_series_print_as_people_say_them() -> None:
    assert str(Series("node17", 3)) == "node17/gpu3"
