"""One GPU: its identity and all its NVML readings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import pynvml

from eagle_eye.agent.nvml import gpm
from eagle_eye.agent.nvml.codes import DEAD, NEVER, NvmlFailure
from eagle_eye.agent.nvml.device_queries import INSTEAD_OF_FIELDS, PCIE_SAMPLES, READINGS, Functions
from eagle_eye.agent.nvml.driver_requests import DriverRequests
from eagle_eye.agent.nvml.fields import METRICS, TRAFFIC, FieldMetrics
from eagle_eye.agent.nvml.gpm import GpmActivity
from eagle_eye.agent.nvml.links import NvLinks
from eagle_eye.agent.nvml.occupants import Occupants

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
        self._activity: GpmActivity | None = GpmActivity(handle) if gpm.supported(handle) else None
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
