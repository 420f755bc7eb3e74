from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.delivery.webhook import BAD_PORTS, SPECIAL, Guard, Target, not_public, parse_url, system_resolver
from eagle_eye.server.model.errors import TargetRefused


def check(url: str, *addresses: str, allow_private: bool = False) -> Target:
    async def resolve(_host: str, _port: int) -> list[str]:
        return list(addresses)

    return asyncio.run(Guard(allow_private, resolve).check(url))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.0.1",
        "100.64.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "::1",
        "fe80::1",
        "fc00::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::808:808",
        "2002:7f00:1::",
        "fe80::1%eth0",
    ],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(TargetRefused, match=r"webhooks\.allow_private"):
        check("https://hook.example/", address)
    assert check("https://hook.example/", address, allow_private=True).addresses == (address,)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "169.254.170.2",
        "fd00:ec2::254",
        "fd20:ce::254",
        "168.63.129.16",
        "192.0.0.192",
        "100.100.100.200",
        "::ffff:168.63.129.16",
        "64:ff9b::a83f:8110",
        "2002:a83f:8110::1",
        "2001:0:4136:e378:8000:63bf:57c0:7eef",
        "2001:470::5efe:168.63.129.16",
        "::168.63.129.16",
        "4000::1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "ff02::1",
    ],
)
def test_addresses_of_no_subscriber_are_refused_whatever_is_allowed(address: str) -> None:
    with pytest.raises(TargetRefused, match="never go there"):
        check("https://hook.example/", address, allow_private=True)


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_counts_as_itself(inner: ipaddress.IPv4Address) -> None:
    number = int(inner)
    wrapped = [
        (0xFFFF << 32) | number,  # mapped
        (0x2002 << 112) | (number << 80) | 1,  # 6to4
        int(ipaddress.IPv6Address("64:ff9b::")) | number,  # NAT64
        (0x20010000 << 96) | (number ^ 0xFFFFFFFF),  # Teredo's client
    ]
    for outer in wrapped:
        assert bool(not_public(ipaddress.IPv6Address(outer))) is bool(not_public(inner)), outer


@given(st.ip_addresses())
def test_what_python_calls_private_is_never_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if address.is_private or address.is_loopback or address.is_link_local or address.is_multicast:
        mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
        assert not_public(address) or mapped


@given(st.text(max_size=60), st.sampled_from(["http://", "https://", "", "//", "http:\\\\"]))
def test_whatever_a_url_looks_like_it_is_refused_or_has_a_checked_address(text: str, start: str) -> None:
    try:
        target = check(start + text, "8.8.8.8")
    except TargetRefused:
        return
    assert target.url.scheme in ("http", "https")
    assert target.url.host
    assert not target.url.userinfo
    assert all(not not_public(ipaddress.ip_address(address)) for address in target.addresses)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_pass(address: str) -> None:
    assert check("https://hook.example/", address).addresses == (address,)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254"])
def test_addresses_in_the_url_itself_are_checked(host: str) -> None:
    with pytest.raises(TargetRefused):
        check(f"http://{host}/")


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "localhost"])
def test_other_spellings_are_judged_by_what_they_resolve_to(host: str) -> None:
    with pytest.raises(TargetRefused):
        check(f"http://{host}/", "127.0.0.1")


def test_one_private_address_among_public_ones_is_enough_to_refuse() -> None:
    with pytest.raises(TargetRefused):
        check("https://hook.example/", "8.8.8.8", "10.0.0.1")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://hook.example/",
        "file:///etc/passwd",
        "gopher://hook.example/",
        "hook.example",
        "",
        "http://",
        "https://user:password@hook.example/",
        "http://[::1",
        "https://hook.example/" + "x" * 3000,
    ],
)
def test_urls_that_are_none_of_ours_are_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(TargetRefused) as caught:
        check(url, "8.8.8.8", allow_private=True)
    assert "password" not in str(caught.value).replace("user name or password", "")


def test_the_message_does_not_tell_what_a_name_resolves_to() -> None:
    with pytest.raises(TargetRefused) as caught:
        check("https://hook.example/", "10.11.12.13")
    assert "10.11.12.13" not in str(caught.value)


