"""One GPU: its identity, all its NVML readings, who holds it, and what the driver states of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_ubyte, c_uint, c_ulonglong, sizeof
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import pynvml

from eagle_eye.agent.nvml import fields
from eagle_eye.agent.nvml.fields import (
    DEAD,
    FUNCTION_NOT_FOUND,
    METRICS,
    NEVER,
    SUCCESS,
    TRAFFIC,
    FieldMetric,
    FieldMetrics,
    GpmActivity,
    NvLinks,
    NvmlFailure,
    reason,
)
from eagle_eye.schema.driver_facts import FABRIC_DEGRADED, FABRIC_FAILED, NVML_RECOVERY_FACTS


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


# What the driver itself says of a GPU's state: the recovery that it asks for, and whether it has joined its fabric.
#
# Source: NVML API Reference, nvmlDeviceGpuRecoveryAction_t and GPU Fabric Info. The numbers are the interface: older
# bindings do not name them.
RECOVERY = "recovery_action"
_NOT_STARTED, _IN_PROGRESS, _COMPLETED = 1, 2, 3  # 0: the GPU has no fabric
# Health mask: each field's first bit, its bits, and its values that are well (0: unsupported).
_HEALTH = (
    ("degraded bandwidth", 0, 0x3, (0, 2)),
    ("unhealthy route", 4, 0x3, (0, 2)),
    ("incorrect configuration", 8, 0xF, (0, 1)),
)


class _FabricInfo(Structure):
    """nvmlGpuFabricInfo_v2_t, which drivers since 545 fill in."""

    _fields_ = (
        ("version", c_uint),
        ("cluster_uuid", c_ubyte * 16),
        ("status", c_uint),
        ("clique_id", c_uint),
        ("state", c_uint),
        ("health_mask", c_uint),
    )


class DriverRequests:
    """One GPU's recovery action and fabric state, as facts of schema/driver_facts.py. ``problem``: what is not settled.

    ``facts`` has each fact's text for people; GPU_REPAIRED is there where the driver says that it asks for nothing.
    Empty where this driver tells neither.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._recovery = FieldMetrics(handle, (FieldMetric("recovery action", RECOVERY, (230,)),))
        self._fabric: Callable[..., int] | None = getattr(pynvml.nvmlLib, "nvmlDeviceGetGpuFabricInfoV", None)
        self.facts: dict[str, str] = {}
        self.problem = ""

    def read(self, now_s: float) -> list[NvmlFailure]:
        """Read both anew; return failures. What this GPU never tells is none: most tell neither."""
        self.facts, self.problem = {}, ""
        row: dict[str, float] = {}
        failures = self._recovery.read(row, now_s)
        if RECOVERY in row:
            action = int(row[RECOVERY])
            fact = NVML_RECOVERY_FACTS.get(action)
            if fact is not None:
                self.facts[fact] = f"NVML: GPU recovery action 0x{action:x}"
            else:
                self.problem = f"its driver asks for an unknown recovery action, 0x{action:x}"
        return [failure for failure in failures + self._read_fabric() if failure.code not in NEVER]

    def _read_fabric(self) -> list[NvmlFailure]:
        if self._fabric is None:
            return []
        info = _FabricInfo(version=sizeof(_FabricInfo) | 2 << 24)
        code = int(self._fabric(self._handle, byref(info)))
        if code in NEVER:
            self._fabric = None
            return [NvmlFailure("fabric", code)]
        if code != SUCCESS:
            return [NvmlFailure("fabric", code)]
        if info.state in (_NOT_STARTED, _IN_PROGRESS):
            self.problem = "it has not joined its NVLink fabric yet: is the fabric manager running?"
        elif info.state == _COMPLETED and info.status != SUCCESS:
            self.facts[FABRIC_FAILED] = f"NVML: GPU fabric status {reason(info.status)}"
        elif info.state == _COMPLETED and (wrong := _wrong_with(info.health_mask)):
            self.facts[FABRIC_DEGRADED] = f"NVML: GPU fabric: {wrong}"
        return []


def _wrong_with(mask: int) -> str:
    return ", ".join(named for named, shift, bits, well in _HEALTH if mask >> shift & bits not in well)


PROCESSES_MAX = 1_024  # per GPU; a GPU time-sliced between more is not used for training


class Occupants:
    """The MIG instances and processes of one GPU as last read.

    ``instances`` are the UUIDs of its MIG instances, none outside MIG mode. ``processes`` maps the pid in the agent's
    pid namespace to the bytes the process holds; None where the driver does not say.
    """

    def __init__(self, handle: Any) -> None:
        self.instances: tuple[str, ...] = ()
        self.processes: dict[int, int | None] = {}
        self._handle = handle
        self._mig = True
        self._process_list = [
            function
            for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
            if (function := getattr(pynvml, name, None)) is not None
        ]

    def read(self) -> list[NvmlFailure]:
        """Read both; return failures. Readings that this GPU never supports are returned once, then skipped."""
        failures = []
        if self._mig:
            try:
                self.instances = self._read_instances()
            except pynvml.NVMLError as error:
                self._mig = error.value not in NEVER
                self.instances = ()
                if error.value not in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                    failures.append(NvmlFailure("MIG instances", error.value))  # most GPUs have none: not reported
        while self._process_list:
            try:
                found = self._process_list[0](self._handle)
            except pynvml.NVMLError as error:
                self.processes = {}
                if error.value not in NEVER:
                    failures.append(NvmlFailure("processes", error.value))
                    break
                del self._process_list[0]  # an older driver has only the older function
                if not self._process_list:
                    failures.append(NvmlFailure("processes", error.value))
            else:
                self.processes = {process.pid: process.usedGpuMemory for process in found[:PROCESSES_MAX]}
                break
        return failures

    def _read_instances(self) -> tuple[str, ...]:
        mode, _pending = pynvml.nvmlDeviceGetMigMode(self._handle)
        if mode != pynvml.NVML_DEVICE_MIG_ENABLE:
            return ()
        found = []
        for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(self._handle)):
            try:
                instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self._handle, place)
            except pynvml.NVMLError_NotFound:
                continue  # this slot is free
            found.append(str(pynvml.nvmlDeviceGetUUID(instance)))
        return tuple(found)


