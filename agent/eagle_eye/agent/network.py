"""Finds the node's network ports, RDMA and Ethernet, and reads their counters. Touches: /sys, ethtool."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from eagle_eye.agent.collector import Unsupported
from eagle_eye.schema.names import is_name

Ask = Callable[[str, mmap.mmap], None]  # sends the buffer's command to an interface's driver, which fills the buffer

_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSTATS, _GSSET_INFO = 0x1B, 0x1D, 0x37  # linux/ethtool.h
_STATS_SET = 1  # ETH_SS_STATS
_SET_INFO = struct.Struct("=IIQI")  # command, reserved, mask of sets, the set's size
_STRINGS = struct.Struct("=III")  # command, set, size
_STATS = struct.Struct("=II")  # command, size
_NAME_BYTES = 32
_INTERFACE_BYTES_MAX = 15
# Older kernels write as many values as exist, whatever the request: the buffer has room for any driver's. Mapped, it
# uses only the pages written, and the two megabytes of names do not stay in the heap.
COUNT_MAX = 1 << 16
_NEVER = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOTTY})


# Left out: rx_out_of_buffer, caused by a slow receiver, and symbols that error correction repaired.
_OF_A_LINK = frozenset({"rx_symbol_err_phy", "rx_pcs_symbol_err_phy", "rx_discards_phy", "tx_discards_phy"})
_PAUSE_OF_PRIORITY = re.compile(
    r"([rt]x)_prio\d_pause"  # mlx5
    r"|([rt]x)_pause_prio_\d"  # mlx4
    r"|([rt]x)_pfc_ena_frames_pri\d"  # bnxt_en
    r"|(?:port\.)?([rt]x)_priority_\d_xoff(?:_[rt]x|\.nic)?"  # ice, i40e
    r"|([rt]x)_pb_\d_pxoff"  # ixgbe
    r"|([rt]x)_ppp\d"  # cxgb4
    r"|mac_([rt]x)_pfc_pri\d_pkt_num"  # hns3
    r"|frames_([rt]x)_pripause_?\d"  # ionic
)
_PAUSE_OF_ALL = re.compile(r"([rt]x)_pfc_frames|frames_([rt]x)_pripause|([rt]x)_priority_pause_frames")


class Statistic(NamedTuple):
    """One value: its role, the driver's name for it, and the value."""

    role: str
    name: str
    value: int


class _Table(NamedTuple):
    size: int
    chosen: tuple[tuple[int, str, str], ...]  # place, name, role


class EthtoolStatistics:
    """Reads the chosen statistics of interfaces; not for several threads at a time.

    ``choose`` maps a driver's names to roles for those wanted. Names are read once, and again when their number
    changes. A driver that refuses is not queried again until ``forget``.
    """

    def __init__(self, choose: Callable[[Sequence[str]], Mapping[str, str]], ask: Ask | None = None) -> None:
        self._choose = choose
        self._ask = ask if ask is not None else KernelEthtool()
        self._tables: dict[str, _Table] = {}
        self._refused: dict[str, str] = {}
        self._values = _room(_STATS.size + 8 * COUNT_MAX)

    def read(self, interface: str) -> list[Statistic]:
        """Return the chosen statistics. Raises Unsupported when the driver refuses, OSError on a transient failure."""
        if interface in self._refused:
            raise Unsupported(self._refused[interface])
        try:
            for _ in range(2):  # once more when the names turn out to be stale
                table = self._tables.get(interface) or self._read_table(interface)
                self._tables[interface] = table
                if not table.chosen:
                    return []
                _STATS.pack_into(self._values, 0, _GSTATS, table.size)
                self._ask(interface, self._values)
                if _STATS.unpack_from(self._values)[1] == table.size:
                    return [
                        Statistic(role, name, int(struct.unpack_from("=Q", self._values, _STATS.size + 8 * place)[0]))
                        for place, name, role in table.chosen
                    ]
                del self._tables[interface]
        except OSError as error:
            self._tables.pop(interface, None)
            if error.errno in _NEVER:
                self._refused[interface] = os.strerror(error.errno or 0)
                raise Unsupported(self._refused[interface]) from None
            raise
        return []  # the number of statistics keeps changing: give up this time

    def forget(self) -> None:
        """Forget all interfaces: their names may now belong to others."""
        self._tables.clear()
        self._refused.clear()

    def close(self) -> None:
        """Close the socket."""
        if isinstance(self._ask, KernelEthtool):
            self._ask.close()

    def _read_table(self, interface: str) -> _Table:
        info = _room(_SET_INFO.size)
        _SET_INFO.pack_into(info, 0, _GSSET_INFO, 0, 1 << _STATS_SET, 0)
        self._ask(interface, info)
        _, _, mask, count = _SET_INFO.unpack_from(info)
        if not mask or not 0 < count <= COUNT_MAX:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        raw = _room(_STRINGS.size + _NAME_BYTES * COUNT_MAX)
        _STRINGS.pack_into(raw, 0, _GSTRINGS, _STATS_SET, count)
        self._ask(interface, raw)
        if _STRINGS.unpack_from(raw)[2] != count:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        starts = range(_STRINGS.size, _STRINGS.size + _NAME_BYTES * count, _NAME_BYTES)
        names = [_text(raw[start : start + _NAME_BYTES]) for start in starts]
        roles = self._choose(names)
        places = {name: place for place, name in reversed(list(enumerate(names)))}  # of duplicates the first
        return _Table(count, tuple((places[name], name, role) for name, role in roles.items() if name in places))


