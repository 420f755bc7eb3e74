"""Finds the node's network ports, RDMA and Ethernet, and reads their counters. Touches: /sys, ethtool."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from eagle_eye.agent.loop.collector import Unsupported
from eagle_eye.agent.network.ethtool import EthtoolStatistics
from eagle_eye.schema.names import is_name

PORTS_MAX = 256  # a host with more has virtual functions for its guests; the relevant ones come first
FILES_MAX = 512  # kept open, and at most half of the process's limit; 16 ports need about 300
_ATTRIBUTE_BYTES_MAX = 64
_UINT32_MAX, _UINT64_MAX = (1 << 32) - 1, (1 << 64) - 1
_ETHERNET = 1  # ARPHRD_ETHER
_GONE = frozenset({errno.ENOENT, errno.ENODEV, errno.ENXIO})
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})  # this hardware or driver lacks that counter
_UP_STATES = (4, 5)  # ACTIVE, and ACTIVE_DEFER while the physical layer recovers (InfiniBand specification, 14.2.5.6)
_UP_PHYSICAL = (5, 6)  # LinkUp, LinkErrorRecovery


class Role(str, Enum):
    """What a counter measures about its port."""

    RDMA_RX = "rdma_rx"  # bytes
    RDMA_TX = "rdma_tx"
    NETWORK_RX = "network_rx"  # bytes through the host's network stack
    NETWORK_TX = "network_tx"
    PAUSE_RX = "pause_rx"  # PFC pause frames; as ethtool's link_statistics calls it
    PAUSE_TX = "pause_tx"
    ERRORS = "errors"  # of the port's own link
    DOWNED = "downed"
    TRANSPORT = "transport"  # RDMA errors: local, remote or of the fabric
    NOTIFICATIONS = "notifications"  # congestion notifications, sent or handled


# Left out: counters that the remote end or the subnet's configuration drives (port_rcv_remote_physical_errors,
# *_constraint_*), lost management packets (VL15_dropped), and waiting for credits (port_xmit_wait), which is
# congestion.
_LINK_ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_xmit_discards",
)
_INTERFACE_ERRORS = ("rx_crc_errors", "rx_frame_errors", "tx_carrier_errors")
# Left out: completions with errors (*_cqe_*), which every ending job causes, slow restarts, which follow every pause,
# and errors of the program itself (access and length errors).
_TRANSPORT_ERRORS = frozenset(
    {
        # mlx5, and the names that newer bnxt_re shares with it
        "out_of_sequence", "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err",
        "req_transport_retries_exceeded", "req_rnr_retries_exceeded", "rx_icrc_encapsulated", "roce_adp_retrans",
        # bnxt_re
        "to_retransmits", "seq_err_naks_rcvd", "max_retry_exceeded", "rnr_naks_rcvd", "missing_resp",
        "unrecoverable_err", "oos_drop_count", "res_oos_drop_count",
        # irdma
        "RetransSegs", "tcpRetransSegs", "InProtoErrors", "tcpInProtoErrors",
        # efa; retransmitted packets alone are how it balances load
        "retrans_timeout_events", "unresponsive_remote_events", "impaired_remote_conn_events", "rx_drops",
        "rdma_read_wr_err", "rdma_write_wr_err",
        # ionic
        "tx_rdma_ack_timeout", "req_rx_pkt_seq_err", "req_rx_rnr_retry_err", "req_rx_impl_nak_seq_err",
        "req_tx_retry_excd_err", "resp_rx_outouf_seq",
        # mana
        "requester_timeout", "requester_oos_nak", "requester_retries_exceeded", "responder_oos",
        # rxe
        "out_of_seq_request", "rcvd_seq_err", "retry_exceeded_err", "retry_rnr_exceeded_err",
    }
)  # fmt: skip
_NOTIFICATIONS = frozenset(
    {
        "np_cnp_sent", "rp_cnp_handled", "rp_cnp_ignored",  # mlx5
        "tx_cnp_pkts", "rx_cnp_pkts",  # bnxt_re
        "cnpSent", "cnpHandled", "cnpIgnored",  # irdma
        "tx_rdma_cnp_pkts", "rx_rdma_cnp_pkts",  # ionic
    }
)  # fmt: skip
# Drivers that do not fill the InfiniBand counters count bytes here: receive, send.
_HARDWARE_BYTES = (
    (("rx_bytes",), ("tx_bytes",)),  # bnxt_re, efa, mana
    (("rx_rdma_ucast_bytes",), ("tx_rdma_ucast_bytes",)),  # ionic
    (("ip4InOctets", "ip6InOctets"), ("ip4OutOctets", "ip6OutOctets")),  # irdma
)


class Counter(NamedTuple):
    """One sysfs counter file; ``scale`` converts its value to the role's unit."""

    role: Role
    path: str
    scale: float = 1
    narrow: bool = False  # it may saturate at 32 bits


