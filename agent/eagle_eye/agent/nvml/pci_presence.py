"""Which GPUs are on the PCI bus, and whether one still is, according to the kernel. Touches: /sys."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from eagle_eye.agent.foreign_files import content
from eagle_eye.agent.kernel_messages import bus_address

# A GPU in reset does not answer on the bus either, for less than two seconds (PCI Express, device readiness).
GONE_S = 3.0

DEVICES_MAX = 4_096
_ATTRIBUTE_BYTES_MAX = 32
NVIDIA_VENDOR, AMD_VENDOR = b"0x10de", b"0x1002"
# Display controllers, with and without an output; AMD's accelerators are processing accelerators.
_GPU_CLASSES = (b"0x0300", b"0x0302", b"0x1200")
_NOTHING = b"\xff\xff\xff\xff"  # what a read returns where no device answers


class Bus:
    """The GPUs on the bus, by PCI address as NVML writes it."""

    def __init__(self, sys: Path = Path("/sys"), monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._devices = sys / "bus/pci/devices"
        self._driver = sys / "bus/pci/drivers/nvidia"
        self._monotonic_s = monotonic_s
        self._seen: set[str] = set()
        self._gone_since_s: dict[str, float] = {}

    def answers(self, bus_id: str) -> bool:
        """Whether the device answers; once it has, ``gone`` can detect when it no longer does."""
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

        False where the kernel never showed it, for example in a container: that is indistinguishable from a missing
        device.
        """
        if self.answers(bus_id) or bus_id not in self._seen:
            self._gone_since_s.pop(bus_id, None)
            return False
        now_s = self._monotonic_s()
        return now_s - self._gone_since_s.setdefault(bus_id, now_s) >= GONE_S

    def bound(self) -> frozenset[str]:
        """Return the devices bound to NVIDIA's driver, by the kernel's names; none where unknown."""
        try:
            return frozenset(entry.name for entry in self._driver.iterdir() if bus_address(entry.name))
        except OSError:
            return frozenset()


def gpus_on_the_bus(sys: Path = Path("/sys"), vendor: bytes = NVIDIA_VENDOR) -> int:
    """Return how many GPUs of a vendor the kernel shows, with or without a driver. Source: pci.ids; PCI class codes."""
    try:
        devices = sorted((sys / "bus/pci/devices").iterdir())[:DEVICES_MAX]
    except OSError:
        return 0
    return sum(1 for device in devices if _is_gpu(device, vendor))


def _is_gpu(device: Path, vendor: bytes) -> bool:
    try:
        made_by, kind = (content(str(device / name), _ATTRIBUTE_BYTES_MAX) for name in ("vendor", "class"))
    except OSError:
        return False
    return made_by.strip() == vendor and kind.startswith(_GPU_CLASSES)
