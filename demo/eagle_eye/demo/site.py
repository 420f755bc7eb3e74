"""The demo's nodes on one machine: network namespaces where permitted, otherwise a loopback address each."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

NODES = ("node1", "node2", "node3", "node4")  # three train, the last is the spare
# Set by the launcher for every process of a job on a node.
JOB_VARIABLE, NODE_VARIABLE = "EAGLE_EYE_JOB", "EAGLE_EYE_NODE"


@dataclass(frozen=True, slots=True)
class DemoNode:
    """One node: its name, its address, and the words that run a command on it."""

    name: str
    address: str
    interface: str
    prefix: tuple[str, ...]


class DemoSite(Protocol):
    """Where the demo's nodes are. ``close`` leaves nothing behind."""

    description: str
    head_address: str
    nodes: tuple[DemoNode, ...]
    exec_template: str

    def cut(self, node: str, job: str, agent_pid: int) -> str:
        """Make the node unreachable, as a fault would, and return how."""
        ...

    def mend(self, node: str) -> None:
        """Make the node reachable again; killed processes stay dead."""
        ...

    def close(self) -> None:
        """Remove what was made."""
        ...


class NamespaceSite:
    """Nodes as network namespaces on one bridge; needs root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and iproute2."""

    def __init__(self, names: Sequence[str] = NODES) -> None:
        self._names = tuple(names)
        self._tag = f"ee{secrets.token_hex(2)}"
        self._bridge = f"{self._tag}br"
        # One of 256 subnets of the range set aside for benchmarks (RFC 2544): no site routes it.
        subnet = f"198.18.{secrets.randbelow(256)}"
        self.head_address = f"{subnet}.1"
        self.exec_template = f"ip netns exec {self._tag}-{{node}}"
        self.nodes = tuple(
            DemoNode(name, f"{subnet}.{10 + i}", "eth0", ("ip", "netns", "exec", f"{self._tag}-{name}"))
            for i, name in enumerate(self._names, start=1)
        )
        self.description = f"network namespaces on bridge {self._bridge}"
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def cut(self, node: str, job: str, agent_pid: int) -> str:  # noqa: ARG002 - everything lives on, unheard
        """Take the node's link down."""
        _ip("link", "set", self._port(node), "down")
        return "its network link was taken down"

    def mend(self, node: str) -> None:
        """Take the node's link up."""
        _ip("link", "set", self._port(node), "up")

    def close(self) -> None:
        """Remove the namespaces and the bridge."""
        for node in self._names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", f"{self._tag}-{node}")
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)

    def _port(self, node: str) -> str:
        return f"{self._tag}p{self._names.index(node) + 1}"

    def _build(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.head_address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for node in self.nodes:
            space, port = f"{self._tag}-{node.name}", self._port(node.name)
            _ip("netns", "add", space)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", port, "master", self._bridge, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{node.address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")


class LoopbackSite:
    """Nodes as loopback addresses: any user can have them."""

    def __init__(self, names: Sequence[str] = NODES) -> None:
        self.head_address = "127.0.0.1"
        self.exec_template = ""
        self.nodes = tuple(DemoNode(name, f"127.0.0.{10 + i}", "lo", ()) for i, name in enumerate(names, start=1))
        self.description = "loopback addresses (network namespaces cannot be made here: they need root and iproute2)"

    def cut(self, node: str, job: str, agent_pid: int) -> str:
        """Kill every process of the node, its agent among them."""
        for process in processes_of(job, node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.Process(agent_pid).kill()
        return "all its processes were killed"

    def mend(self, node: str) -> None:
        """Do nothing: only processes were killed."""

    def close(self) -> None:
        """Do nothing: nothing was created."""


def open_site(names: Sequence[str] = NODES) -> DemoSite:
    """Return nodes in namespaces if this user may create them, else on loopback addresses."""
    if os.geteuid() == 0 and shutil.which("ip"):
        with contextlib.suppress(subprocess.CalledProcessError):
            return NamespaceSite(names)
    return LoopbackSite(names)


def processes_of(job: str, node: str) -> list[psutil.Process]:
    """Return the launcher's processes for a job on a node, identified by their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            mine = (environment.get(JOB_VARIABLE), environment.get(NODE_VARIABLE)) == (job, node)
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def ranks_of(job: str, node: str, script: str) -> list[psutil.Process]:
    """Return the training processes of a job on a node."""
    found = []
    for process in processes_of(job, node):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith(script) for word in process.cmdline()):
                found.append(process)
    return found


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
