"""The NVLinks of a GPU: how many are up, and their errors where the GPU has no total."""

from __future__ import annotations

from ctypes import byref, c_uint
from typing import Any

import pynvml

from eagle_eye.agent.nvml.codes import FUNCTION_NOT_FOUND, NEVER, SUCCESS, NvmlFailure
from eagle_eye.agent.nvml.fields import LINK_ERRORS, FieldMetric, FieldMetrics


class NvLinks:
    """One GPU's links; those that it lacks, or that its board leaves unused, are not queried again."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._links = list(range(pynvml.NVML_NVLINK_MAX_LINKS))
        self._state = c_uint()
        self._errors: FieldMetrics | None = None
        self._sum_errors = False

    def sum_errors(self) -> None:
        """Also report errors, as the sum over the links: this GPU has no total."""
        self._sum_errors = True

    def read(self, row: dict[str, float], now_s: float) -> list[NvmlFailure]:
        """Add to the row; return failures. Readings that this GPU never supports are returned once, then skipped."""
        if not self._links:
            return []
        active = 0
        code = FUNCTION_NOT_FOUND
        function = getattr(pynvml.nvmlLib, "nvmlDeviceGetNvLinkState", None)
        for link in list(self._links):
            if function is not None:
                code = function(self._handle, link, byref(self._state))
            if code == SUCCESS:
                active += self._state.value == pynvml.NVML_FEATURE_ENABLED
            elif code in NEVER:
                self._links.remove(link)
            else:
                return [NvmlFailure("NVLinks", code)]  # a count of only some links would look like links that are down
        if not self._links:
            return [NvmlFailure("NVLinks", code)]
        row["gpu_nvlinks_active"] = float(active)
        return self._read_errors(row, now_s)

    def _read_errors(self, row: dict[str, float], now_s: float) -> list[NvmlFailure]:
        if not self._sum_errors:
            return []
        if self._errors is None:
            metric = FieldMetric("NVLink errors", "gpu_nvlink_errors_total", LINK_ERRORS, tuple(self._links))
            self._errors = FieldMetrics(self._handle, (metric,))
        return self._errors.read(row, now_s)
