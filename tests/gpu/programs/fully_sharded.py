"""Trains a transformer by FSDP in blocks of steps, with agent and hook and without them in turn, and prints both.

Arguments: the hook's socket, a file for the rendezvous, the agent's process id (SIGSTOP takes it away), pairs of
blocks, steps in a block. The order within a pair alternates, so that drift falls on both alike.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from eagle_eye.agent.hook import attach

SETTLE_S = 1.0  # of steps that do not count, after the agent comes or goes
socket, rendezvous = sys.argv[1], sys.argv[2]
agent, pairs, steps = (int(argument) for argument in sys.argv[3:6])


def sharded(model: torch.nn.Module) -> Any:
    """Return the model fully sharded, by whichever of torch's two ways this version has."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model)
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


torch.cuda.set_device(0)
torch.backends.cuda.matmul.allow_tf32 = True
dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1)
layers = (
    torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True, device="cuda")
    for _ in range(6)
)
model = sharded(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
x = torch.randn(32, 512, 1024, device="cuda")
failures = 0


def step(training: Any) -> None:
    """Make one step as a training loop does."""
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if training is not None:
        training.step(loss=loss, tokens=32 * 512)


def block(seen: bool) -> float:
    """Return the seconds of one step, the mean of a block."""
    global failures  # noqa: PLW0603 - a program of one loop
    os.kill(agent, signal.SIGCONT if seen else signal.SIGSTOP)
    training = attach(model, optimizer, socket=socket) if seen else None
    settled_s = time.monotonic() + SETTLE_S
    while time.monotonic() < settled_s:
        step(training)
        torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(steps):
        step(training)
    torch.cuda.synchronize()
    took_s = (time.perf_counter() - begin_s) / steps
    if training is not None:
        failures += training.failures
        training.detach()
    return took_s


block(seen=True)  # warms up
bare_s: list[float] = []
seen_s: list[float] = []
for pair in range(pairs):
    for seen in (True, False) if pair % 2 else (False, True):
        (seen_s if seen else bare_s).append(block(seen))
os.kill(agent, signal.SIGCONT)
dist.destroy_process_group()
print(json.dumps({"bare_s": bare_s, "seen_s": seen_s, "failures": failures}))
