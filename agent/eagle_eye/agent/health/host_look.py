"""Looks at this host for its verdict: one frame of its collectors, and when somebody last repaired it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle_eye.agent.loop.runner import CollectorRunner, gathered
from eagle_eye.agent.loop.tick_result import TickFrame

LOOKS = 2  # rates, and messages of several lines, need a second one
BETWEEN_S = 1.0
ANSWER_S = 15.0  # a look, for all collectors together: a driver without persistence mode needs seconds per GPU
REPAIRED_FILE = "repaired"  # in the spool's folder; anything before its mtime counts as repaired


def look(
    runners: Sequence[CollectorRunner],
    within_s: float = ANSWER_S,
    *,
    now_s: Callable[[], float] = time.time,
    monotonic_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> TickFrame:
    """Return what the collectors saw, all together within ``within_s`` a look, and close them.

    Rows are those of the last look, events those of all.
    """
    events = []
    for place in range(LOOKS):
        if place:
            sleep(BETWEEN_S)
        for runner in runners:
            runner.ask(now_s())
        seen = gathered(runners, monotonic_s() + within_s, monotonic_s)
        events += seen.events
    for runner in runners:
        runner.close()
    return TickFrame(now_s(), BETWEEN_S, seen, tuple(events), tuple(runner.standing() for runner in runners), 1)


def repaired_s(folder: Path) -> float:
    """Return when an operator declared the host repaired, Unix seconds; 0: never."""
    try:
        return (folder / REPAIRED_FILE).stat().st_mtime
    except OSError:
        return 0.0
