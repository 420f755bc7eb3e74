"""What NVML calls the GPUs of each node, as agents' inventories say; kept by node, for whatever job comes. Pure."""

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
    """The names of a job's GPUs: each once ("" unknown), and which is whose by series, as in Window; and by node.

    ``models`` is empty where no name is known. ``of_node`` has a node's known names, sorted; no node without one.
    """

    models: tuple[str, ...] = ()
    model_of: Integers = np.zeros(0, dtype=np.intp)
    of_node: Mapping[str, tuple[str, ...]] = {}


class GpuModels:
    """Names by node and device; ``changes`` grows with each that is news."""

    def __init__(self) -> None:
        self._names: dict[str, dict[int, str]] = {}
        self.changes = 0

    def take(self, node: str, event: Event) -> None:
        """Take what a node's event says, if it is of an inventory."""
        if event.kind == INVENTORY:
            self.note(node, event.device, event.attributes.get("model"))

    def note(self, node: str, device: int, name: object) -> None:
        """Take what a node says of one of its GPUs. What is no plausible name is left out."""
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
        """Return the names of a job's GPUs; ``memo`` is empty again after somebody joined the job."""
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
