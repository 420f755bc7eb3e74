"""A GPU's stream that does its work when the test says so, behind the names of ``torch`` that the hook uses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class FakeStream:
    """Work is enqueued with its duration and done in order by ``run``."""

    def __init__(self) -> None:
        self.queued: list[tuple[float, Callable[[float], None]]] = []
        self.now_s = 0.0

    def work(self, seconds: float, done: Callable[[float], None] = lambda _now_s: None) -> None:
        self.queued.append((seconds, done))

    def run(self, count: int | None = None) -> None:
        count = len(self.queued) if count is None else count
        for seconds, done in self.queued[:count]:
            self.now_s += seconds
            done(self.now_s)
        del self.queued[:count]


class FakeCuda:
    """``torch.cuda`` of one device. Anything that waits does not exist here, and fails the test by its absence."""

    def __init__(self) -> None:
        self.stream = FakeStream()
        self.capturing = False
        self.events = 0
        self.broken = False
        cuda = self

        class Event:
            def __init__(self, *, enable_timing: bool = False) -> None:
                cuda.events += 1
                self.timing = enable_timing
                self.past_s: float | None = None

            def record(self, stream: FakeStream) -> None:
                assert not cuda.capturing, "it would become a node of the graph"
                self.past_s = None
                stream.work(0.0, self._pass)

            def query(self) -> bool:
                assert not cuda.capturing, "it would invalidate the capture"
                if cuda.broken:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                return self.past_s is not None

            def elapsed_time(self, end: Event) -> float:
                assert self.timing
                assert self.past_s is not None
                assert end.past_s is not None
                return (end.past_s - self.past_s) * 1e3

            def _pass(self, now_s: float) -> None:
                self.past_s = now_s

        self.Event = Event

    def current_stream(self, _device: Any) -> FakeStream:
        return self.stream

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def get_device_properties(self, _index: int) -> Any:
        return SimpleNamespace(uuid="1234")


class FakeMemory:
    """A pinned buffer of numbers, of which slices share the storage."""

    def __init__(self, numbers: list[float], place: int = 0) -> None:
        self._numbers = numbers
        self._place = place

    def __getitem__(self, places: slice) -> FakeMemory:
        return FakeMemory(self._numbers, places.start)

    def copy_(self, value: FakeValue, *, non_blocking: bool) -> None:
        assert non_blocking
        number, place = value.number, self._place

        def arrive(_now_s: float) -> None:
            self._numbers[place] = number

        value.cuda.stream.work(0.0, arrive)

    def item(self) -> float:
        return self._numbers[self._place]


class FakeValue:
    """A tensor of one number on the device; reading it at once would wait for the device."""

    is_cpu = False
    is_cuda = True
    device = "cuda:0"

    def __init__(self, cuda: FakeCuda, number: float) -> None:
        self.cuda = cuda
        self.number = number

    def numel(self) -> int:
        return 1

    def detach(self) -> FakeValue:
        return self

    def reshape(self, _size: int) -> FakeValue:
        return self


class FakeEngine:
    """The autograd engine: callbacks run in the order in which they were queued, also those queued meanwhile."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def queue_callback(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def finish_backward(self) -> None:
        while self._callbacks:
            self._callbacks.pop(0)()


class FakeTorch:
    """The module ``torch`` with a GPU."""

    float32 = "float32"

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.engine = FakeEngine()
        self.autograd = SimpleNamespace(Variable=SimpleNamespace(_execution_engine=self.engine))

    def is_grad_enabled(self) -> bool:
        return True

    def empty(self, count: int, *, dtype: str, pin_memory: bool) -> FakeMemory:
        assert (dtype, pin_memory) == (self.float32, True)
        assert not self.cuda.capturing, "to allocate would invalidate the capture"
        return FakeMemory([0.0] * count)


class FakeModule:
    """A module with one parameter on the GPU and torch's hooks."""

    def __init__(self) -> None:
        self.before: list[Callable[..., None]] = []
        self.after: list[Callable[..., None]] = []

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(device=SimpleNamespace(type="cuda", index=0), requires_grad=True)]

    def modules(self) -> list[Any]:
        return [self]

    def register_forward_pre_hook(self, hook: Callable[..., None]) -> Any:
        self.before.append(hook)
        return SimpleNamespace(remove=lambda: self.before.remove(hook))

    def register_forward_hook(self, hook: Callable[..., None]) -> Any:
        self.after.append(hook)
        return SimpleNamespace(remove=lambda: self.after.remove(hook))


class FakeDataParallel(FakeModule):
    """DDP: synchronises buffers before the module's forward, and waits for its reduction in a callback of its own."""

    def __init__(self, torch: FakeTorch) -> None:
        super().__init__()
        self.torch = torch
        self.module = FakeModule()

    def train_step(self, *, buffers_s: float, compute_s: float, wait_s: float) -> None:
        stream = self.torch.cuda.stream
        for hook in self.before:
            hook(self, ())
        stream.work(buffers_s)
        for hook in self.module.before:
            hook(self.module, ())
        stream.work(compute_s / 2)
        backward: list[Callable[..., None]] = []
        output = SimpleNamespace(grad_fn=SimpleNamespace(register_prehook=backward.append))
        for hook in self.after:
            hook(self, (), output)
        for hook in backward:
            hook(("gradient",))
        stream.work(compute_s / 2)
        self.torch.engine.queue_callback(lambda: stream.work(wait_s))
        self.torch.engine.finish_backward()
