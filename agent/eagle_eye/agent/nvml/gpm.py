"""Activity of a GPU's units between two reads, measured by the GPU itself (GPM): Hopper and newer.

Source: NVML API Reference, GPM Functions and nvmlGpmMetricId_t.
"""

from __future__ import annotations

import math
from ctypes import byref
from typing import Any, NamedTuple

import pynvml

from eagle_eye.agent.nvml.codes import NEVER, SUCCESS, NvmlFailure


class _Measure(NamedTuple):
    """One metric: its GPM id, its unit's scale, and its largest value. Traffic comes in MiB/s."""

    identifier: int
    metric: str
    scale: float = float(1 << 20)
    largest: float = math.inf


def _ratio(identifier: int, metric: str) -> _Measure:
    return _Measure(identifier, metric, 0.01, 1.0)


_MEASURES = (
    _ratio(2, "gpu_sm_active_ratio"),
    _ratio(5, "gpu_tensor_active_ratio"),
    _ratio(10, "gpu_dram_active_ratio"),
    _Measure(20, "gpu_pcie_tx_bytes_per_second"),
    _Measure(21, "gpu_pcie_rx_bytes_per_second"),
    _Measure(60, "gpu_nvlink_rx_bytes_per_second"),
    _Measure(61, "gpu_nvlink_tx_bytes_per_second"),
)


def supported(handle: Any) -> bool:
    """Whether the GPU supports GPM; False where the driver does not say."""
    try:
        return bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    except pynvml.NVMLError:
        return False


class GpmActivity:
    """One GPU's means over the time between two reads; the first read gives none."""

    def __init__(self, handle: Any) -> None:
        """Allocate two samples. Raises NVMLError."""
        self._handle = handle
        self._measures = list(_MEASURES)
        self._new, self._old = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        self._sampled = False
        self._sample = pynvml.nvmlLib.nvmlGpmSampleGet
        self._compute = pynvml.nvmlLib.nvmlGpmMetricsGet
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._ask()

    def read(self, row: dict[str, float], _now_s: float) -> list[NvmlFailure]:
        """Add to the row; return failures. Readings that this GPU never supports are returned once, then skipped."""
        if not self._measures:
            return []
        code = self._sample(self._handle, self._new)
        sampled_before, self._sampled = self._sampled, code == SUCCESS
        if code == SUCCESS and sampled_before:
            self._request.sample1, self._request.sample2 = self._old, self._new
            code = self._compute(byref(self._request))
        if code == SUCCESS and sampled_before:
            for measure, place in zip(self._measures, self._places, strict=True):
                value = place.value * measure.scale
                if place.nvmlReturn == SUCCESS and math.isfinite(value):
                    row[measure.metric] = min(measure.largest, max(0.0, value))
        self._new, self._old = self._old, self._new
        if code == SUCCESS:
            return self._failures() if sampled_before else []
        if code in NEVER:
            self._measures = []
        return [NvmlFailure("activity", code)]

    def close(self) -> None:
        """Free the samples."""
        for sample in (self._new, self._old):
            pynvml.nvmlGpmSampleFree(sample)

    def _failures(self) -> list[NvmlFailure]:
        """Return the failures, and stop reading what this GPU never supports."""
        found = [
            (measure, NvmlFailure(measure.metric, place.nvmlReturn))
            for measure, place in zip(self._measures, self._places, strict=True)
            if place.nvmlReturn != SUCCESS
        ]
        never = [measure for measure, failure in found if failure.code in NEVER]
        if never:
            self._measures = [measure for measure in self._measures if measure not in never]
            self._ask()
        return [failure for _, failure in found]

    def _ask(self) -> None:
        self._request.numMetrics = len(self._measures)
        self._places = [self._request.metrics[place] for place in range(len(self._measures))]
        for measure, place in zip(self._measures, self._places, strict=True):
            place.metricId = measure.identifier
