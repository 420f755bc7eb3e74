"""A small training job, the same at each run: it says after each step what its state is, as a number.

Run by ``warm.py`` in a process of its own a rank. Each says in its file, a line of JSON each: where it goes on
(``resumed``), each step, and what it knows to be whole. What it trains on is drawn from generators that are kept with
the rest, so that a step that was restored in the wrong place, or twice, shows in all that follow.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from eagle_eye.checkpoint import MemoryCheckpointer, RandomState

WITHIN_S = 60.0
FEATURES = 16


class Loader:
    """What a rank has read of its data: how many batches, and the last one's number."""

    def __init__(self, rank: int) -> None:
        self.rank, self.batches, self.last = rank, 0, 0

    def batch(self) -> torch.Tensor:
        """Return the next one, by the random number generators of Python and torch."""
        self.batches += 1
        self.last = random.getrandbits(30)
        return torch.randn(4, FEATURES) + self.rank + self.last / 2**30

    def state_dict(self) -> dict[str, int]:
        """Return it."""
        return {"rank": self.rank, "batches": self.batches, "last": self.last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.batches, self.last = state["batches"], state["last"]


def model_of(hidden: int) -> nn.Sequential:
    """Return a model, the same at each call."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, FEATURES))


def state_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a number of the whole parameters and the optimizer's state: equal where every bit is."""
    found = xxhash.xxh3_64()
    options = StateDictOptions(full_state_dict=True)
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    if optimizer.state:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    _add(found, state)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, dict):
        for name in sorted(value):
            found.update(name.encode())
            _add(found, value[name])
    elif isinstance(value, torch.Tensor):
        found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
    else:
        found.update(repr(value).encode())


class Said:
    """What a rank says, a line each, at once on record."""

    def __init__(self, path: str) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, **what: Any) -> None:
        """Say it."""
        os.write(self._handle, json.dumps(what).encode() + b"\n")


def _all_stop(stop: Path) -> bool:
    """Whether a rank sees the file: all of them end after the same step."""
    seen = torch.tensor(float(stop.exists()))
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    return bool(seen)


def train(
    rank: int,
    world: int,
    meet: str,
    directory: str,
    said: str,
    *,
    steps: int,
    kind: str = "ddp",
    hidden: int = 32,
    step_s: float = 0.0,
    persist_every: int = 0,
    keep: int = 2,
    reach_s: float = 0.0,
    replicas: int = 2,
    keeps: bool = True,
    waits: bool = False,
    leaves: str = "close",
    begin: str = "",
    stop: str = "",
) -> None:
    """Train from where the checkpoint is up to a step, or until a file ``stop`` is there; begin once ``begin`` is.

    ``kind``: by DistributedDataParallel (``ddp``), FSDP2 (``fsdp``), or gradients that are ``gathered``, the same on
    any run. ``waits``: each step for a slot, and until it is whole, and on storage where it goes there. Without
    ``keeps``: no checkpoints. It ``leaves`` by ``close``; by ``stay`` it waits to be killed; by ``exit`` it ends as
    failed jobs do.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    say = Said(said)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    random.seed(rank)
    model = _parallel(model_of(hidden), kind)
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = Loader(rank)
    objects = {"model": model, "optimizer": optimizer, "loader": loader, "random": RandomState()}
    options: dict[str, Any] = {"keep": keep, "reach_s": reach_s, "replicas": replicas}
    kept = MemoryCheckpointer(objects, directory, persist_every, **options) if keeps else None
    try:
        step = kept.restore() if kept is not None else 0
    except Exception as error:
        say(failed=type(error).__name__, text=str(error))
        raise
    say(resumed=step, number=state_number(model, optimizer), loader=loader.state_dict(), t_s=time.time())
    _wait_for(begin)
    while step < steps and not (stop and _all_stop(Path(stop))):
        step += 1
        began_s = time.monotonic()
        optimizer.zero_grad()
        model(loader.batch()).square().mean().backward()
        if kind == "gathered":
            _average(model, world)
        optimizer.step()
        adams = {int(one["step"]) for one in optimizer.state.values()}
        number = state_number(model, optimizer)
        if kept is not None:
            if waits:
                _capture_whole(kept, step)
            else:
                kept.capture(step)
            if waits and persist_every and step % persist_every == 0:
                _until_on_storage(Path(directory) / f"step_{step}")
        whole = None if kept is None else kept.whole_step
        counts = {} if kept is None else {name: kept.counts[name] for name in ("captured", "skipped")}
        say(step=step, number=number, loader=loader.state_dict(), adams=sorted(adams), whole=whole, **counts)
        left_s = step_s - (time.monotonic() - began_s)
        if left_s > 0:
            time.sleep(left_s)
    if leaves == "close" and kept is not None:
        kept.close()
    say(ended=True)
    if leaves == "stay":
        time.sleep(600)


def _parallel(model: nn.Sequential, kind: str) -> nn.Module:
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        return model
    return DistributedDataParallel(model) if kind == "ddp" else model


def _average(model: nn.Module, world: int) -> None:
    """Average the gradients over all ranks, in the order of the ranks.

    DistributedDataParallel adds those of three ranks in another order in its first step than in later ones: what is
    trained on then differs from an undisturbed run in the last bit, wherever it was restored.
    """
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    mine = torch.cat([one.view(-1) for one in gradients])
    everyones = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyones, mine)
    average = torch.stack(everyones).sum(0) / world
    for one, piece in zip(gradients, torch.split(average, [one.numel() for one in gradients]), strict=True):
        one.copy_(piece.view_as(one))


def plain(folder: str, said: str, hidden: int = 32) -> None:
    """Load a folder by torch.distributed.checkpoint alone, and say the number of its state."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    model = model_of(hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    Said(said)(number=state_number(model, optimizer))


def _wait_for(begin: str) -> None:
    while begin and not Path(begin).exists():
        time.sleep(0.001)


def _until_on_storage(folder: Path) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not folder.exists():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{folder.name} is not on storage within {WITHIN_S:g} s")
        time.sleep(0.001)


def _capture_whole(kept: MemoryCheckpointer, step: int) -> None:
    end_s = time.monotonic() + WITHIN_S
    while kept._granted is None:  # a capture without a slot is skipped, and its step never whole
        if time.monotonic() > end_s:
            raise TimeoutError(f"step {step} has no slot to be written into within {WITHIN_S:g} s")
        time.sleep(0.001)
    kept.capture(step)
    while kept.whole_step != step:
        if time.monotonic() > end_s:
            raise TimeoutError(f"step {step} is not whole within {WITHIN_S:g} s; {kept.whole_step} is")
        time.sleep(0.001)
