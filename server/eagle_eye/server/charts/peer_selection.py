"""Selects which nodes a chart highlights, and the peers that it compares them with. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from eagle_eye.schema.action import MemberRank

PEER_NODES_MAX = 16  # enough for a median and a spread: with eight GPUs each, 128 series
ACCUSED_MAX = 16  # nodes of one incident that are drawn as one


class Cast(NamedTuple):
    """The nodes that a chart shows.

    ``peers`` are those of the ``peers_total`` comparable nodes that are read, evenly picked. ``roles`` are those of the
    accused's ranks, ``role_of`` all known roles; if both are empty, roles are unknown and all members are compared.
    """

    accused: tuple[str, ...]
    device: int | None
    peers: tuple[str, ...]
    peers_total: int
    roles: frozenset[str]
    role_of: Mapping[tuple[str, int], str]

    @property
    def said(self) -> str:
        """A phrase for the nodes that the accused are compared with."""
        if not self.peers_total:
            return "no other node: none takes part"
        whom = f"{self.peers_total} other node{'s' if self.peers_total > 1 else ''}"
        named = sorted(self.roles - {""})
        alike = f"ranks of role {', '.join(named[:4])} on {whom}" if named else whom
        drawn = "" if len(self.peers) == self.peers_total else f", of which {len(self.peers)} are drawn"
        return f"{alike} of the same attempt{drawn}"

    def comparable(self, node: str, device: int) -> bool:
        """Return whether a peer's series does the same work as the accused."""
        return not self.roles or self.role_of.get((node, device), "") in self.roles


def cast(
    accused: Sequence[str],
    device: int | None,
    members: Iterable[MemberRank],
    nodes: Iterable[str],
    peers_max: int = PEER_NODES_MAX,
) -> Cast:
    """Return the nodes to show; ``members`` are the attempt's known ranks, ``nodes`` its nodes in their order."""
    blamed = tuple(dict.fromkeys(accused))
    role_of = {(rank.node, rank.device): rank.role for rank in members}
    roles = frozenset(
        role for (node, at), role in role_of.items() if node in blamed and (device is None or at == device)
    )
    everybody = dict.fromkeys([*nodes, *(node for node, _ in role_of)])
    alike = {node for (node, _), role in role_of.items() if role in roles} if roles else everybody
    others = [node for node in everybody if node in alike and node not in blamed]
    return Cast(blamed[:ACCUSED_MAX], device, picked(others, peers_max), len(others), roles, role_of)


def picked(names: Sequence[str], most: int) -> tuple[str, ...]:
    """Return at most ``most`` of the names, evenly spaced from first to last; deterministic."""
    if len(names) <= most:
        return tuple(names)
    return tuple(names[at * len(names) // most] for at in range(most))
