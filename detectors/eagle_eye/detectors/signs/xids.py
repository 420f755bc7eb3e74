"""Tables of NVIDIA's error codes: XIDs of GPUs, SXIDs of NVSwitches, and recovery actions of the driver (XID 154).

Sources: NVIDIA, XID Errors (catalogue for Ampere and newer); NVIDIA, Fabric Manager User Guide, appendix D (SXIDs). A
code that is not in the table, or that the catalogue calls unused, is reported but never acted on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from eagle_eye.detectors.signs.attributes import text, whole

CATALOGUE = "NVIDIA XID Errors r610, September 2026"  # version of this table; a code above LAST_CODE is newer
LAST_CODE = 173

# What a code means to a job: the program's own error (or its echo), a process that must restart, failing memory
# (contained: only the process is affected), a remapped row, a GPU that hangs or is gone, one that needs a reset and may
# work until then, links, power, something to watch, something to record, a qualifier of another code, the driver's
# recovery action.
Kind = Literal[
    "application",
    "cleanup",
    "restart",
    "contained",
    "memory",
    "remap",
    "hang",
    "lost",
    "reset",
    "nvlink",
    "power",
    "watch",
    "record",
    "qualifier",
    "recovery",
]


class Xid(NamedTuple):
    """One code: its meaning, the catalogue's immediate action, its kind, and the fault that it indicates here."""

    code: int
    meaning: str
    immediate: str
    kind: Kind
    fault: str = ""


