"""Parses the kernel log: errors of GPUs, switches and the host, OOM kills, link changes, panics; repeats are folded.

Everything here is pure; the log is read by its collector. Sources: Linux, Documentation/ABI/testing/dev-kmsg (records);
NVIDIA, XID Errors and Fabric Manager User Guide (XIDs, SXIDs); Linux, mm/oom_kill.c, drivers/net, x86 MCE, mce_amd,
EDAC and CPER (the other lines).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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

# Kernel log lines that report a failing host or device without a code, as one table of wordings.
#
# What they mean is the table of schema/driver_facts.py.
#
# Sources: Linux, drivers/net (mlx4, mlx5, bnxt, i40e, ice), net/sched/sch_generic.c, drivers/pci/pcie (AER, DPC),
# drivers/pci/hotplug/pciehp, kernel/watchdog.c, kernel/rcu, kernel/hung_task.c, drivers/nvme, block, fs; Lustre;
# NVIDIA's open kernel modules; amdgpu. Wordings of Linux 3.10 to 7.1.
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


TEXT_CHARS_MAX = 512  # per message passed on
HEAD_BYTES_MAX = 128
LINES_MAX = 16  # examined per record
SEQUENCE_MAX = 1 << 63

Kind = Literal["xid", "sxid", "oom_kill", "link_down", "link_up", "machine_check", "host_error"]


class KernelRecord(NamedTuple):
    """One record: its sequence number, its time in seconds since boot by the kernel's clock, its escaped text."""

    sequence: int
    stamp_s: float
    text: bytes


class KernelMessage(NamedTuple):
    """What one line says. ``subject`` tells it from others of its kind: code, process, link, severity; of a host error
    its word and its device.

    ``address`` is the PCI address that it names, as ``bus_address`` formats it, "" where it names none. Severities of
    machine checks are "uncorrected", "deferred" and "corrected", "pcie" for errors of a PCIe device and not of the
    host, "" where the line does not say. ``module`` and ``holder`` are of a blocked task: the kernel module that it
    waits in, and the task that holds the lock.
    """  # noqa: D205 - one thought

    kind: Kind
    subject: str
    text: str = ""
    code: int = -1
    address: str = ""
    module: str = ""
    holder: str = ""


def record(raw: bytes) -> KernelRecord | None:
    """Parse what one read of the log returned, like "6,1234,5678,-;text"; None where it is malformed."""
    head, found, text = raw.partition(b";")
    fields = head.split(b",", 3)
    if not found or len(fields) < 3 or len(head) > HEAD_BYTES_MAX:
        return None
    sequence, stamp_us = fields[1], fields[2]
    if not sequence.isdigit() or not stamp_us.isdigit():
        return None
    number = int(sequence)
    return KernelRecord(number, int(stamp_us) / 1e6, text) if number < SEQUENCE_MAX else None


def message(text: bytes) -> KernelMessage | None:
    """Return the message in a record's text, None where it is irrelevant; most records cost a few searches.

    Lines after the first are the record's properties (" SUBSYSTEM=pci"); a line feed of the message itself is escaped.
    """
    if not (
        b"Xid (" in text
        or b"ink " in text  # "Link is Down", "link status definitely up"
        or b"Killed process" in text
        or b"Hardware Error" in text
        or b"EDAC" in text
        or b"hardware memory error" in text
        or b"BERT: Error" in text
        or b"hardware memory corruption" in text
        or HINT.search(text)
    ):
        return None
    lines = _plain(text.partition(b"\n")[0]).split("\n", LINES_MAX)[:LINES_MAX]
    for line in lines:
        found = _xid(line) or _sxid(line) or _kill(line) or _host(line, lines) or _link(line) or _machine_check(line)
        if found is not None:
            return found
    return None


_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def _plain(text: bytes) -> str:
    if b"\\x" in text:
        text = _ESCAPE.sub(lambda match: bytes.fromhex(match[1].decode("ascii")), text)
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.decode("utf-8", "replace"))


