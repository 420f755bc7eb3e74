"""Matches a node's names by rule, without a name service: the agent's, the host's, Slurm's, Kubernetes's."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from eagle_eye.schema.names import NAME_CHARS_MAX

# What tells a process its node. NODE_NAME is a convention of Kubernetes manifests (downward API, spec.nodeName) and
# means nothing outside a pod.
VARIABLES: Mapping[str, str] = {
    "SLURMD_NODENAME": "Slurm",
    "EAGLE_EYE_NODE": "the launcher",
    "NODE_NAME": "Kubernetes",
}


class NodeName(NamedTuple):
    """A name of this node and its source."""

    source: str
    name: str


def same_node(one: str, other: str) -> bool:
    """Whether two names mean one node: equal ignoring case, or one is the other without its domain."""
    one, other = _plain(one), _plain(other)
    if one == other:
        return bool(one)
    if _is_address(one) or _is_address(other):
        return False
    short, _, domain = one.partition(".")
    other_short, _, other_domain = other.partition(".")
    return bool(short) and short == other_short and not (domain and other_domain)


def node_names(agent: str, host: str, full: str, environ: Mapping[str, str], *, pod: bool) -> tuple[NodeName, ...]:
    """Return all names of this node, the agent's first; unset ones are left out.

    ``host`` is the kernel's name, ``full`` the one with its domain. ``environ`` is a process's environment,
    ``pod`` whether that process runs in a pod.
    """
    given = [NodeName("the agent", agent), NodeName("the host", host), NodeName("the host with its domain", full)]
    given += [
        NodeName(f"{source} ({variable})", environ.get(variable, ""))
        for variable, source in VARIABLES.items()
        if pod or variable != "NODE_NAME"
    ]
    return tuple(item for item in given if item.name and len(item.name) <= NAME_CHARS_MAX and item.name.isprintable())


def conflicts(names: Iterable[NodeName]) -> list[str]:
    """Return, for people, each name that does not match the first; empty when all agree."""
    names = list(names)
    return [
        f"{other.source} calls this node {other.name!r}, {names[0].source} {names[0].name!r}"
        for other in names[1:]
        if not same_node(names[0].name, other.name)
    ]


def _plain(name: str) -> str:
    return name.strip().rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
