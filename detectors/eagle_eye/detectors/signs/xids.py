"""NVIDIA's error codes as data: XIDs of GPUs, SXIDs of NVSwitches, and the driver's own word on recovery (XID 154).

Sources: NVIDIA, XID Errors (catalogue for Ampere and newer); NVIDIA, Fabric Manager User Guide, appendix D (SXIDs). A
code that is not in the table says nothing: no verdict rests on what nobody has looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from eagle_eye.detectors.signs.attributes import text, whole

# What a code means to a job: the program's own error (or the echo of one), a process that must restart, memory that is
# failing (contained: only the process is hurt), a row that was remapped, a GPU that hangs or is gone, links, power,
# something to watch, a qualifier of another code, the driver's word on recovery.
Kind = Literal[
    "application",
    "cleanup",
    "restart",
    "contained",
    "memory",
    "remap",
    "hang",
    "lost",
    "nvlink",
    "power",
    "watch",
    "qualifier",
    "recovery",
]


class Xid(NamedTuple):
    """One code: its meaning, the catalogue's immediate action, its kind, and the fault of ours that it points to."""

    code: int
    meaning: str
    immediate: str
    kind: Kind
    fault: str = ""


# NVIDIA, XID Errors.
XIDS: tuple[Xid, ...] = (
    # The program, or what follows its death.
    Xid(13, "graphics engine exception", "RESTART_APP", "application"),
    Xid(31, "GPU memory page fault", "RESTART_APP", "application"),
    Xid(43, "channel reset after an error of the program", "IGNORE", "application"),
    Xid(45, "preemptive cleanup after another error", "RESTART_FM", "cleanup"),
    Xid(32, "corrupted push buffer, often bad PCIe", "RESTART_APP", "restart", "pcie_degraded"),
    # Memory.
    Xid(48, "uncorrectable memory error", "WORKFLOW_XID_48", "memory", "gpu_memory_error"),
    Xid(64, "row remapping failed", "RESET_GPU", "memory", "gpu_memory_error"),
    Xid(95, "uncontained memory error", "RESET_GPU", "memory", "gpu_memory_error"),
    Xid(140, "unrecovered memory error", "RESET_GPU", "memory", "gpu_memory_error"),
    Xid(94, "contained memory error", "RESTART_APP", "contained", "gpu_memory_error"),
    Xid(63, "row remapping recorded", "IGNORE", "remap", "gpu_memory_error"),
    Xid(160, "memory marked for repair", "IGNORE", "remap", "gpu_memory_error"),
    Xid(92, "high rate of corrected memory errors", "IGNORE", "watch", "gpu_memory_error"),
    Xid(171, "the error was in DRAM", "IGNORE", "qualifier"),
    Xid(172, "the error was in SRAM", "IGNORE", "qualifier"),
    # The GPU, its driver or its firmware stands still.
    Xid(46, "GPU stopped processing", "RESET_GPU", "hang", "gpu_hang"),
    Xid(62, "power management unit halted", "RESET_GPU", "hang", "gpu_hang"),
    Xid(109, "context switch timed out", "RESET_GPU", "hang", "gpu_hang"),
    Xid(110, "security fault", "RESET_GPU", "hang", "gpu_hang"),
    Xid(119, "GPU system processor does not answer", "RESET_GPU", "hang", "gpu_hang"),
    Xid(120, "error of the GPU system processor", "RESET_GPU", "hang", "gpu_hang"),
    Xid(143, "GPU initialisation failed", "RESET_GPU", "hang", "gpu_hang"),
    # The bus.
    Xid(79, "GPU has fallen off the bus", "RESTART_BM", "lost", "gpu_lost"),
    # NVLink: 74 up to Hopper, 144 to 150 from Blackwell on. The remote end may be to blame.
    Xid(74, "NVLink error", "WORKFLOW_NVLINK_ERR", "nvlink", "nvlink_degraded"),
    Xid(136, "NVLink training failed", "RESET_GPU", "nvlink", "nvlink_degraded"),
    *(Xid(code, "NVLink 5 error", "WORKFLOW_NVLINK5_ERR", "nvlink", "nvlink_degraded") for code in range(144, 151)),
    # Power.
    Xid(54, "auxiliary power is not connected", "CHECK_MECHANICALS", "power", "power_throttle"),
    # The driver's own word.
    Xid(154, "recovery action changed", "XID_154", "recovery"),
)