# The parentheses hold the PCI address and, on a partitioned GPU, the instance: "PCI:0000:3b:00 GPU-I:02".
_XID = re.compile(r"NVRM: Xid \(([^()]{1,64})\): (\d{1,5})\b[,:]?\s*(.*)")
_INSTANCE = re.compile(r"GPU-I:\S+(?: .*)?")
_RECOVERY_CHANGED = 154  # each new action is news, not a repeat


def _xid(line: str) -> KernelMessage | None:
    match = _XID.match(line)
    if match is None:
        return None
    place, code, text = match[1], int(match[2]), match[3]
    instance = _INSTANCE.search(place)
    if instance is not None:
        text = f"{instance[0]}, {text}"
    subject = f"{code} {text}" if code == _RECOVERY_CHANGED else str(code)
    return KernelMessage("xid", subject[:TEXT_CHARS_MAX], text[:TEXT_CHARS_MAX], code, bus_address(place))


_SXID = re.compile(r"(nvidia-nvswitch\d+): SXid \(([^()]{1,64})\): (\d{1,6})\b[,:]?\s*(.*)")
_SEVERITY = re.compile(r"\b(?:non-?)?fatal\b", re.IGNORECASE)
_DETAILS = ("Data {", "Severity ")  # the second and third line of an error whose first line gave the severity


def _sxid(line: str) -> KernelMessage | None:
    match = _SXID.match(line)
    if match is None or match[4].startswith(_DETAILS):
        return None
    severity = _SEVERITY.search(match[4])
    subject = f"{int(match[3])} {severity[0].lower() if severity else ''}"
    text = f"{match[1]} {match[2]}: {match[4]}"
    return KernelMessage("sxid", subject, text[:TEXT_CHARS_MAX], int(match[3]), bus_address(match[2]) or match[1])


# "Out of memory: Killed process 7 (python3) total-vm:..."; older kernels announce it with a line "Kill process 7", and
# say "Killed process 7, UID 48, (httpd)". A process may have brackets in its name: "((sd-pam))".
_KILL = re.compile(
    r"(?:(?:Memory cgroup out|Out) of memory[^:]{0,64}: )?Killed process \d+(?:, UID \d+,)? \((.{1,64}?)\)(?=[ ,.]|$)"
)


def _kill(line: str) -> KernelMessage | None:
    match = _KILL.match(line)
    return None if match is None else KernelMessage("oom_kill", match[1])


# "bond0: (slave eth0): link status definitely down, disabling slave", and before Linux 5.4
# "bond0: link status definitely down for interface eth0, disabling it"; "link status down" alone is still in doubt.
_BOND = re.compile(
    r"(?:bonding: )?[\w.@-]{1,64}: (?:\(slave ([\w.@-]{1,64})\): )?link status definitely (down|up)"
    r"(?: for interface ([\w.@-]{1,64}))?"
)
_STATE = re.compile(r"\blink(?: is)? (down|up|active)\b", re.IGNORECASE)
_NAME = re.compile(r"(?!ata|pcie|nvidia|usb)[A-Za-z][\w.@-]{0,63}(?::\d+)?")  # others have links of their own
_BRACKETED = re.compile(r"\(([\w.@-]{1,64})\)\]$")


def _link(line: str) -> KernelMessage | None:
    """Return a network link change; "link becomes ready" only repeats the driver's message."""
    match = _BOND.match(line)
    if match is not None:
        link, state = match[1] or match[3], match[2]
    else:
        match = _STATE.search(line)
        if match is None:
            return None
        link, state = _port(line[: match.start()]), match[1].lower()
    if not link or _NAME.fullmatch(link) is None:
        return None
    return KernelMessage("link_down" if state == "down" else "link_up", link)


