"""What drivers and kernels say of a GPU, an NVSwitch or the host, as one table, whatever channel carries it. Pure.

A kernel line, a return code of NVML, its recovery action, DCGM's health and a recorder of third parties all become
events; ``judged`` says what an event means, for the host's own verdict before a job as for the detectors during one.
Sources: NVIDIA, XID Errors (catalogue for Ampere and newer); NVIDIA, Fabric Manager User Guide, appendix D (SXIDs);
NVML API Reference (return codes, GPU recovery action, GPU fabric); NVIDIA DCGM, health watches; Linux, amdgpu. A code
that is in no table, or that the catalogue calls unused, is reported but never acted on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from eagle_eye.schema.attributes import text, whole

CATALOGUE = "NVIDIA XID Errors r610, September 2026"  # version of this table; a code above LAST_CODE is newer
LAST_CODE = 173

WHOLE_NODE = -1  # the device of a fact that names none that the agent knows

Repair = Literal["reset_gpu", "reboot", "replace", "inspect", "none"]

# What a fact means to a job: the program's own error (or its echo), a process that must restart, failing memory
# (contained: only the process is affected), a remapped row, a GPU that hangs or is gone, one that needs a reset and may
# work until then, links, power, something to watch, something to record, a qualifier of another code, the driver's
# recovery action; an NVSwitch, a part of the host that may stop a job, something that also healthy hosts show.
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
    "switch",
    "part",
    "symptom",
]


class Xid(NamedTuple):
    """One code: its meaning, the catalogue's immediate action, its kind, and the fault that it indicates here."""

    code: int
    meaning: str
    immediate: str
    kind: Kind
    fault: str = ""

    @property
    def name(self) -> str:
        """Return its name, which no other fact has."""
        return f"XID {self.code}"

    @property
    def said(self) -> str:
        """Return it as text for people."""
        return f"XID {self.code} ({self.meaning})"


class Fact(NamedTuple):
    """A fact without a code, by the word that a ``host_error`` event carries in ``what``; else as an XID.

    ``repair`` is what the host needs before its next job; "none": nothing, it is only reported. ``passes``: it is about
    a moment, and soon says nothing of the present.
    """

    name: str
    meaning: str
    kind: Kind
    repair: Repair
    fault: str = ""
    passes: bool = False

    @property
    def code(self) -> int:
        """Return the code that is no XID's."""
        return -1

    @property
    def said(self) -> str:
        """Return it as text for people."""
        return self.meaning


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

GPU_LOST, GPU_RESET_REQUIRED, GPU_REBOOT_REQUIRED = "gpu_lost", "gpu_reset_required", "gpu_reboot_required"
GPU_DRAIN_P2P, GPU_DRAIN_AND_RESET, GPU_REPAIRED = "gpu_drain_p2p", "gpu_drain_and_reset", "gpu_repaired"
GPU_FIRMWARE_SILENT, GPU_HARDWARE_ERROR, GPU_UNUSABLE = "gpu_firmware_silent", "gpu_hardware_error", "gpu_unusable"
GPU_MEMORY_FAILED, NVLINK_BROKEN, FABRIC_FAILED = "gpu_memory_failed", "nvlink_broken", "fabric_failed"
FABRIC_DEGRADED = "fabric_degraded"
NIC_FAILED, NIC_STALLED = "nic_failed", "nic_stalled"
PCIE_FATAL, DEVICE_GONE = "pcie_fatal", "device_gone"
CPU_STUCK, TASK_BLOCKED = "cpu_stuck", "task_blocked"
DISK_FAILED, DISK_ERRORS, STORAGE_SILENT = "disk_failed", "disk_errors", "storage_silent"
MACHINE_CHECK = "machine_check"

