"""Converts the user's objects to and from the state dict that torch.distributed.checkpoint plans and loads.

Models and optimizers are keyed by parameter name (torch.distributed.checkpoint.state_dict), so that other numbers of
ranks and other layouts can load them. All other state belongs to its rank and is kept whole.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

StateDict = dict[str, Any]
FINGERPRINT_ELEMENTS = 1024


@dataclass(frozen=True)
class _Made:
    """A state dict that is made of nothing but views of these tensors."""

    state: StateDict
    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]

    def still_holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it would be made the same again, of the tensors as they are now."""
        return (
            len(tensors) == len(self.tensors)
            and all(now is then for now, then in zip(tensors, self.tensors, strict=True))
            and _addresses(tensors) == self.addresses
        )


class KeptState:
    """The objects that a training job keeps, by name. Raises TypeError for objects without state."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        if not objects:
            raise TypeError("nothing to keep: pass the model, the optimizer, ... by name")
        self._objects = dict(objects)
        self._models = {name: one for name, one in objects.items() if isinstance(one, nn.Module)}
        self._of_rank: list[str] = []
        self._empty: list[Optimizer] = []
        self._made: dict[str, _Made] = {}
        for name, one in objects.items():
            if isinstance(one, (nn.Module, torch.Tensor, Optimizer)):
                continue
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise TypeError(f"{name!r} is a {type(one).__name__}: it has no state_dict and load_state_dict")
            self._of_rank.append(name)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers among them."""
        return [one for one in self._objects.values() if isinstance(one, Optimizer)]

    def fingerprints(self) -> dict[str, bytes]:
        """Return a sum of how each parameter begins that is whole on this rank, by its name.

        One name is one parameter to torch.distributed.checkpoint, of which one rank's is kept: ranks that have others
        under the same name would lose theirs.
        """
        found = {}
        for name, model in self._models.items():
            parameters = set(_addresses([one for one in model.parameters() if not _is_sharded(one)]))
            for key, tensor in self._of_model(name, model).items():
                if isinstance(tensor, torch.Tensor) and tensor.numel() and address_of(tensor) in parameters:
                    head = tensor.detach().reshape(-1)[:FINGERPRINT_ELEMENTS].cpu()
                    found[f"{name}.{key}"] = xxhash.xxh3_64_digest(ctypes.string_at(head.data_ptr(), head.nbytes))
        return found

    def collect(self, rank: int) -> StateDict:
        """Return the current state: tensors are the training's own, not copies.

        An optimizer that has made no step yet gets its tensors by one that changes nothing; ``forget_probe`` undoes it.
        """
        state: StateDict = {}
        for name, one in self._objects.items():
            if isinstance(one, nn.Module):
                state[name] = self._of_model(name, one)
            elif isinstance(one, Optimizer):
                if not one.state:
                    self._empty.append(one)
                state[name] = self._of_optimizer(name, one)
            elif isinstance(one, torch.Tensor):
                state[name] = one
            else:
                state[name] = {rank_key(rank): pickle.dumps(one.state_dict())}
        return state

    def forget_probe(self) -> None:
        """Optimizers that had no tensors before ``collect`` have none again: their first step is their first."""
        for optimizer in self._empty:
            optimizer.state.clear()
        self._empty.clear()

    def to_load(self, known: Mapping[str, Any], rank: int) -> StateDict:
        """Return the state dict to load into, of what a checkpoint with these keys has for this rank.

        A rank that the checkpoint does not know gets rank 0's objects.
        """
        state = self.collect(rank)
        for name in self._of_rank:
            own = rank_key(rank) if f"{name}.{rank_key(rank)}" in known else rank_key(0)
            if f"{name}.{own}" in known:
                state[name] = {own: b""}
            else:
                del state[name]
        return state

    def load(self, state: StateDict) -> None:
        """Give every object the state that was loaded. Raises whatever its ``load_state_dict`` raises."""
        self._empty.clear()
        for name, loaded in state.items():
            one = self._objects[name]
            if isinstance(one, nn.Module):
                set_model_state_dict(one, dict(loaded))  # which renames what it gets where the model is wrapped
            elif isinstance(one, Optimizer):
                set_optimizer_state_dict(self._model_of(name, one), one, loaded)
            elif not isinstance(one, torch.Tensor):
                for data in loaded.values():
                    one.load_state_dict(pickle.loads(data))  # noqa: S301 - the job's own, proven by its key

    def _of_model(self, name: str, model: nn.Module) -> StateDict:
        tensors = [*model.parameters(), *model.buffers()]
        made = self._made.get(name)
        if made is not None and made.still_holds(tensors):
            return made.state
        state = get_model_state_dict(model)
        self._remember(name, state, tensors, state.values())
        return state

    def _of_optimizer(self, name: str, optimizer: Optimizer) -> StateDict:
        """Return an optimizer's state: the settings of its groups, which schedulers change, are always read anew."""
        tensors = _tensors_of(optimizer)
        made = self._made.get(name)
        if made is None or tensors is None or not made.still_holds(tensors):
            state: Any = get_optimizer_state_dict(self._model_of(name, optimizer), optimizer)
            tensors = _tensors_of(optimizer)  # there are some only now, where it had made no step
            values = [value for one in state["state"].values() for value in one.values()]
            # Who loads into what is returned writes to its groups.
            kept = {"state": state["state"], "param_groups": [dict(group) for group in state["param_groups"]]}
            self._remember(name, kept, tensors, values)
            return dict(state)
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": then["params"]}
            for group, then in zip(optimizer.param_groups, made.state["param_groups"], strict=True)
        ]
        return {"state": made.state["state"], "param_groups": groups}

    def _remember(
        self, name: str, state: StateDict, tensors: Sequence[torch.Tensor] | None, values: Iterable[Any]
    ) -> None:
        """Keep a state dict for the next capture, where all of it lies in these tensors' own memory."""
        self._made.pop(name, None)
        if tensors is None:
            return
        addresses = _addresses(tensors)
        known = set(addresses)
        if all(isinstance(value, torch.Tensor) and address_of(value) in known for value in values):
            self._made[name] = _Made(state, tensors, addresses)

    def _model_of(self, name: str, optimizer: Optimizer) -> nn.Module:
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models.values():
            if mine <= {id(parameter) for parameter in model.parameters()}:
                return model
        raise TypeError(f"{name!r} optimizes parameters of no model that was passed: pass that model, too")


class RandomState:
    """The random number generators of Python, NumPy (where it is imported) and torch, to be kept like anything else."""

    def state_dict(self) -> dict[str, Any]:
        """Return their states."""
        import random
        import sys

        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if (numpy := sys.modules.get("numpy")) is not None:
            state["numpy"] = numpy.random.get_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        import random
        import sys

        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor] | None:
    """Return its parameters and the tensors of its state, None where the state has anything else."""
    found: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.append(parameter)
            found.extend(optimizer.state.get(parameter, {}).values())
    return found if all(isinstance(one, torch.Tensor) for one in found) else None


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [address_of(one) for one in tensors]


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's data is: of a sharded tensor, this rank's."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr()


def rank_key(rank: int) -> str:
    """Return the key of what belongs to a rank."""
    return f"rank_{rank}"
