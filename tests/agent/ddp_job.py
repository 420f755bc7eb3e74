"""Two ranks train a small model for a given number of seconds; rank 1 has sixteen times the work."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from eagle_eye.agent.hook import attach

dist.init_process_group("gloo")
rows = 512 if dist.get_rank() == 1 else 32
layers = [
    torch.nn.Linear(256, 512),
    torch.nn.ReLU(),
    torch.nn.Linear(512, 256),
    torch.nn.ReLU(),
    torch.nn.Linear(256, 1),
]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
training = attach(model, optimizer)
end_s = time.monotonic() + float(sys.argv[1])
for _ in range(100_000):
    x = torch.randn(rows, 256)
    time.sleep(0.004)
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    training.step(loss=loss, grad_norm=norm, tokens=rows)
    over = torch.tensor(float(time.monotonic() > end_s))
    dist.all_reduce(over)
    if over > 0:
        break
assert training.failures == 0
dist.destroy_process_group()
training.detach()
os._exit(0)  # one in twenty such programs is aborted by torch's own threads when a busy machine's interpreter ends
