"""The hooks on a torch model and its optimizer, and the split of a step's time by the moments that they observe.

Never imports torch: uses only objects that the program passed in. On the CPU the moments are timed by the host's clock;
on a GPU, where the host returns before the work is done, by CUDA events. On any other device the
parts of a step are not timed.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from time import perf_counter
from typing import Any, NamedTuple

# Splits a training step's time: a state machine over the moments that the hook sees.
#
# It uses neither torch nor a clock: every moment is passed in, in seconds of one clock, the host's or a device's.


class StepParts(NamedTuple):
    """One step's durations in seconds; None: not observed. ``backwards`` counts its backward passes."""

    step_s: float | None
    compute_s: float | None
    data_wait_s: float | None
    collective_s: float | None
    backwards: int = 0


class StepTimer:
    """Splits a step into data wait, compute and collective.

    The moments of one step: ``finish`` of the previous one, ``forward`` (the model is called), ``backward_end`` (its
    gradients are computed), ``reduced`` (they are summed over the ranks, where the model does that by itself at the end
    of its backward pass), ``optimizer`` (the optimizer is about to step), ``finish``. Compute runs from a forward to
    the last end of a backward pass after it. The collective runs from there to ``reduced``, or to ``optimizer`` where
    ``reduced`` is not called. The time between ``finish`` and the first forward is the data wait. Between ``pause`` and
    ``resume`` nothing counts.
    """

    __slots__ = (
        "_backward_s",
        "_backwards",
        "_begin_s",
        "_collective_s",
        "_compute_s",
        "_data_wait_s",
        "_entering",
        "_pause_s",
        "_paused",
        "_ready_s",
        "_reduced",
        "_segment_s",
    )

    def __init__(self) -> None:
        self._begin_s: float | None = None  # the first step starts at its forward: everything before is start-up
        self._ready_s: float | None = None
        self._segment_s: float | None = None
        self._backward_s: float | None = None  # the segment's compute ends here, as far as is known
        self._entering = False  # the segment was just opened by a wrapper's forward
        self._reduced = False
        self._paused = 0
        self._pause_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._compute_s: float | None = None
        self._data_wait_s: float | None = None
        self._collective_s: float | None = None
        self._backwards = 0

    @property
    def paused(self) -> bool:
        """Whether a phase is open, so that no time counts."""
        return self._paused > 0

    def forward(self, now_s: float) -> None:
        """Record that the model is called for training."""
        if self._paused:
            return
        self._entering = False
        if self._segment_s is not None:
            if self._backward_s is None:
                return  # called again before any backward: the same compute segment continues
            self._close_segment()
            self._data_wait_s = (self._data_wait_s or 0.0) + now_s - self._backward_s
        elif self._ready_s is not None:
            self._data_wait_s = now_s - self._ready_s
        if self._begin_s is None:
            self._begin_s = now_s
        self._ready_s = None
        self._segment_s = now_s
        self._entering = True
        self._reduced = False
        self._backward_s = None

    def compute_begin(self, now_s: float) -> None:
        """Record that the wrapped module was entered: since ``forward`` the wrapper synchronised buffers."""
        if not self._paused and self._entering and self._segment_s is not None:
            self._collective_s = (self._collective_s or 0.0) + now_s - self._segment_s
            self._segment_s = now_s
            self._entering = False

    def ignored_forward(self) -> None:
        """Record a call outside training: the data wait cannot be separated from it."""
        self._ready_s = None

    def backward_end(self, now_s: float) -> None:
        """Record that a backward pass computed its last gradient."""
        if not self._paused and self._segment_s is not None:
            self._entering = False
            self._backward_s = now_s
            self._backwards += 1

    def reduced(self, now_s: float) -> None:
        """Record that the gradients of the backward pass that just ended are reduced."""
        if self._paused or self._segment_s is None or self._backward_s is None:
            return
        waited_s = now_s - self._backward_s
        self._collective_s = (self._collective_s or 0.0) + waited_s
        # Shifted by the wait, so that the segment holds only compute, also when a second backward pass follows.
        self._segment_s += waited_s
        self._backward_s = now_s
        self._reduced = True

    def optimizer(self, now_s: float) -> None:
        """Record that the optimizer is about to step: gradients are reduced."""
        if self._paused or self._segment_s is None or self._backward_s is None:
            return
        self._close_segment()
        if not self._reduced:
            self._collective_s = (self._collective_s or 0.0) + now_s - self._backward_s
        self._segment_s = None

    def finish(self, now_s: float) -> StepParts:
        """End the step; return its parts. The next one starts now."""
        if self._segment_s is not None and self._backward_s is not None:
            self._close_segment()
            if not self._reduced:
                self._collective_s = None  # the end of the reduction is unknown
        parts = StepParts(
            None if self._begin_s is None or self._paused else now_s - self._begin_s,
            self._compute_s,
            self._data_wait_s,
            self._collective_s,
            self._backwards,
        )
        self._begin_s = self._ready_s = now_s
        self._segment_s = self._backward_s = None
        self._reduced = False
        self._clear()
        return parts

    def pause(self, now_s: float) -> None:
        """Start a phase; phases may nest."""
        if not self._paused:
            self._pause_s = now_s
        self._paused += 1

    def resume(self, now_s: float) -> None:
        """End a phase: its time is excluded from the step, and the data wait starts over."""
        self._paused = max(0, self._paused - 1)
        if self._paused:
            return
        away_s = now_s - self._pause_s
        if self._begin_s is not None:
            self._begin_s += away_s
        if self._segment_s is not None:
            self._segment_s += away_s
            if self._backward_s is not None:
                self._backward_s += away_s
        else:
            self._ready_s = now_s if self._begin_s is not None else None

    def _close_segment(self) -> None:
        assert self._segment_s is not None  # noqa: S101 - the callers looked
        assert self._backward_s is not None  # noqa: S101 - the callers looked
        self._compute_s = (self._compute_s or 0.0) + self._backward_s - self._segment_s


