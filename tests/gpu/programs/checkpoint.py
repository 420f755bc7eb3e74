"""One rank trains on the GPU, captures its state, and finds it again as it was, whatever came after.

Arguments: the folder of the checkpoints, how many captures are compared, how many parameters. Prints what it measured
as JSON. ``EAGLE_EYE_CHECKPOINT_STORE`` is a store's folder.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

from eagle_eye.checkpoint import MemoryCheckpointer

WITHIN_S = 60.0
WIDTH = 2048
TIMED_STEPS = 20


class Training:
    """A model with parameters, an optimizer's state, and buffers that each forward pass changes."""

    def __init__(self, parameters: int) -> None:
        torch.manual_seed(1)
        layers: list[torch.nn.Module] = []
        for _ in range(max(1, parameters // WIDTH**2)):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        """One step, of which the host waits for nothing."""
        self.optimizer.zero_grad()
        self.model(torch.randn(4096, WIDTH, device="cuda")).pow(2).mean().backward()
        self.optimizer.step()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is kept, by name."""
        found = dict(self.model.state_dict())
        for number, state in enumerate(self.optimizer.state.values()):
            found |= {f"{number}.{name}": value for name, value in state.items()}
        return found


def main() -> None:
    """Compare, measure, print."""
    directory, rounds, parameters = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.cuda.set_device(0)
    training = Training(parameters)
    state = {"model": training.model, "optimizer": training.optimizer}
    kept = MemoryCheckpointer(state, directory, job="gpu")
    number = kept.restore()
    wrong, blocked_s, whole_s = [], [], []
    for _ in range(rounds):
        for _ in range(2):
            training.step()
        number += 2
        torch.cuda.synchronize()
        before_s = kept.counts["blocked_s"]
        expected = {name: tensor.clone() for name, tensor in training.tensors.items()}
        torch.cuda.synchronize()
        at_s = time.perf_counter()
        capture(kept, number)
        blocked_s.append(kept.counts["blocked_s"] - before_s)
        for _ in range(3):  # what is being copied must not follow them
            training.step()
        wait_whole(kept, number)
        whole_s.append(time.perf_counter() - at_s)
        kept._client.close(ended=False)
        kept = MemoryCheckpointer(state, directory, job="gpu")
        if kept.restore() != number:
            wrong.append(f"step {number} was not restored")
        wrong += [f"{name} of step {number}" for name, now in training.tensors.items() if not expected[name].equal(now)]
    reported: dict[str, Any] = {
        "wrong": wrong[:5],
        "bytes": sum(one.nbytes for one in training.tensors.values()),
        "blocked_s": statistics.median(blocked_s),
        "whole_s": statistics.median(whole_s),
        "pinned_bytes_per_s": pinned_bytes_per_s(),
        "step_s": {"without": timed(training, None, number), "with_captures": timed(training, kept, number)},
        "skipped": int(kept.counts["skipped"]),
    }
    kept.close()
    print(json.dumps(reported))


def capture(kept: MemoryCheckpointer, step: int) -> None:
    """Capture the step as soon as there is a slot for it."""
    until_s = time.monotonic() + WITHIN_S
    while kept._granted is None:
        if time.monotonic() > until_s:
            raise TimeoutError("no slot is granted")
        time.sleep(0.001)
    kept.capture(step)


def wait_whole(kept: MemoryCheckpointer, step: int) -> None:
    """The step is whole."""
    until_s = time.monotonic() + WITHIN_S
    while kept.whole_step != step:
        if time.monotonic() > until_s:
            raise TimeoutError(f"step {step} is not whole")
        time.sleep(0.001)


def timed(training: Training, kept: MemoryCheckpointer | None, number: int) -> float:
    """Return how long a step takes, with a capture of each where there is one who captures."""
    training.step()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for offset in range(1, TIMED_STEPS + 1):
        training.step()
        if kept is not None:
            kept.capture(number + offset)
    torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / TIMED_STEPS


def pinned_bytes_per_s() -> float:
    """Return what the GPU copies into pinned memory in a second."""
    source = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(5):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(len(source) / (time.perf_counter() - began_s))
    return statistics.median(rates)


if __name__ == "__main__":
    main()
