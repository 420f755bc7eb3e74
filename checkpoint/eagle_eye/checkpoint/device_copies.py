"""Copies a state into a slot from host memory, and from a GPU concurrently with the following steps.

GPU tensors are copied to pinned memory without blocking the host. Parameters and optimizer tensors change only in an
optimizer step: they are copied on a separate stream, for which the next step waits on the GPU. All other tensors, which
may change at any time, are copied on the program's own stream, in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from eagle_eye.checkpoint.state import address_of

_log = logging.getLogger(__name__)


class DeviceCopies(Protocol):
    """Copies one rank's tensors into its slots. One capture at a time, by one thread."""

    def attach(self, slot: memoryview) -> None:
        """Prepare a slot for copies."""

    def detach(self, slot: memoryview) -> None:
        """Release a slot: no copy into it is or will be in progress."""

    def begin(self) -> None:
        """Start a capture: from now on copies take the current values."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor into the slot, or schedule the copy."""

    def end(self) -> Callable[[], None] | None:
        """Return a function that waits, in another thread, until all copies are done; None if they are."""

    def close(self) -> None:
        """Stop: no copy is in progress, and no slot is attached."""


class HostCopies:
    """For host tensors: each copy is done when ``copy`` returns."""

    def attach(self, slot: memoryview) -> None:
        """See Copies."""

    def detach(self, slot: memoryview) -> None:
        """See Copies."""

    def begin(self) -> None:
        """See Copies."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Copies."""
        target.copy_(source)

    def end(self) -> Callable[[], None] | None:
        """See Copies."""
        return None

    def close(self) -> None:
        """See Copies."""


class CudaCopies:
    """For tensors of one GPU, and of the host. ``cuda`` is ``torch.cuda``.

    Our own stream is used only after an observed step, and never again once a step was captured into a CUDA graph: a
    replay is not observable.
    """

    def __init__(self, device: torch.device, optimizers: Sequence[Optimizer], cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._optimizers = optimizers
        self._stream = cuda.Stream(device)
        self._optimized: frozenset[int] = frozenset()
        self._events: list[Any] = []  # behind the last capture's copies: on our own stream, on the program's
        # Slots by address. What is pinned must not be unmapped: whatever is mapped there next would be taken for it.
        self._pinned: dict[int, memoryview] = {}
        self._step_seen = self._in_graphs = False
        # An optimizer may outlive capturing, and must keep nothing else alive.
        before_step = weakref.WeakMethod(self._before_step)
        self._hooks = [one.register_step_pre_hook(lambda *_: _call(before_step)) for one in optimizers]
        self._unpin_all = weakref.finalize(self, _unpin_all, cuda, self._events, self._pinned)
        self._unpin_all.atexit = False  # at exit nothing is mapped any more

    def attach(self, slot: memoryview) -> None:
        """See Copies. Memory that cannot be pinned is still copied into, but blocks the host."""
        if not self._unpin_all.alive:
            return  # closed
        address = _address(slot)
        code = int(self._cuda.cudart().cudaHostRegister(address, len(slot), 0))
        if code == 0:
            self._pinned[address] = slot
        else:
            _log.warning("%d bytes of shared memory are not pinned, and captures wait: CUDA error %d", len(slot), code)
            _forget_error()

    def detach(self, slot: memoryview) -> None:
        """See Copies."""
        _wait_for(self._events)
        address = _address(slot)
        if self._pinned.pop(address, None) is not None:
            _unpin(self._cuda, address)

    def close(self) -> None:
        """See Copies."""
        for hook in self._hooks:
            hook.remove()
        self._unpin_all()

    def begin(self) -> None:
        """See Copies."""
        aside = self._step_seen and not self._in_graphs
        self._step_seen = False
        self._optimized = frozenset(_addresses_of(self._optimizers)) if aside else frozenset()
        self._stream.wait_stream(self._cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Copies."""
        if source.device != self._device or source.data_ptr() not in self._optimized:
            target.copy_(source, non_blocking=source.device.type == "cuda")
            return
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)  # its memory is not reused before it is copied

    def end(self) -> Callable[[], None] | None:
        """See Copies."""
        events = (self._stream.record_event(), self._cuda.current_stream(self._device).record_event())
        self._events[:] = events
        return partial(_wait_for, events)

    def _before_step(self) -> None:
        """Make an optimizer's stream, not the host, wait for copies before it changes their sources."""
        if self._cuda.is_current_stream_capturing():
            self._in_graphs = True
            return
        self._step_seen = True
        if self._events:
            self._cuda.current_stream(self._device).wait_event(self._events[0])


def copies_for(devices: Collection[torch.device], optimizers: Sequence[Optimizer]) -> DeviceCopies:
    """Return how to copy tensors of these devices. On several GPUs, or another accelerator, the host blocks."""
    gpus = [device for device in devices if device.type == "cuda"]
    return CudaCopies(gpus[0], optimizers) if len(gpus) == 1 else HostCopies()


def _addresses_of(optimizers: Sequence[Optimizer]) -> list[int]:
    """Return the addresses of the tensors that these optimizers change."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensors = [parameter, *optimizer.state.get(parameter, {}).values()]
                found += [address_of(one) for one in tensors if isinstance(one, torch.Tensor)]
    return found


def _wait_for(events: Sequence[Any]) -> None:
    for event in events:
        event.synchronize()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call it if its object still exists."""
    found = method()
    if found is not None:
        found()


def _unpin_all(cuda: Any, events: Sequence[Any], pinned: dict[int, memoryview]) -> None:
    with contextlib.suppress(RuntimeError):  # the GPU has failed: no copy is in progress any more
        _wait_for(events)
    while pinned:
        address, slot = pinned.popitem()
        _unpin(cuda, address)
        del slot  # not before


def _unpin(cuda: Any, address: int) -> None:
    if int(cuda.cudart().cudaHostUnregister(address)):
        _forget_error()


def _forget_error() -> None:
    """Clear a failed call's error from the CUDA runtime, which keeps it for this thread.

    Otherwise the training's next kernel launch in this thread fails with it. Torch has no call for this.
    """
    version = torch.version.cuda
    if version is not None:
        with contextlib.suppress(OSError, AttributeError):  # linked statically: there is no other way to it
            ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}").cudaGetLastError()


def _address(slot: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot))
