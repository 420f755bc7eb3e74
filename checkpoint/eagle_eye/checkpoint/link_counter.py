"""Reads an interface's sent bytes by netlink, so that it is the one of this network namespace.

A file below /sys/class/net may be of another namespace, and /proc/net/dev asks every interface of the host.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

NETLINK_ROUTE = 0  # linux/netlink.h
REQUEST, ERROR = 1, 2
GET_ROUTE, NEW_ROUTE, GET_STATS, NEW_STATS = 26, 24, 94, 92  # linux/rtnetlink.h
ROUTE_TO, ROUTE_LINK, LOCAL_ROUTE = 1, 4, 2  # RTA_DST, RTA_OIF, RTN_LOCAL
LINK_STATS = 1  # IFLA_STATS_LINK_64, and its bit in the mask
SENT_OFFSET = 24  # of tx_bytes in rtnl_link_stats64
ANSWER_WITHIN_S = 1.0

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_ROUTE = struct.Struct("=8BI")  # family, bits of the destination, ..., type, flags
_STATS = struct.Struct("=BxxxII")  # family, interface, mask
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_COUNT = struct.Struct("=Q")
_INDEX = struct.Struct("=I")


class LinkCounter:
    """The bytes that an interface has sent since it came up. Raises OSError where the kernel does not report them."""

    def __init__(self, interface: int) -> None:
        self.interface = interface
        self._socket = _netlink()
        message = _STATS.pack(socket.AF_UNSPEC, interface, LINK_STATS)
        self._request = _HEADER.pack(_HEADER.size + len(message), GET_STATS, REQUEST, 0, 0) + message

    def sent_bytes(self) -> int:
        """Return them. Raises OSError."""
        answer = _asked(self._socket, self._request, NEW_STATS)
        for kind, value in _attributes(answer[_HEADER.size + _STATS.size :]):
            if kind == LINK_STATS:
                sent: int = _COUNT.unpack_from(value, SENT_OFFSET)[0]
                return sent
        raise OSError("the kernel counts nothing of this interface")

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def outgoing_interface(address: str) -> int | None:
    """Return the index of the interface by which this host reaches an IP address; None for its own address.

    Raises OSError where it is unreachable.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    route = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0)
    message = route + _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), ROUTE_TO) + packed
    asking = _netlink()
    try:
        request = _HEADER.pack(_HEADER.size + len(message), GET_ROUTE, REQUEST, 0, 0) + message
        answer = _asked(asking, request, NEW_ROUTE)
    finally:
        asking.close()
    if answer[_HEADER.size + 7] == LOCAL_ROUTE:
        return None
    for kind, value in _attributes(answer[_HEADER.size + _ROUTE.size :]):
        if kind == ROUTE_LINK:
            number: int = _INDEX.unpack_from(value)[0]
            return None if socket.if_indextoname(number) == "lo" else number
    raise OSError(f"no interface leads to {address}")


def _netlink() -> socket.socket:
    asking = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_ROUTE)
    asking.settimeout(ANSWER_WITHIN_S)
    return asking


def _asked(asking: socket.socket, request: bytes, kind: int) -> bytes:
    asking.send(request)
    answer = asking.recv(1 << 14)
    _, got, _, _, _ = _HEADER.unpack_from(answer)
    if got == ERROR:
        code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        raise OSError(code, "the kernel does not say")
    if got != kind:
        raise OSError(f"the kernel answers {got} where {kind} was expected")
    return answer


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[-(-length // 4) * 4 :]
