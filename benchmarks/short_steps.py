"""The job of ``healthy.py --short-steps``: a small model, data parallel on the CPU, as most first trials are.

Its loop is that of the page on the hook. Nothing in it is even: batches are drawn in the loop or by a worker process,
rank 0 also writes a log, steps are padded or not, and evaluations and checkpoints are announced.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from eagle_eye.agent.hook import attach

INPUTS, CLASSES = 256, 32


class Samples(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches that cost ``passes`` passes over them to prepare."""

    def __init__(self, seed: int, batch: int, passes: int) -> None:
        self._seed, self._batch, self._passes = seed, batch, passes

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Draw batches without end."""
        random = torch.Generator().manual_seed(self._seed)
        while True:
            inputs = torch.randn(self._batch, INPUTS, generator=random)
            for _ in range(self._passes):
                inputs = inputs.sort(dim=1).values[:, torch.randperm(INPUTS, generator=random)]
            yield inputs, torch.randint(CLASSES, (self._batch,), generator=random)


def main() -> None:
    """Train until somebody ends it."""
    args = _arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ.get("EAGLE_EYE_ATTEMPT", "0"))
    torch.manual_seed(0)
    layers = [nn.Linear(INPUTS, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(args.width, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(Samples(rank, args.batch, args.passes), batch_size=None, num_workers=args.workers)
    training = attach(model, optimizer)
    for step, (inputs, targets) in enumerate(data, start=1):
        began_s = time.monotonic()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        training.step(loss=loss, tokens=args.batch)
        if rank == 0:
            with args.step_log.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({"time_s": time.time(), "step": step, "attempt": attempt, "loss": loss.item()}) + "\n"
                )
        if args.evaluate_every and step % args.evaluate_every == 0:
            with training.phase("eval"), torch.no_grad():
                for _ in range(5):
                    model.module(inputs)
            if rank == 0:
                with training.phase("checkpoint"):
                    torch.save(model.state_dict(), args.checkpoint_dir / "newest.pt")
        time.sleep(max(0.0, args.step_seconds_min - (time.monotonic() - began_s)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--step-seconds-min", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