# Times a step's moments on a GPU with CUDA events, recorded asynchronously and read long after.
#
# Never imports torch: ``torch.cuda`` is passed in.
#
# What is measured. An event marks the moment at which the model's stream reaches it, after all work enqueued before.
# Between the call of the model and the end of its backward pass the stream holds the model's own kernels, and idles
# where the host is slow to enqueue them: that time is compute, host stalls included. Meanwhile
# ``DistributedDataParallel`` reduces gradients on a stream of its own; the model's stream waits for it in DDP's own
# callback at the end of the backward pass. The engine runs such callbacks in the order in which they were queued, on
# the streams of the caller of ``backward``. Ours is queued at the first gradient and DDP's with the last bucket, so
# that ours runs before the wait, and one queued from within ours runs after it: the time between the two is the wait
# for the reduction (slower peers included) and the copy out of the buckets, nothing else. Reductions overlapped with
# the backward pass are in neither, except that they slow its kernels down.
#
# What is not measured. Collectives inside the model (tensor, sequence, expert, pipeline, fully sharded) run between or
# beside its kernels, and such events cannot separate them: the caller does not use this there.
# A step's moments, named as in the timer.
FORWARD = "forward"
COMPUTE_BEGIN = "compute_begin"
BACKWARD_END = "backward_end"
REDUCED = "reduced"
OPTIMIZER = "optimizer"

MARKS_PER_STEP_MAX = 256  # four for each of 64 micro-batches; a step with more is not observed
STEPS_PENDING_MAX = 16  # the driver's launch queue keeps a host from running more than a few steps ahead


