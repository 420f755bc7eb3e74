"""The network topology: which switch each node and link connects to."""

from __future__ import annotations

import msgspec


class Topology(msgspec.Struct, frozen=True):
    """The switch of each node, and of each node's links where they differ; missing entries are unknown."""

    switch_of_node: dict[str, str] = {}
    switch_of_link: dict[str, dict[str, str]] = {}
