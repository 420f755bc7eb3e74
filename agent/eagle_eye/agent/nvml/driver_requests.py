"""What the driver itself says of a GPU's state: the recovery that it asks for, and whether it has joined its fabric.

Source: NVML API Reference, nvmlDeviceGpuRecoveryAction_t and GPU Fabric Info. The numbers are the interface: older
bindings do not name them.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, byref, c_ubyte, c_uint, sizeof
from typing import Any

import pynvml

from eagle_eye.agent.nvml.codes import NEVER, SUCCESS, NvmlFailure, reason
from eagle_eye.agent.nvml.fields import FieldMetric, FieldMetrics
from eagle_eye.schema.driver_facts import FABRIC_DEGRADED, FABRIC_FAILED, NVML_RECOVERY_FACTS

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