def _port(before: str) -> str:
    """Return the interface or RDMA port ("mlx5_0:2") that a driver names before "Link is down", "" where it names none.

    "mlx5_core 0000:41:00.0 ens1np0: ", "mlx4_en: eth2: ", "igb 0000:07:00.0 eno1: igb: eno1 NIC ", "e1000e: eth0 NIC ",
    "infiniband mlx5_0: Port: 1 ", "[qede_link_update:2211(ens2)]"; not "ata8: SATA ", "pciehp: Slot(0): ".
    """
    words = before.split()
    by_name = bool(words) and words[-1] in ("NIC", "logical", "physical")
    if by_name:
        words.pop()
    if len(words) >= 3 and words[-2].lower() in ("port", "port:") and words[-1].rstrip(":").isdecimal():
        number = int(words[-1].rstrip(":")[:6])
        words = [*words[:-3], words[-3].rstrip(":") + (f":{number}:" if number > 1 else ":")]
    if len(words) >= 2 and words[-1].startswith("(") and words[-1].endswith("):"):
        words = [*words[:-2], words[-2] + ":"]  # "ens1np0 (unregistering): "
    if not words:
        return ""
    if words[-1].endswith(":"):
        return words[-1][:-1]
    if by_name and len(words) >= 2 and words[-2].endswith(":"):
        return words[-1]
    match = _BRACKETED.search(words[-1])
    return match[1] if match is not None else ""


_FULL_ADDRESS = re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b", re.IGNORECASE)


def _host(line: str, lines: Sequence[str]) -> KernelMessage | None:
    found = host_error(line)
    if found is None:
        return None
    # The first of several lines in a record names the device, in full: "kernel_gsp.c:23" is no address.
    full = None if found.device else _FULL_ADDRESS.search(lines[0])
    address = bus_address(full[0] if full is not None else found.device)
    text = line if found.device else " ".join(lines)
    return KernelMessage(
        "host_error", f"{found.what} {found.device or address}", text[:TEXT_CHARS_MAX], address=address
    )


_ERROR = re.compile(r"(?:\{(\d+)\})?(?:mce: )?\[Hardware Error\]:\s*(.*)")
_OTHER_ERROR = re.compile(
    r"(EDAC \w+: (?:\d+ )?[CU]E\b.*|mce: Uncorrected hardware memory error.*|BERT: Error records.*"
    r"|(?:Memory failure:|MCE) 0x[0-9a-f]+: (?:Sending SIGBUS to|Killing) .{1,80} due to hardware memory corruption.*)"
)
_STATUS = re.compile(r"Machine Check(?: Exception)?: [0-9a-f]+ Bank \d+: ([0-9a-f]{16})")
_STATUS_UNCORRECTED, _STATUS_DEFERRED = 1 << 61, 1 << 44
_UNCORRECTED = re.compile(
    r"uncorrect|\bfatal\b|severity: recoverable|type: recoverable|processor context corrupt|\bUE\b|unrecoverable"
    r"|hardware memory corruption",
    re.IGNORECASE,
)
_DEFERRED = re.compile(r"deferred", re.IGNORECASE)
_CORRECTED = re.compile(r"corrected|no action required|\bCE\b", re.IGNORECASE)


def _machine_check(line: str) -> KernelMessage | None:
    match = _ERROR.match(line)
    if match is not None:
        return KernelMessage("machine_check", _severity(match[2]), match[2][:TEXT_CHARS_MAX], address=match[1] or "")
    match = _OTHER_ERROR.match(line)
    return None if match is None else KernelMessage("machine_check", _severity(match[1]), match[1][:TEXT_CHARS_MAX])


def _severity(text: str) -> str:
    match = _STATUS.search(text)
    if match is not None:
        status = int(match[1], 16)
        if status & _STATUS_UNCORRECTED:
            return "uncorrected"
        return "deferred" if status & _STATUS_DEFERRED else "corrected"
    if "section_type: PCIe" in text:
        return "pcie"
    for severity, pattern in (("uncorrected", _UNCORRECTED), ("deferred", _DEFERRED), ("corrected", _CORRECTED)):
        if pattern.search(text):
            return severity
    return ""


