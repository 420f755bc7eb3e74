"""Metrics against what the others make expected, on made-up machines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.detection.real.expected_metrics import ExpectedMetrics
from benchmarks.detection.real.own_history import own_thresholds

DAY = 1440


def machine(seed: int, days: float = 6.0, metrics: int = 8) -> Any:
    rng = np.random.default_rng(seed)
    minutes = np.arange(int(days * DAY))
    load = 0.5 + 0.2 * np.sin(2 * np.pi * minutes / DAY) + 0.05 * rng.normal(size=len(minutes))
    gain = np.linspace(0.2, 0.9, metrics)
    return np.clip(load[:, None] * gain + 0.01 * rng.normal(size=(len(minutes), metrics)), 0, 1)


@pytest.fixture(scope="module")
def fitted() -> tuple[ExpectedMetrics, float]:
    detector = ExpectedMetrics()
    (threshold,) = own_thresholds(detector, machine(0), [1.0], DAY)
    return detector, threshold


def test_finds_metrics_that_part_company_within_their_ordinary_range(fitted: tuple[ExpectedMetrics, float]) -> None:
    detector, threshold = fitted
    spoiled = machine(1)
    spoiled[3000:3010, 3] = spoiled[3000 + DAY // 2 : 3010 + DAY // 2, 3]
    flags = detector.score(spoiled) > threshold
    assert flags[3000:3012].any()


def test_ordinary_days_raise_about_as_many_alarms_as_wished_for(fitted: tuple[ExpectedMetrics, float]) -> None:
    detector, threshold = fitted
    assert (detector.score(machine(2, days=10)) > threshold).sum() <= 25


def test_is_causal(fitted: tuple[ExpectedMetrics, float]) -> None:
    detector, _ = fitted
    values = machine(3, days=1)
    assert np.array_equal(detector.score(values)[:600], detector.score(values[:600]))


def test_names_the_metric_that_is_off(fitted: tuple[ExpectedMetrics, float]) -> None:
    detector, _ = fitted
    values = machine(3, days=1)
    values[700:, 5] += 0.2
    assert int(detector.residuals(values)[705].argmax()) == 5


def test_a_constant_metric_does_no_harm() -> None:
    values = machine(0, days=2)
    values[:, 2] = 0.0
    detector = ExpectedMetrics()
    detector.fit(values)
    assert np.isfinite(detector.score(values)).all()