# Facts without a code. Consumers of the events depend on the names: docs/reference/wire.md.
FACTS: tuple[Fact, ...] = (
    # GPUs, by any vendor's driver.
    Fact(GPU_LOST, "the GPU has left the bus", "lost", "reboot", "gpu_lost"),
    Fact(GPU_RESET_REQUIRED, "the driver asks for a reset of the GPU", "recovery", "reset_gpu", "gpu_hang"),
    Fact(GPU_REBOOT_REQUIRED, "the driver asks for a reboot of the node", "recovery", "reboot", "gpu_hang"),
    Fact(GPU_DRAIN_AND_RESET, "the driver asks for a drain, then a reset", "recovery", "reset_gpu", "gpu_hang"),
    Fact(GPU_DRAIN_P2P, "the driver asks for a drain of peer-to-peer traffic", "recovery", "none", "gpu_hang"),
    Fact(GPU_REPAIRED, "the GPU asks for no repair any more", "record", "none"),
    Fact(GPU_FIRMWARE_SILENT, "GPU system processor does not answer", "hang", "reset_gpu", "gpu_hang"),
    Fact(GPU_HARDWARE_ERROR, "an uncorrectable hardware error of the GPU", "reset", "reset_gpu", "gpu_hang"),
    Fact(GPU_MEMORY_FAILED, "uncontained memory error", "memory", "reset_gpu", "gpu_memory_error"),
    Fact(NVLINK_BROKEN, "the driver's state of the NVLinks is broken", "reset", "reset_gpu", "gpu_hang"),
    Fact(FABRIC_FAILED, "the GPU could not join its NVLink fabric", "reset", "reset_gpu", "gpu_hang"),
    Fact(FABRIC_DEGRADED, "the GPU's NVLink fabric is degraded", "symptom", "none", "nvlink_degraded"),
    Fact(GPU_UNUSABLE, "a GPU could not be brought up", "part", "reboot", "host_errors"),
    # The host.
    Fact(MACHINE_CHECK, "a machine check was not corrected", "part", "inspect", "host_errors"),
    Fact(DEVICE_GONE, "a PCIe device is gone", "part", "none", "host_errors"),
    Fact(DISK_FAILED, "a disk or its filesystem has failed", "part", "none", "host_errors"),
    Fact(NIC_FAILED, "a network adapter has failed", "part", "none", "nic_degraded", passes=True),
    Fact(NIC_STALLED, "a network adapter does not answer", "part", "none", "nic_degraded", passes=True),
    Fact(PCIE_FATAL, "a fatal PCIe error", "part", "none", "host_errors", passes=True),
    Fact(CPU_STUCK, "a CPU is stuck", "part", "none", "host_errors", passes=True),
    Fact(TASK_BLOCKED, "a task is blocked", "symptom", "none", "host_errors", passes=True),
    Fact(DISK_ERRORS, "a disk reports errors", "symptom", "none", "host_errors", passes=True),
    Fact(STORAGE_SILENT, "storage does not answer", "symptom", "none", "storage_stall", passes=True),
)
BY_NAME = MappingProxyType({fact.name: fact for fact in FACTS})
_MACHINE_CHECK_CORRECTED = Fact(MACHINE_CHECK, "a corrected machine check", "record", "none")

# Modules of GPU drivers (nvidia_uvm, nvidia_modeset): a task that waits in them waits for the driver, not the program.
GPU_MODULES = ("nvidia", "amdgpu", "amdkfd")

# nvml.h, nvmlReturn_t. An unknown error (999) or trouble with interrupts (11) says nothing of a single reading, but a
# GPU that the driver lists and cannot open for it is one that no program can open.
NVML_FACTS: Mapping[int, str] = MappingProxyType({15: GPU_LOST, 16: GPU_RESET_REQUIRED})
NVML_OPENING_FACTS: Mapping[int, str] = MappingProxyType({**NVML_FACTS, 11: GPU_UNUSABLE, 999: GPU_UNUSABLE})

# DCGM's error codes, as health checks and diagnostics carry them. DCGM_FR_XID_ERROR does not say which XID: the event
# of the XID itself does.
DCGM_FACTS: Mapping[str, str] = MappingProxyType(
    {
        "DCGM_FR_FALLEN_OFF_BUS": GPU_LOST,
        "DCGM_FR_UNCONTAINED_ERROR": GPU_MEMORY_FAILED,
        "DCGM_FR_GPU_RECOVERY_RESET": GPU_RESET_REQUIRED,
        "DCGM_FR_GPU_RECOVERY_REBOOT": GPU_REBOOT_REQUIRED,
        "DCGM_FR_GPU_RECOVERY_DRAIN_P2P": GPU_DRAIN_P2P,
        "DCGM_FR_GPU_RECOVERY_DRAIN_RESET": GPU_DRAIN_AND_RESET,
    }
)

Recovery = Literal["none", "drain_p2p", "drain_and_reset", "reset", "reboot"]

