"""The members of one attempt of a job: nodes, device rows, ranks, roles, phases; as arrays in column order.

With what is known of a node across jobs: the models of its GPUs and the switch it connects to.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.types import Integers, Series
from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.events import Event

INVENTORY = "inventory"
CHARS_MAX = 96  # of a name
DEVICES_MAX = 256  # of a node


class Named(NamedTuple):
    """The GPU names of a job: each once ("" unknown), each series' name as in Window, and by node.

    ``models`` is empty if no name is known. ``of_node`` has a node's known names, sorted; nodes without one are
    missing.
    """

    models: tuple[str, ...] = ()
    model_of: Integers = np.zeros(0, dtype=np.intp)
    of_node: Mapping[str, tuple[str, ...]] = {}


class GpuModels:
    """Names by node and device; ``changes`` counts the changes."""

    def __init__(self) -> None:
        self._names: dict[str, dict[int, str]] = {}
        self.changes = 0

    def record_inventory(self, node: str, event: Event) -> None:
        """Record the names in a node's event, if it is of an inventory."""
        if event.kind == INVENTORY:
            self.record_name(node, event.device, event.attributes.get("model"))

    def record_name(self, node: str, device: int, name: object) -> None:
        """Record the name of one of a node's GPUs. An implausible name is ignored."""
        if not isinstance(name, str) or not 0 < len(name) <= CHARS_MAX or not name.isprintable():
            return
        known = self._names.setdefault(node, {})
        if 0 <= device < DEVICES_MAX and known.get(device) != name:
            known[device] = name
            self.changes += 1

    def keep(self, nodes: Container[str]) -> None:
        """Forget the names of all other nodes' GPUs."""
        gone = [node for node in self._names if node not in nodes]
        for node in gone:
            del self._names[node]
        self.changes += len(gone)

    def of(self, series: Sequence[Series], memo: dict[Any, Any]) -> Named:
        """Return the GPU names of a job; ``memo`` is emptied when a member joins."""
        known: tuple[int, Named] | None = memo.get(GpuModels)
        if known is None or known[0] != self.changes:
            known = memo[GpuModels] = self.changes, self.named(series)
        return known[1]

    def named(self, series: Sequence[Series]) -> Named:
        """Return the names of these series' GPUs."""
        each = [self._names.get(one.node, {}).get(one.device, "") for one in series]
        places = {name: place for place, name in enumerate(sorted(set(each)))}
        if not places.keys() - {""}:
            return Named()
        of_node: dict[str, set[str]] = {}
        for one, name in zip(series, each, strict=True):
            if name:
                of_node.setdefault(one.node, set()).add(name)
        return Named(
            tuple(places),
            np.array([places[name] for name in each], dtype=np.intp),
            {node: tuple(sorted(names)) for node, names in of_node.items()},
        )


class Topology(msgspec.Struct, frozen=True):
    """The switch of each node, and of each node's links where they differ; missing entries are unknown."""

    switch_of_node: dict[str, str] = {}
    switch_of_link: dict[str, dict[str, str]] = {}


GROWTH_MIN = 16  # initial capacity of arrays in columns


