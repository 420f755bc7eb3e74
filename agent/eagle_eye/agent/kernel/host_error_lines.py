"""Kernel log lines that report a failing host or device without a code, as one table of wordings. Pure.

What they mean is the table of schema/driver_facts.py.

Sources: Linux, drivers/net (mlx4, mlx5, bnxt, i40e, ice), net/sched/sch_generic.c, drivers/pci/pcie (AER, DPC),
drivers/pci/hotplug/pciehp, kernel/watchdog.c, kernel/rcu, kernel/hung_task.c, drivers/nvme, block, fs; Lustre; NVIDIA's
open kernel modules; amdgpu. Wordings of Linux 3.10 to 7.1.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from eagle_eye.schema.driver_facts import (
    CPU_STUCK,
    DEVICE_GONE,
    DISK_ERRORS,
    DISK_FAILED,
    GPU_FIRMWARE_SILENT,
    GPU_HARDWARE_ERROR,
    GPU_LOST,
    GPU_REPAIRED,
    GPU_RESET_REQUIRED,
    GPU_UNUSABLE,
    NIC_FAILED,
    NIC_STALLED,
    NVLINK_BROKEN,
    PCIE_FATAL,
    STORAGE_SILENT,
    TASK_BLOCKED,
)

LINE_CHARS_MAX = 1_024  # examined per line


class HostError(NamedTuple):
    """A line's meaning: ``what`` is a name of FACTS; the device as the line names it, "" where it names none."""

    what: str
    device: str


class _Wording(NamedTuple):
    """One wording: a substring that its lines must contain, and the line's beginning, with the group ``device``."""

    hint: str
    what: str
    pattern: re.Pattern[str]


_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_MLX5 = rf"mlx5_core (?P<device>{_ADDRESS})(?: [\w.@-]+)?: (?:\w+:\d+:\(pid \d+\): )?"
_AMD = rf"amdgpu (?P<device>{_ADDRESS}): (?:amdgpu: )?"
_LINK = r"(?P<device>[\w.@-]{1,64})"
_DISK = r"(?P<device>(?!loop|sr\d|fd\d|ram)[\w!.-]{1,64})"

