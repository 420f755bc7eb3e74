"""A job that as a whole became slower, and all that only looks so."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.slowness.throughput_drop import ThroughputDrop
from eagle_eye.detectors.types import Blind, Curve, Floats
from tests.detectors.courses import LENGTH, curve, first_said, paces, window
from tests.detectors.windows import NOW_S, Story

DETECTOR = ThroughputDrop()
AT = 300


def slower(factor: float, noise: float = 0.01, steps: int | None = None) -> Floats:
    seconds = paces(noise=noise)
    seconds[AT : None if steps is None else AT + steps] *= factor
    return seconds


@pytest.mark.parametrize(("factor", "noise"), [(1.15, 0.01), (1.3, 0.03), (3.0, 0.02), (1.3, 0.07)])
def test_a_lasting_rise_of_the_step_time_is_told(factor: float, noise: float) -> None:
    found = first_said(DETECTOR, curve(train_step_seconds=slower(factor, noise)), AT)
    assert found is not None
    steps, verdict = found
    assert steps <= (20 if noise < 0.05 else 30)
    assert (verdict.fault, verdict.nodes, verdict.node) == ("throughput_drop", (), None)
    assert verdict.slowdown_ratio == pytest.approx(factor - 1, rel=0.25)
    assert abs(verdict.onset_s - (NOW_S - (LENGTH - AT))) <= 8.0


def test_a_job_of_few_long_steps_is_judged() -> None:
    seconds = paces(60, step_s=10.0)
    seconds[22:] *= 1.2
    found = first_said(DETECTOR, curve(train_step_seconds=seconds), 22)
    assert found is not None
    assert found[0] <= 20


def test_tokens_per_second_serve_where_no_step_time_is_reported() -> None:
    found = first_said(DETECTOR, curve(train_tokens_per_second=1e6 / slower(1.3)), AT)
    assert found is not None
    assert found[1].slowdown_ratio == pytest.approx(0.3, rel=0.2)


def test_says_which_part_of_the_step_grew() -> None:
    wait = np.full(LENGTH, 0.01)
    wait[AT:] += 0.6
    course = curve(
        train_step_seconds=slower(1.3), train_compute_seconds=np.full(LENGTH, 1.5), train_data_wait_seconds=wait
    )
    assert "waiting for data" in DETECTOR.detect(window(course))[0].summary


def test_it_is_still_told_when_most_of_what_is_looked_at_in_detail_is_slow() -> None:
    seconds = paces(900)
    seconds[500:] *= 1.3
    assert DETECTOR.detect(window(curve(train_step_seconds=seconds)))


def repeated(factor: float, every: int, length: int) -> Floats:
    seconds = paces()
    for start in range(every - length, LENGTH, every):
        seconds[start : start + length] *= factor
    return seconds


def batch_doubles() -> Curve:
    return curve(train_step_seconds=slower(2.0), train_tokens_per_second=np.full(LENGTH, 1e6))


def longer_sequences() -> Curve:
    tokens = np.full(LENGTH, 1e6)
    tokens[AT:] *= 0.8  # twice the tokens a step in two and a half times the time
    return curve(train_step_seconds=slower(2.5), train_tokens_per_second=tokens)


QUIET = {
    "healthy": curve(train_step_seconds=paces()),
    "noisy": curve(train_step_seconds=paces(noise=0.07)),
    "a_single_slow_step": curve(train_step_seconds=slower(10.0, steps=1)),
    "six_slow_steps": curve(train_step_seconds=slower(2.0, steps=6)),
    "a_checkpoint_every_fiftieth_step": curve(train_step_seconds=repeated(4.0, 50, 1)),
    "every_third_step_accumulates": curve(train_step_seconds=repeated(1.6, 3, 1)),
    "some_slow_steps_after_each_checkpoint": curve(train_step_seconds=repeated(1.4, 100, 6)),
    "the_time_of_day": curve(train_step_seconds=paces() * (1 + 0.02 * np.sin(np.arange(LENGTH) / 40))),
    "a_few_percent": curve(train_step_seconds=slower(1.06)),
    "a_larger_batch": batch_doubles(),
    "longer_sequences": longer_sequences(),
    "warm_up": curve(train_step_seconds=paces(60)),
}


@pytest.mark.parametrize("name", QUIET)
def test_daily_life_is_quiet(name: str) -> None:
    assert first_said(DETECTOR, QUIET[name], min(250, len(QUIET[name].number) - 20)) is None


def test_what_the_job_does_again_and_again_by_itself_is_told_twice_at_most() -> None:
    seconds = paces(900)
    for start in range(200, 900, 100):
        seconds[start : start + 40] *= 1.2
    assert first_said(DETECTOR, curve(train_step_seconds=seconds), 690) is None


def test_steps_with_more_work_in_them_are_not_slower() -> None:
    story = drop_story()
    story.device["train_work_units"] = np.ones_like(story.device["train_loss"])
    story.device["train_work_units"][-40:] = 1.5
    assert DETECTOR.detect(story.window()) == []


def test_one_nodes_compute_is_that_nodes_trouble() -> None:
    story = drop_story()
    story.device["train_compute_seconds"][-40:, 2] += 0.2
    assert DETECTOR.detect(story.window()) == []


@pytest.mark.parametrize(("nodes", "reported"), [([2], False), ([1, 2], True), ([0, 1, 2, 3], True)])
def test_one_nodes_wait_for_data_is_that_nodes_trouble_and_that_of_several_the_jobs(
    nodes: list[int], reported: bool
) -> None:
    story = drop_story()
    story.device["train_data_wait_seconds"] = np.zeros_like(story.device["train_loss"])
    story.device["train_data_wait_seconds"][-40:, nodes] = 0.2
    assert bool(DETECTOR.detect(story.window())) == reported


def test_all_nodes_alike_are_the_jobs_trouble() -> None:
    story = drop_story()
    story.device["train_compute_seconds"][-40:] += 0.2
    assert DETECTOR.detect(story.window())


def test_a_checkpoint_under_way_is_no_drop() -> None:
    story = drop_story()
    story.phase[0] = "checkpoint"
    assert DETECTOR.detect(story.window()) == []


def drop_story() -> Story:
    story = Story(rows=160)
    story.device["train_step_seconds"][-40:] = 0.7
    return story


def test_is_blind_where_nobody_reports_a_pace() -> None:
    story = Story()
    del story.device["train_step_seconds"]
    with pytest.raises(Blind, match="step time"):
        DETECTOR.detect(story.window())
