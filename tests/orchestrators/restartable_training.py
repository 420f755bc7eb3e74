"""A data-parallel gloo job with a restart point: each step's data and so its loss follow from its number and rank."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eagle_eye.agent.hook import attach
from eagle_eye.checkpoint import MemoryCheckpointer, run_restartable

FOLDER, STEPS, STEP_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
calls = 0


def train() -> None:
    global calls  # noqa: PLW0603 - of this process
    calls += 1
    if calls > 1 and "STAYS_AWAY" in os.environ:
        time.sleep(3600.0)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["EAGLE_EYE_ATTEMPT"])
    torch.manual_seed(0)
    # Several buckets, so that one of a step's all-reduces may have ended on some ranks and not on others; and the same
    # in each step: after the first one they would be laid out anew, and sums be added up in another order.
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.005, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = MemoryCheckpointer({"model": model, "optimizer": optimizer}, FOLDER)
    step = checkpointer.restore()
    attach(model, optimizer, step=step)
    with (FOLDER / f"losses-{rank}.jsonl").open("a", buffering=1) as losses:
        while step < STEPS:
            step += 1
            data = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = (model(data) - data.roll(1, dims=1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            said = {"attempt": attempt, "step": step, "loss": loss.item().hex(), "pid": os.getpid()}
            losses.write(json.dumps(said) + "\n")
            checkpointer.capture(step)
            time.sleep(STEP_S)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    run_restartable(train)
