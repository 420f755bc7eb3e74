"""The hooks on a torch model and its optimizer that observe a step's moments.

Never imports torch: uses only objects that the program passed in. On the CPU the moments are timed by the host's clock;
on a GPU, where the host returns before the work is done, by CUDA events (``cuda_events``). On any other device the
parts of a step are not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from eagle_eye.agent.training_hook.cuda_events import (
    BACKWARD_END,
    COMPUTE_BEGIN,
    FORWARD,
    OPTIMIZER,
    REDUCED,
    DeviceTimer,
)
from eagle_eye.agent.training_hook.gradient_norm import LocalNorm
from eagle_eye.agent.training_hook.sampling_share import Share
from eagle_eye.agent.training_hook.timer import StepParts, StepTimer

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