@dataclass(eq=False)
class Port:
    """One port as found. ``device`` is its hardware's folder below /sys, ``interface`` the one whose driver is read.

    ``key`` identifies it by its hardware, and stays when names shift. ``passing`` ones, virtual functions, come and go
    with guests: a missing one is not a fault.
    """

    name: str
    rdma: bool
    folder: str
    key: str = ""
    device: str = ""
    interface: str = ""
    passing: bool = False
    counters: list[Counter] = field(default_factory=list)


class UnreadableFile(NamedTuple):
    """A file or folder that could not be read, and why."""

    name: str
    reason: str


@dataclass
class PortCounters:
    """One port's counters: role -> source -> value in the role's unit; unreadable ones are absent."""

    values: dict[Role, dict[str, float]] = field(default_factory=dict)
    failures: list[UnreadableFile] = field(default_factory=list)


class Attributes:
    """Reads sysfs files. They stay open, up to the limit, and are reread from the start, which queries the driver."""

    def __init__(self, files_max: int | None = None) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        half = min(FILES_MAX, limit // 2) if limit != resource.RLIM_INFINITY else FILES_MAX
        self._files_max = half if files_max is None else files_max
        self._open: dict[str, int] = {}

    def read(self, path: str) -> bytes:
        """Return the file's content, stripped of whitespace. Raises OSError."""
        file = self._open.get(path)
        if file is not None:
            try:
                return os.pread(file, _ATTRIBUTE_BYTES_MAX, 0).strip()
            except OSError:
                os.close(self._open.pop(path))  # it may belong to a device that has gone and come back
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.pread(file, _ATTRIBUTE_BYTES_MAX, 0).strip()
        except OSError:
            os.close(file)
            raise
        if len(self._open) < self._files_max:
            self._open[path] = file
        else:
            os.close(file)
        return content

    def text(self, path: str) -> str:
        """Return the file's content; empty where it does not exist."""
        try:
            return self.read(path).decode("ascii", errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        """Close the files; they are reopened when read."""
        for file in self._open.values():
            with contextlib.suppress(OSError):
                os.close(file)
        self._open.clear()


class PortReader:
    """Finds the ports below ``sys`` and reads them; not for several threads at a time."""

    def __init__(self, sys: Path, attributes: Attributes, ethtool: EthtoolStatistics) -> None:
        self._sys = str(sys)
        self._infiniband = f"{sys}/class/infiniband"
        self._net = f"{sys}/class/net"
        self._attributes = attributes
        self._ethtool = ethtool
        self.failures: list[UnreadableFile] = []  # folders that the last ``listing`` could not list

    def listing(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of RDMA devices and interfaces: cheap, and changes when ports come or go."""
        self.failures = []
        return self._list(self._infiniband), self._list(self._net)

    def find(self) -> list[Port]:
        """Return every RDMA port and every physical Ethernet interface that is not one."""
        devices, interfaces = self.listing()
        found, taken = [], set()
        for device in devices:
            owned = [name for name in _entries(f"{self._infiniband}/{device}/device/net") if not self._stands_for(name)]
            # The ports of a bond share one RDMA device; each keeps its own link.
            taken |= {name for name in owned if not _exists(f"{self._net}/{name}/master")}
            numbers = [int(name) for name in _entries(f"{self._infiniband}/{device}/ports") if name.isdecimal()]
            found += [self._rdma_port(device, number, owned) for number in sorted(numbers)]
        found += [self._interface_port(name) for name in interfaces if name not in taken and self._is_physical(name)]
        keys = [port.key for port in found]
        for port in found:
            if keys.count(port.key) > 1:  # a driver that does not number its ports
                port.key += f" {port.name}"
        found.sort(key=lambda port: port.passing)
        return [port for port in found if is_name(port.name)][:PORTS_MAX]

    def is_up(self, port: Port) -> bool | None:
        """Whether the port carries data; None where that cannot be read."""
        try:
            if port.rdma:
                state = _leading_number(self._attributes.read(f"{port.folder}/state"))
                physical = _leading_number(self._attributes.text(f"{port.folder}/phys_state").encode())
                return None if state is None else state in _UP_STATES and physical in (*_UP_PHYSICAL, None)
            state_text = self._attributes.read(f"{port.folder}/operstate")
        except OSError as error:
            return False if error.errno in _GONE else None
        if state_text == b"unknown":  # drivers that do not maintain it
            return self._attributes.text(f"{port.folder}/carrier") == "1"
        return state_text == b"up" if state_text else None

    def read(self, port: Port) -> PortCounters:
        """Return the port's counters. A file that this hardware lacks is not tried again until ``find``."""
        sample = PortCounters()
        for counter in list(port.counters):
            try:
                value = _count(self._attributes.read(counter.path))
            except OSError as error:
                if error.errno not in _GONE:
                    port.counters.remove(counter)
                if error.errno not in _GONE | _REFUSED:
                    sample.failures.append(UnreadableFile(counter.path, os.strerror(error.errno or 0)))
                continue
            if value is None or (counter.narrow and value == _UINT32_MAX):
                continue  # its value means none, or saturated
            sample.values.setdefault(counter.role, {})[counter.path] = float(int(value * counter.scale))
        if port.interface:
            self._read_ethtool(port, sample)
        return sample

    def refresh(self) -> None:
        """Close files and forget drivers' names: they may now belong to other ports."""
        self._attributes.close()
        self._ethtool.forget()

    def has_hardware(self, device: str) -> bool:
        """Whether the hardware is present and bound to a driver."""
        return bool(device) and _exists(f"{self._sys}/{device}/driver")

    def rdma_is_private(self) -> bool:
        """Whether RDMA devices are visible only in the network namespace they are assigned to."""
        return self._attributes.text(f"{self._sys}/module/ib_core/parameters/netns_mode") == "N"

    def _list(self, folder: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(folder)))  # noqa: PTH208 - names, not paths
        except FileNotFoundError:
            return ()
        except OSError as error:
            self.failures.append(UnreadableFile(folder, os.strerror(error.errno or 0)))
            return ()

    def _rdma_port(self, device: str, number: int, owned: Sequence[str]) -> Port:
        folder = f"{self._infiniband}/{device}/ports/{number}"
        port = Port(device if number == 1 else f"{device}:{number}", rdma=True, folder=folder)
        self._place(port, f"{self._infiniband}/{device}/device", f"{number}")
        if self._attributes.text(f"{folder}/link_layer") == "Ethernet":
            port.interface = self._interface_of(folder, number, owned)
        port.counters = _infiniband_counters(folder)
        if port.interface:
            port.counters = [item for item in port.counters if item.role is not Role.DOWNED]  # RoCE leaves it at 0
            port.counters += _interface_counters(f"{self._net}/{port.interface}")
        return port

    def _interface_port(self, name: str) -> Port:
        folder = f"{self._net}/{name}"
        port = Port(name, rdma=False, folder=folder, interface=name, counters=_interface_counters(folder))
        self._place(port, f"{folder}/device", self._attributes.text(f"{folder}/dev_port"))
        return port

    def _place(self, port: Port, link: str, number: str) -> None:
        """Fill in the port's hardware: virtual functions and sub-functions come and go."""
        real = os.path.realpath(link)
        port.device = os.path.relpath(real, os.path.realpath(self._sys))
        port.key = f"{'rdma' if port.rdma else 'net'} {port.device} {number}"
        port.passing = _exists(f"{real}/physfn") or ".sf." in real.rpartition("/")[2]

    def _interface_of(self, folder: str, number: int, owned: Sequence[str]) -> str:
        if len(owned) > 1:
            named = self._attributes.text(f"{folder}/gid_attrs/ndevs/0")
            place = f"{number - 1}"
            by_number = [name for name in owned if self._attributes.text(f"{self._net}/{name}/dev_port") == place]
            owned = [name for name in owned if name == named] or by_number or owned
        return owned[0] if owned else ""

    def _is_physical(self, name: str) -> bool:
        folder = f"{self._net}/{name}"
        if not _exists(f"{folder}/device") or self._stands_for(name):
            return False
        # USB interfaces belong to the management controller, and vanish whenever it restarts.
        bus = os.path.realpath(f"{folder}/device/subsystem").rpartition("/")[2]
        return bus != "usb" and self._attributes.text(f"{folder}/type") in (f"{_ETHERNET}", "")

    def _stands_for(self, name: str) -> bool:
        """Whether the interface is the host's end of a virtual function, not a port."""
        return bool(re.search(r"[vs]f\d", self._attributes.text(f"{self._net}/{name}/phys_port_name")))

    def _read_ethtool(self, port: Port, sample: PortCounters) -> None:
        try:
            statistics = self._ethtool.read(port.interface)
        except Unsupported as reason:
            if str(reason) in (os.strerror(errno.EPERM), os.strerror(errno.EACCES)):
                sample.failures.append(UnreadableFile("ethtool", str(reason)))
            return
        except OSError as error:
            if error.errno not in _GONE:
                sample.failures.append(UnreadableFile("ethtool", os.strerror(error.errno or 0)))
            return
        for role, name, value in statistics:
            if value != _UINT64_MAX:
                sample.values.setdefault(Role(role), {})[f"ethtool {name}"] = float(value)


def _infiniband_counters(folder: str) -> list[Counter]:
    plain, wide, hardware = (set(_entries(f"{folder}/{name}")) for name in ("counters", "counters_ext", "hw_counters"))
    counters = []
    for role, name in ((Role.RDMA_RX, "port_rcv_data"), (Role.RDMA_TX, "port_xmit_data")):
        if f"{name}_64" in wide:
            counters.append(Counter(role, f"{folder}/counters_ext/{name}_64", scale=4))  # words of 4 bytes
        elif name in plain:
            counters.append(Counter(role, f"{folder}/counters/{name}", scale=4, narrow=True))
    if not counters:
        for rx, tx in _HARDWARE_BYTES:
            if rx[0] in hardware and tx[0] in hardware:
                counters += _named(Role.RDMA_RX, f"{folder}/hw_counters", rx, hardware)
                counters += _named(Role.RDMA_TX, f"{folder}/hw_counters", tx, hardware)
                break
    counters += _named(Role.ERRORS, f"{folder}/counters", _LINK_ERRORS, plain)
    counters += _named(Role.DOWNED, f"{folder}/counters", ("link_downed",), plain)
    counters += _named(Role.TRANSPORT, f"{folder}/hw_counters", sorted(_TRANSPORT_ERRORS), hardware)
    return counters + _named(Role.NOTIFICATIONS, f"{folder}/hw_counters", sorted(_NOTIFICATIONS), hardware)


def _interface_counters(folder: str) -> list[Counter]:
    present = set(_entries(f"{folder}/statistics"))
    counters = _named(Role.NETWORK_RX, f"{folder}/statistics", ("rx_bytes",), present)
    counters += _named(Role.NETWORK_TX, f"{folder}/statistics", ("tx_bytes",), present)
    counters += _named(Role.ERRORS, f"{folder}/statistics", _INTERFACE_ERRORS, present)
    if _exists(f"{folder}/carrier_down_count"):
        return [*counters, Counter(Role.DOWNED, f"{folder}/carrier_down_count")]
    return [*counters, Counter(Role.DOWNED, f"{folder}/carrier_changes", scale=0.5)]  # it starts down: up, down, up ...


def _named(role: Role, folder: str, names: Iterable[str], present: set[str]) -> list[Counter]:
    return [Counter(role, f"{folder}/{name}") for name in names if name in present]


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
    except OSError:
        return []


def _exists(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - a Path interns each of its parts


def _count(raw: bytes) -> int | None:
    """Return a counter's value; None if not a number, or all ones as from a device that fell off its bus."""
    if not raw.isdigit() or len(raw) > 20 or (value := int(raw)) >= _UINT64_MAX:
        return None
    return value


def _leading_number(raw: bytes) -> int | None:
    """Return the leading number of a state like "4: ACTIVE"."""
    number = raw.partition(b":")[0]
    return int(number) if number.isdigit() and len(number) < 4 else None
