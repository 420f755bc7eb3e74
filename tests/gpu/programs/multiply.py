"""Loads the GPU with products of matrices until it is killed, or nobody is left who would."""

from __future__ import annotations

import os

import torch

parent = os.getppid()
left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
while os.getppid() == parent:
    for _ in range(10):
        torch.matmul(left, right)
    torch.cuda.synchronize()
