"""The job of pipelines with nobody who watches it or keeps its state: one of a single stage on each rank.

Started by torchrun.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from eagle_eye.demo.pipeline_train import LAYERS, MICRO_BATCH, PipelineTraining, read_layout
from eagle_eye.demo.train import log_step


def layout(ranks: int, global_batch: int) -> str:
    """Return a pipeline of one stage on each rank, as ``eagle-eye launch --layouts`` would say it."""
    batches = global_batch // MICRO_BATCH
    pipelines = [
        {
            "micro_batches": batches * (rank + 1) // ranks - batches * rank // ranks,
            "stages": [{"first": 0, "last": LAYERS - 1, "ranks": [rank]}],
        }
        for rank in range(ranks)
    ]
    return json.dumps(
        {"layers": LAYERS, "ranks": ranks, "global_batch": global_batch, "micro_batch": MICRO_BATCH,
         "pipelines": pipelines}
    )  # fmt: skip


def main() -> None:
    """Train so many steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--step-log", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    own = PipelineTraining(read_layout(layout(ranks, args.global_batch), ranks))
    for step in range(1, args.steps + 1):
        done = own.step(step)
        if dist.get_rank() == 0:
            log_step(args.step_log, step=step, **done._asdict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
