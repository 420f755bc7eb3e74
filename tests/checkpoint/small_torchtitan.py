"""A small job of torchtitan's own training loop, on CPUs. For a process of its own: what it changes of torch stays so.

Models, FSDP2, optimizers, schedules and loop are torchtitan's. It looks for GPUs alone, so here torch tells it of a
CPU; and what else stands in is attention without CUDA's kernels, tokens that nobody has to download, and what torch
calls ``set_timeout`` from 2.14 on.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

VOCABULARY, TOKENS, ROWS = 64, 16, 2

_cpu: Any = torch.cpu
_cpu.current_device = lambda: 0
_cpu.get_device_name = lambda _=None: "CPU"
_cpu.get_device_properties = lambda _=None: types.SimpleNamespace(total_memory=1 << 30)
_cpu.memory_stats = lambda _=None: {}
_cpu.reset_peak_memory_stats = _cpu.empty_cache = lambda: None
_distributed: Any = import_module("torch.distributed")
if not hasattr(_distributed, "set_timeout"):
    _distributed.set_timeout = _distributed.distributed_c10d._set_pg_timeout
_utils: Any = import_module("torch._utils")
_utils._get_available_device_type = lambda: "cpu"

# By name, for it is installed on some machines only.
trainers: Any = import_module("torchtitan.trainer")
checkpointers: Any = import_module("torchtitan.components.checkpointer")
_attention: Any = import_module("torchtitan.models.common.attention")
_configs: Any = import_module("torchtitan.config")
_dataloader: Any = import_module("torchtitan.components.dataloader")
_loss: Any = import_module("torchtitan.components.loss")
_optimizer: Any = import_module("torchtitan.components.optimizer")
_tokenizer: Any = import_module("torchtitan.components.tokenizer")


class Tokens(IterableDataset[Any]):
    """Rows of a rank, one like no other; where it is goes with its state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.row = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.row += 1
            drawn = torch.Generator().manual_seed(1000 * self.rank + self.row)
            row = torch.randint(VOCABULARY, (TOKENS + 1,), generator=drawn)
            yield {"input": row[:-1]}, row[1:]

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.row = state["row"]


class TokenLoader(_dataloader.ParallelAwareDataloader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(_dataloader.ParallelAwareDataloader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any) -> None:
        super().__init__(Tokens(dp_rank), dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(_tokenizer.BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(_tokenizer.BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def _for_gloo(parallelize: Any, *arguments: Any, **named: Any) -> Any:
    """Return what torchtitan's own function makes of a model, whose gradients are added up as gloo can."""
    model = parallelize(*arguments, **named)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(enable=True)
    return model


def configured(folder: Path, checkpoint: Any, steps: int, seed: int) -> Any:
    """Return the configuration of a job of so many steps, whose checkpoints are configured so."""
    spec = import_module("torchtitan.models.llama3").model_registry("debugmodel")
    spec.parallelize_fn = partial(_for_gloo, spec.parallelize_fn)
    for _, _, parent, attribute in spec.model.traverse(_attention.FlexAttention.Config):
        setattr(parent, attribute, _attention.ScaledDotProductAttention.Config())
    return trainers.Trainer.Config(
        model_spec=spec,
        dump_folder=str(folder / "outputs"),
        loss=_loss.CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        tokenizer=NoTokenizer.Config(),
        dataloader=TokenLoader.Config(),
        optimizer=_optimizer.default_adamw(lr=0.01),
        lr_scheduler=_optimizer.LRSchedulersContainer.Config(warmup_steps=1, decay_ratio=0.8),
        training=_configs.TrainingConfig(
            local_batch_size=ROWS,
            seq_len=TOKENS,
            steps=steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=_configs.ParallelismConfig(spmd_backend="partial_dtensor"),  # torch 2.13 has no more
        debug=_configs.DebugConfig(seed=seed),
        checkpoint=checkpoint,
        activation_checkpoint=None,
    )


def digests(trainer: Any) -> dict[str, str]:
    """Return a number each of this rank's weights, optimizers and random numbers: equal where every bit is."""
    weights = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    states = [optimizer.state[one] for optimizer in trainer.optimizers for one in weights if one in optimizer.state]
    moments = [value for state in states for _, value in sorted(state.items())]
    return {"weights": _digest(weights), "optimizers": _digest(moments), "random": _digest([torch.get_rng_state()])}


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    found = xxhash.xxh3_64()
    for tensor in tensors:
        local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
        found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