class DeviceTimer:
    """Marks the moments of steps on one GPU's current stream, and returns their durations some steps later.

    It never blocks: events are polled, and again after the next step if not complete. While the stream is being
    captured into a graph nothing is recorded or polled (either would break the capture); a replayed graph calls no
    hook, so that its steps are not observed. Any failure disables the timer permanently and is passed to ``failed``
    once.
    """

    def __init__(self, cuda: Any, index: int, failed: Callable[[BaseException], None]) -> None:
        """``cuda`` is ``torch.cuda``; ``index`` the device of the model."""
        self._cuda: Any = cuda
        self._index = index
        self._failed = failed
        self._free: list[Any] = []
        self._marks: list[tuple[str, Any]] = []
        self._spoiled = False
        self._pending: deque[list[tuple[str, Any]]] = deque()

    def mark(self, moment: str) -> None:
        """Record a moment: the host has enqueued everything before it. Never raises."""
        if self._cuda is None or self._spoiled:
            return
        try:
            if (
                len(self._pending) >= STEPS_PENDING_MAX
                or len(self._marks) >= MARKS_PER_STEP_MAX
                or self._cuda.is_current_stream_capturing()
            ):
                self._spoiled = True
                return
            event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
            event.record(self._cuda.current_stream(self._index))
            self._marks.append((moment, event))
        except Exception as error:  # noqa: BLE001 - training must go on without us; it is counted
            self._switch_off(error)

    def interrupt(self) -> None:
        """Note that something else begins; a step whose compute is in progress is not observed."""
        if self._marks and self._marks[-1][0] in (FORWARD, COMPUTE_BEGIN):
            self._spoiled = True

    def finish(self) -> list[StepParts]:
        """End the step on the host; return the durations of steps that have completed on the device."""
        if self._marks and not self._spoiled:
            self._pending.append(self._marks)
        else:
            self._free.extend(event for _, event in self._marks)
        self._marks = []
        self._spoiled = False
        return self._read()

    def _read(self) -> list[StepParts]:
        done: list[StepParts] = []
        if self._cuda is None or not self._pending:
            return done
        try:
            if self._cuda.is_current_stream_capturing():
                return done
            # The last event first: it completes last.
            while self._pending and all(event.query() for _, event in reversed(self._pending[0])):
                marks = self._pending.popleft()
                done.append(_parts(marks))
                self._free.extend(event for _, event in marks)
        except Exception as error:  # noqa: BLE001 - training must go on without us; it is counted
            self._switch_off(error)
        return done

    def close(self) -> None:
        """Stop recording and reporting."""
        self._cuda = None
        self._marks = []
        self._free.clear()
        self._pending.clear()

    def _switch_off(self, error: BaseException) -> None:
        self.close()
        self._failed(error)


def _parts(marks: list[tuple[str, Any]]) -> StepParts:
    """Return the durations of one step whose events are all complete."""
    timer = StepTimer()
    origin = marks[0][1]
    seconds = 0.0
    for moment, event in marks:
        seconds = origin.elapsed_time(event) / 1e3 if event is not origin else 0.0
        getattr(timer, moment)(seconds)
    return timer.finish(seconds)


LOOKS_JUDGED = 8  # the first steps, all sampled; after that as many recent samples decide


class Share:
    """``every``: sample every, every second, every fourth step and so on.

    Powers of two, so that the ranks of a job mostly sample the same steps.
    """

    __slots__ = ("_cost_ratios", "_every_max", "_ratio_max", "every")

    def __init__(self, ratio_max: float, every_max: int) -> None:
        """``ratio_max``: sampling's largest share of all steps' time. Every ``every_max``-th step is always sampled."""
        self.every = 1
        self._ratio_max = ratio_max
        self._every_max = every_max
        self._cost_ratios: deque[float] = deque(maxlen=LOOKS_JUDGED)

    def looked(self, cost_s: float, step_s: float) -> None:
        """Record that sampling a step of ``step_s`` cost ``cost_s``: choose the rate again."""
        self._cost_ratios.append(cost_s / step_s)
        if len(self._cost_ratios) == LOOKS_JUDGED:
            # The least of several, since a process that was preempted meanwhile measures others' work too.
            affordable = min(self._cost_ratios) / self._ratio_max
            every = 1 << math.ceil(math.log2(affordable)) if affordable > 1.0 else 1
            self.every = min(self._every_max, every)

    def seldom(self) -> None:
        """Nothing to sample: use the lowest rate."""
        self.every = self._every_max


COST_RATIO_MAX = 0.001  # of a step's time
EVERY_MAX = 256
CALL_S = 2e-6  # the autograd engine's cost of calling one hook, besides the hook's own work
SENTINEL_ELEMENTS_MAX = 4_096  # of the parameter whose gradient is checked in every step: in some microseconds


