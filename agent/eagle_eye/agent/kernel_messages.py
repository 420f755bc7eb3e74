"""What records of the kernel's log mean: GPU and switch errors, kills for memory, links, machine checks, panics.

Everything here is pure; the log is read elsewhere. Sources: Linux, Documentation/ABI/testing/dev-kmsg (records);
NVIDIA, XID Errors and Fabric Manager User Guide (XIDs, SXIDs); Linux, mm/oom_kill.c, drivers/net, x86 MCE, mce_amd,
EDAC and CPER (the other lines).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

TEXT_CHARS_MAX = 512  # of a message that is passed on
HEAD_BYTES_MAX = 128
LINES_MAX = 16  # of one record that are looked at
SEQUENCE_MAX = 1 << 63
PANIC_LINE = b"Kernel panic - not syncing"

Kind = Literal["xid", "sxid", "oom_kill", "link_down", "link_up", "machine_check"]


class Record(NamedTuple):
    """One record: its sequence number, its time in seconds since boot by the kernel's own clock, its escaped text."""

    sequence: int
    stamp_s: float
    text: bytes


class Message(NamedTuple):
    """What one line says. ``subject`` tells it from others of its kind: code, process, link or severity.

    ``address`` is the PCI address that it names, as ``bus_address`` writes it, "" where it names none. Severities of
    machine checks are "uncorrected", "deferred" and "corrected", "pcie" for what is an error of a PCIe device and not
    of the host, "" where the line does not say.
    """

    kind: Kind
    subject: str
    text: str = ""
    code: int = -1
    address: str = ""


def record(raw: bytes) -> Record | None:
    """Return what one read of the log returned as a record, None where it is none: "6,1234,5678,-;text"."""
    head, found, text = raw.partition(b";")
    fields = head.split(b",", 3)
    if not found or len(fields) < 3 or len(head) > HEAD_BYTES_MAX:
        return None
    sequence, stamp_us = fields[1], fields[2]
    if not sequence.isdigit() or not stamp_us.isdigit():
        return None
    number = int(sequence)
    return Record(number, int(stamp_us) / 1e6, text) if number < SEQUENCE_MAX else None


