"""XIDs from NVML's event API, for hosts whose kernel log cannot be read.

Source: NVML API Reference, Event Handling Methods. Of its other events, ECC errors are read every second as counters,
which say more.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from ctypes import byref, c_void_p, cast
from typing import Any

import pynvml

from eagle_eye.agent.kernel.deduplication import NewMessage, Repeats
from eagle_eye.agent.kernel.messages import KernelMessage
from eagle_eye.agent.nvml.codes import NEVER, NvmlFailure
from eagle_eye.agent.nvml.device import Device

XIDS_MAX = 256  # per poll; the driver keeps the rest
CODE_MAX = 99_999  # the largest that the kernel log could hold
TEXT = "reported by NVML; the kernel log would say more, and could not be read"

_log = logging.getLogger("eagle_eye.agent")


class Xids:
    """The XIDs of all GPUs since each was watched, deduplicated like those of the kernel log.

    ``poll`` runs where driver calls may hang; ``take`` never waits.
    """

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Register with the driver; where that fails, there are no XIDs."""
        self._monotonic_s = monotonic_s
        self._buses: dict[int, str] = {}  # PCI addresses by handle
        self._found: deque[tuple[int, int, float]] = deque(maxlen=XIDS_MAX)  # address of the handle, code, time
        self._repeats = Repeats()
        self._wait: Callable[..., int] | None = getattr(pynvml.nvmlLib, "nvmlEventSetWait_v2", None)
        self._event = pynvml.c_nvmlEventData_t()
        self._set: Any = None
        try:
            self._set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            _log.info("NVML tells no XIDs: %s", error)

    def watch(self, device: Device) -> None:
        """Subscribe to this GPU's XIDs, where the driver supports it."""
        if self._set is None:
            return
        self._buses[_address(device.handle)] = device.bus_id
        try:
            pynvml.nvmlDeviceRegisterEvents(device.handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
        except pynvml.NVMLError as error:
            _log.info("NVML tells no XIDs of %s: %s", device.bus_id, error)

    def poll(self) -> NvmlFailure | None:
        """Fetch pending events without waiting for more; return the failure, if any."""
        if self._set is None or self._wait is None:
            return None
        for _ in range(XIDS_MAX):
            code = self._wait(self._set, byref(self._event), 0)
            if code == pynvml.NVML_ERROR_TIMEOUT:
                return None
            if code != pynvml.NVML_SUCCESS:
                if code in NEVER:
                    self._wait = None
                return NvmlFailure("XIDs", code)
            event = self._event
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError and 0 < event.eventData <= CODE_MAX:
                self._found.append((_address(event.device), int(event.eventData), self._monotonic_s()))
        return None

    def take(self) -> list[NewMessage]:
        """Return the XIDs to report now, each with its GPU's PCI address as NVML writes it."""
        news: list[NewMessage] = []
        while self._found:
            address, code, at_s = self._found.popleft()
            said = KernelMessage("xid", str(code), TEXT, code, self._buses.get(address, ""))
            news += self._repeats.add(said, at_s)
        return news + self._repeats.due(self._monotonic_s())

    def close(self) -> None:
        """Unregister from the driver. Raises NVMLError."""
        if self._set is not None:
            pynvml.nvmlEventSetFree(self._set)
            self._set = None


def _address(handle: Any) -> int:
    return cast(handle, c_void_p).value or 0
