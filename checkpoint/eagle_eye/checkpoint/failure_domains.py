"""Reads which nodes fail together from the site's file: the server's ``topology_file``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from eagle_eye.schema.configuration import ConfigurationError

FILE_BYTES_MAX = 64 << 20  # as the server's

Kinds = Mapping[str, Mapping[str, frozenset[str]]]  # nodes by kind and name of what they fail with


class _File(msgspec.Struct, frozen=True):
    switch_of_node: dict[str, str] = {}
    rack_of_node: dict[str, str] = {}


def read_failure_domains(path: Path) -> Kinds:
    """Return the nodes of each switch and rack under "switch" and "rack", where the file has any.

    A link's switch (``switch_of_link``) is not included: the node's memory survives its failure. Raises
    ConfigurationError for a file that is missing, too large or malformed.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        if len(raw) > FILE_BYTES_MAX:
            raise ConfigurationError(f"--topology: {path} is larger than {FILE_BYTES_MAX} bytes")
        read = msgspec.json.decode(raw, type=_File)
    except OSError as error:
        raise ConfigurationError(f"--topology: {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f'--topology: {path}: {error}; expected {{"switch_of_node": {{"n1": "leaf1"}}, "rack_of_node": {{}}}}'
        ) from None
    kinds = {"switch": read.switch_of_node, "rack": read.rack_of_node}
    return {kind: _members(of_node) for kind, of_node in kinds.items() if of_node}


def together(kinds: Kinds) -> dict[str, frozenset[str]]:
    """Return the domains of all kinds by names that distinguish switches from racks: "rack r12"."""
    return {f"{kind} {name}": nodes for kind, domains in kinds.items() for name, nodes in domains.items()}


def _members(of_node: Mapping[str, str]) -> dict[str, frozenset[str]]:
    found = defaultdict[str, set[str]](set)
    for node, domain in of_node.items():
        found[domain].add(node)
    return {domain: frozenset(nodes) for domain, nodes in found.items()}
