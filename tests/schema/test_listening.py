"""Why a socket cannot listen: the address, the system's reason, and who has the port."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from eagle_eye.schema.service import why_not_listening

IN_USE = OSError(errno.EADDRINUSE, "Address already in use")
HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"]
)
def test_the_process_that_listens_on_the_port_is_named(family: socket.AddressFamily, host: str) -> None:
    try:
        taken = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with taken:
        said = why_not_listening(IN_USE, host, taken.getsockname()[1])
    assert f"process {os.getpid()} has it: " in said
    assert said.startswith("cannot listen on ")


def test_a_process_of_another_user_cannot_be_named_and_how_to_find_it_is_said(tmp_path: Path) -> None:
    net = tmp_path / "self" / "net"
    net.mkdir(parents=True)
    (net / "tcp").write_text(f"{HEADER}   0: 0100007F:2116 00000000:0000 0A 00000000:00000000 00:0 0 0 0 4711 1\n")
    assert "sudo ss -ltnp 'sport = :8470'" in why_not_listening(IN_USE, "127.0.0.1", 8_470, proc=tmp_path)


def test_a_connection_that_uses_the_port_is_not_who_listens_there(tmp_path: Path) -> None:
    net = tmp_path / "self" / "net"
    net.mkdir(parents=True)
    (net / "tcp").write_text(f"{HEADER}   0: 0100007F:2116 0100007F:9999 01 00000000:00000000 00:0 0 0 0 4711 1\n")
    (tmp_path / "17" / "fd").mkdir(parents=True)
    (tmp_path / "17" / "fd" / "3").symlink_to("socket:[4711]")
    assert "process 17" not in why_not_listening(IN_USE, "127.0.0.1", 8_470, proc=tmp_path)


def test_nobody_is_accused_of_another_reason() -> None:
    said = why_not_listening(PermissionError(errno.EACCES, "Permission denied"), "127.0.0.1", 80)
    assert said == "cannot listen on 127.0.0.1:80: Permission denied"


def test_what_a_process_calls_itself_is_cleaned(tmp_path: Path) -> None:
    net = tmp_path / "self" / "net"
    net.mkdir(parents=True)
    (net / "tcp").write_text(f"{HEADER}   0: 0100007F:2116 00000000:0000 0A 00000000:00000000 00:0 0 0 0 4711 1\n")
    (tmp_path / "17" / "fd").mkdir(parents=True)
    (tmp_path / "17" / "fd" / "3").symlink_to("socket:[4711]")
    (tmp_path / "17" / "cmdline").write_bytes(b"evil\x1b[31m\nname\0--flag")
    said = why_not_listening(IN_USE, "127.0.0.1", 8_470, proc=tmp_path)
    assert said.endswith("(process 17 has it: evil?[31m?name --flag)")
