"""Kernel log lines that report a failing host or device, as one table of wordings. Pure.

Sources: Linux, drivers/net (mlx4, mlx5, bnxt, i40e, ice), net/sched/sch_generic.c, drivers/pci/pcie (AER, DPC),
drivers/pci/hotplug/pciehp, kernel/watchdog.c, kernel/rcu, kernel/hung_task.c, drivers/nvme, block, fs; Lustre; NVIDIA's
open kernel modules (probe). Wordings of Linux 3.10 to 6.15.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LINE_CHARS_MAX = 1_024  # examined per line

# Kinds of host error. Consumers of the events depend on these words: docs/reference/wire.md.
NIC_FAILED, NIC_STALLED = "nic_failed", "nic_stalled"
PCIE_FATAL, DEVICE_GONE, GPU_UNUSABLE = "pcie_fatal", "device_gone", "gpu_unusable"
CPU_STUCK, TASK_BLOCKED = "cpu_stuck", "task_blocked"
DISK_FAILED, DISK_ERRORS, STORAGE_SILENT = "disk_failed", "disk_errors", "storage_silent"

LASTING = (GPU_UNUSABLE, DEVICE_GONE, DISK_FAILED)  # true until the next boot; the others soon expire


class HostError(NamedTuple):
    """A line's meaning: ``what`` is one of the words above; the device as the line names it, "" where it names none."""

    what: str
    device: str


class _Wording(NamedTuple):
    """One wording: a substring that its lines must contain, and the line's beginning, with the group ``device``."""

    hint: str
    what: str
    pattern: re.Pattern[str]


_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_MLX5 = rf"mlx5_core (?P<device>{_ADDRESS})(?: [\w.@-]+)?: (?:\w+:\d+:\(pid \d+\): )?"
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


_FRAME = re.compile(rb"\b(\w{1,64}?)(?:\.\w+)*\+0x[0-9a-f]+/0x[0-9a-f]+(?: \[(\w{1,64})[^\]]{0,64}\])?")
STACK_FRAMES_MAX = 32


def stack_frame(text: bytes) -> str:
    """Return the module of a stack line, or the function where it is the kernel's own; "": not a stack line."""
    match = _FRAME.search(text[:LINE_CHARS_MAX])
    return "" if match is None else (match[2] or match[1]).decode("ascii", "replace")
