"""A gloo training job of one parameter: all-reduce each step, a checkpoint every few steps, resumes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

imported_from_s = time.time()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save  # noqa: E402


def main() -> None:
    folder, steps, step_seconds, every = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    fail_at = int(os.environ.get("FAIL_AT", "-1"))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    node, attempt = os.environ["EAGLE_EYE_NODE"], os.environ["EAGLE_EYE_ATTEMPT"]
    folder.mkdir(parents=True, exist_ok=True)
    say = Path(folder, f"progress-{attempt}-{rank}.txt").open("a", buffering=1)  # noqa: SIM115
    state = {"weight": torch.zeros(4), "step": torch.tensor(0)}
    resume_from = os.environ["EAGLE_EYE_RESUME_FROM"]
    if resume_from:
        load(state, checkpoint_id=resume_from)
    say.write(f"start {node} {int(state['step'])} {imported_from_s} {time.time()}\n")
    for step in range(int(state["step"]) + 1, steps + 1):
        if step == fail_at and rank == 1 and attempt == "1":
            sys.exit("failing as I was told to")
        gradient = torch.ones(4)
        dist.all_reduce(gradient)
        state["weight"] += gradient / dist.get_world_size()
        state["step"].fill_(step)
        time.sleep(step_seconds)
        say.write(f"step {step}\n")
        if step % every == 0:
            save(state, checkpoint_id=folder / f"step_{step}")
    assert torch.equal(state["weight"], torch.full((4,), float(steps)))
    say.write("end\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