_RECOVERY_FACTS: Mapping[str, Recovery] = MappingProxyType(
    {
        GPU_RESET_REQUIRED: "reset",
        GPU_REBOOT_REQUIRED: "reboot",
        GPU_DRAIN_P2P: "drain_p2p",
        GPU_DRAIN_AND_RESET: "drain_and_reset",
    }
)

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
    {0: "none", 1: "reset", 2: "reboot", 3: "drain_p2p", 4: "drain_and_reset", 6: "reset", 7: "reboot"}
)
# Unlike the driver's line "none", which is about the error beside it, NVML's is about the GPU as it is now.
NVML_RECOVERY_FACTS: Mapping[int, str] = MappingProxyType(
    {
        number: next((name for name, known in _RECOVERY_FACTS.items() if known == asked), GPU_REPAIRED)
        for number, asked in _RECOVERY_NUMBERS.items()
    }
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
    """Return the recovery action that the driver now asks for: in an XID 154 ("changed from … to …"), or by NVML.

    None if it does not state one, or states an unknown one.
    """
    if (what := text(attributes, "what")) in _RECOVERY_FACTS:
        return _RECOVERY_FACTS[what]
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


# How the kernel words errors that were corrected or deferred and harmless (Linux, EDAC and MCE messages).
CORRECTED = re.compile(
    r"(?<!un)correct(ed|able) (error|memory|events?)|\bCE\b|deferred error|no action required", re.IGNORECASE
)
UNCORRECTED = re.compile(r"uncorrect|fatal|\bUE\b|\bPCC\b|processor context corrupt", re.IGNORECASE)

_SXID_PORT = Fact("sxid", "NVSwitch error fatal to a port", "switch", "reset_gpu", "gpu_hang")
_SXID_ALL = Fact("sxid", "NVSwitch error fatal to the node's fabric", "switch", "reset_gpu", "gpu_hang")
_SXID_OTHER = Fact("sxid", "NVSwitch error without effect", "record", "none")
_SXIDS: Mapping[str, Fact] = MappingProxyType(
    {"port": _SXID_PORT, "all": _SXID_ALL, "nonfatal": _SXID_OTHER, "unknown": _SXID_OTHER}
)
_XID_REPAIRS: Mapping[Kind, Repair] = MappingProxyType(
    {"lost": "reboot", "hang": "reset_gpu", "memory": "reset_gpu", "reset": "reset_gpu"}
)
_RECOVERY_REPAIRS: Mapping[Recovery | None, Repair] = MappingProxyType(
    {"reset": "reset_gpu", "drain_and_reset": "reset_gpu", "reboot": "reboot"}
)
_TAKEN_DOWN_XID = 155  # a reset itself takes links down, which is no reason for the next one


class FactJudgement(NamedTuple):
    """What an event means: its fact, whether it is marked as fatal, and what the driver asks for.

    ``repair`` is what the host needs before its next job, "none" if it may take one. A detector drains or excludes a
    node for what asks for a repair; what does not it reports, or blames if the job stopped just after it.
    """

    fact: Xid | Fact
    repair: Repair
    fatal: bool = True
    recovery: Recovery | None = None


def judged(kind: str, attributes: Mapping[str, Any], device: int = WHOLE_NODE) -> FactJudgement | None:
    """Return what an event of this kind means; None for other kinds, and for codes and words in no table.

    ``device`` is the event's: a GPU that could not be brought up and has a row by now is up.
    """
    if kind == "xid":
        known = BY_CODE.get(code_of(attributes) or 0)
        return None if known is None else _judged_xid(known, attributes)
    if kind == "sxid":
        fact = _SXIDS[sxid_severity(attributes)]
        return FactJudgement(fact, fact.repair, fatal=fact.kind == "switch")
    if kind == GPU_LOST:
        return FactJudgement(BY_NAME[GPU_LOST], BY_NAME[GPU_LOST].repair)
    if kind == MACHINE_CHECK:
        said = text(attributes, "text", "severity")
        serious = bool(UNCORRECTED.search(said)) or not CORRECTED.search(said)
        fact = BY_NAME[MACHINE_CHECK] if serious else _MACHINE_CHECK_CORRECTED
        return FactJudgement(fact, fact.repair, fatal=serious)
    named = BY_NAME.get(text(attributes, "what")) if kind == "host_error" else None
    if named is None:
        return None
    up = named.name == GPU_UNUSABLE and device != WHOLE_NODE
    return FactJudgement(named, "none" if up else named.repair, recovery=_RECOVERY_FACTS.get(named.name))


def _judged_xid(xid: Xid, attributes: Mapping[str, Any]) -> FactJudgement:
    fatal = is_fatal(attributes)
    if xid.kind == "recovery":
        recovery = recovery_of(attributes)
        return FactJudgement(xid, _RECOVERY_REPAIRS.get(recovery, "none"), fatal, recovery)
    repair: Repair = _XID_REPAIRS.get(xid.kind, "none")
    links = xid.immediate == "RESET_GPU" or xid.code in NVLINK5_XIDS
    if xid.kind == "nvlink" and links and xid.code != _TAKEN_DOWN_XID:
        repair = "reset_gpu"
    return FactJudgement(xid, repair if fatal else "none", fatal)