_DEVICE_ID = re.compile(r"\bdevice_id: ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")


def whole_machine_check(lines: Sequence[KernelMessage]) -> KernelMessage | None:
    """Return the lines of one machine check as one message with the worst severity; None where irrelevant.

    Lines without a severity ("Machine check events logged", which every corrected error also logs) would look like an
    uncorrected error. Errors of PCIe devices show at the devices, except fatal ones: the firmware that reports those
    has taken over their handling from the kernel.
    """
    severities = {line.subject for line in lines}
    if "pcie" in severities and any("severity: fatal" in line.text for line in lines):
        text = "; ".join(line.text for line in lines[:LINES_MAX])
        named = _DEVICE_ID.search(text)
        device = named[1] if named is not None else ""
        return KernelMessage(
            "host_error", f"{PCIE_FATAL} {device}", text[:TEXT_CHARS_MAX], address=bus_address(device) if device else ""
        )
    severity = next((one for one in ("uncorrected", "deferred", "corrected") if one in severities), "")
    if not severity or "pcie" in severities:
        return None
    text = f"{severity} error: " + "; ".join(line.text for line in lines[:LINES_MAX])
    return KernelMessage("machine_check", severity, text[:TEXT_CHARS_MAX])


_ANY_ADDRESS = re.compile(
    r"(?:\b([0-9a-f]{1,8}):)?\b([0-9a-f]{1,4}):([0-9a-f]{2})(?:\.[0-7])?(?![0-9a-f:])", re.IGNORECASE
)


def bus_address(text: str) -> str:
    """Return a PCI address as "0000:3b:00", whatever its domain width, with or without function; "" if invalid."""
    match = _ANY_ADDRESS.search(text.removeprefix("PCI:"))
    if match is None:
        return ""
    return f"{int(match[1] or '0', 16):04x}:{int(match[2], 16):02x}:{match[3].lower()}"


_STAMP = rb"^(?:<\d+>)?(?:\[ *\d+\.\d+\](?:\[[^\]\n]{0,32}\])? *)?"
_PANIC = re.compile(_STAMP + rb"(Kernel panic - not syncing[^\n\0]{0,512})", re.MULTILINE)
_PANIC_PART = re.compile(rb"Panic#\d+ Part\d+")
_CAUSE = re.compile(_STAMP + rb"((?:BUG: |Oops: |general protection fault)[^\n\0]{0,512})", re.MULTILINE)


class Panic(NamedTuple):
    """A panic left by a crashed kernel; ``line`` carries that kernel's time, so that duplicates are equal."""

    line: str
    text: str


def panic(dump: bytes) -> Panic | None:
    """Return the panic in part of a crashed kernel's log; None where there is none, as after a survived oops.

    ``line`` is "" where the kernel labels the part as a panic's but it lacks the panic's own line.
    """
    match = _PANIC.search(dump)
    if match is not None:
        return Panic(_plain(match[0])[:TEXT_CHARS_MAX], _plain(match[1])[:TEXT_CHARS_MAX])
    if _PANIC_PART.match(dump) is None:
        return None
    match = _CAUSE.search(dump)
    return Panic("", f"Kernel panic: {_plain(match[1])}"[:TEXT_CHARS_MAX] if match is not None else "Kernel panic")


# Deduplicates messages: collapses bursts of repeats into a few, and reports each link state change once.
FOLD_S = 59.0  # repeats within this are folded: detectors treat messages up to 60 s apart as one occurrence
KILLS_FOLD_S = 5.0  # shorter: a kill must be close to the exit of the rank that it explains (10 s)
KEYS_MAX = 1_024
BRING_UP_S = 300.0  # a link first seen going down this soon after boot is not reported: nothing is plugged in
CHANGES_MAX = 10  # per link and minute; beyond it only the final state is reported


