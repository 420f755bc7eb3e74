"""NVML names of each node's GPUs, from agents' inventories; kept per node, across jobs. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.detectors.types import Integers, Series
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

    def take(self, node: str, event: Event) -> None:
        """Record the names in a node's event, if it is of an inventory."""
        if event.kind == INVENTORY:
            self.note(node, event.device, event.attributes.get("model"))

    def note(self, node: str, device: int, name: object) -> None:
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
