"""The job of pipelines without Eagle Eye: one of a single stage on each rank, its state on disk where it is kept.

Started by torchrun.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eagle_eye.demo.pipeline_train import LAYERS, MICRO_BATCH, PipelineTraining, read_layout
from eagle_eye.demo.train import log_step

CHECKPOINT = "newest.pt"


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


def keep(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """The folder has a whole checkpoint of this step, and no other one."""
    kept = {name: one if isinstance(one, torch.Tensor) else one.state_dict() for name, one in state.items()}
    unfinished = folder / f"{CHECKPOINT}.unfinished"
    torch.save({"step": step, "state": kept}, unfinished)
    unfinished.replace(folder / CHECKPOINT)


def resume(folder: Path, state: Mapping[str, Any]) -> int:
    """Load the folder's checkpoint into the state, and return its step; 0 without one."""
    if not (folder / CHECKPOINT).exists():
        return 0
    kept = torch.load(folder / CHECKPOINT, weights_only=True)
    for name, one in state.items():
        if isinstance(one, torch.Tensor):
            one.copy_(kept["state"][name])
        else:
            one.load_state_dict(kept["state"][name])
    return int(kept["step"])


def _most(global_batch: int, ranks: int) -> int:
    """Return how many micro-batches the busiest of so many ranks runs, for which all others wait."""
    return math.ceil(global_batch // MICRO_BATCH / ranks)


def main() -> None:
    """Train so many steps; with ``--checkpoint-dir`` from the newest checkpoint there on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=1, help="on which a step takes --step-seconds at least")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--collective-seconds-max", type=float, default=1800.0)
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.collective_seconds_max))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    own = PipelineTraining(read_layout(layout(ranks, args.global_batch), ranks))
    pace_s = args.step_seconds * _most(args.global_batch, ranks) / _most(args.global_batch, args.nodes)
    done_before = resume(args.checkpoint_dir, own.state()) if args.checkpoint_dir else 0
    for step in range(done_before + 1, args.steps + 1):
        began_s = time.monotonic()
        done = own.step(step)
        if rank == 0:
            log_step(args.step_log, step=step, attempt=attempt, ranks=ranks, **done._asdict())
            if args.checkpoint_dir and step % args.checkpoint_every == 0:
                keep(args.checkpoint_dir, step, own.state())
        time.sleep(max(0.0, pace_s - (time.monotonic() - began_s)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