# Readings that need a call per link, or block, or change only by an operator. The row repeats them in between.
SELDOM_S = 5.0


class MetricGroup(Protocol):
    """Some of a GPU's metrics."""

    def read(self, row: dict[str, float], now_s: float) -> list[NvmlFailure]:
        """Add to the row; return failures. Readings that this GPU never supports are returned once, then skipped."""
        ...


@dataclass
class GpuReading:
    """One GPU's answers: its row, this time's failures, and readings found to be unsupported.

    ``facts`` are the names of facts that its driver states, each with its text; ``problem`` what it leaves open.
    """

    row: dict[str, float] = field(default_factory=dict)
    failed: list[NvmlFailure] = field(default_factory=list)
    left_out: list[NvmlFailure] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    problem: str = ""


class Device:
    """One GPU while the library is open. ``index`` names its row, whatever its place in NVML's list."""

    def __init__(self, index: int, handle: Any, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Raises NVMLError when the GPU does not identify itself."""
        self.index = index
        self.handle = handle
        self.uuid = str(pynvml.nvmlDeviceGetUUID(handle))
        self.bus_id = str(pynvml.nvmlDeviceGetPciInfo(handle).busId)
        self.name = str(pynvml.nvmlDeviceGetName(handle))
        self.serial = _serial(handle)
        self.occupants = Occupants(handle)
        self._requests = DriverRequests(handle)
        self._monotonic_s = monotonic_s
        self._functions = Functions(handle, READINGS)
        self._links = NvLinks(handle)
        self._pcie_samples = Functions(handle, ())
        self._activity: GpmActivity | None = GpmActivity(handle) if fields.gpm_supported(handle) else None
        metrics = METRICS if self._activity is not None else METRICS + TRAFFIC
        self._often: list[MetricGroup] = [self._functions, FieldMetrics(handle, metrics)]
        if self._activity is not None:
            self._often.append(self._activity)
        self._seldom: list[MetricGroup] = [self._links, self._pcie_samples]
        self._otherwise: dict[str, Callable[[], None]] = {
            **{reading.name: partial(self._functions.add, reading) for reading in INSTEAD_OF_FIELDS},
            **{reading.name: partial(self._pcie_samples.add, reading) for reading in PCIE_SAMPLES},
            "NVLink errors": self._links.sum_errors,
        }
        self._seldom_row: dict[str, float] = {}
        self._seldom_failed: list[NvmlFailure] = []
        self._seldom_due_s = 0.0

    def read(self) -> GpuReading:
        """Return the GPU's current readings; without a row when it is lost, or the driver is gone."""
        answer = GpuReading()
        now_s = self._monotonic_s()
        failures: list[NvmlFailure] = []
        for source in self._often:
            failures += source.read(answer.row, now_s)
            if any(failure.code in DEAD for failure in failures):
                return GpuReading(failed=failures)
        self._sort(failures, answer.failed, answer.left_out)
        if now_s >= self._seldom_due_s:
            # Not all GPUs in the same second.
            self._seldom_due_s = now_s + SELDOM_S * (1.0 if self._seldom_due_s else 1.0 + self.index % 5 / 5.0)
            self._seldom_row, self._seldom_failed = {}, []
            failures = [
                *(failure for source in self._seldom for failure in source.read(self._seldom_row, now_s)),
                *self.occupants.read(),
                *self._requests.read(now_s),
            ]
            self._sort(failures, self._seldom_failed, answer.left_out)
        answer.row.update(self._seldom_row)
        answer.failed += self._seldom_failed
        answer.facts, answer.problem = dict(self._requests.facts), self._requests.problem
        return answer

    @property
    def nvlinks(self) -> int | None:
        """How many NVLinks were up when last read; None where unknown."""
        active = self._seldom_row.get("gpu_nvlinks_active")
        return None if active is None else int(active)

    def close(self) -> None:
        """Release the library's resources for this GPU."""
        if self._activity is not None:
            self._activity.close()

    def _sort(self, failures: list[NvmlFailure], failed: list[NvmlFailure], left_out: list[NvmlFailure]) -> None:
        """Separate failures from unsupported readings, and switch the latter to another method where there is one."""
        for failure in failures:
            if failure.code not in NEVER:
                failed.append(failure)
            elif failure.name in self._otherwise:
                self._otherwise.pop(failure.name)()
            else:
                left_out.append(failure)


def _serial(handle: Any) -> str:
    """Return the board's serial number, "" where it has none, as workstation cards and simulated ones."""
    try:
        return str(pynvml.nvmlDeviceGetSerial(handle))
    except pynvml.NVMLError:
        return ""
