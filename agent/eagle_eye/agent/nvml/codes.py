"""What NVML's return codes mean to whoever asks again every second. Source: NVML API Reference, nvmlReturn_t."""

from __future__ import annotations

from typing import NamedTuple

import pynvml

SUCCESS: int = pynvml.NVML_SUCCESS
NOT_SUPPORTED: int = pynvml.NVML_ERROR_NOT_SUPPORTED
FUNCTION_NOT_FOUND: int = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND

# Answers that will not change while the library is open: what was asked is left out for life.
NEVER = frozenset(
    {
        NOT_SUPPORTED,
        FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
# Answers that hold for every other question to the same GPU: nothing else is asked this time.
DEAD = frozenset({pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_GPU_IS_LOST})


class Failure(NamedTuple):
    """One reading that gave nothing: its name for people, and NVML's return code."""

    name: str
    code: int

    def describe(self) -> str:
        """Return it for people: "utilization: GPU is lost"."""
        return f"{self.name}: {reason(self.code)}"


def reason(code: int) -> str:
    """Return NVML's words for a return code."""
    return str(pynvml.NVMLError(code))
