"""What the kernel says of interfaces."""

from __future__ import annotations

import socket

import pytest

from eagle_eye.checkpoint.traffic import LinkCounter, outgoing_interface


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1"])
def test_to_this_host_itself_no_interface_leads(address: str) -> None:
    assert outgoing_interface(address) is None


def test_what_is_no_address_is_an_error() -> None:
    with pytest.raises(OSError, match="illegal IP address"):
        outgoing_interface("node1")


def test_what_was_sent_is_counted_once_it_was_sent() -> None:
    counter = LinkCounter(socket.if_nametoindex("lo"))
    before = counter.sent_bytes()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.sendto(bytes(5000), ("127.0.0.1", 9))
    assert counter.sent_bytes() >= before + 5000
    counter.close()


def test_an_interface_that_is_not_there_is_an_error() -> None:
    counter = LinkCounter(1 << 30)
    with pytest.raises(OSError, match="the kernel"):
        counter.sent_bytes()
    counter.close()
