"""The job of the traffic benchmark: a rank that trains by DDP, and captures each step, or not, in blocks.

Each step has several micro-batches, of which each computes (the device is somebody else: the CPU sleeps) and then
reduces its gradients. What is kept is the model, its moving average and Adam's state.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from eagle_eye.checkpoint import MemoryCheckpointer
from eagle_eye.schema.checkpoint_files import FOLDER_VARIABLE

MODES = ("none", "at_once", "scheduled")
WARM_STEPS = 4  # of each block, that are not counted: the first must be learned from
DRAIN_S = 20.0


class Training:
    """The model and what a step of it is."""

    def __init__(self, width: int, micro_batches: int, compute_s: float) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.model = nn.parallel.DistributedDataParallel(layers)
        self.average = copy.deepcopy(layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self._width, self._micro_batches, self._compute_s = width, micro_batches, compute_s

    def step(self) -> None:
        """Train one."""
        self.optimizer.zero_grad()
        for _ in range(self._micro_batches):
            x = torch.randn(2, self._width)
            loss = (self.model(x) - x).pow(2).mean()
            time.sleep(self._compute_s)
            loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for mean, new in zip(self.average.parameters(), self.model.module.parameters(), strict=True):
                mean.lerp_(new, 0.01)


class Block:
    """Steps of one mode, one after another."""

    def __init__(self, training: Training, checkpointer: MemoryCheckpointer | None) -> None:
        self._training = training
        self._checkpointer = checkpointer
        self.times_s: list[float] = []
        self.whole: set[int] = set()
        self.captured = 0

    def run(self, step: int, count: int) -> int:
        """Train so many steps; return the last one's number."""
        dist.barrier()
        for number in range(WARM_STEPS + count):
            step += 1
            began_s = time.perf_counter()
            self._training.step()
            if self._checkpointer is not None:
                self._checkpointer.capture(step)
            if number >= WARM_STEPS:
                self.times_s.append(time.perf_counter() - began_s)
            self._look()
        self._drain()
        return step

    def _look(self) -> None:
        if self._checkpointer is not None and self._checkpointer.whole_step is not None:
            self.whole.add(self._checkpointer.whole_step)

    def _drain(self) -> None:
        """What was captured is whole before another mode begins."""
        until_s = time.monotonic() + DRAIN_S
        seen, changed_s = None, time.monotonic()
        while self._checkpointer is not None and time.monotonic() < until_s and time.monotonic() - changed_s < 2.0:
            self._look()
            if self._checkpointer.whole_step != seen:
                seen, changed_s = self._checkpointer.whole_step, time.monotonic()
            time.sleep(0.05)


def main() -> None:
    """Train until the time is over; rank 0 leaves what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--compute", type=float, required=True)
    parser.add_argument("--block", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(args.width, args.micro_batches, args.compute)
    state = {"model": training.model, "average": training.average, "optimizer": training.optimizer}
    blocks: dict[str, Block] = {"none": Block(training, None)}
    checkpointers: dict[str, MemoryCheckpointer] = {}
    for mode in MODES[1:]:
        os.environ[FOLDER_VARIABLE] = str(args.folder / mode / f"node{rank}")
        checkpointers[mode] = MemoryCheckpointer(state, args.out.parent / mode, job=mode, node=f"node{rank}")
        checkpointers[mode].restore()
        blocks[mode] = Block(training, checkpointers[mode])
    step, until_s = 0, time.monotonic() + args.seconds
    for round_number in range(1_000_000):
        for mode in MODES[round_number % 3 :] + MODES[: round_number % 3]:
            step = blocks[mode].run(step, args.block)
        ends = [time.monotonic() > until_s]
        dist.broadcast_object_list(ends, src=0)
        if ends[0]:
            break
    if rank == 0:
        args.out.write_text(json.dumps({mode: _reported(blocks[mode], checkpointers.get(mode)) for mode in MODES}))
    dist.barrier()  # the stores are asked before their job is over
    for _ in range(600):
        if (args.out.parent / "asked").exists():
            break
        time.sleep(0.1)
    for checkpointer in checkpointers.values():
        checkpointer.close()
    dist.destroy_process_group()


def _reported(block: Block, checkpointer: MemoryCheckpointer | None) -> dict[str, Any]:
    return {
        "step_s": block.times_s,
        "whole": len(block.whole),
        "counts": {} if checkpointer is None else checkpointer.counts,
    }


if __name__ == "__main__":
    main()
