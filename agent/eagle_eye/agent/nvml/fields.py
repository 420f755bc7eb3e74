"""NVML field values: many readings of a GPU in one call, each with its own return code.

Source: NVML API Reference, nvmlDeviceGetFieldValues and Field Value Enums. The numbers are the interface: they are
repeated here because older bindings do not name the newer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import pynvml

from eagle_eye.agent.nvml.codes import FUNCTION_NOT_FOUND, NEVER, NOT_SUPPORTED, SUCCESS, NvmlFailure

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
# Byte counters, for GPUs that do not measure throughput themselves (see gpm.py): NVLink in KiB, PCIe in bytes.
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

    def take(self, row: dict[str, float], now_s: float) -> int:
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
            code = item.take(row, now_s)
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
