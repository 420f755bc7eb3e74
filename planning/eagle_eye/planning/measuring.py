"""Measures a model's profile layer by layer on this machine: runs the job's own code, and torch."""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from eagle_eye.planning.files import PROFILE_FORMAT, Layer, Profile, check
from eagle_eye.schema.configuration import ConfigurationError

if TYPE_CHECKING:
    import torch

WARM_UP_ROUNDS = 2
EXPECTED = (
    "expected a function without arguments that returns the layers in order (nn.Sequential, or a list of modules)"
    " and a micro-batch of inputs, and may return what makes an optimizer of parameters (AdamW)"
)


class _Job(NamedTuple):
    layers: list[torch.nn.Module]
    inputs: tuple[torch.Tensor, ...]
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def measure(target: str, device: str, rounds: int) -> Profile:
    """Return the profile of the job returned by the function ``target``, ``module:function``.

    Each layer alone is on the device while it is measured, with its gradients and its optimizer's states; times are
    medians. Raises ConfigurationError where the function does not exist, or returns something else; its own and layers'
    exceptions propagate.
    """
    function = _function(target)
    import torch

    try:
        where = torch.device(device)
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"--device: {device!r}: {str(error).splitlines()[0]}") from None
    job = _job(target, function())
    inputs = tuple(tensor.to(where) for tensor in job.inputs)
    layers = []
    for number, module in enumerate(job.layers):
        layer, inputs = _layer(number, module, inputs, job, where, rounds)
        layers.append(layer)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else str(where)
    profile = Profile(format=PROFILE_FORMAT, micro_batch=int(job.inputs[0].shape[0]), layers=tuple(layers), device=name)
    try:
        check(profile)
    except ValueError as error:
        raise ConfigurationError(f"{target}: {error}") from None
    return profile


def _function(target: str) -> Callable[[], object]:
    module_name, _, name = target.partition(":")
    if not (name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise ConfigurationError(f"{target!r}: expected module:function")
    sys.path.insert(0, str(Path.cwd()))  # as python itself does for what is run from here
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(f"{target}: there is no module {error.name} here, or on PYTHONPATH") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{target}: {module_name} has no function {name}")
    return cast("Callable[[], object]", function)


def _job(target: str, returned: object) -> _Job:
    import torch

    match returned:
        case (layers, inputs):
            make_optimizer: Any = torch.optim.AdamW
        case (layers, inputs, make_optimizer):
            pass
        case _:
            raise ConfigurationError(f"{target}: {EXPECTED}")
    tensors = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not (
        isinstance(layers, (torch.nn.Sequential, torch.nn.ModuleList, list, tuple))
        and all(isinstance(each, torch.nn.Module) for each in layers)
        and isinstance(tensors, (list, tuple))
        and tensors
        and all(isinstance(tensor, torch.Tensor) and tensor.ndim for tensor in tensors)
        and callable(make_optimizer)
    ):
        raise ConfigurationError(f"{target}: {EXPECTED}")
    return _Job(list(layers), tuple(tensors), make_optimizer)


def _layer(
    number: int,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    job: _Job,
    device: torch.device,
    rounds: int,
) -> tuple[Layer, tuple[torch.Tensor, ...]]:
    """Return one layer's cost, and its outputs, the next one's inputs."""
    import torch

    module.to(device).train()
    inputs = tuple(
        tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex()) for tensor in inputs
    )
    parameters = [each for each in module.parameters() if each.requires_grad]
    forward_s, backward_s = [], []
    for turn in range(-WARM_UP_ROUNDS, rounds):
        began_s = _now_s(device)
        outputs = _tensors(module(*inputs))
        turned_s = _now_s(device)
        _backward(outputs)
        ended_s = _now_s(device)
        if turn >= 0:
            forward_s.append(turned_s - began_s)
            backward_s.append(ended_s - turned_s)
    saved_bytes, outputs = _saved(module, inputs)
    optimizer_bytes = 0
    if parameters:
        optimizer = job.make_optimizer(parameters)
        optimizer.step()
        optimizer_bytes = sum(
            value.nbytes
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        optimizer.zero_grad(set_to_none=True)
    layer = Layer(
        layer=number,
        name=type(module).__name__,
        forward_s=statistics.median(forward_s),
        backward_s=statistics.median(backward_s),
        parameter_bytes=sum(each.nbytes for each in (*module.parameters(), *module.buffers())),
        optimizer_bytes=optimizer_bytes,
        activation_bytes=saved_bytes,
    )
    module.to("cpu")  # the next one may need the memory
    return layer, tuple(tensor.detach() for tensor in outputs)


def _saved(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
    """Return the bytes that a forward pass keeps for the backward pass, without parameters, and its outputs."""
    import torch

    own = {each.untyped_storage().data_ptr() for each in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = _tensors(module(*inputs))
        kept_bytes = sum(kept.values())  # while all of them live: no address is used twice
    return kept_bytes, outputs


def _backward(outputs: Sequence[torch.Tensor]) -> None:
    import torch

    differentiable = [tensor for tensor in outputs if tensor.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(tensor) for tensor in differentiable])


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [*_found(outputs)]


def _found(outputs: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple)):
        for each in outputs:
            yield from _found(each)
    else:
        raise ConfigurationError(f"a layer returned {type(outputs).__name__}; expected a tensor, or several")


def _now_s(device: torch.device) -> float:
    """Return the time at which all pending work of the device is done."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