# NVIDIA, XID Errors.
XIDS: tuple[Xid, ...] = (
    # The program, or consequences of its death.
    Xid(13, "graphics engine exception", "RESTART_APP", "application"),
    Xid(31, "GPU memory page fault", "RESTART_APP", "application"),
    Xid(43, "channel reset after an error of the program", "IGNORE", "application"),
    Xid(45, "preemptive cleanup after another error", "RESTART_FM", "cleanup"),
    Xid(32, "corrupted push buffer, often bad PCIe", "RESTART_APP", "restart", "pcie_degraded"),
    Xid(8, "a channel stood still", "RESTART_APP", "restart"),
    *(Xid(code, "invalid push buffer", "RESTART_APP", "restart") for code in (11, 25)),
    Xid(80, "data arrived corrupted at the GPU", "RESTART_APP", "restart"),
    *(
        Xid(code, "error of a copy engine", "RESTART_APP", "restart")
        for code in (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
    ),
    Xid(69, "error of the graphics engine's class", "RESTART_APP", "restart"),
    *(
        Xid(code, "error of a video, JPEG or optical flow engine", "RESTART_APP", "restart")
        for code in (60, 68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139)
    ),
    # Memory.
    Xid(48, "uncorrectable memory error", "WORKFLOW_XID_48", "memory", "gpu_memory_error"),
    Xid(64, "row remapping failed", "RESET_GPU", "memory", "gpu_memory_error"),
    Xid(95, "uncontained memory error", "RESET_GPU", "memory", "gpu_memory_error"),
    Xid(140, "unrecovered memory error", "RESET_GPU", "memory", "gpu_memory_error"),
    Xid(94, "contained memory error", "RESTART_APP", "contained", "gpu_memory_error"),
    Xid(63, "row remapping recorded", "IGNORE", "remap", "gpu_memory_error"),
    Xid(160, "memory channel marked for repair", "IGNORE", "remap", "gpu_memory_error"),
    Xid(92, "high rate of corrected memory errors", "IGNORE", "watch", "gpu_memory_error"),
    Xid(171, "the error was in DRAM", "IGNORE", "qualifier"),
    Xid(172, "the error was in SRAM", "IGNORE", "qualifier"),
    # A GPU, its driver or its firmware that no longer works.
    Xid(46, "GPU stopped processing", "RESET_GPU", "hang", "gpu_hang"),
    Xid(62, "power management unit halted", "RESET_GPU", "hang", "gpu_hang"),
    Xid(109, "context switch timed out", "RESET_GPU", "hang", "gpu_hang"),
    Xid(110, "security fault", "RESET_GPU", "hang", "gpu_hang"),
    Xid(119, "GPU system processor does not answer", "RESET_GPU", "hang", "gpu_hang"),
    Xid(120, "error of the GPU system processor", "RESET_GPU", "hang", "gpu_hang"),
    Xid(143, "GPU initialisation failed", "RESET_GPU", "hang", "gpu_hang"),
    # The bus.
    Xid(79, "GPU has fallen off the bus", "RESTART_BM", "lost", "gpu_lost"),
    # The GPU needs a reset; the job shows whether it still works. For 167 and 173 the catalogue has no action yet.
    Xid(151, "rotation of its encryption keys failed", "RESTART_VM", "reset", "gpu_hang"),
    Xid(156, "a failed unit waits for its retirement", "RESET_GPU", "reset", "gpu_hang"),
    Xid(158, "fatal timeout in the GPU", "RESET_GPU", "reset", "gpu_hang"),
    Xid(167, "fatal PCIe timeout", "", "reset", "gpu_hang"),
    Xid(173, "fatal failure of the link to its CPU", "", "reset", "gpu_hang"),
    # NVLink: 74 up to Hopper, 144 to 150 from Blackwell on, whose lines say "Fatal" or "Nonfatal". The remote end may
    # be to blame.
    Xid(74, "NVLink error", "WORKFLOW_NVLINK_ERR", "nvlink", "nvlink_degraded"),
    Xid(136, "NVLink training failed", "RESET_GPU", "nvlink", "nvlink_degraded"),
    *(
        Xid(code, f"NVLink 5 error in {unit}", "WORKFLOW_NVLINK5_ERR", "nvlink", "nvlink_degraded")
        for code, unit in enumerate(("SAW", "RLW", "TLW", "TREX", "NVLPW_CTRL", "NETIR", "MSE"), 144)
    ),
    Xid(155, "NVLink taken down by software", "RESET_GPU", "nvlink", "nvlink_degraded"),
    # Power.
    Xid(54, "auxiliary power is not connected", "CHECK_MECHANICALS", "power", "power_throttle"),
    # Recorded only: corrected, informational, without effect on a job, or of a feature that training does not use.
    Xid(14, "a fake error, for tests", "IGNORE", "record"),
    *(Xid(code, "error in the driver's firmware", "IGNORE", "record") for code in (37, 38)),
    Xid(44, "fault of the graphics engine during a context switch", "IGNORE", "record"),
    *(Xid(code, "illegal access by the driver", "IGNORE", "record") for code in (66, 67)),
    Xid(78, "a virtual GPU did not start", "UPDATE_SWFW", "record"),
    Xid(93, "many writes to the GPU's own configuration memory", "IGNORE", "record"),
    *(Xid(code, "a test message", "IGNORE", "record") for code in (106, 107)),
    Xid(108, "translation of a remote NVLink address failed", "IGNORE", "record"),
    Xid(121, "corrected errors on the link to its CPU", "IGNORE", "record"),
    Xid(137, "access over NVLink was refused, often the program's error", "IGNORE", "record"),
    Xid(141, "error of CUDA's fast path", "IGNORE", "record"),
    Xid(142, "error of a video engine", "CONTACT_SUPPORT", "record"),
    *(Xid(code, "error of a deep learning accelerator", "IGNORE", "record") for code in (152, 153)),
    Xid(157, "no spare unit is left for a retirement", "IGNORE", "record"),
    Xid(159, "error on the link to its CPU, without data", "CHECK_UVM", "record"),
    Xid(161, "a memory channel could not be marked for repair", "IGNORE", "record"),
    *(Xid(code, "state of the power smoothing circuit", "", "record") for code in range(162, 166)),
    *(Xid(code, "NVLink event of confidential computing", "", "record") for code in (166, 170)),
    Xid(168, "less memory: errors in its protected region", "", "record"),
    Xid(169, "a security processor halted", "", "record"),
    # The driver's recovery action.
    Xid(154, "recovery action changed", "XID_154", "recovery"),
)

BY_CODE = MappingProxyType({xid.code: xid for xid in XIDS})

Recovery = Literal["none", "drain_p2p", "drain_and_reset", "reset", "reboot"]

# Texts of XID 154 (drivers 570 to 610 word the same action differently), and the numbers that both it and NVML's
# nvmlDeviceGpuRecoveryAction_t use. The number decides if present: names change, and an unknown one ("0x5 (Recover IMEX
# Domain)", which concerns the domain and not the GPU) neither acts nor cancels.
_RECOVERIES: tuple[tuple[str, Recovery], ...] = (
    ("drain and reset", "drain_and_reset"),
    ("drain p2p", "drain_p2p"),
    ("gpu reset required", "reset"),
    ("pf flr", "reset"),
    ("node reboot required", "reboot"),
    ("os reboot", "reboot"),
    ("none", "none"),
)
_RECOVERY_NUMBERS: Mapping[int, Recovery] = MappingProxyType(
    {0: "none", 1: "reset", 2: "reboot", 3: "drain_p2p", 4: "drain_and_reset"}
)
_RECOVERY_NAMES = re.compile("|".join(rf"\b{name}\b" for name, _ in _RECOVERIES))
_ASKED = re.compile(r"\bto (0x[0-9a-fA-F]{1,8} \([^()]{1,60}\))")
_CHANGED_TO = re.compile(r"\bto (?:0x([0-9a-f]{1,8})\b)?(.*)")

# NVIDIA, Fabric Manager User Guide, D.4: corrected by the switch, or without effect on running jobs.
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
_FATAL = re.compile(r"(?<!non-)\bfatal\b", re.IGNORECASE)
RECOVERY_XID = 154
NVLINK5_XIDS = frozenset(range(144, 151))


def code_of(attributes: Mapping[str, Any]) -> int | None:
    """Return the code of an "xid" or "sxid" event, None if it has none."""
    return whole(attributes, "code")


def recovery_of(attributes: Mapping[str, Any]) -> Recovery | None:
    """Return the recovery action that an XID 154 now asks for ("changed from … to …").

    None if it does not state one, or states an unknown one.
    """
    for name in ("recovery_action", "recovery", "action"):
        number = whole(attributes, name)
        if number is not None and number in _RECOVERY_NUMBERS:
            return _RECOVERY_NUMBERS[number]
    said = text(attributes, "text", "recovery_action", "recovery", "action").lower().replace("_", " ")
    changed = _CHANGED_TO.search(said)
    if changed is not None and changed[1] is not None:
        return _RECOVERY_NUMBERS.get(int(changed[1], 16))
    found = _RECOVERY_NAMES.findall(changed[2] if changed is not None else said)
    return dict(_RECOVERIES)[found[-1]] if found else None


def unknown_recovery_of(attributes: Mapping[str, Any]) -> str:
    """Return the text of an unknown recovery action in an XID 154; "" for any other, and for none."""
    if code_of(attributes) != RECOVERY_XID or recovery_of(attributes) is not None:
        return ""
    asked = _ASKED.search(text(attributes, "text"))
    return asked[1] if asked is not None else ""


def is_fatal(attributes: Mapping[str, Any]) -> bool:
    """Return whether an XID is marked fatal: 144 to 150 must say so, others only must not deny it.

    A source that passes on only the code says neither; most of 144 to 150 are not fatal.
    """
    said = text(attributes, "text", "severity")
    if code_of(attributes) in NVLINK5_XIDS:
        return bool(_FATAL.search(said)) and not _NONFATAL.search(said)
    return not _NONFATAL.search(said)


def sxid_severity(attributes: Mapping[str, Any]) -> Literal["nonfatal", "port", "all", "unknown"]:
    """Return what an NVSwitch error stops: nothing, a port's GPU, or all of the node's; the log's own word wins."""
    code = code_of(attributes)
    said = text(attributes, "text", "severity")
    if _NONFATAL.search(said) or (code in SXIDS_NONFATAL and not _FATAL.search(said)):
        return "nonfatal"
    if code in SXIDS_FATAL_TO_ALL:
        return "all"
    return "port" if code in SXIDS_FATAL_TO_A_PORT or _FATAL.search(said) else "unknown"