_WORDINGS: tuple[_Wording, ...] = tuple(
    _Wording(hint, what, re.compile(pattern))
    for hint, what, pattern in (
        # Network adapters. A temperature syndrome, or a severity of warning, is not a failure.
        ("health compromised", NIC_FAILED, _MLX5 + r"device's health compromised"),
        ("Fatal error", NIC_FAILED, _MLX5 + r"Fatal error \d+ detected"),
        ("bad device", NIC_FAILED, _MLX5 + r"handling bad device here"),
        ("synd 0x", NIC_FAILED, _MLX5 + r"synd 0x(?!0+:)[0-9a-f]+: (?!.*temperature)"),
        ("Health issue", NIC_FAILED, _MLX5 + r"Health issue observed, (?!.*temperature).{1,80}, severity\([0-3]\)"),
        ("Internal error detected", NIC_FAILED, rf"mlx4_core (?P<device>{_ADDRESS}): Internal error detected:"),
        (
            "wait_func",
            NIC_STALLED,
            _MLX5 + r"[A-Z]\w*\(0x[0-9a-f]+\) (?:timeout\. Will cause a leak|canceled on out of queue timeout)",
        ),
        ("TX timeout", NIC_STALLED, rf"bnxt_en {_ADDRESS} {_LINK}: TX timeout detected"),
        ("tx_timeout", NIC_STALLED, rf"(?:i40e|ice|iavf) {_ADDRESS} {_LINK}: tx_timeout: VSI_"),
        ("NETDEV WATCHDOG", NIC_STALLED, rf"NETDEV WATCHDOG: {_LINK} \([\w-]+\): transmit queue \d+ timed out"),
        (
            "NETDEV WATCHDOG",
            NIC_STALLED,
            rf"\S+ \S+ {_LINK}: NETDEV WATCHDOG: CPU: \d+: transmit queue \d+ timed out",
        ),
        # PCIe. A failed recovery may have followed a non-fatal error: those lines say nothing by themselves.
        (
            "(Fatal)",
            PCIE_FATAL,
            (
                rf"\S+ (?P<port>{_ADDRESS}): (?:AER: )?(?:Multiple )?Uncorrect(?:ed|able) \(Fatal\) error"
                rf" (?:message )?received(?:: | from )(?P<device>{_ADDRESS}|id=[0-9a-f]+)?"
            ),
        ),
        (
            "(Fatal)",
            PCIE_FATAL,
            rf"\S+ (?P<device>{_ADDRESS}): (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)",
        ),
        ("DPC: cont", PCIE_FATAL, rf"pcieport (?P<device>{_ADDRESS}): (?:pcie_)?DPC: containment event"),
        (
            "Slot(",
            DEVICE_GONE,
            (
                rf"(?:pcieport|pciehp) (?P<device>{_ADDRESS}): ?(?:pciehp|pcie\d+): Slot\([\w-]{{1,32}}\):"
                r" (?:Link Down|Card not present)"
            ),
        ),
        # GPUs that the driver could not bring up.
        ("fallen off the bus and", GPU_UNUSABLE, r"NVRM: (?:has )?fallen off the bus and is not responding"),
        ("RmInitAdapter", GPU_UNUSABLE, rf"NVRM: (?:GPU (?P<device>{_ADDRESS}): )?RmInitAdapter failed!"),
        ("rm_init_adapter", GPU_UNUSABLE, rf"NVRM: GPU (?P<device>{_ADDRESS}): rm_init_adapter failed"),
        ("probe", GPU_UNUSABLE, rf"nvidia: probe of (?P<device>{_ADDRESS}) failed with error"),
        ("probe", GPU_UNUSABLE, rf"nvidia (?P<device>{_ADDRESS}): probe with driver nvidia failed with error"),
        # GPUs whose driver says so without an XID: its status codes in assertions, its firmware, its NVLinks.
        ("NV_ERR_RESET_REQUIRED", GPU_RESET_REQUIRED, r"NVRM: .{0,400}\[NV_ERR_RESET_REQUIRED\]"),
        ("marked for reset", GPU_RESET_REQUIRED, r"NVRM: .{0,400}\bGPU marked for reset\b"),
        ("NV_ERR_GPU_IS_LOST", GPU_LOST, r"NVRM: .{0,400}\[NV_ERR_GPU_IS_LOST\]"),
        ("rpcRecvPoll", GPU_FIRMWARE_SILENT, r"NVRM: (?:GPU\d+ )?\w+: .{0,20}rpcRecvPoll time(?:d ?)?out\b"),
        ("Rx Detect Link", NVLINK_BROKEN, r"NVRM: (?:GPU\d+ )?knvlink\w+: Failed to update Rx Detect Link mask"),
        ("postRxDetLinkMask", NVLINK_BROKEN, r"NVRM: (?:GPU\d+ )?knvlink\w+: .{0,60}postRxDetLinkMask failed"),
        ("hardware error(", GPU_HARDWARE_ERROR, _AMD + r"(?:\{\d+\} ?)?[Uu]ncorrectable hardware error\("),
        ("GPU reset(", GPU_REPAIRED, _AMD + r"GPU reset\(\d+\) succeeded"),
        ("GPU reset(", GPU_UNUSABLE, _AMD + r"GPU reset\(\d+\) failed"),
        ("GPU Recovery F", GPU_UNUSABLE, _AMD + r"GPU Recovery Failed"),
        ("GPU init", GPU_UNUSABLE, _AMD + r"Fatal error during GPU init"),
        ("lost from bus", GPU_LOST, _AMD + r"device lost from bus"),
        ("probe of", GPU_UNUSABLE, rf"amdgpu: probe of (?P<device>{_ADDRESS}) failed with error"),
        # CPUs and tasks.
        ("LOCKUP", CPU_STUCK, r"(?:(?:NMI )?watchdog: )?Watchdog detected hard LOCKUP on (?P<device>cpu \d+)"),
        ("soft lockup", CPU_STUCK, r"(?:(?:NMI )?watchdog: )?BUG: soft lockup - (?P<device>CPU#\d+) stuck for \d+s"),
        (
            "stall",
            CPU_STUCK,
            r"(?:rcu: )?INFO: (?P<device>rcu_\w{1,32}) (?:self-)?detected (?:expedited )?stalls? on CPU",
        ),
        (
            "blocked ",
            TASK_BLOCKED,
            r"INFO: task (?P<device>.{1,64}?):\d+ blocked (?:in I/O wait )?for more than \d+ seconds",
        ),
        # Disks and filesystems of the host.
        (
            "nvme nvme",
            DISK_FAILED,
            (
                r"nvme (?P<device>nvme\d+): (?:Device not ready; aborting (?:reset|initiali[sz]ation)"
                r"|Removing after probe failure|Disabling device after reset failure"
                r"|controller is down; will reset: CSTS=0xffffffff)"
            ),
        ),
        ("nvme nvme", DISK_ERRORS, r"nvme (?P<device>nvme\d+): I/O (?:tag )?\d+ .{0,80}\btimeout, "),
        ("Remounting", DISK_FAILED, rf"EXT4-fs \({_DISK}\): Remounting filesystem read-only"),
        ("ournal on device", DISK_FAILED, rf"Aborting journal on device {_DISK}"),
        (
            "XFS (",
            DISK_FAILED,
            rf"XFS \({_DISK}\): (?!User init).{{0,160}}(?:[Ff]ilesystem has been shut down|Shutting down filesystem)",
        ),
        ("forced readonly", DISK_FAILED, r"BTRFS \w+ \(device (?P<device>[\w-]{1,64})[^)]{0,80}\): forced readonly"),
        ("offline", DISK_FAILED, r"sd (?P<device>[\d:]+): (?:\[\w+\] )?(?:Device offlined|rejecting I/O to offline)"),
        (
            " error, dev ",
            DISK_ERRORS,
            rf"(?:\w+: )?(?:I/O|critical (?:medium|target|nexus|space allocation)) error, dev {_DISK}, sector \d",
        ),
        ("Buffer I/O", DISK_ERRORS, rf"Buffer I/O error on dev(?:ice)? {_DISK}, (?:logical|async)"),
        ("EXT4-fs error", DISK_ERRORS, rf"EXT4-fs error \(device {_DISK}\)"),
        ("XFS (", DISK_ERRORS, rf"XFS \({_DISK}\): (?:metadata I/O error|Metadata (?:CRC error|corruption) detected)"),
        ("ata", DISK_ERRORS, r"(?P<device>ata\d+(?:\.\d+)?): (?:failed command: |exception Emask )"),
        # Remote storage whose servers do not answer.
        (
            "Lustre",
            STORAGE_SILENT,
            (
                r"Lustre(?:Error)?: .{0,200}?(?P<device>\b[\w-]{1,64}-(?:OST|MDT)[0-9a-f]{4})\S*: "
                r"(?:operation \w+ to node \S+ failed: rc = -(?:5|11|19|10[78]|11[0-3])\b"
                r"|Connection to \S+ \(at \S+\) was lost)"
            ),
        ),
        ("Lustre", STORAGE_SILENT, r"LustreError: .{0,200}?This client was evicted by (?P<device>[\w-]{1,64})"),
        (
            "Lustre",
            STORAGE_SILENT,
            r"Lustre: .{0,200}?ptlrpc_expire_one_request\(\)\) @@@ Request sent has (?:timed out|failed)",
        ),
        ("nfs: server", STORAGE_SILENT, r"nfs: server (?P<device>\S{1,200}) not responding, "),
        ("CIFS", STORAGE_SILENT, r"CIFS:? (?:VFS: )?(?:Server )?(?P<device>\S{1,200}) has not responded in \d+ s"),
        ("ceph: ", STORAGE_SILENT, r"ceph: (?:\[[^\]]{1,100}\]: )?(?P<device>mds\d+) hung"),
        ("session lost", STORAGE_SILENT, r"libceph: (?P<device>mon\d+) .{0,100}session lost"),
    )
)
# A single pattern costs a quarter of what a search for each hint does.
HINT = re.compile(b"|".join(dict.fromkeys(re.escape(wording.hint.encode()) for wording in _WORDINGS)))


