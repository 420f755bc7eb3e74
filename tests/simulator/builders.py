"""Small recordings, and what tests ask of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import Recording, simulate

SMALL: dict[str, Any] = {"nodes": 4, "gpus": 2, "minutes": 4.0, "seed": 7, "habits": False}


@lru_cache(maxsize=256)
def recorded(fault: str = "none", **changes: Any) -> Recording:
    """Return the recording of a small job."""
    return simulate(Scenario(**(SMALL | {"fault": fault} | changes)))


def row_at(recording: Recording, seconds: float) -> int:
    """Return the index of the last row that every node had taken by then, counted from the trace's start."""
    return int(np.searchsorted(recording.true_time.max(axis=1) - recording.start, seconds)) - 1


def onset_s(recording: Recording) -> float:
    """Return when the first label starts, from the trace's start."""
    return recording.labels[0].start - recording.start


def culprit(recording: Recording) -> int:
    """Return the position of the first label's node."""
    return recording.layout.names.index(recording.labels[0].nodes[0])


def late(recording: Recording, name: str) -> NDArray[Any]:
    """Return a device metric in the rows of the trace's last third, mean over time, (N, G)."""
    values = recording.device[name]
    result: NDArray[Any] = np.nanmean(values[len(values) * 2 // 3 :], axis=0)
    return result
