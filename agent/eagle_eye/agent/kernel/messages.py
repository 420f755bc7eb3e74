"""Parses the kernel log: errors of GPUs, switches and the host, OOM kills, link changes, panics.

Everything here is pure; the log is read by its collector. Sources: Linux, Documentation/ABI/testing/dev-kmsg (records);
NVIDIA, XID Errors and Fabric Manager User Guide (XIDs, SXIDs); Linux, mm/oom_kill.c, drivers/net, x86 MCE, mce_amd,
EDAC and CPER (the other lines).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from eagle_eye.agent.kernel.host_error_lines import HINT, host_error
from eagle_eye.schema.driver_facts import PCIE_FATAL

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


_ADDRESS = re.compile(r"(?:\b([0-9a-f]{1,8}):)?\b([0-9a-f]{1,4}):([0-9a-f]{2})(?:\.[0-7])?(?![0-9a-f:])", re.IGNORECASE)


def bus_address(text: str) -> str:
    """Return a PCI address as "0000:3b:00", whatever its domain width, with or without function; "" if invalid."""
    match = _ADDRESS.search(text.removeprefix("PCI:"))
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
