"""What the user wants kept, as the state dict that torch.distributed.checkpoint plans and loads, and back.

Models and optimizers go by the names of parameters (torch.distributed.checkpoint.state_dict), so that other numbers of
ranks and other layouts can load them. Everything else that has a state belongs to its rank and is kept whole.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

StateDict = dict[str, Any]


class KeptState:
    """The objects that a training job wants kept, by name. Raises TypeError for what has no state."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        if not objects:
            raise TypeError("nothing to keep: pass the model, the optimizer, ... by name")
        self._objects = dict(objects)
        self._models = {name: one for name, one in objects.items() if isinstance(one, nn.Module)}
        self._of_rank: list[str] = []
        self._empty: list[Optimizer] = []
        for name, one in objects.items():
            if isinstance(one, (nn.Module, torch.Tensor, Optimizer)):
                continue
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise TypeError(f"{name!r} is a {type(one).__name__}: it has no state_dict and load_state_dict")
            self._of_rank.append(name)

    def collect(self, rank: int) -> StateDict:
        """Return the state as it is now: tensors are the training's own, not copies.

        An optimizer that has made no step yet gets its tensors by one that changes nothing; ``forget_probe`` undoes it.
        """
        state: StateDict = {}
        for name, one in self._objects.items():
            if isinstance(one, nn.Module):
                state[name] = get_model_state_dict(one)
            elif isinstance(one, Optimizer):
                if not one.state:
                    self._empty.append(one)
                state[name] = get_optimizer_state_dict(self._model_of(name, one), one)
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
                set_model_state_dict(one, loaded)
            elif isinstance(one, Optimizer):
                set_optimizer_state_dict(self._model_of(name, one), one, loaded)
            elif not isinstance(one, torch.Tensor):
                for data in loaded.values():
                    one.load_state_dict(pickle.loads(data))  # noqa: S301 - the job's own, proven by its key

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
        """Set them."""
        import random
        import sys

        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def rank_key(rank: int) -> str:
    """Return the key of what belongs to a rank."""
    return f"rank_{rank}"
