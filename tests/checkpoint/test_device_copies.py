"""Copies out of a GPU: in which order streams do what, with a GPU that notes it. ``tests/gpu`` has a real one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import socket
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_eye.checkpoint.connection import BlockingConnection
from eagle_eye.checkpoint.messages import Close, Skipped
from eagle_eye.checkpoint.shards import CudaCopies, DeviceCopies, HostCopies, copies_for
from eagle_eye.checkpoint.store_client import AttemptConnection

DEVICE = torch.device("cpu")  # tensors of the CPU stand for a GPU's


class FakeEvent:
    def __init__(self, notes: list[str], name: str) -> None:
        self._notes = notes
        self.name = name

    def synchronize(self) -> None:
        self._notes.append(f"host waits for {self.name}")


class FakeStream:
    def __init__(self, notes: list[str], name: str) -> None:
        self._notes = notes
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self._notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self._notes.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> FakeEvent:
        return FakeEvent(self._notes, f"copies of {self.name}")


class Gpu:
    """``torch.cuda`` as far as copies need it; ``notes`` says what happened, in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.capturing = False
        self.code = 0
        self._program = self._current = FakeStream(self.notes, "program")

    def Stream(self, _: torch.device) -> FakeStream:  # noqa: N802 - torch's name
        return FakeStream(self.notes, "aside")

    def current_stream(self, _: torch.device) -> FakeStream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._current, before = stream, self._current
        yield
        self._current = before

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def cudart(self) -> Any:
        def register(address: int, length: int, flags: int) -> int:
            self.notes.append(f"pinned {length}")
            return self.code

        def unregister(address: int) -> int:
            self.notes.append("unpinned")
            return self.code

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)

    def source(self, name: str, tensor: torch.Tensor) -> Any:
        """Return a tensor that notes on which stream it is copied."""
        return SimpleNamespace(name=name, device=DEVICE, data_ptr=tensor.data_ptr, record_stream=lambda _: None)

    def target(self) -> Any:
        """Return the tensor in the slot."""
        return SimpleNamespace(
            copy_=lambda source, **_: self.notes.append(f"{self._current.name} copies {source.name}")
        )


class Training:
    """A model with a parameter that an optimizer changes, and a buffer that the forward pass does."""

    def __init__(self) -> None:
        self.gpu = Gpu()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.buffer = torch.zeros(3)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.copies = CudaCopies(DEVICE, [self.optimizer], self.gpu)

    def step(self) -> list[str]:
        """Return what the step did, beside itself."""
        self.gpu.notes.clear()
        self.optimizer.step()
        return list(self.gpu.notes)

    def capture(self) -> list[str]:
        """Return in which order a capture copied."""
        self.gpu.notes.clear()
        self.copies.begin()
        self.copies.copy(self.gpu.target(), self.gpu.source("buffer", self.buffer))
        self.copies.copy(self.gpu.target(), self.gpu.source("weight", self.weight))
        self.wait = self.copies.end()
        return list(self.gpu.notes)


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def slot() -> memoryview:
    return memoryview(mmap.mmap(-1, 4096))


def test_what_only_an_optimizer_changes_is_copied_aside_behind_what_the_program_has_queued(training: Training) -> None:
    training.step()
    assert training.capture() == ["aside waits for program", "program copies buffer", "aside copies weight"]


def test_a_step_waits_for_what_is_copied_aside_on_the_gpu(training: Training) -> None:
    training.step()
    training.capture()
    assert training.step() == ["program waits for copies of aside"]


def test_an_optimizers_own_tensors_are_copied_aside(training: Training) -> None:
    training.optimizer = torch.optim.SGD([training.weight], lr=0.1, momentum=0.9)
    training.copies = CudaCopies(DEVICE, [training.optimizer], training.gpu)
    training.weight.grad = torch.ones(3)
    training.step()
    training.buffer = training.optimizer.state[training.weight]["momentum_buffer"]
    assert training.capture()[1] == "aside copies buffer"


def test_all_is_copied_in_the_programs_order_where_no_step_was_seen(training: Training) -> None:
    # Then something else than these optimizers may change parameters, and would not wait.
    assert training.capture()[1:] == ["program copies buffer", "program copies weight"]
    training.step()
    training.capture()
    assert training.capture()[1:] == ["program copies buffer", "program copies weight"]


