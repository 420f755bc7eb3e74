"""NVML's field values and activity samples: many readings of a GPU in one call, each with its own return code.

Source: NVML API Reference, nvmlDeviceGetFieldValues and Field Value Enums. The numbers are the interface: they are
repeated here because older bindings do not name the newer ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from ctypes import byref, c_uint
from typing import Any, NamedTuple

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


# Activity of a GPU's units between two reads, measured by the GPU itself (GPM): Hopper and newer.
#
# Source: NVML API Reference, GPM Functions and nvmlGpmMetricId_t.
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


def gpm_supported(handle: Any) -> bool:
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


ALL_LINKS = 0xFFFFFFFF  # the scope of a sum over all NVLinks

# By the value's type: its offset in the union. Types that none of our fields use count as unsupported.
_PLACES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal"}
_WIDE = (2, 3, 4)


class FieldMetric(NamedTuple):
    """One metric as the sum of fields over scopes; those that a GPU lacks are left out of the sum.

    ``rate``: the fields are counters, the metric is their growth per second. ``wide``: 32-bit fields count as
    unsupported, because they wrap more than once between two reads.
    """

    name: str
    metric: str
    fields: tuple[int, ...]
    scopes: tuple[int, ...] = (0,)
    scale: float = 1.0
    rate: bool = False
    wide: bool = False


METRICS = (
    FieldMetric("memory temperature", "gpu_memory_temperature_celsius", (82,)),
    FieldMetric("corrected ECC errors", "gpu_ecc_corrected_total", (3,)),
    FieldMetric("uncorrected ECC errors", "gpu_ecc_uncorrected_total", (4,)),
    FieldMetric("PCIe replays", "gpu_pcie_replays_total", (94,)),
    FieldMetric("remapped rows", "gpu_remapped_rows_total", (142, 143)),
    FieldMetric("pending row remap", "gpu_remap_pending", (144,)),
    # CRC of flits and of data, replays, recoveries, ECC: totals over all links, up to Ampere.
    FieldMetric("NVLink errors", "gpu_nvlink_errors_total", (38, 45, 52, 59, 160)),
)
# Byte counters, for GPUs that do not measure throughput themselves (see GpmActivity): NVLink in KiB, PCIe in bytes.
TRAFFIC = (
    FieldMetric("NVLink send", "gpu_nvlink_tx_bytes_per_second", (138,), (ALL_LINKS,), 1024.0, rate=True),
    FieldMetric("NVLink receive", "gpu_nvlink_rx_bytes_per_second", (139,), (ALL_LINKS,), 1024.0, rate=True),
    FieldMetric("PCIe send", "gpu_pcie_tx_bytes_per_second", (197,), rate=True, wide=True),
    FieldMetric("PCIe receive", "gpu_pcie_rx_bytes_per_second", (198,), rate=True, wide=True),
)
# Per link, the scope being the link's number. Hopper: replays, recoveries, CRC. Blackwell: malformed packets, overruns,
# receive errors, link integrity, recoveries. Drops by congestion are not errors.
LINK_ERRORS = (161, 162, 163, 206, 207, 208, 211, 215)


class _Item:
    """One metric, its fields still being read, and their values when the last rate was computed."""

    def __init__(self, metric: FieldMetric) -> None:
        self.metric = metric
        self.asked = [(field, scope) for field in metric.fields for scope in metric.scopes]
        self.places: list[tuple[Any, Any]] = []  # in the call's array: each field's value, and its union
        self.before: tuple[float, float] | None = None  # the sum, and when

    def left_out(self) -> int:
        """Stop reading fields that this GPU never supports; return the code if none is left, else success."""
        code = SUCCESS
        kept = []
        for asked, (value, _) in zip(self.asked, self.places, strict=True):
            if value.nvmlReturn in NEVER:
                code = int(value.nvmlReturn)
            elif value.nvmlReturn == SUCCESS and value.valueType not in self._types():
                code = NOT_SUPPORTED
            else:
                kept.append(asked)
        self.asked = kept
        return SUCCESS if kept else code

    def add_metric(self, row: dict[str, float], now_s: float) -> int:
        """Add the metric to the row; return the code of a failed field, else success."""
        total = 0.0
        for value, union in self.places:
            if value.nvmlReturn != SUCCESS:
                return int(value.nvmlReturn)
            total += getattr(union, _PLACES[value.valueType])
        metric = self.metric
        if not metric.rate:
            row[metric.metric] = total * metric.scale
            return SUCCESS
        if self.before is not None:
            grown, elapsed_s = total - self.before[0], now_s - self.before[1]
            if grown >= 0.0 and elapsed_s > 0.0:  # a counter that decreased was reset
                row[metric.metric] = grown * metric.scale / elapsed_s
        self.before = (total, now_s)
        return SUCCESS

    def _types(self) -> Collection[int]:
        return _WIDE if self.metric.wide else _PLACES.keys()


class FieldMetrics:
    """The metrics of one GPU that come from field values, in one call into the driver."""

    def __init__(self, handle: Any, metrics: Sequence[FieldMetric]) -> None:
        self._handle = handle
        self._function: Callable[..., int] | None = getattr(pynvml.nvmlLib, "nvmlDeviceGetFieldValues", None)
        self._items = [_Item(metric) for metric in metrics]
        self._array: Any = None
        self._lay_out()
        self._sure = False  # that no unsupported field is left in the call

    def read(self, row: dict[str, float], now_s: float) -> list[NvmlFailure]:
        """Add to the row; return failures. Readings that this GPU never supports are returned once, then skipped."""
        failures: list[NvmlFailure] = []
        code = self._call()
        if code == SUCCESS and not self._sure:
            failures = self._leave_out()
            code = self._call()
        if code in NEVER:
            failures += [NvmlFailure(item.metric.name, code) for item in self._items]
            self._items = []
        if code != SUCCESS:
            return failures or [NvmlFailure("field values", code)]
        for item in self._items:
            code = item.add_metric(row, now_s)
            if code in NEVER:
                self._sure = False
            elif code != SUCCESS:
                failures.append(NvmlFailure(item.metric.name, code))
        return failures

    def _call(self) -> int:
        if not self._items:
            return SUCCESS
        if self._function is None:
            return FUNCTION_NOT_FOUND
        return int(self._function(self._handle, len(self._array), self._array))

    def _leave_out(self) -> list[NvmlFailure]:
        failures = [NvmlFailure(item.metric.name, code) for item in self._items if (code := item.left_out())]
        self._items = [item for item in self._items if item.asked]
        self._lay_out()
        self._sure = True
        return failures

    def _lay_out(self) -> None:
        """Build the call's array: one element per field read."""
        asked = [(item, field, scope) for item in self._items for field, scope in item.asked]
        self._array = (pynvml.c_nvmlFieldValue_t * len(asked))()
        for item in self._items:
            item.places = []
        for value, (item, field, scope) in zip(list(self._array), asked, strict=True):
            value.fieldId, value.scopeId = field, scope
            item.places.append((value, value.value))


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