class NewMessage(NamedTuple):
    """A message to report; ``more`` repeats since the last one reported, the last of them at ``at_s``, since boot."""

    message: KernelMessage
    at_s: float
    more: int = 0


@dataclass
class _Reported:
    """What was last reported of a message, and what has been folded since."""

    message: KernelMessage
    reported_s: float
    last_s: float
    more: int = 0


class Repeats:
    """Folds repeats of a message: 800,000 lines of one XID become a handful.

    The first is reported at once; those that follow within FOLD_S as one at the end of that time, dated to the last of
    them. No gap between reports is longer than between the lines, so that grouping reports by time gives as many
    occurrences as grouping the lines.
    """

    def __init__(self) -> None:
        self._reported: dict[tuple[str, str, str], _Reported] = {}

    def add(self, message: KernelMessage, at_s: float) -> list[NewMessage]:
        """Add a message; return what to report now."""
        key = (message.kind, message.subject, message.address)
        fold_s = _fold_s(message)
        known = self._reported.get(key)
        news: list[NewMessage] = []
        if known is not None:
            if known.more and at_s - known.reported_s > fold_s:
                news.append(_fold(known))
            if at_s - known.reported_s <= fold_s:
                known.more += 1
                known.last_s = max(known.last_s, at_s)
                return news
            del self._reported[key]  # keeps the dict in reporting order
        elif len(self._reported) >= KEYS_MAX:
            oldest = self._reported.pop(next(iter(self._reported)))
            news += [_fold(oldest)] if oldest.more else []
        self._reported[key] = _Reported(message, at_s, at_s)
        return [*news, NewMessage(message, at_s)]

    def due(self, now_s: float) -> list[NewMessage]:
        """Return the repeats due at ``now_s``, and forget messages that were not repeated."""
        news: list[NewMessage] = []
        for key, known in list(self._reported.items()):
            if now_s - known.reported_s > _fold_s(known.message):
                if known.more:
                    news.append(_fold(known))
                else:
                    del self._reported[key]
        return news


def _fold_s(message: KernelMessage) -> float:
    return KILLS_FOLD_S if message.kind == "oom_kill" else FOLD_S


def _fold(known: _Reported) -> NewMessage:
    news = NewMessage(known.message, known.last_s, known.more)
    known.reported_s, known.more = known.last_s, 0
    return news


@dataclass
class _Link:
    """A link's current and last reported state; ``changes`` since ``minute_s``."""

    kind: Kind
    reported: Kind
    last_s: float
    minute_s: float
    changes: int = 1


class LinkChanges:
    """Reports each link change once, whether the driver or the bond above it logs it."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    def add(self, message: KernelMessage, at_s: float) -> list[NewMessage]:
        """Add a message; return what to report now."""
        known = self._links.get(message.subject)
        if known is None:
            if len(self._links) >= KEYS_MAX:
                del self._links[next(iter(self._links))]
            self._links[message.subject] = _Link(message.kind, message.kind, at_s, at_s)
            return [] if message.kind == "link_down" and at_s < BRING_UP_S else [NewMessage(message, at_s)]
        same, near = message.kind == known.kind, at_s - known.last_s <= FOLD_S
        known.kind, known.last_s = message.kind, at_s
        if same and near:
            return []
        if at_s - known.minute_s > FOLD_S:
            known.minute_s, known.changes = at_s, 0
        known.changes += 1
        if known.changes > CHANGES_MAX:
            return []
        known.reported = message.kind
        return [NewMessage(message, at_s)]

    def due(self, now_s: float) -> list[NewMessage]:
        """Return the final states of links that changed too often."""
        news: list[NewMessage] = []
        for link, known in self._links.items():
            if known.reported != known.kind and now_s - known.minute_s > FOLD_S:
                known.reported = known.kind
                news.append(NewMessage(KernelMessage(known.kind, link), known.last_s))
        return news
