"""A training program that ends by a CUDA error in its fourth step. Argument: the hook's socket."""

from __future__ import annotations

import sys

import torch

from eagle_eye.agent.hook import attach

training = attach(socket=sys.argv[1])
values = torch.zeros(4, device="cuda")
for number in range(8):
    picked = values[torch.tensor([number], device="cuda")]  # beyond the fourth: a device-side assertion
    torch.cuda.synchronize()
    training.step(loss=picked.sum())
