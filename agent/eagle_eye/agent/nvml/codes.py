"""NVML return codes, as they matter to a periodic reader. Source: NVML API Reference, nvmlReturn_t."""

from __future__ import annotations

from typing import NamedTuple

import pynvml

SUCCESS: int = pynvml.NVML_SUCCESS
NOT_SUPPORTED: int = pynvml.NVML_ERROR_NOT_SUPPORTED
FUNCTION_NOT_FOUND: int = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND

# Answers that do not change while the library is open: the reading is dropped permanently.
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
# Answers that apply to every query of the same GPU: no more are made this time.
DEAD = frozenset({pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_GPU_IS_LOST})


class NvmlFailure(NamedTuple):
    """A reading that failed: its name for people, and NVML's return code."""

    name: str
    code: int

    def describe(self) -> str:
        """Return the text for people: "utilization: GPU is lost"."""
        return f"{self.name}: {reason(self.code)}"


def reason(code: int) -> str:
    """Return NVML's text for a return code."""
    return str(pynvml.NVMLError(code))
