"""What the hook hangs onto a torch model and its optimizer to see a step's moments.

Torch is never imported here: only objects that the program handed over are touched. On a device other
than the CPU the host returns before the work is done, so that nothing of a step's inside is timed there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from eagle_eye.agent.hook_timer import StepTimer

NORM_COST_RATIO = 0.002  # local norms may cost this share of a step; they are taken at every n-th step otherwise
NORM_EVERY_MAX = 64
COSTS_KEPT = 8


class Inert:
    """A hook that a copy of the model does not inherit.

    Programs copy models (for averages) and pickle them whole. A copy must not report as if it were the
    original, and a pickle must load where Eagle Eye is not installed: both get ``{}.get``, which as a
    forward pre-hook returns the arguments as they are.
    """

    __slots__ = ("_call", "_failed")
    __torch_unserializable__ = True  # torch: drop the hook silently when its tensor is pickled

    def __init__(self, call: Callable[..., None], failed: Callable[[BaseException], None]) -> None:
        self._call = call
        self._failed = failed

    def __call__(self, *args: Any) -> None:
        """Do the hook's work; whatever it raises ends here."""
        try:
            self._call(*args)
        except Exception as error:  # noqa: BLE001 - the training loop must not see it; it is counted
            self._failed(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")


class LocalNorm:
    """The norm of one step's gradients before the reduction, from each parameter's own norm."""

    def __init__(self) -> None:
        self.wanted = True
        self._squares = 0.0
        self._gradients = 0
        self._partial = False
        self._cost_s = 0.0
        self._cost_ratios: deque[float] = deque(maxlen=COSTS_KEPT)
        self._every = 1
        self._step = 0

    def add(self, gradient: Any) -> None:
        """Count one parameter's gradient."""
        begin_s = perf_counter()
        if gradient.is_sparse:
            self._partial = True
        else:
            flat = gradient.detach().reshape(-1)
            squares = float(flat.dot(flat))  # in half the time of a norm
            if math.isinf(squares):
                squares = float(flat.double().norm()) ** 2  # what overflows here need not be infinite
            self._squares += squares
            self._gradients += 1
        self._cost_s += perf_counter() - begin_s

    def finish(self, backwards: int, step_s: float | None) -> float | None:
        """Return the step's norm and make ready for the next; None: not observed.

        After several backward passes the norms are those of the parts and say nothing of their sum.
        """
        whole = self.wanted and self._gradients and backwards == 1 and not self._partial
        norm = math.sqrt(self._squares) if whole else None
        if self.wanted and step_s:
            # The least of several, since a process that lost its CPU meanwhile measures others' work too.
            self._cost_ratios.append(self._cost_s / step_s)
            affordable = min(self._cost_ratios) / NORM_COST_RATIO
            # A power of two, so that the ranks of a job mostly agree on the steps that they look at.
            every = 1 << math.ceil(math.log2(max(affordable, 1.0)))
            self._every = min(NORM_EVERY_MAX, every)
        self._step += 1
        self.wanted = self._step % self._every == 0
        self._squares = self._cost_s = 0.0
        self._partial = False
        self._gradients = 0
        return norm


class Watch:
    """The hooks on one model and optimizer; ``remove`` takes them off again."""

    def __init__(self, timer: StepTimer, failed: Callable[[BaseException], None]) -> None:
        self.norm = LocalNorm()
        self.gpu = ""
        self.device: int | None = None
        self._timer = timer
        self._failed = failed
        self._handles: list[Any] = []

    def attach(self, model: Any, optimizer: Any, modules: Mapping[str, Any]) -> None:
        """Hang the hooks that this model allows; ``modules`` is ``sys.modules``."""
        if model is None:
            return
        parameters = list(model.parameters())
        grad_enabled = getattr(modules.get("torch"), "is_grad_enabled", lambda: True)
        self._watch_forward(model, grad_enabled)
        if all(_on_cpu(parameter) for parameter in parameters) and not _sharded(model, parameters):
            self._watch_gradients(parameters)
            if type(model).__name__ == "DistributedDataParallel":
                self._hang(model.module.register_forward_pre_hook, self._compute_begin)
            if hasattr(optimizer, "register_step_pre_hook"):
                self._hang(optimizer.register_step_pre_hook, self._optimizer_step)
        else:
            self._find_gpu(parameters, modules)

    def remove(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hang(self, register: Callable[[Any], Any], call: Callable[..., None]) -> None:
        self._handles.append(register(Inert(call, self._failed)))

    def _watch_forward(self, model: Any, grad_enabled: Callable[[], bool]) -> None:
        timer = self._timer

        def forward(_module: Any, _args: Any) -> None:
            if timer.paused:
                return
            if grad_enabled():
                timer.forward(perf_counter(), reduces=bool(getattr(model, "require_backward_grad_sync", False)))
            else:
                timer.ignored_forward()

        self._hang(model.register_forward_pre_hook, forward)

    def _watch_gradients(self, parameters: list[Any]) -> None:
        timer, norm = self._timer, self.norm

        def gradient(value: Any) -> None:
            if timer.paused:
                return
            if norm.wanted:
                norm.add(value)
            timer.last_gradient_s = perf_counter()

        for parameter in parameters:
            if parameter.requires_grad:
                self._hang(parameter.register_hook, gradient)

    def _compute_begin(self, _module: Any, _args: Any) -> None:
        self._timer.compute_begin(perf_counter())

    def _optimizer_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._timer.optimizer(perf_counter())

    def _find_gpu(self, parameters: list[Any], modules: Mapping[str, Any]) -> None:
        for parameter in parameters:
            device = parameter.device
            if device.type == "cuda":
                index = device.index or 0
                self.device = index
                properties = modules["torch"].cuda.get_device_properties(index)
                uuid = str(getattr(properties, "uuid", ""))
                self.gpu = f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid
                return


def scalar(value: Any) -> float | None:
    """Return a number, or None for a tensor on a device: reading it would wait for the device."""
    if isinstance(value, (float, int)):
        return float(value)
    if getattr(value, "is_cpu", True) is False:
        return None
    detach = getattr(value, "detach", None)
    return float(value if detach is None else detach())


def _on_cpu(parameter: Any) -> bool:
    return bool(parameter.device.type == "cpu")


def _sharded(model: Any, parameters: list[Any]) -> bool:
    """Whether gradients are shards: their hooks fire inside collectives, and compute cannot be told apart."""
    names = {type(module).__name__ for module in model.modules()}
    return any(name.startswith(("FullyShardedDataParallel", "FSDP")) for name in names) or any(
        type(parameter).__name__ == "DTensor" or hasattr(parameter, "device_mesh") for parameter in parameters
    )
