"""Addresses that no webhook may go to, as data, with the kind of each. Pure.

From IANA's special-purpose address registries (iana-ipv4-special-registry and iana-ipv6-special-registry): those that
are not globally reachable, and all of 2001::/23. Also multicast and unassigned parts of both address spaces, and the
cloud metadata addresses that serve a machine's credentials, some of which are public addresses.
"""

from __future__ import annotations

import ipaddress

REGISTRIES_OF = "2024-10-22"  # the registries' date

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# The first entry that contains an address gives its kind.
_SPECIAL: tuple[tuple[str, str], ...] = (
    # Most clouds; AWS's containers; Tencent; Scaleway; Alibaba; Azure's host; Oracle; AWS; Google; Scaleway; Oracle.
    ("169.254.169.0/24", "metadata"),
    ("169.254.170.0/24", "metadata"),
    ("169.254.0.23/32", "metadata"),
    ("169.254.42.42/32", "metadata"),
    ("100.100.100.200/32", "metadata"),
    ("168.63.129.16/32", "metadata"),
    ("192.0.0.192/32", "metadata"),
    ("fd00:ec2::/32", "metadata"),
    ("fd20:ce::254/128", "metadata"),
    ("fd00:42::42/128", "metadata"),
    ("fd00:c1::a9fe:a9fe/128", "metadata"),
    # IPv4
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "no_public"),
    ("127.0.0.0/8", "loopback"),
    ("169.254.0.0/16", "link_local"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "no_public"),
    ("192.0.2.0/24", "no_public"),
    ("192.88.99.0/24", "no_public"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "no_public"),
    ("198.51.100.0/24", "no_public"),
    ("203.0.113.0/24", "no_public"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    # IPv6
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("64:ff9b:1::/48", "private"),  # a network's own translation: its destinations are unknown
    ("100::/64", "no_public"),
    ("2001:2::/48", "no_public"),
    ("2001:10::/28", "no_public"),
    ("2001:db8::/32", "no_public"),
    ("2001::/23", "no_public"),
    ("3fff::/20", "no_public"),
    ("5f00::/16", "no_public"),
    ("fc00::/7", "private"),
    ("fe80::/10", "link_local"),
    ("fec0::/10", "private"),
    ("ff00::/8", "multicast"),
)
SPECIAL: tuple[tuple[Network, str], ...] = tuple((ipaddress.ip_network(text), kind) for text, kind in _SPECIAL)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")  # the rest of IPv6 is not assigned for global unicast
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


def not_public(address: Address) -> str:
    """Return the kind of special address, "" for a public one. An embedded special address counts as itself.

    metadata, loopback, link_local, private, no_public (documentation, benchmarks, shared and the like), multicast,
    unspecified, reserved.
    """
    inner = _embedded(address) if isinstance(address, ipaddress.IPv6Address) else None
    if inner is not None:
        return not_public(inner)
    for network, kind in SPECIAL:
        if address in network:
            return kind
    return "" if isinstance(address, ipaddress.IPv4Address) or address in _GLOBAL_UNICAST else "reserved"


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that packets to this address reach, None if there is none."""
    if address in _NAT64 or (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
