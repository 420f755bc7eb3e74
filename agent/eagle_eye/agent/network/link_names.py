"""Maps the interface or PCI function named in a kernel message to the link name used in rows."""

from __future__ import annotations

import re
from pathlib import Path

NAMES_MAX = 256  # interfaces remembered

_PCI_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_STANDS_FOR = re.compile(r"[vs]f\d")  # the host's end of a virtual function: not a port


class LinkNames:
    """Cached link names: a device that failed may be gone when its name is looked up."""

    def __init__(self, sys: Path) -> None:
        self._sys = sys
        self._names: dict[str, str] = {}

    def of_device(self, device: str) -> str:
        """Return the link name in rows of an interface or a PCI function."""
        if _PCI_FUNCTION.fullmatch(device) is None:
            return self.of_interface(device)
        folder = self._sys / "bus/pci/devices" / device
        for sort in ("infiniband", "net"):
            try:
                names = sorted(item.name for item in (folder / sort).iterdir())
            except OSError:
                continue
            if names:
                return names[0]
        return device

    def of_interface(self, interface: str) -> str:
        """Return the interface's link name in rows: its RDMA port's, its own where it has none.

        Members of a bond share one RDMA device and keep their own links.
        """
        folder = self._sys / "class/net" / interface
        try:
            if (folder / "master").exists() or _STANDS_FOR.search((folder / "phys_port_name").read_text("ascii")):
                return interface
        except (OSError, ValueError):
            pass  # most drivers have no name for the port
        name = self._names.get(interface, "")  # a device that failed may be gone from the list
        try:
            (device,) = (folder / "device/infiniband").iterdir()
            number = int((folder / "dev_port").read_text("ascii")) + 1
            name = f"{device.name}:{number}" if number > 1 and (device / f"ports/{number}").exists() else device.name
        except (OSError, ValueError):
            return name or interface
        if len(self._names) < NAMES_MAX:
            self._names[interface] = name
        return name