def message(text: bytes) -> Message | None:
    """Return what a record's text says, None where it says nothing to us; most records cost a few searches.

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
    ):
        return None
    for line in _plain(text.partition(b"\n")[0]).split("\n", LINES_MAX)[:LINES_MAX]:
        found = _xid(line) or _sxid(line) or _kill(line) or _link(line) or _machine_check(line)
        if found is not None:
            return found
    return None


_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")
_CONTROL = re.compile(r"[^\n -~\u00a1-\u024f]")


def _plain(text: bytes) -> str:
    if b"\\x" in text:
        text = _ESCAPE.sub(lambda match: bytes.fromhex(match[1].decode("ascii")), text)
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.decode("utf-8", "replace"))


# The parentheses hold the PCI address, and on a partitioned GPU the instance: "PCI:0000:3b:00 GPU-I:02".
_XID = re.compile(r"NVRM: Xid \(([^()]{1,64})\): (\d{1,5})\b[,:]?\s*(.*)")
_INSTANCE = re.compile(r"GPU-I:\S+(?: .*)?")
_RECOVERY_CHANGED = 154  # each new action is news, not a repeat


def _xid(line: str) -> Message | None:
    match = _XID.match(line)
    if match is None:
        return None
    place, code, text = match[1], int(match[2]), match[3]
    instance = _INSTANCE.search(place)
    if instance is not None:
        text = f"{instance[0]}, {text}"
    subject = f"{code} {text}" if code == _RECOVERY_CHANGED else str(code)
    return Message("xid", subject[:TEXT_CHARS_MAX], text[:TEXT_CHARS_MAX], code, bus_address(place))


_SXID = re.compile(r"(nvidia-nvswitch\d+): SXid \(([^()]{1,64})\): (\d{1,6})\b[,:]?\s*(.*)")
_SEVERITY = re.compile(r"\b(?:non-?)?fatal\b", re.IGNORECASE)
_DETAILS = ("Data {", "Severity ")  # the second and third line of an error whose first said how bad it is


def _sxid(line: str) -> Message | None:
    match = _SXID.match(line)
    if match is None or match[4].startswith(_DETAILS):
        return None
    severity = _SEVERITY.search(match[4])
    subject = f"{int(match[3])} {severity[0].lower() if severity else ''}"
    text = f"{match[1]} {match[2]}: {match[4]}"
    return Message("sxid", subject, text[:TEXT_CHARS_MAX], int(match[3]), bus_address(match[2]) or match[1])


# "Out of memory: Killed process 7 (python3) total-vm:..."; older kernels announce it with a line "Kill process 7", and
# say "Killed process 7, UID 48, (httpd)". A process may have brackets in its name: "((sd-pam))".
_KILL = re.compile(
    r"(?:(?:Memory cgroup out|Out) of memory[^:]{0,64}: )?Killed process \d+(?:, UID \d+,)? \((.{1,64}?)\)(?=[ ,.]|$)"
)


def _kill(line: str) -> Message | None:
    match = _KILL.match(line)
    return None if match is None else Message("oom_kill", match[1])


_STATE = r"(?P<state>down|up|active)\b"
# "bond0: (slave eth0): link status definitely down, disabling slave",
# "bond0: link status definitely down for interface eth0, disabling it"; "link status down" alone is still in doubt.
_BOND = re.compile(
    r"(?:bonding: )?[\w.@-]+: (?:\(slave (?P<slave>[\w.@-]+)\): )?link status definitely "
    + _STATE
    + r"(?: for interface (?P<interface>[\w.@-]+?)\b(?![\w.@-]))?",
    re.IGNORECASE,
)
# "mlx5_core 0000:41:00.0 ens1np0: Link down", "igb 0000:07:00.0 eno1: igb: eno1 NIC Link is Up 1000 Mbps",
# "mlx4_en: eth2: Link Down", "infiniband mlx5_0: Port: 1 Link DOWN", "tg3 0000:04:00.0 eth0: Link is up at 1000 Mbps".
_PORT = re.compile(
    r"[^:\[\]]{0,64}(?::[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] ?)?(?:: )?(?<![\w:.-])(?P<link>[a-z][\w.@-]{0,63})"
    r"(?: \([\w ]{1,20}\))?: (?:[\w-]{1,20}: [\w.@-]{1,63} )?(?:port:? \d+:? )?(?:(?:NIC|logical|physical) )?"
    r"link(?: is)? " + _STATE,
    re.IGNORECASE,
)
_OLD_INTEL = re.compile(r"[\w-]+: (?P<link>[a-z][\w.@-]{0,63}) NIC link is " + _STATE, re.IGNORECASE)
_QLOGIC = re.compile(r"\[[^\]()]{1,64}\((?P<link>[a-z][\w.@-]{0,63})\)\] ?(?:NIC )?link is " + _STATE, re.IGNORECASE)


def _link(line: str) -> Message | None:
    """SATA, PCIe slots and NVLinks have links of their own, and "link becomes ready" repeats what the driver said."""
    match = _BOND.match(line)
    if match is not None:
        link = match["slave"] or match["interface"]
    else:
        match = _PORT.match(line) or _OLD_INTEL.match(line) or _QLOGIC.match(line)
        link = match["link"] if match is not None else None
    if match is None or not link:
        return None
    return Message("link_down" if match["state"].lower() == "down" else "link_up", link)


_ERROR = re.compile(r"(?:\{(\d+)\})?(?:mce: )?\[Hardware Error\]:\s*(.*)")
_OTHER_ERROR = re.compile(r"(EDAC \w+: \d+ [CU]E\b.*|mce: Uncorrected hardware memory error.*|BERT: Error records.*)")
_STATUS = re.compile(r"Machine Check(?: Exception)?: [0-9a-f]+ Bank \d+: ([0-9a-f]{16})")
_STATUS_UNCORRECTED, _STATUS_DEFERRED = 1 << 61, 1 << 44
_UNCORRECTED = re.compile(
    r"uncorrect|\bfatal\b|severity: recoverable|type: recoverable|processor context corrupt|\bUE\b", re.IGNORECASE
)
_DEFERRED = re.compile(r"deferred", re.IGNORECASE)
_CORRECTED = re.compile(r"corrected|no action required|\bCE\b", re.IGNORECASE)


def _machine_check(line: str) -> Message | None:
    match = _ERROR.match(line)
    if match is not None:
        return Message("machine_check", _severity(match[2]), match[2][:TEXT_CHARS_MAX], address=match[1] or "")
    match = _OTHER_ERROR.match(line)
    return None if match is None else Message("machine_check", _severity(match[1]), match[1][:TEXT_CHARS_MAX])


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


def whole_machine_check(lines: Sequence[Message]) -> Message | None:
    """Return the lines of one machine check as one message with the worst severity; None where it is no news.

    Lines that never say how bad it was ("Machine check events logged", which every corrected error brings too) would
    read like an error that nothing corrected. Errors of PCIe devices show at the devices.
    """
    severities = {line.subject for line in lines}
    severity = next((one for one in ("uncorrected", "deferred", "corrected") if one in severities), "")
    if not severity or "pcie" in severities:
        return None
    text = f"{severity} error: " + "; ".join(line.text for line in lines[:LINES_MAX])
    return Message("machine_check", severity, text[:TEXT_CHARS_MAX])


_ADDRESS = re.compile(r"(?:\b([0-9a-f]{1,8}):)?\b([0-9a-f]{1,4}):([0-9a-f]{2})(?:\.[0-7])?(?![0-9a-f:])", re.IGNORECASE)


def bus_address(text: str) -> str:
    """Return a PCI address as "0000:3b:00", however wide its domain and with or without function; "" if it is none."""
    match = _ADDRESS.search(text.removeprefix("PCI:"))
    if match is None:
        return ""
    return f"{int(match[1] or '0', 16):04x}:{int(match[2], 16):02x}:{match[3].lower()}"


class Panic(NamedTuple):
    """A panic as a crashed kernel left it; ``line`` carries the kernel's own time and so names this panic for ever."""

    line: str
    text: str


_PANIC = re.compile(rb"^(?:<\d+>)?(\[ *\d+\.\d+\][^\n]{0,32}?)?(Kernel panic - not syncing[^\n\0]{0,512})", re.MULTILINE)
_PANIC_HEAD = re.compile(rb"Panic#\d+ Part\d+")
_WHY = re.compile(rb"^(?:<\d+>)?\[ *\d+\.\d+\][^\n]{0,32}?((?:BUG: |Oops: |general protection fault)[^\n\0]{0,512})", re.M)


def panic(dump: bytes) -> Panic | None:
    """Return the panic that a dump of the log ends in; None where it holds none, as after an oops that was survived."""
    match = _PANIC.search(dump)
    if match is not None:
        return Panic(_plain(match[0])[:TEXT_CHARS_MAX], _plain(match[2]).strip()[:TEXT_CHARS_MAX])
    return None


def panicked(dump: bytes) -> str:
    """Return why the kernel says that it wrote this part of a dump, as far as the part tells; "" if for no panic."""
    if _PANIC_HEAD.match(dump) is None:
        return ""
    match = _WHY.search(dump)
    return _plain(match[1])[:TEXT_CHARS_MAX] if match is not None else "Kernel panic"
