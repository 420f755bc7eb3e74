"""What is said of a job whose own pace is not known: that nobody can tell."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.types import Blind, Detector, Window
from eagle_eye.server.engine.detector_schedule import build_detectors
from eagle_eye.server.engine.settings import DetectionSettings
from tests.detectors.slow_stories import hot
from tests.detectors.slow_stories import job as cluster
from tests.detectors.windows import Story

DETECTORS: dict[str, Detector] = {d.name: d for d in build_detectors(DetectionSettings())}
OF_STEPS = ("straggler", "slow_input", "slow_stage", "throughput_drop", "workload_imbalance")
OF_THE_WHOLE_JOB = ("slow_input", "throughput_drop", "workload_imbalance")


def spoilt(fault: str, rows: int, slow: int) -> Story:
    """Return a job that shows the fault in its newest rows."""
    story = Story(nodes=8, rows=rows).complete()
    device, shape = story.device, story.device["train_step"].shape
    if fault == "workload_imbalance":
        device["train_compute_seconds"][-slow:] *= np.exp(0.4 * np.random.default_rng(7).normal(size=(slow, shape[1])))
        device["train_step_seconds"][-slow:] += 0.2
    elif fault == "throughput_drop":
        device["train_step_seconds"][-slow:] *= 1.5
    elif fault == "slow_input":
        device["train_data_wait_seconds"][-slow:, 2] += 0.2
        device["train_step_seconds"][-slow:] += 0.2
    else:
        device["train_compute_seconds"][-slow:, 2] *= 1.6
        device["train_step_seconds"][-slow:] += 0.18
    return story


def busy(story: Story, nodes: slice, pressure: float = 0.95, metric: str = "node_cpu_pressure_ratio") -> Window:
    story.node[metric][-40:, nodes] = pressure
    return story.window()


@pytest.mark.parametrize("name", OF_STEPS)
def test_no_cost_is_claimed_in_the_first_steps(name: str) -> None:
    with pytest.raises(Blind, match=r"16 reports .* 17 needed: its pace is not known yet"):
        DETECTORS[name].detect(spoilt(name, rows=17, slow=14).window())


def test_a_host_is_not_said_to_hold_up_the_first_steps() -> None:
    story = spoilt("straggler", rows=17, slow=14)
    story.node["node_cpu_utilization_ratio"][-14:, 2] = 0.98
    with pytest.raises(Blind, match="its pace is not known yet"):
        DETECTORS["cpu_contention"].detect(story.window())


def test_a_hot_gpu_in_the_first_steps_is_of_unknown_cost() -> None:
    (verdict,) = DETECTORS["thermal_throttle"].detect(hot(cluster(rows=17), rows=14).window())
    assert "what it costs the job is not known" in verdict.summary
    assert verdict.slowdown_ratio == 0.0


@pytest.mark.parametrize("name", OF_THE_WHOLE_JOB)
def test_ranks_short_of_cpu_show_nothing_of_the_job(name: str) -> None:
    story = spoilt(name, rows=100, slow=40)
    assert DETECTORS[name].detect(story.window())
    with pytest.raises(Blind, match="8 of 8 hosts are short of CPU"):
        DETECTORS[name].detect(busy(spoilt(name, rows=100, slow=40), slice(None)))


@pytest.mark.parametrize("collectives", [True, False], ids=["sure", "told of"])
def test_a_slow_rank_short_of_cpu_must_be_sure(collectives: bool) -> None:
    story = spoilt("straggler", rows=100, slow=80)
    compute = story.device["train_compute_seconds"]
    if collectives:
        story.device["nccl_collective_seconds"] = 0.05 + compute.max(axis=1, keepdims=True) - compute
        assert DETECTORS["straggler"].detect(busy(story, slice(None)))
    else:
        del story.device["nccl_collective_seconds"]
        story.device["train_step_seconds"][:] = 0.68
        with pytest.raises(Blind, match="short of CPU"):
            DETECTORS["straggler"].detect(busy(story, slice(None)))


def test_so_they_do_not_where_only_utilisation_is_reported() -> None:
    story = spoilt("throughput_drop", rows=100, slow=40)
    del story.node["node_cpu_pressure_ratio"]
    with pytest.raises(Blind, match="node_cpu_utilization_ratio"):
        DETECTORS["throughput_drop"].detect(busy(story, slice(None), 1.0, "node_cpu_utilization_ratio"))


@pytest.mark.parametrize("name", OF_THE_WHOLE_JOB)
def test_a_few_busy_hosts_are_not_all(name: str) -> None:
    assert DETECTORS[name].detect(busy(spoilt(name, rows=100, slow=40), slice(0, 3)))


def test_one_busy_host_of_two_is_not_most() -> None:
    story = Story(nodes=2, rows=100).complete()
    story.device["train_step_seconds"][-40:] *= 1.5
    assert DETECTORS["throughput_drop"].detect(busy(story, slice(0, 1)))
