"""Copies of a state into a slot: out of the host's memory, and out of a GPU's, beside the steps that follow.

What is on a GPU goes into pinned memory without the host's waiting. Parameters and the optimizers' own tensors change
in an optimizer's step and nowhere else: they are copied on a stream of their own, and the next step waits for it, on
the GPU. Whatever else there is, which anything may change, is copied on the program's own stream, in its order.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from eagle_eye.checkpoint.state import address_of

_log = logging.getLogger(__name__)


class Copies(Protocol):
    """How the tensors of one rank get into its slots. One capture at a time, by one thread."""

    def attach(self, slot: memoryview) -> None:
        """A slot will be copied into."""

    def detach(self, slot: memoryview) -> None:
        """A slot will not be copied into any more, and nothing is on its way into it."""

    def begin(self) -> None:
        """A capture begins: what is copied from now on is copied as it is now."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor into the slot, or have it copied."""

    def end(self) -> Callable[[], None] | None:
        """Return what waits, in another thread, until all is in the slot; None where it is already."""


class HostCopies:
    """For tensors of the host: each is there when ``copy`` returns."""

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


class CudaCopies:
    """For tensors of one GPU, and of the host. ``cuda`` is ``torch.cuda``.

    The stream of our own is used only after a step that was seen, and never again once one was captured into a CUDA
    graph: a replay does not say that it begins.
    """

    def __init__(self, device: torch.device, optimizers: Sequence[Optimizer], cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._optimizers = optimizers
        self._stream = cuda.Stream(device)
        self._optimized: frozenset[int] = frozenset()
        self._events: tuple[Any, ...] = ()  # behind the last capture's copies: on our own stream, on the program's
        self._pinned: set[int] = set()
        self._step_seen = self._in_graphs = False
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def attach(self, slot: memoryview) -> None:
        """See Copies. Memory that cannot be pinned is copied into all the same; the host waits then."""
        address = _address(slot)
        code = int(self._cuda.cudart().cudaHostRegister(address, len(slot), 0))
        if code == 0:
            self._pinned.add(address)
        else:
            _log.warning("%d bytes of shared memory are not pinned, and captures wait: CUDA error %d", len(slot), code)

    def detach(self, slot: memoryview) -> None:
        """See Copies."""
        for event in self._events:
            event.synchronize()
        address = _address(slot)
        if address in self._pinned:
            self._pinned.discard(address)
            self._cuda.cudart().cudaHostUnregister(address)

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
        source.record_stream(self._stream)  # its memory is nobody else's before it is copied

    def end(self) -> Callable[[], None] | None:
        """See Copies."""
        events = (self._stream.record_event(), self._cuda.current_stream(self._device).record_event())
        self._events = events

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def _before_step(self, *_: Any) -> None:
        """An optimizer is about to change what may still be being copied: its stream waits, and the host does not."""
        if self._cuda.is_current_stream_capturing():
            self._in_graphs = True
            return
        self._step_seen = True
        if self._events:
            self._cuda.current_stream(self._device).wait_event(self._events[0])


def copies_for(devices: Collection[torch.device], optimizers: Sequence[Optimizer]) -> Copies:
    """Return how tensors of these devices are copied. On several GPUs, or another accelerator, the host waits."""
    gpus = [device for device in devices if device.type == "cuda"]
    return CudaCopies(gpus[0], optimizers) if len(gpus) == 1 else HostCopies()


def _addresses_of(optimizers: Sequence[Optimizer]) -> list[int]:
    """Return where the tensors are that these optimizers change."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensors = [parameter, *optimizer.state.get(parameter, {}).values()]
                found += [address_of(one) for one in tensors if isinstance(one, torch.Tensor)]
    return found


def _address(slot: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot))