@pytest.mark.parametrize("port", [22, 25, 6667])
def test_ports_of_other_protocols_are_refused(port: int) -> None:
    assert port in BAD_PORTS
    with pytest.raises(TargetRefused, match="expected one that serves HTTP"):
        check(f"https://hook.example:{port}/", "8.8.8.8", allow_private=True)
    assert check("https://hook.example:8443/", "8.8.8.8").url.port == 8443


def test_a_dead_name_holds_one_thread_however_many_ask_and_nobody_else() -> None:
    release, asked = threading.Event(), []

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        if host == "dead.example":
            release.wait(10.0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", port))]

    async def story() -> None:
        resolve = system_resolver(look_up)
        stuck = [asyncio.ensure_future(resolve("dead.example", 443)) for _ in range(200)]
        assert await asyncio.wait_for(resolve("alive.example", 443), 5.0) == ["8.8.8.8"]
        stuck[0].cancel()
        await asyncio.sleep(0)
        release.set()
        assert await asyncio.wait_for(asyncio.gather(*stuck[1:]), 5.0) == [["8.8.8.8"]] * 199
        assert await resolve("dead.example", 443) == ["8.8.8.8"]

    asyncio.run(story())
    assert asked == ["dead.example", "alive.example", "dead.example"]


@pytest.mark.parametrize(
    "address", [str(network[0]) for network, _ in SPECIAL] + [str(network[-1]) for network, _ in SPECIAL]
)
def test_the_ends_of_every_special_range_are_refused(address: str) -> None:
    with pytest.raises(TargetRefused):
        check("https://hook.example/", address)


@pytest.mark.parametrize("address", ["168.63.129.15", "168.63.129.17", "192.0.1.0", "100.128.0.0", "2001:4860::1"])
def test_the_neighbours_of_special_ranges_are_public(address: str) -> None:
    assert check("https://hook.example/", address).addresses == (address,)


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("https://hook.example:99999/", "port 99999 does not exist; expected 1 to 65535"),
        ("https://hook.example:0/", "port 0 does not exist"),
        ("https://hook.example/a b", "' ' at position 22; write it as %20"),
        ("https://hook.example /", "' ' at position 20"),
        ("https://hook.example/\t", "'\\\\t' at position"),
        ("https://hook.example/\n", "'\\\\n' at position"),
        ("https://hook.example/\x00", "'\\\\x00' at position"),
        ("https://hook.example/\u2003", "at position"),
        ("https://hook.example\\@other.example/", "at position"),
        ("https:///path", "no host"),
        ("https://user@hook.example/", "user name or password"),
        ("https://@hook.example/", "user name or password"),
        ("https://a..b/", "no name and no address"),
        ("https://a%20b/", "no name and no address"),
        (f"https://{'a' * 64}.example/", "no name and no address"),
        (f"https://{'a.' * 127}example/", "no name and no address"),
        ("ws://hook.example/", "scheme is 'ws'"),
        ("https://hook.example/" + "x" * 2_048, "2069 characters; at most 2048"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_with_what_is_wrong(url: str, wrong: str) -> None:
    with pytest.raises(TargetRefused, match=wrong):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://hook.example",
        "http://h",
        "https://hook.example.:65535/a%20b?q=1#f",
        "https://under_score.example/",
        "https://b\u00fccher.example/",
        "http://[2001:4860::1]:8080/",
        "http://10.0.0.1:1/",
    ],
)
def test_urls_of_subscribers_pass(url: str) -> None:
    assert parse_url(url).host


def test_a_name_that_is_bound_anew_is_refused_at_the_next_delivery() -> None:
    answers = [["8.8.8.8"], ["169.254.169.254"]]

    async def resolve(_host: str, _port: int) -> list[str]:
        return answers.pop(0)

    guard = Guard(True, resolve)
    assert asyncio.run(guard.check("https://hook.example/")).addresses == ("8.8.8.8",)
    with pytest.raises(TargetRefused, match="metadata"):
        asyncio.run(guard.check("https://hook.example/"))
