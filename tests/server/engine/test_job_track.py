"""When steps of ranks whose agents tick at different moments are known to detectors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.job_track import LATE_S, JobTrack

T0 = 1_000_000.0
PHASES_S = (0.0, 0.3, 0.7)  # of the ranks' agents in an interval of 1 s


def track() -> JobTrack:
    known = JobTrack("j", 0, 1.0, 120.0, T0)
    for rank in range(len(PHASES_S)):
        known.add_series(f"n{rank}", 0, rank, "")
    return known


def tell(known: JobTrack, rank: int, time_s: float, step: float, step_s: float = 5.0) -> None:
    """Have a rank's agent report at a moment the step that ended last, and how long it took."""
    metrics = ("train_step", "train_step_seconds", "train_compute_seconds")
    values = np.array([[step], [step_s], [0.8 * step_s]], np.float32)
    known.write(time_s, Scope.DEVICE, metrics, slice(rank, rank + 1), values)


def settled(known: JobTrack, now_s: float) -> list[float]:
    """Return the steps that detectors may see."""
    none = np.full(len(PHASES_S), now_s)
    window = known.window(now_s, none, np.zeros(len(PHASES_S), bool), T0)
    return [float(number) for number in window.steps.number]


def train(known: JobTrack, seconds: int, without: int | None = None) -> None:
    """Report steps of 5 s for so long, at the last one without a rank's row."""
    for second in range(seconds):
        for rank, phase_s in enumerate(PHASES_S):
            time_s = second + phase_s
            if not (second == seconds - 1 and rank == without):
                tell(known, rank, T0 + time_s, math.floor(time_s / 5))
        settled(known, T0 + second + 0.9)


def test_a_step_is_known_once_the_last_rank_has_reported_it() -> None:
    known = track()
    train(known, 26)
    assert settled(known, T0 + 25.9)[-1] == 5


def test_a_step_that_one_rank_has_not_reported_waits_for_its_row() -> None:
    known = track()
    train(known, 26, without=2)
    assert settled(known, T0 + 25.9)[-1] == 4
    tell(known, 2, T0 + 25.7, 5.0)
    assert settled(known, T0 + 26.0)[-1] == 5


def test_a_rank_that_says_nothing_is_waited_for_no_longer_than_a_late_row() -> None:
    known = track()
    train(known, 26, without=2)
    for second in (26, 27, 30, 31):
        for rank in (0, 1):
            tell(known, rank, T0 + second + PHASES_S[rank], math.floor(second / 5))
    assert settled(known, T0 + 31.3 + 0.5 + LATE_S)[-1] == 5


def test_values_of_a_step_are_each_ranks_own() -> None:
    known = track()
    train(known, 26)
    window = known.window(T0 + 25.9, np.full(3, T0 + 25.9), np.zeros(3, bool), T0)
    assert np.array_equal(window.steps.values["train_compute_seconds"][-1], np.full(3, 4.0, np.float32))


@pytest.mark.parametrize("step_s", [0.141, 0.3, 0.708, 1.407])
def test_what_a_step_takes_is_the_ranks_own_time(step_s: float) -> None:
    known = track()
    for second in range(60):
        for rank, phase_s in enumerate(PHASES_S):
            tell(known, rank, T0 + second + phase_s, math.floor((second + phase_s) / step_s), step_s)
        settled(known, T0 + second + 0.9)
    assert known.pace_s == pytest.approx(step_s, rel=1e-6)


def test_where_no_rank_times_its_steps_they_are_timed_as_seen() -> None:
    known = track()
    for second in range(60):
        for rank, phase_s in enumerate(PHASES_S):
            step = np.array([[math.floor(second / 5)]], np.float32)
            known.write(T0 + second + phase_s, Scope.DEVICE, ("train_step",), slice(rank, rank + 1), step)
        settled(known, T0 + second + 0.9)
    assert known.pace_s == pytest.approx(5.0, abs=0.1)
