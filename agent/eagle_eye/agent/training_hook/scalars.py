"""Converts a program's values to numbers, without ever waiting for a device.

Never imports torch: it is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

VALUES_PENDING_MAX = 64  # a host leads by a few steps of two values each; more are not read


def scalar(value: Any) -> float | None:
    """Return a number, or None for a tensor on a device: reading it would block on the device."""
    if isinstance(value, (float, int)):
        return float(value)
    if getattr(value, "is_cpu", True) is False:
        return None
    item = getattr(value, "item", None)  # the fastest way, and silent about gradients
    return float(value if item is None else item())


class DeviceScalars:
    """Numbers on a GPU, copied asynchronously to pinned memory and read some steps later.

    The copy is enqueued on the current stream, where the program would read the value itself. Nothing is enqueued or
    polled while the stream is being captured into a graph. Any failure disables this permanently and is passed to
    ``failed`` once.
    """

    def __init__(self, torch: Any, failed: Callable[[BaseException], None]) -> None:
        """``torch`` is the module."""
        self._torch: Any = torch
        self._failed = failed
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self._free: list[tuple[Any, Any]] | None = None  # before the first value

    def keep(self, name: int, value: Any) -> bool:
        """Schedule the one-element tensor to be read later as ``name``; return whether it will be. Never raises."""
        if self._torch is None:
            return False
        cuda = self._torch.cuda
        try:
            if value.numel() != 1 or cuda.is_current_stream_capturing():
                return False
            if self._free is None:
                self._free = self._allocate()
            if not self._free:
                return False
            memory, event = self._free[-1]
            memory.copy_(value.detach().reshape(1), non_blocking=True)
            event.record(cuda.current_stream(value.device))
        except Exception as error:  # noqa: BLE001 - training must go on without us; it is counted
            self._switch_off(error)
            return False
        self._free.pop()
        self._pending.append((name, memory, event))
        return True

    def _allocate(self) -> list[tuple[Any, Any]]:
        torch = self._torch
        memory = torch.empty(VALUES_PENDING_MAX, dtype=torch.float32, pin_memory=True)
        return [(memory[place : place + 1], torch.cuda.Event()) for place in range(VALUES_PENDING_MAX)]

    def read(self) -> list[tuple[int, float]]:
        """Return the values that have arrived since the last call, oldest first, with their names."""
        values: list[tuple[int, float]] = []
        if not self._pending or self._free is None:
            return values
        try:
            if self._torch.cuda.is_current_stream_capturing():
                return values
            while self._pending and self._pending[0][2].query():
                name, memory, event = self._pending.popleft()
                values.append((name, float(memory.item())))
                self._free.append((memory, event))
        except Exception as error:  # noqa: BLE001 - training must go on without us; it is counted
            self._switch_off(error)
        return values

    def _switch_off(self, error: BaseException) -> None:
        self._torch = self._free = None
        self._pending.clear()
        self._failed(error)
