"""Adds each step's values to the totals that are sent."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from math import isfinite
from typing import Any

from eagle_eye.agent.training_hook.message import Totals

# Converts a program's values to numbers, without ever waiting for a device.
#
# Never imports torch: it is passed in.
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


_STEPS = Totals._fields.index("steps")
_TIMED = Totals._fields.index("timed_steps")
_COMPUTE = Totals._fields.index("compute_steps")
_DATA_WAIT = Totals._fields.index("data_wait_steps")
_COLLECTIVE = Totals._fields.index("collective_steps")
_TOKENS = Totals._fields.index("token_steps")
_WORK = Totals._fields.index("work_steps")
_LOSS = Totals._fields.index("losses")
_GRAD_NORM = Totals._fields.index("grad_norms")
_LOCAL_GRAD_NORM = Totals._fields.index("local_grad_norms")


class RunningTotals:
    """One process's totals since it attached, in ``sums`` in the order of ``Totals``.

    An invalid value is passed to ``failed``, one that cannot be read without blocking on its device is counted in
    ``unread``; the step still counts.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self.sums = [0.0] * len(Totals._fields)
        self.unread = 0
        self._failed = failed
        self._device_values: DeviceScalars | None = None

    def step(self, step_s: float | None, tokens: Any) -> None:
        """Add a finished step; it took ``step_s`` (None: not observed)."""
        sums = self.sums
        sums[_STEPS] += 1.0
        if step_s is None:
            return
        sums[_TIMED] += 1.0
        sums[_TIMED + 1] += step_s
        if tokens is not None and (number := self._amount(tokens)) is not None:
            sums[_TOKENS] += 1.0
            sums[_TOKENS + 1] += step_s
            sums[_TOKENS + 2] += number

    def parts(self, compute_s: Any, data_wait_s: Any, collective_s: Any) -> None:
        """Add a step's parts in seconds; None: not observed."""
        for index, value in ((_COMPUTE, compute_s), (_DATA_WAIT, data_wait_s), (_COLLECTIVE, collective_s)):
            if value is not None:
                self._add(index, value)

    def values(self, loss: Any, grad_norm: Any, local_grad_norm: Any, work_units: Any, *, looking: bool) -> bool:
        """Add a step's values; None: not observed. Return False where a loss or norm is not finite.

        ``looking``: this step is sampled, so values may be copied from a GPU; they count in a later step.
        """
        sound = loss is None or self._number(_LOSS, loss, looking=looking)
        if local_grad_norm is not None and sound:
            # A broken loss breaks the gradient on every rank, which then does not show where it came from.
            sound = self._number(_LOCAL_GRAD_NORM, local_grad_norm, looking=looking)
        if grad_norm is not None:
            sound = self._number(_GRAD_NORM, grad_norm, looking=looking) and sound
        if work_units is not None:
            self._add(_WORK, work_units)
        return self.arrived() and sound

    def arrived(self) -> bool:
        """Add the values that have arrived from a GPU; return False where one is not finite."""
        sound = True
        if self._device_values is not None:
            for index, number in self._device_values.read():
                sound = self._number(index, number, looking=False) and sound
        return sound

    def _add(self, index: int, value: Any) -> None:
        """Add to a (count, sum) pair; non-finite values count as not observed."""
        if (number := self._amount(value)) is not None:
            self.sums[index] += 1.0
            self.sums[index + 1] += number

    def _amount(self, value: Any) -> float | None:
        try:
            number = scalar(value)
        except Exception as error:  # noqa: BLE001 - a value of a kind that we don't know; the step counts all the same
            self._failed(error)
            return None
        if number is None:
            self.unread += 1
        elif not (isfinite(number) and number >= 0.0):
            self._failed(ValueError(f"{number!r} is no amount: expected a finite number from 0"))
            return None
        return number

    def _number(self, index: int, value: Any, *, looking: bool) -> bool:
        """Add to a (count, sum, odd) triple; return False for a non-finite value, which counts as odd."""
        try:
            number = scalar(value)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
            return True
        if number is None:
            if looking and not self._read_later(index, value):
                self.unread += 1
        elif isfinite(number):
            self.sums[index] += 1.0
            self.sums[index + 1] += number
        else:
            self.sums[index + 2] += 1.0
            return False
        return True

    def _read_later(self, index: int, value: Any) -> bool:
        """Schedule a GPU value to be read when it has arrived; return whether it will be."""
        if self._device_values is None:
            if not getattr(value, "is_cuda", False):
                return False
            self._device_values = DeviceScalars(sys.modules["torch"], self._failed)
        return self._device_values.keep(index, value)