def test_all_is_copied_in_the_programs_order_once_a_step_is_in_a_graph(training: Training) -> None:
    training.gpu.capturing = True
    assert training.step() == [], "a graph cannot wait for what is outside of it"
    training.gpu.capturing = False
    training.step()
    assert training.capture()[1:] == ["program copies buffer", "program copies weight"]


def test_the_host_waits_for_both_streams_and_only_where_it_is_asked_to(training: Training) -> None:
    training.step()
    assert not [note for note in training.capture() if "host" in note]
    assert training.wait is not None
    training.wait()
    assert training.gpu.notes[-2:] == ["host waits for copies of aside", "host waits for copies of program"]


def test_a_slot_is_pinned_until_nothing_is_copied_into_it_any_more(training: Training, slot: memoryview) -> None:
    training.copies.attach(slot)
    assert training.gpu.notes == ["pinned 4096"]
    training.capture()
    training.copies.detach(slot)
    assert training.gpu.notes[-3:] == [
        "host waits for copies of aside", "host waits for copies of program", "unpinned",
    ]  # fmt: skip


def test_memory_that_cannot_be_pinned_is_said_and_used(
    training: Training, slot: memoryview, caplog: pytest.LogCaptureFixture
) -> None:
    training.gpu.code = 2
    training.copies.attach(slot)
    assert "not pinned" in caplog.text
    training.copies.detach(slot)
    assert "unpinned" not in training.gpu.notes


def test_a_closed_one_has_pinned_nothing_and_steps_wait_for_nothing(training: Training, slot: memoryview) -> None:
    training.copies.attach(slot)
    training.step()
    training.capture()
    training.copies.close()
    assert training.gpu.notes[-3:] == [
        "host waits for copies of aside", "host waits for copies of program", "unpinned",
    ]  # fmt: skip
    assert training.step() == []
    training.copies.attach(slot)
    assert training.gpu.notes == [], "pinned by nobody who will ever unpin it"


def test_an_abandoned_one_unpins_before_its_slots_are_unmapped(training: Training) -> None:
    mapping = mmap.mmap(-1, 4096)
    mapped = weakref.ref(mapping)
    unmapped_then = []
    unregister = training.gpu.cudart().cudaHostUnregister

    def noting(address: int) -> int:
        unmapped_then.append(mapped() is None)
        return int(unregister(address))

    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=noting)
    training.gpu.cudart = lambda: cudart  # type: ignore[method-assign]
    training.copies.attach(memoryview(mapping))
    del mapping
    training.copies = CudaCopies(DEVICE, [], training.gpu)
    gc.collect()
    assert unmapped_then == [False]
    assert mapped() is None
    assert training.step() == [], "the optimizer keeps nobody alive"


def test_a_failed_call_leaves_no_error_for_the_trainings_next_kernel(
    training: Training, slot: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def library(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(cudaGetLastError=lambda: asked.append("taken"))

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", library)
    training.gpu.code = 712
    training.copies.attach(slot)
    assert asked == ["libcudart.so.13", "taken"]


def test_tensors_of_the_host_need_no_gpu() -> None:
    copies: DeviceCopies = copies_for({torch.device("cpu")}, [])
    assert isinstance(copies, HostCopies)
    target = torch.zeros(3)
    copies.begin()
    copies.copy(target, torch.ones(3))
    assert target.tolist() == [1.0, 1.0, 1.0]
    assert copies.end() is None


def test_a_capture_is_said_once_all_of_it_is_in_the_slot() -> None:
    ours, theirs = socket.socketpair()
    line, copied = AttemptConnection(BlockingConnection(ours, 10.0)), threading.Event()
    said = BlockingConnection(theirs, 0.2)

    def wait() -> None:
        copied.wait(10.0)

    line.say(Skipped(1, "first"), wait)
    with pytest.raises(TimeoutError):
        said.receive()
    copied.set()
    said.set_timeout(10.0)
    assert said.receive() == Skipped(1, "first")
    line.end(10.0)
    said.close()
    ours.close()


def test_a_capture_that_the_gpu_failed_is_never_said(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ours, theirs = socket.socketpair()
    line, said = AttemptConnection(BlockingConnection(ours, 10.0)), BlockingConnection(theirs, 10.0)
    line.say(Skipped(1, "first"), fails)
    line.say(Close())
    assert said.receive() == Close()
    assert "illegal memory access" in caplog.text
    line.end(10.0)
    said.close()
    ours.close()
