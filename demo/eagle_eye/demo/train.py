"""A real data-parallel training job: a small character transformer learns Python's own documentation.

Started by torchrun or ``eagle-eye launch``; Gloo on the CPU. Knows nothing of faults. The two lines that
tell Eagle Eye how training goes are marked. Its state is kept in memory at each step and goes to storage now and then;
with ``--checkpoints storage`` it goes there at once, and the training waits. With ``--restarts in-process`` a process
whose peers were lost goes on in the next attempt; it is a new one otherwise.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

from eagle_eye.agent.hook import attach
from eagle_eye.checkpoint import MemoryCheckpointer, run_restartable

CONTEXT_CHARS = 64
WIDTH = 128
LAYERS = 2
HEADS = 4
LEARNING_RATE = 1e-3
GRADIENT_NORM_MAX = 1.0


class CharacterModel(nn.Module):
    """Predicts the next character of a text."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(CONTEXT_CHARS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, time, characters) for text (batch, time)."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.embedding(text) + self.position(torch.arange(length))
        logits: torch.Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits


@functools.cache
def documentation() -> tuple[torch.Tensor, int]:
    """Return the documentation's text, each character as its number, and how many characters there are."""
    text = "\n".join(topics.topics[key] for key in sorted(topics.topics))
    alphabet = sorted(set(text))
    # By a table rather than character by character: each restart waits for it.
    index = torch.zeros(ord(alphabet[-1]) + 1, dtype=torch.long)
    index[[ord(character) for character in alphabet]] = torch.arange(len(alphabet))
    return index[torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)], len(alphabet)


class Text:
    """Batches of the documentation's text, a different stream for each rank and attempt."""

    def __init__(self, seed: int, batch: int) -> None:
        self._data, self.characters = documentation()
        self._size = batch
        self._random = torch.Generator().manual_seed(seed)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, each (batch, time)."""
        starts = torch.randint(0, len(self._data) - CONTEXT_CHARS - 1, (self._size,), generator=self._random)
        rows = torch.stack([self._data[start : start + CONTEXT_CHARS + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]


def main() -> None:
    """Train until ``--steps``, again and again where the launcher restarts it in this process."""
    args = _arguments()
    torch.set_num_threads(1)
    documentation()  # what needs no process group is there once
    if args.restarts == "in-process":
        run_restartable(lambda: train(args))
    else:
        train(args)


def train(args: argparse.Namespace) -> None:
    """Train until ``--steps``, with checkpoints and evaluations, resuming where the launcher says."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.collective_seconds_max))
    rank, attempt = dist.get_rank(), int(os.environ.get("EAGLE_EYE_ATTEMPT", "0"))
    text = Text(1000 * attempt + rank, args.batch)
    torch.manual_seed(0)
    model = DistributedDataParallel(CharacterModel(text.characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    checkpointer = _in_memory(model, optimizer, args) if args.checkpoints == "memory" else None
    step = _resume(model, optimizer) if checkpointer is None else checkpointer.restore()
    first, source = step + 1, None if checkpointer is None else checkpointer.resumed_from
    kept_s = 0.0  # how long the last checkpoint has kept the training waiting
    training = attach(model, optimizer, step=step)  # the first of the two lines
    while step < args.steps:
        began_s = time.monotonic()
        step += 1
        loss = _loss(model, text)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        norm = nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        tokens = args.batch * CONTEXT_CHARS
        training.step(loss=loss, grad_norm=norm, tokens=tokens, work_units=args.batch)  # the second
        if rank == 0:
            more = {"resumed_from": first - 1, "source": source, "kept_s": kept_s}
            log_step(args.step_log, step=step, attempt=attempt, loss=loss.item(), **more)
        if step % args.evaluate_every == 0:
            with training.phase("eval"), torch.no_grad():
                for _ in range(args.evaluation_batches):
                    _loss(model, text)
                dist.barrier()
        keeping_s = time.monotonic()
        if checkpointer is not None:
            checkpointer.capture(step)
        elif step % args.checkpoint_every == 0:
            with training.phase("checkpoint"):
                save(_state(model, optimizer, step), checkpoint_id=str(args.checkpoint_dir / f"step_{step}"))
        kept_s = time.monotonic() - keeping_s
        # A faster machine must not make the demonstration meaningless: steps take at least this long.
        time.sleep(max(0.0, args.step_seconds_min - (time.monotonic() - began_s)))
    if checkpointer is not None:
        checkpointer.close()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--checkpoints", choices=("memory", "storage"), default="memory")
    parser.add_argument("--restarts", choices=("in-process", "process"), default="in-process")
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--evaluation-batches", type=int, default=10)
    parser.add_argument("--collective-seconds-max", type=float, default=1800.0)  # torch's own default for Gloo
    parser.add_argument("--step-seconds-min", type=float, default=0.3)
    return parser.parse_args()


def _loss(model: nn.Module, text: Text) -> torch.Tensor:
    inputs, targets = text.batch()
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _in_memory(model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> MemoryCheckpointer:
    return MemoryCheckpointer({"model": model, "optimizer": optimizer}, args.checkpoint_dir, args.checkpoint_every)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": torch.tensor(step)}


def _resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint that the launcher chose and return its step; 0 without one."""
    chosen = os.environ.get("EAGLE_EYE_RESUME_FROM", "")
    if not chosen:
        return 0
    # Optimizer state exists only after a step; one with zero gradients gives the load its tensors.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = _state(model, optimizer, 0)
    load(state, checkpoint_id=chosen)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.zero_grad()
    return int(state["step"])


def log_step(path: Path, **fields: Any) -> None:
    """The step log has a line more, with the time."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time_s": time.time(), **fields}) + "\n")


if __name__ == "__main__":
    main()