class LocalNorm:
    """The norm of one step's gradients before the reduction, from each parameter's own norm.

    Its hooks are registered on the parameters only during sampled steps. One small parameter, near the model's input,
    has a hook of its own in every step: a gradient that is not finite makes those of all layers before it so, and the
    step in which that happens on one rank alone is followed by steps in which all ranks are alike.
    """

    def __init__(self, parameters: list[Any], hook: Callable[[Callable[..., None]], Any]) -> None:
        """``hook`` wraps a function so that it can be registered on a parameter."""
        self._parameters = parameters
        self._hook = hook(self._add)
        self._handles: list[Any] = []
        self.share = Share(COST_RATIO_MAX, EVERY_MAX)
        self._squares = 0.0
        self._gradients = 0
        self._partial = False
        self._cost_s = 0.0
        self._broken = False
        small = (each for each in parameters if each.requires_grad and each.numel() <= SENTINEL_ELEMENTS_MAX)
        self._sentinels = [each.register_hook(hook(self._look)) for each in itertools.islice(small, 1)]

    def forward(self) -> None:
        """Register the hooks: the model is called for training in a sampled step."""
        if not self._handles:
            begin_s = perf_counter()
            self._handles = [each.register_hook(self._hook) for each in self._parameters if each.requires_grad]
            self._cost_s += perf_counter() - begin_s

    def finish(self, backwards: int, step_s: float | None) -> float | None:
        """End a sampled step; return its norm; None: not observed.

        After several backward passes the norms are per pass and say nothing about their sum.
        """
        whole = self._gradients and backwards == 1 and not self._partial
        norm = self.broken() or (math.sqrt(self._squares) if whole else None)
        begin_s = perf_counter()
        self._remove_hooks()
        self._cost_s += perf_counter() - begin_s
        if backwards > 1:
            self.share.seldom()
        elif step_s:
            self.share.looked(self._cost_s, step_s)
        self._squares = self._cost_s = 0.0
        self._partial = False
        self._gradients = 0
        return norm

    def broken(self) -> float | None:
        """End a step; return infinity where a gradient was seen that is not finite, None elsewhere."""
        broken, self._broken = self._broken, False
        return math.inf if broken else None

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        self._remove_hooks()
        for handle in self._sentinels:
            handle.remove()
        self._sentinels = []

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _look(self, gradient: Any) -> None:
        if not gradient.is_sparse and not bool(gradient.isfinite().all()):
            self._broken = True

    def _add(self, gradient: Any) -> None:
        begin_s = perf_counter()
        if gradient.is_sparse:
            self._partial = True
        else:
            flat = gradient.detach().reshape(-1)
            squares = float(flat.dot(flat))  # takes half the time of a norm
            if math.isinf(squares):
                squares = float(flat.double().norm()) ** 2  # an overflow here need not mean infinite gradients
            self._squares += squares
            self._gradients += 1
        self._cost_s += perf_counter() - begin_s + CALL_S


INSIDE_COST_S = 40e-6  # of timing one step's parts, measured between steps of 1.5 ms, whose work leaves the caches cold
INSIDE_COST_RATIO_MAX = 0.001  # of a step's time
INSIDE_EVERY_MAX = 64
COLLECTIVE_MODULES = ("FullyShardedDataParallel", "FSDP", "SyncBatchNorm", "DeepSpeedEngine", "PipelineEngine")
OUTPUTS_LOOKED_AT_MAX = 32  # outputs examined per model call: the first few hold the loss or the logits
OUTPUTS_DEPTH_MAX = 4


