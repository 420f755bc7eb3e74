"""What holds for every detector: finds its own fault, pure, indifferent to order and clock, never sure of nothing."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.detectors.types import Blind, Detector, Series, Verdict, Window
from eagle_eye.server.engine.detector_schedule import build_detectors
from eagle_eye.server.engine.settings import DetectionSettings
from tests.detectors import courses, slow_stories
from tests.detectors.tiny_model import tiny_model
from tests.detectors.windows import NOW_S, ROWS, Story

SETTINGS = DetectionSettings(silent_floor_s=5, rank_silent_floor_s=5, hang_floor_s=10, straggler_floor_s=10)
ALL = build_detectors(SETTINGS, tiny_model())
DETECTORS = {detector.name: detector for detector in ALL}
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
    story = Story().complete()
    story.device["gpu_remap_pending"][-10:, 1] = 1
    return story


def retrained_nvlink() -> Story:
    return Story().complete().happened("xid", "n2", 10, 0, code=136)


def unlike() -> Story:
    story = Story(nodes=8).complete()
    story.node["node_memory_used_ratio"][-40:, 1] += 0.3
    story.device["gpu_power_watts"][-40:, 1] -= 150.0
    return story


def failing_nvlink() -> Story:
    text = "NVLink: fatal error detected on link 3"
    return Story(gpus=2).complete().standstill(20).happened("xid", "n1", 20.5, 1, code=74, text=text)


def unconnected() -> Story:
    story = Story()
    story.device = {"gpu_power_watts": np.full((ROWS, 4), 90.0)}
    return story.exit("n1", 1, 5, "RuntimeError: Gloo connectFullMesh failed with no error")


def left_gpu() -> Story:
    """A process has ended in a job without the hook: its GPU's memory is free, and all others wait."""
    story = slow_stories.hookless(Story(gpus=2).complete())
    story.device["gpu_memory_used_bytes"] = np.full((ROWS, 8), 7e10)
    story.device["gpu_memory_used_bytes"][-12:, 3] = 5e8
    return story.waiting(12)


def late_data() -> Story:
    story = Story(nodes=8).complete()
    waits_s = story.device["train_data_wait_seconds"]
    waits_s[-40:, 2] += 0.2
    story.device["train_step_seconds"][-40:] += 0.2
    story.device["nccl_collective_seconds"] = 0.05 + waits_s.max(axis=1, keepdims=True) - waits_s
    return story


def slow_stage() -> Story:
    """Four stages on a node each, the last of which takes a quarter longer than before."""
    story = Story(rows=200)
    story.role_of = np.arange(4)
    compute_s = np.exp(0.01 * np.random.default_rng(4).normal(size=(200, 4))) * [1.0, 1.0, 1.0, 1.4]
    compute_s[-80:, 3] *= 1.25
    story.device["train_step"] = np.repeat(np.arange(200.0)[:, None], 4, axis=1)
    story.device["train_compute_seconds"] = compute_s
    story.device["train_step_seconds"] = np.repeat(compute_s.max(axis=1, keepdims=True), 4, axis=1)
    return story


class Own(NamedTuple):
    """A detector's own fault: a story in which it speaks, and which fault it finds there on which node."""

    detector: str
    story: Callable[[], Story]
    fault: str
    node: str | None


