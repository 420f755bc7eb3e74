"""The NVML library: opening it with its GPUs, and closing it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pynvml

from eagle_eye.agent.nvml.codes import NvmlFailure
from eagle_eye.agent.nvml.device import Device
from eagle_eye.agent.nvml.xids import Xids
from eagle_eye.schema.frame import KEYS_MAX

SIMULATED_MARK = "eagle_eye_simulated"  # a symbol that the simulated library has and NVIDIA's does not

_log = logging.getLogger("eagle_eye.agent")


class Library:
    """NVML while open: its GPUs, those that it lists but does not let us open, and its XIDs.

    ``pending`` are the places in NVML's list whose GPUs have not been opened yet.
    """

    def __init__(self, rows: dict[str, int], monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Open it, without its GPUs. Raises NVMLError.

        ``rows`` are those of the GPUs seen before, by UUID. A GPU keeps its row when others vanish from the list and
        the library is reopened; new ones are added.
        """
        pynvml.nvmlInit()
        self.begun_s = monotonic_s()
        self.devices: tuple[Device, ...] = ()  # by row
        self.unopened: tuple[NvmlFailure, ...] = ()
        self._rows = rows
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()  # GPUs are opened in several threads where one is slow
        try:
            self.pending = set(range(min(pynvml.nvmlDeviceGetCount(), KEYS_MAX)))
            self.xids = Xids(monotonic_s)
            self._driver = str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            raise

    @property
    def simulated(self) -> bool:
        """Whether this is the library of ``simulation.py``, which measures nothing."""
        return hasattr(pynvml.nvmlLib, SIMULATED_MARK)

    def open_gpu(self, place: int) -> Device | None:
        """Open the GPU at a place in NVML's list; return it, None where opening fails."""
        try:
            device = Device(place, pynvml.nvmlDeviceGetHandleByIndex(place), self._monotonic_s)
        except (pynvml.NVMLError, UnicodeDecodeError) as error:
            code = getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN)
            with self._lock:
                self.unopened += (NvmlFailure(f"gpu {place}", code),)
                self.pending.discard(place)
            return None
        self.xids.watch(device)
        with self._lock:
            if device.uuid not in self._rows:
                taken = set(self._rows.values())
                free = (row for row in (place, *range(KEYS_MAX)) if row not in taken)
                self._rows[device.uuid] = next(free, KEYS_MAX)  # rows from there on are not sent
            device.index = self._rows[device.uuid]
            self.devices = tuple(sorted((*self.devices, device), key=lambda opened: opened.index))
            self.pending.discard(place)
        return device

    def close(self) -> None:
        """Release everything; errors of a library that is already gone are ignored."""
        for close in (*(device.close for device in self.devices), self.xids.close, pynvml.nvmlShutdown):
            try:
                close()
            except pynvml.NVMLError as error:
                _log.debug("closing NVML: %s", error)

    def describe(self) -> str:
        """Return a description for people: "8 GPUs (NVIDIA H100 80GB HBM3), driver 550.54.15"."""
        names = ", ".join(sorted({device.name for device in self.devices}))
        return f"{len(self.devices)} GPU{'s' * (len(self.devices) != 1)} ({names}), driver {self._driver}"
