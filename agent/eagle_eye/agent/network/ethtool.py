"""Reads a network interface's driver statistics through ethtool ioctls. Touches: one socket that sends nothing."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from eagle_eye.agent.loop.collector import Unsupported

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
_LINK_ERRORS = frozenset({"rx_symbol_err_phy", "rx_pcs_symbol_err_phy", "rx_discards_phy", "tx_discards_phy"})
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
    chosen = dict.fromkeys((name for name in names if name in _LINK_ERRORS), "errors")
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
