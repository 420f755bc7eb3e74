"""Work that is uneven, and nodes that are."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.slowness.workload_imbalance import WorkloadImbalance
from eagle_eye.detectors.types import Blind, Verdict
from tests.detectors.windows import Story

DETECTOR = WorkloadImbalance()


def job(rows: int = 80) -> Story:
    """Return a job of eight nodes, one step a row, whose compute differs by a percent."""
    story = Story(nodes=8, rows=rows)
    shape = story.device["train_step"].shape
    story.device["train_step"] = np.repeat(np.arange(1.0, rows + 1)[:, None], shape[1], axis=1)
    story.device["train_compute_seconds"] = 0.6 * np.exp(0.01 * np.random.default_rng(6).normal(size=shape))
    story.device["train_step_seconds"] = np.full(shape, 1.0)
    return story


def uneven(story: Story, spread: float) -> Story:
    """Each rank's work is another in each step."""
    compute = story.device["train_compute_seconds"]
    compute *= np.exp(spread * np.random.default_rng(7).normal(size=compute.shape))
    return story


def detect(story: Story) -> list[Verdict]:
    return DETECTOR.detect(story.window())


def test_uneven_sequences_are_reported() -> None:
    (verdict,) = detect(uneven(job(), 0.3))
    assert (verdict.fault, verdict.node, verdict.nodes) == ("workload_imbalance", None, ())
    assert "no node is slow" in verdict.summary


def starved(story: Story, nodes: int) -> Story:
    """On so many nodes some process waits for a processor nearly all the time."""
    pressure = np.full((len(story.times_s), len(story.nodes)), 0.02)
    pressure[:, :nodes] = 0.97
    story.node["node_cpu_pressure_ratio"] = pressure
    return story


def test_where_most_hosts_lack_processors_uneven_work_cannot_be_told() -> None:
    with pytest.raises(Blind, match="short of CPU"):
        detect(starved(uneven(job(), 0.3), nodes=6))


def test_a_few_hosts_that_lack_processors_hide_no_uneven_work() -> None:
    assert detect(starved(uneven(job(), 0.3), nodes=3))


def test_hosts_that_lack_processors_hide_no_long_stage() -> None:
    story = starved(job(), nodes=8)
    story.role_of = np.repeat([0, 1, 2, 3], 2)
    story.device["train_compute_seconds"][:, 6:] *= 1.6
    assert "pipeline stage" in detect(story)[0].summary


def test_a_little_unevenness_is_not_reported() -> None:
    assert detect(uneven(job(), 0.07)) == []


def test_unevenness_that_began_is_reported_sooner() -> None:
    story = job(120)
    story.device["train_compute_seconds"][-35:] = uneven(job(35), 0.12).device["train_compute_seconds"]
    assert "was usual" in detect(story)[0].summary


def test_unevenness_that_was_always_there_is_the_jobs_data() -> None:
    assert detect(uneven(job(120), 0.12)) == []


def test_a_slow_node_is_another_finding() -> None:
    story = job()
    story.device["train_compute_seconds"][:, 3] *= 1.5
    assert detect(story) == []


def test_several_slow_nodes_are_no_uneven_work() -> None:
    story = job()
    story.device["train_compute_seconds"][-40:, 5:] *= 1.3
    assert detect(story) == []


def test_must_last() -> None:
    story = job()
    story.device["train_compute_seconds"][-12:] = uneven(job(12), 0.3).device["train_compute_seconds"]
    assert detect(story) == []


def test_a_stage_far_longer_than_the_others_is_reported() -> None:
    story = job()
    story.role_of = np.repeat([0, 1, 2, 3], 2)
    story.device["train_compute_seconds"][:, 6:] *= 1.6
    assert "pipeline stage" in detect(story)[0].summary


def test_a_last_stage_somewhat_longer_is_by_design() -> None:
    story = job()
    story.role_of = np.repeat([0, 1, 2, 3], 2)
    story.device["train_compute_seconds"][:, 6:] *= 1.15
    assert detect(story) == []


def test_a_stage_that_became_longer_is_reported() -> None:
    story = job()
    story.role_of = np.repeat([0, 1, 2, 3], 2)
    story.device["train_compute_seconds"][-24:, 6:] *= 1.2
    assert "was usual" in detect(story)[0].summary


def test_a_job_of_forty_long_steps_is_judged() -> None:
    story = job(40)
    story.device["train_compute_seconds"][-22:] = uneven(job(22), 0.2).device["train_compute_seconds"]
    assert "was usual" in detect(story)[0].summary


def test_slower_gpus_among_others_are_no_uneven_stage() -> None:
    story = job()
    story.role_of = np.array([0, 0, 0, 0, 0, 0, 1, 1])
    story.device["train_compute_seconds"][:, 6:] *= 1.6
    assert detect(story) == []


def test_is_blind_without_compute_time() -> None:
    story = job()
    del story.device["train_compute_seconds"]
    with pytest.raises(Blind, match="compute"):
        detect(story)