BY_CODE = MappingProxyType({xid.code: xid for xid in XIDS})

Recovery = Literal["none", "drain_p2p", "drain_and_reset", "reset", "reboot"]

# Texts of XID 154, and the numbers of NVML's nvmlDeviceGpuRecoveryAction_t.
_RECOVERIES: tuple[tuple[str, Recovery], ...] = (
    ("drain and reset", "drain_and_reset"),
    ("drain p2p", "drain_p2p"),
    ("gpu reset required", "reset"),
    ("node reboot required", "reboot"),
    ("none", "none"),
)
_RECOVERY_NUMBERS: Mapping[int, Recovery] = MappingProxyType(
    {0: "none", 1: "reset", 2: "reboot", 3: "drain_p2p", 4: "drain_and_reset"}
)
_RECOVERY_NAMES = re.compile("|".join(name for name, _ in _RECOVERIES))

# NVIDIA, Fabric Manager User Guide, D.4: corrected by the switch, or without effect on what runs.
SXIDS_NONFATAL = frozenset(
    {11004, 11012, 11021, 11022, 11023, 12021, 12023, 12028, 15008, 15011}
    | {19049, 19055, 19057, 19059, 19062, 19065, 19068, 19071, 19084}
    | {20001, 22013, 24001, 24002, 24003}
)
# D.5: fatal to the GPU behind the port (which then shows XID 74).
SXIDS_FATAL_TO_A_PORT = frozenset(
    {11001, 11009, 11013, 11018, 11019, 11020, 12001, 12002, 12022, 12024, 12025, 12026, 12027, 12030, 12031, 12032}
    | {14017, 15001, 15006, 15009, 15010, 15012, 15013}
    | {19047, 19048, 19054, 19056, 19058, 19060, 19061, 19063, 19064, 19066, 19067, 19069, 19070}
    | {20034, 22012, 24004, 24005, 24006, 24007}
)
# D.6 and D.7: fatal to the whole fabric of the node.
SXIDS_FATAL_TO_ALL = frozenset({10003, 12020, 22003, 22011} | set(range(23001, 23018)))

_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)
_FATAL = re.compile(r"\bfatal\b", re.IGNORECASE)


def code_of(attributes: Mapping[str, Any]) -> int | None:
    """Return the code of an "xid" or "sxid" event, None where it says none."""
    return whole(attributes, "code")


def recovery_of(attributes: Mapping[str, Any]) -> Recovery | None:
    """Return the recovery action that an XID 154 asks for now ("changed from … to …"); None where it does not say."""
    for name in ("recovery_action", "recovery", "action"):
        number = whole(attributes, name)
        if number is not None and number in _RECOVERY_NUMBERS:
            return _RECOVERY_NUMBERS[number]
    said = text(attributes, "text", "recovery_action", "recovery", "action").lower().replace("_", " ")
    found = _RECOVERY_NAMES.findall(said)
    return dict(_RECOVERIES)[found[-1]] if found else None


def sxid_severity(attributes: Mapping[str, Any]) -> Literal["nonfatal", "port", "all", "unknown"]:
    """Return whom an NVSwitch error stops: nobody, a port's GPU, all of the node's; the log's word goes first."""
    code = code_of(attributes)
    said = text(attributes, "text", "severity")
    if _NONFATAL.search(said) or (code in SXIDS_NONFATAL and not _FATAL.search(said)):
        return "nonfatal"
    if code in SXIDS_FATAL_TO_ALL:
        return "all"
    return "port" if code in SXIDS_FATAL_TO_A_PORT or _FATAL.search(said) else "unknown"
