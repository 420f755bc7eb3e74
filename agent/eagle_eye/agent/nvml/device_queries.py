"""GPU readings that each have an NVML function. Source: NVML API Reference, Device Queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref, c_uint, c_ulonglong
from typing import Any, NamedTuple

import pynvml

from eagle_eye.agent.nvml.codes import FUNCTION_NOT_FOUND, NEVER, SUCCESS, NvmlFailure


class MetricFunction(NamedTuple):
    """One metric: its function, newest name first, and how the result is converted to the metric.

    ``arguments`` go between handle and result; ``part`` names the field of a structure result.
    """

    name: str
    metric: str
    functions: tuple[str, ...]
    result: Any = c_uint
    arguments: tuple[int, ...] = ()
    part: str = "value"
    scale: float = 1.0


READINGS = (
    MetricFunction(
        "utilization",
        "gpu_utilization_ratio",
        ("nvmlDeviceGetUtilizationRates",),
        pynvml.c_nvmlUtilization_t,
        part="gpu",
        scale=0.01,
    ),
    MetricFunction("memory", "gpu_memory_used_bytes", ("nvmlDeviceGetMemoryInfo",), pynvml.c_nvmlMemory_t, part="used"),
    # Newer GPUs give a one-second mean here; the field values of power are instantaneous, or take milliseconds.
    MetricFunction("power", "gpu_power_watts", ("nvmlDeviceGetPowerUsage",), scale=1e-3),
    MetricFunction("power limit", "gpu_power_limit_watts", ("nvmlDeviceGetEnforcedPowerLimit",), scale=1e-3),
    MetricFunction(
        "temperature",
        "gpu_temperature_celsius",
        ("nvmlDeviceGetTemperature",),
        arguments=(pynvml.NVML_TEMPERATURE_GPU,),
    ),
    MetricFunction(
        "SM clock",
        "gpu_sm_clock_hertz",
        ("nvmlDeviceGetClockInfo",),
        arguments=(pynvml.NVML_CLOCK_SM,),
        scale=1e6,
    ),
    MetricFunction(
        "memory clock",
        "gpu_memory_clock_hertz",
        ("nvmlDeviceGetClockInfo",),
        arguments=(pynvml.NVML_CLOCK_MEM,),
        scale=1e6,
    ),
    MetricFunction(
        "throttle reasons",
        "gpu_throttle_reasons",
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),  # until 535 the latter
        c_ulonglong,
    ),
    MetricFunction("PCIe width", "gpu_pcie_link_width", ("nvmlDeviceGetCurrPcieLinkWidth",)),
    MetricFunction("PCIe generation", "gpu_pcie_link_generation", ("nvmlDeviceGetCurrPcieLinkGeneration",)),
)
# For readings that field values lack on some drivers and GPUs.
INSTEAD_OF_FIELDS = (
    MetricFunction(
        "corrected ECC errors",
        "gpu_ecc_corrected_total",
        ("nvmlDeviceGetTotalEccErrors",),
        c_ulonglong,
        (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC),
    ),
    MetricFunction(
        "uncorrected ECC errors",
        "gpu_ecc_uncorrected_total",
        ("nvmlDeviceGetTotalEccErrors",),
        c_ulonglong,
        (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
    ),
    MetricFunction("PCIe replays", "gpu_pcie_replays_total", ("nvmlDeviceGetPcieReplayCounter",)),
)
# The driver samples for 20 ms, during which each call blocks. In KB/s.
PCIE_SAMPLES = (
    MetricFunction(
        "PCIe send",
        "gpu_pcie_tx_bytes_per_second",
        ("nvmlDeviceGetPcieThroughput",),
        arguments=(pynvml.NVML_PCIE_UTIL_TX_BYTES,),
        scale=1e3,
    ),
    MetricFunction(
        "PCIe receive",
        "gpu_pcie_rx_bytes_per_second",
        ("nvmlDeviceGetPcieThroughput",),
        arguments=(pynvml.NVML_PCIE_UTIL_RX_BYTES,),
        scale=1e3,
    ),
)


class _Call:
    """One reading of one GPU, with the call's buffers prepared: the binding would create them at every call."""

    def __init__(self, handle: Any, reading: MetricFunction) -> None:
        self.reading = reading
        self.function: Callable[..., int] | None = None
        for name in reading.functions:
            self.function = self.function or getattr(pynvml.nvmlLib, name, None)
        self.result = reading.result()
        self.arguments = (handle, *reading.arguments, byref(self.result))


class Functions:
    """One GPU's metrics that have a function each."""

    def __init__(self, handle: Any, readings: Sequence[MetricFunction]) -> None:
        self._handle = handle
        self._calls = [_Call(handle, reading) for reading in readings]

    def add(self, reading: MetricFunction) -> None:
        """Also read this from now on."""
        self._calls.append(_Call(self._handle, reading))

    def read(self, row: dict[str, float], _now_s: float) -> list[NvmlFailure]:
        """Add to the row; return failures. Readings that this GPU never supports are returned once, then skipped."""
        failures = []
        for call in list(self._calls):
            reading = call.reading
            code = FUNCTION_NOT_FOUND if call.function is None else int(call.function(*call.arguments))
            if code == SUCCESS:
                row[reading.metric] = getattr(call.result, reading.part) * reading.scale
                continue
            failures.append(NvmlFailure(reading.name, code))
            if code in NEVER:
                self._calls.remove(call)
        return failures
