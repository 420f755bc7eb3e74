"""Nodes that are network namespaces of this host, joined by a bridge over links that ``tc`` shapes. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

SUBNET = "10.77.0"  # of the namespaces alone: nothing leads there from outside
BUFFER_S = 0.01  # of a port's queue at its rate


def why_not() -> str:
    """Return why there can be no such nodes here, "" where there can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} missing: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    try:
        with nodes(1, "1gbit"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextlib.contextmanager
def nodes(count: int, rate: str) -> Iterator[list[str]]:
    """Yield the namespaces of so many nodes, whose links carry so much in each direction; they are gone behind it.

    Raises CalledProcessError where one cannot be made.
    """
    names = [f"eagle-eye-{os.getpid()}-{number}" for number in range(count)]
    switch = f"eagle-eye-{os.getpid()}-switch"
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", link, "up")
            for namespace, link in ((name, "eth0"), (switch, port)):
                shape = ("rate", rate, "burst", "128kb", "latency", f"{BUFFER_S * 1000:g}ms")
                _run("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", "tbf", *shape)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def address(number: int) -> str:
    """Return a node's IP address."""
    return f"{SUBNET}.{10 + number}"


def inside(namespace: str, command: list[str]) -> list[str]:
    """Return the command that runs another one in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