class Roster:
    """Nodes and series are only ever added; arrays are rebuilt only after an addition."""

    def __init__(self) -> None:
        self._nodes: dict[str, int] = {}
        self._series: list[Series] = []
        self._columns: dict[tuple[str, int], int] = {}
        self._roles: list[int] = []
        self._role_ids: dict[str, int] = {}
        self._changes = 0
        self._made: dict[str, tuple[int, Any]] = {}
        self.phase: list[str] = []
        self._silent_s: NDArray[np.float64] = np.zeros(GROWTH_MIN)
        self._phase_since_s: NDArray[np.float64] = np.full(GROWTH_MIN, -math.inf)
        self._named: NDArray[np.bool_] = np.zeros(GROWTH_MIN, dtype=np.bool_)

    def add_node(self, node: str) -> bool:
        """Add the node and return whether it is new."""
        if node in self._nodes:
            return False
        self._nodes[node] = len(self._nodes)
        self._changes += 1
        return True

    def add_series(self, node: str, device: int, rank: int, role: str) -> tuple[int, bool]:
        """Add a device row of a known node; return its column and whether it is new."""
        column = self._columns.get((node, device))
        new = column is None
        if column is None:
            column = self._columns[node, device] = len(self._series)
            self._series.append(Series(node, device, rank))
            self._roles.append(0)
            self.phase.append("")
            if column >= len(self._silent_s):
                self._silent_s = np.concatenate([self._silent_s, np.zeros(column)])
                self._phase_since_s = np.concatenate([self._phase_since_s, np.full(column, -math.inf)])
                self._named = np.concatenate([self._named, np.zeros(column, dtype=np.bool_)])
            self._changes += 1
        elif rank >= 0 and self._series[column].rank != rank:
            self._series[column] = Series(node, device, rank)
            self._changes += 1
        if role or rank >= 0:
            known = self._role_ids.setdefault(role, len(self._role_ids))
            if self._roles[column] != known:
                self._roles[column] = known
                self._changes += 1
        return column, new

    @property
    def silent_s(self) -> NDArray[np.float64]:
        """How long each rank's live process has been silent: (S,), a writable view."""
        return self._silent_s[: len(self._series)]

    @property
    def phase_since_s(self) -> NDArray[np.float64]:
        """Since when each rank is in its phase: (S,), -inf unknown; a writable view."""
        return self._phase_since_s[: len(self._series)]

    @property
    def named(self) -> NDArray[np.bool_]:
        """Whether an agent has reported each rank: (S,), a writable view."""
        return self._named[: len(self._series)]

    def forget_ranks(self) -> None:
        """Forget what ranks reported of themselves: their processes are new ones."""
        self.phase[:] = [""] * len(self.phase)
        self.phase_since_s[:] = -math.inf
        self.silent_s[:] = 0.0
        self.named[:] = False

    def node_index(self, node: str) -> int:
        """Return a known node's column among the node rows."""
        return self._nodes[node]

    def column(self, node: str, device: int) -> int | None:
        """Return the column of a device row, None if not known."""
        return self._columns.get((node, device))

    def columns_of(self, node: str, device: int) -> list[int]:
        """Return the column of a device row, or all of the node's if ``device`` is -1; [] if none is known."""
        if device >= 0:
            column = self._columns.get((node, device))
            return [] if column is None else [column]
        return [column for column, series in enumerate(self._series) if series.node == node]

    def __contains__(self, node: str) -> bool:
        """Whether the node is a member."""
        return node in self._nodes

    @property
    def series_count(self) -> int:
        """Number of device rows."""
        return len(self._series)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes, in the order they became known."""
        made: tuple[str, ...] = self._once("nodes", lambda: tuple(self._nodes))
        return made

    @property
    def series(self) -> tuple[Series, ...]:
        """The device rows, in column order."""
        made: tuple[Series, ...] = self._once("series", lambda: tuple(self._series))
        return made

    @property
    def roles(self) -> Integers:
        """Each device row's group of peers: (S,)."""
        made: Integers = self._once("roles", lambda: np.array(self._roles, dtype=np.intp))
        return made

    @property
    def node_of(self) -> Integers:
        """Each device row's node, as its index among the nodes: (S,)."""
        made: Integers = self._once(
            "node_of", lambda: np.array([self._nodes[series.node] for series in self._series], dtype=np.intp)
        )
        return made

    @property
    def memo(self) -> dict[Any, Any]:
        """Cached results that depend only on the members: emptied when a member joins or changes."""
        made: dict[Any, Any] = self._once("memo", dict)
        return made

    @property
    def ranked(self) -> bool:
        """Whether the placement of ranks is known."""
        made: bool = self._once("ranked", lambda: any(series.rank >= 0 for series in self._series))
        return made

    @property
    def ranks(self) -> tuple[MemberRank, ...]:
        """The members with a rank, by rank."""

        def make() -> tuple[MemberRank, ...]:
            known: Iterable[MemberRank] = (MemberRank(s.rank, s.node, s.device) for s in self._series if s.rank >= 0)
            return tuple(sorted(known, key=lambda member: member.rank))

        made: tuple[MemberRank, ...] = self._once("ranks", make)
        return made

    def _once(self, name: str, make: Any) -> Any:
        known = self._made.get(name)
        if known is None or known[0] != self._changes:
            known = (self._changes, make())
            self._made[name] = known
        return known[1]