def host_error(line: str) -> HostError | None:
    """Return the host error in a line, None where there is none."""
    line = line[:LINE_CHARS_MAX]
    for wording in _WORDINGS:
        if wording.hint in line:
            match = wording.pattern.match(line)
            if match is not None:
                known = match.groupdict()
                return HostError(wording.what, known.get("device") or known.get("port") or "")
    return None


_FRAME = re.compile(rb"(\? )?\b(\w{1,64}?)(?:\.\w+)*\+0x[0-9a-f]+/0x[0-9a-f]+(?: \[(\w{1,64})[^\]]{0,64}\])?")
_HOLDER = re.compile(rb"INFO: task .{1,64} blocked on an? .{1,60} likely .{1,20} by (?:\w+ )?task (.{1,64}?):\d+")
_TASK = re.compile(rb"task:.{1,64} state:")
STACK_FRAMES_MAX = 32


class StackFrame(NamedTuple):
    """A function in a stack; ``module`` "": the kernel's own. ``sure``: the unwinder does not doubt it ("? name")."""

    function: str
    module: str
    sure: bool


def stack_frame(text: bytes) -> StackFrame | None:
    """Return the frame in a line of a stack; None: it is none."""
    match = _FRAME.search(text[:LINE_CHARS_MAX])
    if match is None:
        return None
    function, module = (part.decode("ascii", "replace") for part in (match[2], match[3] or b""))
    return StackFrame(function, module, match[1] is None)


def lock_holder(text: bytes) -> str:
    """Return the task that holds the lock that a blocked task waits for (since Linux 6.16); "": the line says none."""
    match = _HOLDER.match(text[:LINE_CHARS_MAX])
    return "" if match is None else match[1].decode("utf-8", "replace")


def begins_task(text: bytes) -> bool:
    """Whether a line begins the state and stack of a task: first those of the one that waits, then of the holder."""
    return _TASK.match(text[:LINE_CHARS_MAX]) is not None