class Inert:
    """A hook that copies of the model do not inherit.

    Programs copy models (for averages) and pickle them whole. A copy must not report as the original, and a pickle must
    load where Eagle Eye is not installed: both get a standard library method that accepts anything and returns None.

    A compiler that traces the model sees a hook that does nothing: the hook's work cannot be traced, and would cause a
    graph break or, with ``fullgraph``, an error.
    """

    __slots__ = ("_call", "_compiling", "_failed")
    __torch_unserializable__ = True  # torch: drop the hook silently when its tensor is pickled

    def __init__(self, call: Callable[..., None], failed: Callable[[BaseException], None], torch: Any) -> None:
        """``torch`` is the module."""
        self._call = call
        self._failed = failed
        self._compiling: Callable[[], bool] = getattr(getattr(torch, "compiler", None), "is_compiling", bool)

    def __call__(self, *args: Any) -> None:
        """Run the hook; its exceptions are not propagated."""
        if self._compiling():
            return
        try:
            self._call(*args)
        except Exception as error:  # noqa: BLE001 - the training loop must not see it; it is counted
            self._failed(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Watch:
    """The hooks on one model and optimizer; ``remove`` removes them."""

    def __init__(self, timer: StepTimer, failed: Callable[[BaseException], None]) -> None:
        self.gpu = ""
        self.device: int | None = None
        self._timer = timer
        self._failed = failed
        self._handles: list[Any] = []
        self._grad_enabled: Callable[[], bool] = lambda: True
        self._on_device: DeviceTimer | None = None
        self._steps = 0
        self._share = Share(INSIDE_COST_RATIO_MAX, INSIDE_EVERY_MAX)
        self.looking = True  # the current step is sampled
        self._norm: LocalNorm | None = None
        self._norm_wanted = True
        self._data_parallel: Any = None  # torch's class
        self._is_data_parallel = False
        self._reduces_itself = False
        # Queues a callback for the end of the running backward pass; None: a step's parts are not timed.
        self._at_backward_end: Callable[[Callable[[], None]], None] | None = None
        self._awaiting_end = False
        self._torch: Any = None
        self._backward_began = self._inert(self._begin_backward)
        self._backward_ended = self._inert(self._end_backward)
        self._reduction_ended = self._inert(self._end_reduction)

    def attach(self, model: Any, optimizer: Any, modules: Mapping[str, Any]) -> None:
        """Register the hooks that this model allows; ``modules`` is ``sys.modules``."""
        if model is None:
            return
        parameters = list(model.parameters())
        torch: Any = modules.get("torch")
        self._torch = torch
        self._grad_enabled = getattr(torch, "is_grad_enabled", self._grad_enabled)
        self._find_gpu(parameters, torch)
        self._hang(model.register_forward_pre_hook, self._forward)
        devices = {(parameter.device.type, parameter.device.index) for parameter in parameters}
        if len(devices) != 1 or collectives_inside(model, parameters):
            return
        kind, index = devices.pop()
        if kind == "cuda":
            self._on_device = DeviceTimer(torch.cuda, index or 0, self._failed)
        elif kind == "cpu":
            self._norm = LocalNorm(parameters, self._inert)
        else:
            return
        # A private name, but the only way to be called between the backward pass and DDP's wait.
        self._at_backward_end = torch.autograd.Variable._execution_engine.queue_callback
        self._data_parallel = getattr(modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
        self._is_data_parallel = self._data_parallel is not None and isinstance(model, self._data_parallel)
        self._hang(model.register_forward_hook, self._watch_outputs)
        if self._is_data_parallel:
            self._hang(model.module.register_forward_pre_hook, self._compute_begin)
        elif _distributed(modules) and hasattr(optimizer, "register_step_pre_hook"):
            self._hang(optimizer.register_step_pre_hook, self._optimizer_step)

    def remove(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._at_backward_end = None
        if self._norm is not None:
            self._norm.remove()

    def finish(self, measured: StepParts) -> float | None:
        """End a step; return its local gradient norm, None: not observed. Chooses what to sample in the next."""
        if not self._handles:
            return None
        norm = None
        step_s = measured.step_s
        if self.looking:
            self._awaiting_end = False
            if step_s:
                self._share.looked(INSIDE_COST_S, step_s)
        if self._norm is not None:
            norm = self._norm.finish(measured.backwards, step_s) if self._norm_wanted else self._norm.broken()
        self._steps += 1
        self._norm_wanted = self._norm is not None and self._steps % self._norm.share.every == 0
        # A norm requires counting backward passes.
        self.looking = self._norm_wanted or self._steps % self._share.every == 0
        return norm

    def device_steps(self) -> list[StepParts]:
        """End a step; return the durations of earlier steps that a device has completed."""
        return [] if self._on_device is None else self._on_device.finish()

    def phase_begins(self) -> None:
        """Start a non-training phase: the device's clock cannot exclude it from a step's compute."""
        if self._on_device is not None:
            self._on_device.interrupt()

    def forget_device(self) -> None:
        """Stop device timing: the program measures its steps on the device itself."""
        if self._on_device is not None:
            self._on_device.close()  # and kept: without it the host's clock would be used

    def _hang(self, register: Callable[[Any], Any], call: Callable[..., None]) -> None:
        self._handles.append(register(self._inert(call)))

    def _inert(self, call: Callable[..., None]) -> Inert:
        return Inert(call, self._failed, self._torch)

    def _tell(self, moment: str) -> None:
        if self._on_device is not None:
            self._on_device.mark(moment)
        else:
            getattr(self._timer, moment)(perf_counter())

    def _forward(self, _module: Any, _args: Any) -> None:
        timer = self._timer
        if not self.looking or timer.paused:
            return
        if not self._grad_enabled():
            timer.ignored_forward()
            return
        timer.forward(perf_counter())
        self._awaiting_end = False
        # Frameworks pass the module that they wrapped: DDP then shows its activity through a private name.
        self._reduces_itself = (
            self._is_data_parallel or getattr(self._data_parallel, "_active_ddp_module", None) is not None
        )
        if self._on_device is not None:
            self._on_device.mark(FORWARD)
        elif self._norm is not None and self._norm_wanted:
            self._norm.forward()

    def _compute_begin(self, _module: Any, _args: Any) -> None:
        if self.looking and not self._timer.paused and self._grad_enabled():
            self._tell(COMPUTE_BEGIN)

    def _watch_outputs(self, _module: Any, _args: Any, output: Any) -> None:
        if not self.looking or self._timer.paused:
            return
        for tensor in (output,) if hasattr(output, "grad_fn") else tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._backward_began)  # takes half the time of a tensor's own hook

    def _begin_backward(self, _gradients: Any) -> None:
        if self._at_backward_end is None or self._awaiting_end or self._timer.paused:
            return
        self._awaiting_end = True
        self._at_backward_end(self._backward_ended)

    def _end_backward(self) -> None:
        self._awaiting_end = False
        if self._timer.paused or self._at_backward_end is None:
            return
        self._tell(BACKWARD_END)
        if self._reduces_itself:
            self._at_backward_end(self._reduction_ended)

    def _end_reduction(self) -> None:
        self._tell(REDUCED)

    def _optimizer_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self.looking and not self._timer.paused:
            self._tell(OPTIMIZER)

    def _find_gpu(self, parameters: list[Any], torch: Any) -> None:
        for parameter in parameters:
            device = parameter.device
            if device.type == "cuda":
                index = device.index or 0
                self.device = index
                properties = torch.cuda.get_device_properties(index)
                uuid = str(getattr(properties, "uuid", ""))
                self.gpu = f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid
                return


def _distributed(modules: Mapping[str, Any]) -> bool:
    """Whether there are other ranks to reduce with."""
    is_initialized = getattr(modules.get("torch.distributed"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def tensors_in(output: Any) -> Iterator[Any]:
    """Return the first tensors in a model's output, however nested."""
    stack = [(output, 0)]
    for _ in range(OUTPUTS_LOOKED_AT_MAX):
        if not stack:
            return
        item, depth = stack.pop()
        if hasattr(item, "grad_fn"):
            yield item
            continue
        if depth == OUTPUTS_DEPTH_MAX:
            continue
        if isinstance(item, Mapping):
            inner = list(item.values())
        elif isinstance(item, (list, tuple)):
            inner = list(item)
        else:
            inner = list(getattr(item, "__dict__", {}).values())  # a dataclass, for example
        stack.extend((each, depth + 1) for each in reversed(inner[:OUTPUTS_LOOKED_AT_MAX]))


def collectives_inside(model: Any, parameters: list[Any]) -> bool:
    """Whether the model's forward or backward pass contains collectives, which cannot be separated from compute.

    True where parameters or gradients are sharded (FSDP, DTensor, DeepSpeed, Megatron's tensor-parallel layers) and
    where statistics are synchronised.
    """
    names = {type(module).__name__ for module in model.modules()}
    return any(name.startswith(COLLECTIVE_MODULES) for name in names) or any(
        type(parameter).__name__ == "DTensor"
        or hasattr(parameter, "device_mesh")
        or hasattr(parameter, "ds_id")
        or getattr(parameter, "tensor_model_parallel", False)
        for parameter in parameters
    )
