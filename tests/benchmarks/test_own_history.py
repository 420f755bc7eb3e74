"""Own-history detectors, their thresholds and event scores, on small made-up machines."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.detection.real.own_history import (
    Floats,
    NearestNeighbour,
    OwnHistory,
    PcaEwma,
    alarm_runs,
    event_score,
    own_thresholds,
)


def machine(lines: int, seed: int) -> Floats:
    """Six metrics that two causes move."""
    rng = np.random.default_rng(seed)
    causes = np.stack([np.sin(np.arange(lines) / 30), np.cos(np.arange(lines) / 7)], axis=1)
    return np.asarray(0.5 + 0.1 * causes @ rng.uniform(-1, 1, (2, 6)) + 0.01 * rng.standard_normal((lines, 6)))


@pytest.mark.parametrize("detector", [NearestNeighbour(), PcaEwma()])
def test_what_never_happened_before_scores_highest(detector: OwnHistory) -> None:
    data = machine(900, 0)
    detector.fit(data[:600])
    test = data[600:].copy()
    test[150:160, 2] += 0.4
    assert 150 <= int(detector.score(test).argmax()) < 162


@pytest.mark.parametrize("detector", [NearestNeighbour(), PcaEwma()])
def test_a_score_does_not_know_the_future(detector: OwnHistory) -> None:
    data = machine(400, 1)
    detector.fit(data[:200])
    whole, start = detector.score(data[200:]), detector.score(data[200:300])
    assert np.allclose(whole[:100], start)


def test_a_threshold_of_no_alarm_raises_none_on_the_unseen_part_of_train() -> None:
    data = machine(600, 2)
    detector = NearestNeighbour()
    strict, loose = own_thresholds(detector, data, [0.0, 50.0], lines_per_day=600.0)
    detector.fit(data[:420])
    assert not (detector.score(data[420:]) > strict).any()
    assert loose < strict


def test_alarms_close_together_are_one() -> None:
    flags = np.zeros(60, dtype=bool)
    flags[[5, 10, 40]] = True
    assert alarm_runs(flags) == [(5, 11), (40, 41)]


def test_a_long_event_counts_once_and_so_does_a_long_false_alarm() -> None:
    labels, flags = np.zeros(200, dtype=bool), np.zeros(200, dtype=bool)
    labels[20:80] = labels[150:155] = True
    flags[70] = True
    flags[100:120] = True
    found = event_score(flags, labels)
    assert (found.events, found.found, found.alarms, found.false) == (2, 1, 2, 1)
    assert found.f1 == pytest.approx(0.5)


def test_without_alarms_the_score_is_zero() -> None:
    labels = np.ones(5, dtype=bool)
    assert event_score(np.zeros(5, dtype=bool), labels).f1 == 0.0
