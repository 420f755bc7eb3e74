"""Reports the GPU inventory of this node when it changes, and periodically."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from eagle_eye.schema.events import Event

AGAIN_S = 3_600.0  # a server may have lost it
LINKS_S = 60.0  # the minimum interval for links that come and go


class InstalledGpu(NamedTuple):
    """One GPU: its row, UUID, product name, bus address, and its board's serial ("": unknown).

    ``nvlinks`` is how many are up, None where unknown.
    """

    device: int
    uuid: str
    model: str
    pci_address: str = ""
    serial: str = ""
    nvlinks: int | None = None


class Inventory:
    """Reports all GPUs when one is added, removed or moved or its links have changed, and every AGAIN_S."""

    def __init__(self) -> None:
        self._reported: tuple[InstalledGpu, ...] = ()
        self._reported_s = 0.0

    def news(self, seats: Iterable[InstalledGpu], now_s: float, monotonic_s: float) -> list[Event]:
        """Return an event per GPU, or nothing while all is unchanged. An empty list of GPUs is never reported."""
        seen = tuple(sorted(seats))
        patience_s = AGAIN_S
        if seen != self._reported:
            patience_s = LINKS_S if _without_links(seen) == _without_links(self._reported) else 0.0
        if not seen or monotonic_s - self._reported_s < patience_s:
            return []
        self._reported, self._reported_s = seen, monotonic_s
        return [Event(now_s, "inventory", s.device, _attributes(s, len(seen))) for s in seen]


def _without_links(seats: Iterable[InstalledGpu]) -> list[InstalledGpu]:
    return [seat._replace(nvlinks=None) for seat in seats]


def _attributes(seat: InstalledGpu, gpus: int) -> dict[str, Any]:
    reported = {"uuid": seat.uuid, "model": seat.model, "pci_address": seat.pci_address, "serial": seat.serial}
    links = {} if seat.nvlinks is None else {"nvlinks": seat.nvlinks}
    return {name: text for name, text in reported.items() if text or name in ("uuid", "model")} | {"gpus": gpus} | links