class KernelEthtool:
    """Queries the kernel; statistics need no privilege. The call can wait for the network configuration's lock."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def __call__(self, interface: str, buffer: mmap.mmap) -> None:
        """Fill the buffer. Raises OSError."""
        name = os.fsencode(interface)
        if not 0 < len(name) <= _INTERFACE_BYTES_MAX:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        held = (ctypes.c_char * len(buffer)).from_buffer(buffer)  # the buffer cannot move while this exists
        request = struct.pack("16sP16x", name, ctypes.addressof(held))
        fcntl.ioctl(self._socket, _SIOCETHTOOL, request)

    def close(self) -> None:
        """Close the socket; the next call opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def link_statistics(names: Sequence[str]) -> Mapping[str, str]:
    """Return name -> role for link statistics: "errors", "pause_rx" or "pause_tx" (PFC frames)."""
    chosen = dict.fromkeys((name for name in names if name in _OF_A_LINK), "errors")
    for direction in ("rx", "tx"):
        by_priority = [name for name in names if _direction(_PAUSE_OF_PRIORITY, name) == direction]
        together = [name for name in names if _direction(_PAUSE_OF_ALL, name) == direction]
        chosen.update(dict.fromkeys(by_priority or together, f"pause_{direction}"))  # both would count each frame twice
    return chosen


def _direction(pattern: re.Pattern[str], name: str) -> str:
    match = pattern.fullmatch(name)
    return next((group for group in match.groups() if group), "") if match else ""


def _room(size: int) -> mmap.mmap:
    """Return that many writable zero bytes, freed with the last reference."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode("ascii", errors="replace")


NAMES_MAX = 256  # interfaces remembered

_PCI_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_STANDS_FOR = re.compile(r"[vs]f\d")  # the host's end of a virtual function: not a port


class LinkNames:
    """Cached link names: a device that failed may be gone when its name is looked up."""

    def __init__(self, sys: Path) -> None:
        self._sys = sys
        self._names: dict[str, str] = {}

    def of_device(self, device: str) -> str:
        """Return the link name in rows of an interface or a PCI function."""
        if _PCI_FUNCTION.fullmatch(device) is None:
            return self.of_interface(device)
        folder = self._sys / "bus/pci/devices" / device
        for sort in ("infiniband", "net"):
            try:
                names = sorted(item.name for item in (folder / sort).iterdir())
            except OSError:
                continue
            if names:
                return names[0]
        return device

    def of_interface(self, interface: str) -> str:
        """Return the interface's link name in rows: its RDMA port's, its own where it has none.

        Members of a bond share one RDMA device and keep their own links.
        """
        folder = self._sys / "class/net" / interface
        try:
            if (folder / "master").exists() or _STANDS_FOR.search((folder / "phys_port_name").read_text("ascii")):
                return interface
        except (OSError, ValueError):
            pass  # most drivers have no name for the port
        name = self._names.get(interface, "")  # a device that failed may be gone from the list
        try:
            (device,) = (folder / "device/infiniband").iterdir()
            number = int((folder / "dev_port").read_text("ascii")) + 1
            name = f"{device.name}:{number}" if number > 1 and (device / f"ports/{number}").exists() else device.name
        except (OSError, ValueError):
            return name or interface
        if len(self._names) < NAMES_MAX:
            self._names[interface] = name
        return name


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
