from __future__ import annotations

import asyncio

import pytest

from eagle_eye.server.errors import TargetRefused
from eagle_eye.server.notifiers.guard import Guard, Target


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
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "192.0.2.1",
        "198.18.0.1",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "ff02::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "fe80::1%eth0",
    ],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(TargetRefused, match=r"webhooks\.allow_private"):
        check("https://hook.example/", address)
    assert check("https://hook.example/", address, allow_private=True).addresses == (address,)


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
