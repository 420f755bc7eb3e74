"""Which detectors are asked at a tick: none more often than its answer can change, of many jobs each in its turn."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from eagle_eye.detectors.types import Blind, Verdict, Window
from eagle_eye.server.engine.detector_schedule import JOBS_AT_EASE, RARELY_S, DetectorSchedule
from tests.detectors.windows import NOW_S, Story


@dataclass
class Counting:
    """Says nothing, and counts by moment how often it is asked."""

    name: str = "counting"
    every_s: float = 0.0
    by_step: bool = False
    blind: str = ""
    asked: list[tuple[str, float]] = field(default_factory=list)

    def detect(self, window: Window) -> list[Verdict]:
        self.asked.append((window.job, window.now_s))
        if self.blind:
            raise Blind(self.blind)
        return []


WINDOW = Story().window()


def asked_of(detector: Counting, jobs: int, seconds: int) -> Counter[float]:
    """Ask of some jobs for some seconds and return how often the detector was asked in each, from the first."""
    asking = DetectorSchedule((detector,))
    for second in range(seconds):
        for job in range(jobs):
            asking.judge_window(dataclasses.replace(WINDOW, job=f"job{job}", now_s=NOW_S + second))
    return Counter(now_s - NOW_S for _, now_s in detector.asked)


def test_one_job_is_asked_about_as_often_as_the_detector_likes() -> None:
    assert asked_of(Counting(every_s=2.0), 1, 7) == {0.0: 1, 2.0: 1, 4.0: 1, 6.0: 1}


def test_jobs_that_began_together_are_asked_about_in_turn() -> None:
    counts = asked_of(Counting(every_s=2.0), 100, 12)
    assert all(45 <= counts[second] <= 55 for second in range(2, 12))


def test_of_very_many_jobs_each_is_asked_about_more_rarely_but_within_bounds() -> None:
    detector = Counting(every_s=2.0)
    counts = asked_of(detector, 8 * JOBS_AT_EASE, 16)
    even = 8 * JOBS_AT_EASE / RARELY_S
    assert all(0.8 * even <= counts[second] <= 1.2 * even for second in range(6, 16))
    times = [now_s for job, now_s in detector.asked if job == "job7"]
    assert max(np.diff(times)) <= RARELY_S


def test_what_is_asked_at_every_tick_is_so_with_very_many_jobs() -> None:
    assert set(asked_of(Counting(), 3 * JOBS_AT_EASE, 3).values()) == {3 * JOBS_AT_EASE}


def test_who_cannot_tell_is_heard_until_asked_again() -> None:
    asking = DetectorSchedule((Counting(every_s=5.0, blind="nobody reports it"),))
    for second in range(3):
        assert asking.judge_window(dataclasses.replace(WINDOW, now_s=NOW_S + second))[1] == {
            "counting": "nobody reports it"
        }
