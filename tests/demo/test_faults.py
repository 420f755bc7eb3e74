"""The faults' own strength, on machines that are busy with something else."""

from __future__ import annotations

import signal
import threading

import psutil
import pytest

from eagle_eye.demo.faults import SLOWER_TIMES, _throttle


class FakeRank(psutil.Process):
    """Runs or stands by its signals, and is gone at ``ends_s``; ``ran_s`` is how long it could run."""

    def __init__(self, ends_s: float) -> None:
        self.now_s = self.ran_s = 0.0
        self._ends_s = ends_s
        self._stopped = False

    def send_signal(self, sig: int) -> None:
        if self.now_s >= self._ends_s:
            raise psutil.NoSuchProcess(1)
        self._stopped = sig == signal.SIGSTOP

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.ran_s += 0.0 if self._stopped else seconds


@pytest.mark.parametrize("late_s", [0.0, 0.1])
def test_a_slow_rank_gets_its_share_however_late_its_signals_come(late_s: float) -> None:
    rank = FakeRank(ends_s=60.0)
    _throttle([rank], threading.Event(), lambda s: rank.passes(s + late_s), lambda: rank.now_s)
    share = rank.ran_s / rank.now_s
    assert share <= 1 / SLOWER_TIMES + 0.01
    assert share >= 0.5 / SLOWER_TIMES
