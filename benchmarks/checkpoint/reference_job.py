"""The reference job: a small transformer on CPUs, trained by AdamW and DistributedDataParallel over gloo.

A step is as many micro-batches as take ``step_s`` on this machine, so that it is as long here as anywhere. One thread
a rank: with a rank on each core the cores are busy, and whatever works behind training slows it down. ``busy_ratio``
below 1 leaves the rest of a step to a sleep: the host's cores while accelerators compute.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, TOKENS, BATCH = 1_024, 64, 4
MICRO_BATCHES_MAX = 1_000
BUSY_RATIOS = (1.0, 0.5)


class Model(nn.Module):
    """A language model of so many blocks, ``width`` wide."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        scores = self.head(self.blocks(self.embedding(tokens)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


class Job:
    """One rank of it. The process group is there."""

    def __init__(self, width: int, blocks: int, step_s: float, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(Model(width, blocks))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._step_s = step_s
        self._busy_ratio = 1.0
        self._micro_batches = 1
        self.step()
        self._busy = {ratio: self._calibrated(step_s * ratio) for ratio in BUSY_RATIOS}
        self.busy_ratio = 1.0

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        """One step of the optimizer."""
        began_s = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=False)
        for number in range(self._micro_batches):
            last = number == self._micro_batches - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                self.model(torch.randint(0, VOCABULARY, (BATCH, TOKENS))).backward()
        self.optimizer.step()
        if self._busy_ratio < 1.0:
            time.sleep(max(0.0, began_s + self._step_s - time.perf_counter()))

    @property
    def busy_ratio(self) -> float:
        """Which part of a step computes: one of ``BUSY_RATIOS``."""
        return self._busy_ratio

    @busy_ratio.setter
    def busy_ratio(self, ratio: float) -> None:
        self._busy_ratio, self._micro_batches = ratio, self._busy[ratio]

    def _calibrated(self, step_s: float) -> int:
        """Return how many micro-batches take so long, the same on all ranks."""
        takes = []
        for count in (1, 3):
            self._micro_batches = count
            self.step()
            began_s = time.perf_counter()
            self.step()
            takes.append(time.perf_counter() - began_s)
        each_s = max((takes[1] - takes[0]) / 2, 1e-4)
        found = torch.tensor(max(1, min(MICRO_BATCHES_MAX, round(1 + (step_s - takes[0]) / each_s))))
        dist.broadcast(found, 0)
        return int(found)
