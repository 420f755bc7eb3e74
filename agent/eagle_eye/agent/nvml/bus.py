"""Whether a GPU is still on the PCI bus, by what the kernel shows of it. Touches: /sys."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from eagle_eye.agent.kernel_messages import bus_address

# A GPU in a reset does not answer on the bus either, for less than two seconds (PCI Express, device readiness).
GONE_S = 3.0

_NOTHING = b"\xff\xff\xff\xff"  # what a read gives where no device answers


class Bus:
    """The GPUs on the bus, by PCI address as NVML writes it."""

    def __init__(self, sys: Path = Path("/sys"), monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._devices = sys / "bus/pci/devices"
        self._driver = sys / "bus/pci/drivers/nvidia"
        self._monotonic_s = monotonic_s
        self._seen: set[str] = set()
        self._gone_since_s: dict[str, float] = {}

    def answers(self, bus_id: str) -> bool:
        """Whether the device answers; when it does, ``gone`` can tell later that it does no longer."""
        try:
            with (self._devices / f"{bus_address(bus_id)}.{bus_id[-1:]}" / "config").open("rb") as file:
                answered = file.read(4) not in (_NOTHING, b"")
        except (OSError, ValueError):
            return False
        if answered:
            self._seen.add(bus_id)
        return answered

    def gone(self, bus_id: str) -> bool:
        """Whether a device that did answer has not for GONE_S, to be asked repeatedly.

        False where the kernel never showed it, in a container say: that cannot be told from a device that has gone.
        """
        if self.answers(bus_id) or bus_id not in self._seen:
            self._gone_since_s.pop(bus_id, None)
            return False
        now_s = self._monotonic_s()
        return now_s - self._gone_since_s.setdefault(bus_id, now_s) >= GONE_S

    def bound(self) -> frozenset[str]:
        """Return the devices that NVIDIA's driver has, by the kernel's names; none where the kernel does not say."""
        try:
            return frozenset(entry.name for entry in self._driver.iterdir() if bus_address(entry.name))
        except OSError:
            return frozenset()
