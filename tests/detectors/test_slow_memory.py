"""Memory that is hot or clocked down."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.slowness.slow_memory import SlowMemory
from eagle_eye.detectors.types import Blind
from tests.detectors.slow_stories import SICK_ROWS, job, one, without
from tests.detectors.windows import Story

DETECTOR = SlowMemory()


def slow_memory(story: Story, column: int = 5, celsius: float = 99.0, clock: float = 0.75) -> Story:
    story.device["gpu_memory_clock_hertz"][-SICK_ROWS:, column] *= clock
    story.device["gpu_memory_temperature_celsius"][-60:, column] = celsius
    return story


def test_hot_memory_that_is_clocked_down_is_thermal() -> None:
    verdict = one(DETECTOR.detect(slow_memory(job()).window()))
    assert (verdict.fault, verdict.node, verdict.device) == ("thermal_throttle", "n1", 1)
    assert verdict.kinds == {"memory_clock", "memory_temperature"}
    assert verdict.confidence >= 0.9


def test_memory_clocked_down_without_heat_is_a_straggler_with_this_evidence() -> None:
    verdict = one(DETECTOR.detect(slow_memory(job(), celsius=78).window()))
    assert (verdict.fault, verdict.node) == ("straggler", "n1")
    assert verdict.kinds == {"memory_clock"}
    assert verdict.confidence < 0.9


def test_hot_memory_counts_when_its_rank_computes_longer() -> None:
    story = slow_memory(job(), clock=1.0)
    story.device["train_compute_seconds"][-60:, 5] *= 1.2
    verdict = one(DETECTOR.detect(story.window()))
    assert (verdict.fault, verdict.node) == ("thermal_throttle", "n1")
    assert verdict.kinds == {"memory_temperature"}
    assert verdict.slowdown_ratio > 0.05


def test_hot_memory_that_slows_nobody_is_no_fault() -> None:
    assert DETECTOR.detect(slow_memory(job(), clock=1.0).window()) == []


def test_one_reading_beyond_what_is_possible_is_no_heat_where_nodes_report_in_turn() -> None:
    story = job()
    story.device["train_compute_seconds"][-60:, 5] *= 1.2
    for offset in (1, 2, 4, 5):
        story.device["gpu_memory_temperature_celsius"][-offset, 4:8] = np.nan
    story.device["gpu_memory_temperature_celsius"][-3, 5] = 330.0
    assert DETECTOR.detect(story.window(interval_s=15.0, times_s=story.times_s[-1] - 5.0 * np.arange(120)[::-1])) == []


def test_memory_as_hot_as_its_peers_is_no_fault() -> None:
    story = slow_memory(job(), clock=1.0)
    story.device["gpu_memory_temperature_celsius"][:] = 97
    story.device["train_compute_seconds"][-60:, 5] *= 1.2
    assert DETECTOR.detect(story.window()) == []


def test_a_clock_of_nothing_is_a_reading_that_failed() -> None:
    story = job()
    story.device["gpu_memory_clock_hertz"][-SICK_ROWS:, 5] = 0
    assert DETECTOR.detect(story.window()) == []


def test_many_nodes_with_another_memory_clock_are_another_model() -> None:
    story = job(nodes=9)
    columns = [c for node in ("n6", "n7", "n8") for c in story.column(node)]
    story.device["gpu_memory_clock_hertz"][:, columns] = 1.6e9
    assert DETECTOR.detect(story.window()) == []


def test_is_blind_without_memory_metrics() -> None:
    with pytest.raises(Blind, match="memory"):
        DETECTOR.detect(without(job(), "gpu_memory").window())


def test_clocks_alone_are_enough_to_look() -> None:
    story = without(slow_memory(job()), "gpu_memory_temperature")
    assert one(DETECTOR.detect(story.window())).fault == "straggler"
    assert np.isfinite(one(DETECTOR.detect(story.window())).slowdown_ratio)