OWN = (
    Own("node_silent", unreachable, "node_unreachable", "n1"),
    Own("switch_down", switch_lost, "switch_down", None),
    Own("network_hang", cut_off, "network_hang", "n2"),
    Own("failed_start", unconnected, "network_hang", "n1"),
    Own("nic_degraded", failing_port, "nic_degraded", "n2"),
    Own("network_congestion", congested, "network_congestion", None),
    Own("storage_stall", starved, "storage_stall", None),
    Own("gpu_lost", lost_gpu, "gpu_lost", "n1"),
    Own("gpu_memory", failing_memory, "gpu_memory_error", "n1"),
    Own("gpu_hang", deaf_gpu, "gpu_hang", "n1"),
    Own("nvswitch", lost_switch_port, "gpu_hang", "n1"),
    Own("device_errors", failing_nvlink, "gpu_hang", "n1"),
    Own("host_errors", panicked, "node_unreachable", "n1"),
    Own("out_of_memory", out_of_memory, "out_of_memory", "n1"),
    Own("process_gone", left_gpu, "process_crash", "n1"),
    Own("early_signs", ageing, "gpu_memory_error", "n1"),
    Own("early_signs", retrained_nvlink, "nvlink_degraded", "n2"),
    Own("process_exit", crashed, "process_crash", "n1"),
    Own("hang", hanging, "hang", "n1"),
    Own("thermal_throttle", throttling, "thermal_throttle", "n2"),
    Own("power_throttle", power_capped, "power_throttle", "n2"),
    Own("slow_memory", slow_memory, "thermal_throttle", "n2"),
    Own("pcie_degraded", narrow_link, "pcie_degraded", "n2"),
    Own("nvlink_degraded", lost_nvlinks, "nvlink_degraded", "n2"),
    Own("cpu_contention", contended, "cpu_contention", "n1"),
    Own("straggler", slow, "straggler", "n1"),
    Own("slow_input", late_data, "straggler", "n2"),
    Own("slow_stage", slow_stage, "straggler", "n3"),
    Own("silent_corruption", courses.wrong_gradient, "silent_data_corruption", "n5"),
    Own("silent_corruption", courses.wrong_parameters, "silent_data_corruption", "n3"),
    Own("loss_not_finite", corrupt, "loss_not_finite", None),
    Own("loss_course", courses.spiking, "loss_spike", None),
    Own("loss_course", courses.diverging, "loss_divergence", None),
    Own("throughput_drop", courses.slowed, "throughput_drop", None),
    Own("workload_imbalance", courses.uneven, "workload_imbalance", None),
    Own("learned", unlike, "node_anomaly", "n1"),
)
STORIES = (healthy, *(own.story for own in OWN))


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
    """Return the window with its nodes, series and links in the opposite order."""
    turned = story()
    for metrics in (turned.device, turned.node, turned.link):
        metrics.update({name: values[:, ::-1].copy() for name, values in metrics.items()})
    turned.nodes, turned.switches = turned.nodes[::-1], turned.switches[::-1]
    turned.series, turned.links = turned.series[::-1], turned.links[::-1]
    turned.role_of, turned.silent_s, turned.phase_since_s = (
        turned.role_of[::-1],
        turned.silent_s[::-1],
        turned.phase_since_s[::-1],
    )
    turned.heard_s, turned.farewell = turned.heard_s[::-1], turned.farewell[::-1]
    turned.phase = turned.phase[::-1]
    return turned.window()


def say(detector: Detector, window: Window) -> list[Verdict] | str:
    try:
        return detector.detect(window)
    except Blind as reason:
        return str(reason)


def claims(detector: Detector, view: Callable[[Callable[[], Story]], Window]) -> dict[str, object]:
    """Return by story whom the detector accuses of what and how surely, or why it cannot tell."""
    said = {story.__name__: say(detector, view(story)) for story in STORIES}
    return {name: one if isinstance(one, str) else sorted(map(claim, one)) for name, one in said.items()}


def claim(verdict: Verdict) -> tuple[str, str, float]:
    return verdict.fault, verdict.node or "", round(verdict.confidence, 6)


def spoken(detector: Detector) -> list[tuple[Window, Verdict]]:
    """Return all verdicts of the detector, each with its window."""
    said = [(plain(story), say(detector, plain(story))) for story in STORIES]
    found = [(window, verdict) for window, one in said if not isinstance(one, str) for verdict in one]
    assert found, f"{detector.name} speaks in no story"
    return found


def content(window: Window) -> bytes:
    """Return all that a window tells; not what detectors have noted of it."""
    return pickle.dumps(dataclasses.replace(window, members_memo={}))


def test_every_detector_has_a_fault_of_its_own_here() -> None:
    assert {own.detector for own in OWN} == {detector.name for detector in ALL}


@pytest.mark.parametrize("own", OWN, ids=lambda own: f"{own.detector}-{own.story.__name__}")
class TestOwnFault:
    def test_is_found(self, own: Own) -> None:
        found = DETECTORS[own.detector].detect(plain(own.story))
        assert [(verdict.fault, verdict.node) for verdict in found] == [(own.fault, own.node)]

    def test_nothing_of_its_window_is_changed(self, own: Own) -> None:
        window = own.story().window()
        before = content(window)
        DETECTORS[own.detector].detect(window)
        assert content(window) == before


@pytest.mark.parametrize("detector", ALL, ids=lambda d: d.name)
class TestEveryDetector:
    def test_says_the_same_twice(self, detector: Detector) -> None:
        assert [say(detector, plain(story)) for story in STORIES] == [say(detector, plain(story)) for story in STORIES]

    def test_does_not_depend_on_the_clock(self, detector: Detector) -> None:
        assert claims(detector, a_day_later) == claims(detector, plain)

    def test_does_not_depend_on_the_order_of_nodes_series_and_links(self, detector: Detector) -> None:
        assert claims(detector, turned) == claims(detector, plain)

    def test_accuses_only_members(self, detector: Detector) -> None:
        for window, verdict in spoken(detector):
            assert {*verdict.nodes} <= {*window.nodes}
            assert verdict.node in (None, *verdict.nodes)

    def test_says_only_documented_faults_with_evidence(self, detector: Detector) -> None:
        for _, verdict in spoken(detector):
            assert verdict.fault in BY_NAME
            assert verdict.evidence
            assert 0 <= verdict.confidence <= 1
            assert verdict.onset_s <= NOW_S


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
    assert DETECTORS["straggler"].detect(story.window(role_of=np.array([0, 0, 0, 1]))) == []


def test_series_print_as_people_say_them() -> None:
    assert str(Series("node17", 3)) == "node17/gpu3"
