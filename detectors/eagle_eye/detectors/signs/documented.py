"""Documented limits of the GPUs in a window, with our own defaults for undocumented types."""

from __future__ import annotations

import numpy as np

from eagle_eye.detectors.device_types import DeviceType, device_type
from eagle_eye.detectors.types import Floats, Window

HELD_C = 3.0  # a GPU that throttles for heat stays this little below its documented limit
BRAKING_FROM_C = 82.0  # below the documented limit of any type
MEMORY_LIMIT_C = 95.0  # hotter memory refreshes more often and slows down
NVLINK_BYTES_PER_SECOND = 25e9  # each way: NVLink 3 and 4


def type_at(window: Window, column: int) -> DeviceType | None:
    """Return the documentation of a series' GPU; None if its name is not known or not in the table."""
    return device_type(window.models[int(window.model_of[column])]) if window.models else None


def braking_from_c(window: Window, column: int) -> float:
    """Return the temperature from which heat may make a GPU slow."""
    kind = type_at(window, column)
    documented = kind.max_operating_c if kind is not None else None
    return BRAKING_FROM_C if documented is None else documented.value - HELD_C


def memory_limits_c(window: Window) -> Floats:
    """Return the temperature from which each GPU's memory slows it: (S,)."""
    if not window.models:
        return np.full(len(window.series), MEMORY_LIMIT_C)
    limits = [MEMORY_LIMIT_C] * len(window.models)
    for place, kind in enumerate(map(device_type, window.models)):
        if kind is not None and kind.memory_max_operating_c is not None:
            limits[place] = kind.memory_max_operating_c.value
    each: Floats = np.array(limits)[window.model_of]
    return each


def nvlink_bytes_per_second(window: Window, column: int) -> float:
    """Return the documented rate of one NVLink of a GPU in each direction."""
    kind = type_at(window, column)
    documented = kind.nvlink_bytes_per_second if kind is not None else None
    return NVLINK_BYTES_PER_SECOND if documented is None else documented.value
