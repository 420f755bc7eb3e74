"""A GPU's users: its MIG instances, and the processes that compute on it."""

from __future__ import annotations

from typing import Any

import pynvml

from eagle_eye.agent.nvml.codes import NEVER, NvmlFailure

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
