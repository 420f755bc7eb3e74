"""A pipeline stage without comparable peers: its own history says that it has become slower."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.slowness.slow_stage import SlowStage
from eagle_eye.detectors.types import Blind, Verdict
from tests.detectors.windows import Story

DETECTOR = SlowStage(ratio=1.05)
STAGES = np.arange(4)


def job(noise: float = 0.01, seed: int = 4) -> Story:
    """Return four stages on a node each, of which the last has more to do by design."""
    story = Story(nodes=4, rows=200)
    story.device["train_step"] = np.repeat(np.arange(200.0)[:, None], 4, axis=1)
    compute = np.exp(noise * np.random.default_rng(seed).normal(size=(200, 4))) * [1.0, 1.0, 1.0, 1.4]
    story.device["train_compute_seconds"] = compute
    story.device["train_step_seconds"] = np.repeat(compute.max(axis=1, keepdims=True), 4, axis=1)
    return story


def slower(story: Story, ratio: float, column: int | slice = 3, rows: int = 80) -> Story:
    compute = story.device["train_compute_seconds"]
    compute[-rows:, column] *= ratio
    story.device["train_step_seconds"] = np.repeat(compute.max(axis=1, keepdims=True), 4, axis=1)
    return story


def said(story: Story) -> list[Verdict]:
    return DETECTOR.detect(story.window(role_of=STAGES))


@pytest.mark.parametrize("ratio", [1.1, 1.25])
def test_a_stage_that_became_slower_is_reported(ratio: float) -> None:
    story = slower(job(), ratio)
    (verdict,) = said(story)
    assert verdict.node == "n3"
    assert verdict.asks == "notify"
    assert f"{100 * (ratio - 1):.0f}% slower" in verdict.summary
    assert verdict.onset_s == pytest.approx(story.times_s[-80], abs=3)


def test_a_stage_that_always_was_longer_is_nothing() -> None:
    assert said(job()) == []


def test_a_larger_batch_on_all_stages_is_nothing() -> None:
    assert said(slower(job(), 1.5, slice(None))) == []


def test_a_stage_with_time_to_spare_costs_nothing() -> None:
    assert said(slower(job(), 1.2, 0)) == []


def test_what_has_just_begun_is_not_reported_yet() -> None:
    assert said(slower(job(), 1.2, rows=15)) == []


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_nothing(seed: int) -> None:
    assert said(job(0.15, seed)) == []


def test_a_job_without_stages_has_none_that_is_slow() -> None:
    assert DETECTOR.detect(slower(job(), 1.25).window()) == []


def test_without_compute_time_nobody_can_tell() -> None:
    story = job()
    del story.device["train_compute_seconds"]
    with pytest.raises(Blind, match="compute time"):
        DETECTOR.detect(story.window(role_of=STAGES))
