"""The groups of nodes that policy's terms name: those of the configuration, and the racks of the topology file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.names import did_you_mean
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.site_files.topology import read_places


def with_racks(policy: PolicySettings, topology_file: str, where: str = "policy") -> PolicySettings:
    """Return the settings with each rack that their terms of nodes name as a group.

    Raises ConfigurationError, which names the key below ``where``, for a name that is neither a group nor a rack, or
    is both with different nodes; and for a file that cannot be read.
    """
    named = [(name, place) for place, terms in enumerate(policy.nodes) for name in terms.groups]
    racks = _racks(topology_file) if named and topology_file else {}
    groups = dict(policy.node_groups)
    for name, place in named:
        members = groups.setdefault(name, racks.get(name, []))
        if not members:
            rack = "no rack of topology_file" if topology_file else "no topology_file names racks"
            raise ConfigurationError(
                f"{where}.nodes[{place}].groups: expected groups of {where}.node_groups or racks, got {name!r}, which"
                f" is no such group, and {rack}{did_you_mean(name, (*policy.node_groups, *racks))}"
            )
        if name in racks and sorted(members) != racks[name]:
            raise ConfigurationError(
                f"{where}.node_groups.{name}: topology_file has a rack of this name, with other nodes;"
                " give the group another name"
            )
    return msgspec.structs.replace(policy, node_groups=groups)


def _racks(topology_file: str) -> dict[str, list[str]]:
    racks: dict[str, list[str]] = {}
    for node, rack in sorted(read_places(Path(topology_file)).rack_of_node.items()):
        racks.setdefault(rack, []).append(node)
    return racks
