"""A real training job of pipelines side by side, laid out as ``EAGLE_EYE_LAYOUT`` says: docs/how-to/planning.md.

Started by ``eagle-eye launch --layouts``; torch.distributed.pipelining over Gloo, on the CPU. The course of training is
the same in every layout: a step's samples follow from its number, its loss and gradients are sums over tokens, and each
layer's gradients are summed over the pipelines, whichever stage of theirs has it. Every layer and its optimizer are
kept under a name of their own, so that any layout finds in the nodes' memory what it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from eagle_eye.agent.hook import attach
from eagle_eye.checkpoint import MemoryCheckpointer
from eagle_eye.demo.train import documentation, log_step

LAYOUT_VARIABLE = "EAGLE_EYE_LAYOUT"
BLOCKS = 6
LAYERS = BLOCKS + 2  # an embedding before them, a head behind them
WIDTH = 64
HEADS = 4
CONTEXT_CHARS = 64
MICRO_BATCH = 2  # samples that a profile is measured with
LEARNING_RATE = 1e-3
GRADIENT_NORM_MAX = 1.0
NO_TARGET = -100  # behind a sample's end


class WrongLayout(ValueError):
    """The layout is not one for this job; the message says why."""


class DemoStage(NamedTuple):
    """Layers ``first`` to ``last``, on ``rank``."""

    first: int
    last: int
    rank: int


class DemoPipeline(NamedTuple):
    """Its stages in order, and which of a step's micro-batches it runs."""

    stages: tuple[DemoStage, ...]
    micro_batches: range


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Which rank has which layers, and which pipeline which samples."""

    global_batch: int
    micro_batch: int
    pipelines: tuple[DemoPipeline, ...]

    def holders(self) -> dict[tuple[int, ...], list[int]]:
        """Return the layers by the ranks that have them, in the order of the first of these layers."""
        found: dict[tuple[int, ...], list[int]] = {}
        for layer in range(LAYERS):
            ranks = [
                stage.rank for pipeline in self.pipelines for stage in pipeline.stages
                if stage.first <= layer <= stage.last
            ]  # fmt: skip
            found.setdefault(tuple(sorted(ranks)), []).append(layer)
        return found


def read_layout(text: str, ranks: int) -> ModelLayout:
    """Return the layout that the launcher has given to so many ranks. Raises WrongLayout."""
    if not text:
        raise WrongLayout(f"{LAYOUT_VARIABLE} is not set: start this job with eagle-eye launch --layouts")
    said = json.loads(text)
    if said["layers"] != LAYERS:
        raise WrongLayout(f"{LAYOUT_VARIABLE} is for a job of {said['layers']} layers; this one has {LAYERS}")
    if said["ranks"] != ranks:
        raise WrongLayout(f"{LAYOUT_VARIABLE} is for {said['ranks']} ranks; there are {ranks}")
    pipelines, begin = [], 0
    for pipeline in said["pipelines"]:
        if any(len(stage["ranks"]) > 1 for stage in pipeline["stages"]):
            raise WrongLayout(f"{LAYOUT_VARIABLE} has several ranks in a stage; this job is not tensor parallel")
        stages = tuple(DemoStage(stage["first"], stage["last"], stage["ranks"][0]) for stage in pipeline["stages"])
        pipelines.append(DemoPipeline(stages, range(begin, begin := begin + pipeline["micro_batches"])))
    return ModelLayout(said["global_batch"], said["micro_batch"], tuple(pipelines))


class Embedding(nn.Module):
    """The first layer: characters and their places."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, WIDTH)
        self.place = nn.Embedding(CONTEXT_CHARS, WIDTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return what stands for text (batch, time), (batch, time, width)."""
        embedded: torch.Tensor = self.character(text) + self.place(torch.arange(text.shape[1]))
        return embedded


class HiddenLayer(nn.Module):
    """A layer in between, in which each character sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the same shape, (batch, time, width)."""
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        changed: torch.Tensor = self.layer(hidden, src_mask=mask, is_causal=True)
        return changed


def make_layer(number: int, characters: int) -> nn.Module:
    """Return a layer as it is before the first step: the same on every rank that has it."""
    torch.manual_seed(number)
    if number == 0:
        return Embedding(characters)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)) if number == LAYERS - 1 else HiddenLayer()


def job() -> tuple[list[nn.Module], torch.Tensor]:
    """Return the layers and a micro-batch, for ``eagle-eye plan profile eagle_eye.demo.pipeline_train:job``."""
    samples = Samples()
    layers = [make_layer(number, samples.characters) for number in range(LAYERS)]
    return layers, samples.batch(range(MICRO_BATCH))[0]


class Samples:
    """The samples by their number: pieces of the documentation, of different lengths."""

    def __init__(self) -> None:
        self._text, self.characters = documentation()

    def batch(self, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, each (batch, time); behind a sample's end there is nothing to predict."""
        inputs = torch.zeros(len(numbers), CONTEXT_CHARS, dtype=torch.long)
        targets = torch.full_like(inputs, NO_TARGET)
        for row, number in enumerate(numbers):
            random = torch.Generator().manual_seed(number)
            length = int(torch.randint(CONTEXT_CHARS // 2, CONTEXT_CHARS + 1, (), generator=random))
            start = int(torch.randint(len(self._text) - CONTEXT_CHARS, (), generator=random))
            inputs[row, :length] = self._text[start : start + length]
            targets[row, :length] = self._text[start + 1 : start + length + 1]
        return inputs, targets


class StepResult(NamedTuple):
    """What all ranks together have done in a step: ``loss`` is the mean over ``tokens``."""

    loss: float
    grad_norm: float
    tokens: int
    samples: int


class SharedLayers(NamedTuple):
    """Layers that the same ranks have, one in each pipeline; ``counts`` on the first of these ranks."""

    layers: list[nn.Module]
    group: dist.ProcessGroup
    counts: bool

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that there are."""
        parameters = [parameter for layer in self.layers for parameter in layer.parameters()]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]


class PipelineTraining:
    """This rank's part of the job: the layers of its stage and their optimizers."""

    def __init__(self, layout: ModelLayout) -> None:
        self._layout, self._rank = layout, dist.get_rank()
        self._samples = Samples()
        self._tokens = torch.tensor(0)  # of all ranks, since the first step
        # Groups are made by all ranks, in the same order.
        groups = [dist.new_group([stage.rank for stage in pipeline.stages]) for pipeline in layout.pipelines]
        self._layers: dict[int, nn.Module] = {}
        self._pipeline: DemoPipeline | None = None
        for pipeline, group in zip(layout.pipelines, groups, strict=True):
            for number, stage in enumerate(pipeline.stages):
                if stage.rank == self._rank:
                    self._take(pipeline, number, group)
        self._optimizers = {
            number: torch.optim.AdamW(layer.parameters(), lr=LEARNING_RATE) for number, layer in self._layers.items()
        }
        self._shared = [*self._sharing()]

    def _take(self, pipeline: DemoPipeline, number: int, group: dist.ProcessGroup) -> None:
        """This rank has the pipeline's stage of this number."""
        own, stages, batches = pipeline.stages[number], len(pipeline.stages), len(pipeline.micro_batches)
        layers = range(own.first, own.last + 1)
        self._layers = {layer: make_layer(layer, self._samples.characters) for layer in layers}
        module = nn.Sequential(*self._layers.values())
        self._stage = PipelineStage(module, number, stages, torch.device("cpu"), group=group)
        # Of fewer micro-batches than stages all are on their way before the first one is back: that is GPipe.
        schedule = Schedule1F1B if batches >= stages else ScheduleGPipe
        self._schedule = schedule(self._stage, batches, loss_fn=_loss, scale_grads=False)
        self._pipeline = pipeline

    def _sharing(self) -> Iterator[SharedLayers]:
        for holders, numbers in self._layout.holders().items():
            group = dist.new_group(list(holders))
            if self._rank in holders:
                yield SharedLayers([self._layers[number] for number in numbers], group, self._rank == holders[0])

    def state(self) -> dict[str, Any]:
        """Return what is to be kept: of each layer under its own name, which is the same in every layout."""
        layers = {f"layer_{number}": layer for number, layer in self._layers.items()}
        optimizers = {f"optimizer_{number}": optimizer for number, optimizer in self._optimizers.items()}
        return {"tokens": self._tokens, **layers, **optimizers}

    def step(self, step: int) -> StepResult:
        """Make the step with all ranks."""
        loss, tokens, samples = self._forward_and_backward(step).tolist()
        gradients = self._sum_gradients()
        square = torch.zeros(())
        for shared in self._shared:
            if shared.counts:
                square += sum(gradient.square().sum() for gradient in shared.gradients())
        dist.all_reduce(square)
        norm = float(square.sqrt()) / tokens
        for gradient in gradients:
            gradient.mul_(min(1.0, GRADIENT_NORM_MAX / (norm + 1e-6)) / tokens)
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        self._tokens += int(tokens)
        return StepResult(loss / tokens, norm, int(tokens), int(samples))

    def _forward_and_backward(self, step: int) -> torch.Tensor:
        """Leave the gradients of this pipeline's tokens; return the loss of all, their number and that of samples."""
        total = torch.zeros(3, dtype=torch.float64)
        if self._pipeline is not None:
            size, batches = self._layout.micro_batch, self._pipeline.micro_batches
            begin = (step - 1) * self._layout.global_batch
            inputs, targets = self._samples.batch(range(begin + batches.start * size, begin + batches.stop * size))
            losses: list[torch.Tensor] = []
            first = (inputs,) if self._stage.is_first else ()
            last: dict[str, Any] = {"target": targets, "losses": losses} if self._stage.is_last else {}
            self._schedule.step(*first, **last, return_outputs=False)
            if self._stage.is_last:
                total[0] = torch.stack(losses).sum()
                total[1] = (targets != NO_TARGET).sum()
                total[2] = len(targets)
        dist.all_reduce(total)
        return total

    def _sum_gradients(self) -> list[torch.Tensor]:
        """Each layer has the sum of all pipelines' gradients, bit by bit the same everywhere; return this rank's."""
        for shared in self._shared:
            gradients = shared.gradients()
            if dist.get_world_size(shared.group) > 1:
                summed = nn.utils.parameters_to_vector(gradients)
                dist.all_reduce(summed, group=shared.group)
                nn.utils.vector_to_parameters(summed, gradients)
        return [gradient for shared in self._shared for gradient in shared.gradients()]


def main() -> None:
    """Train until ``--steps``, from the step that the nodes' memory has, in the layout that the launcher says."""
    args = _arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.collective_seconds_max))
    ranks, attempt = dist.get_world_size(), int(os.environ.get("EAGLE_EYE_ATTEMPT", "0"))
    own = PipelineTraining(read_layout(os.environ.get(LAYOUT_VARIABLE, ""), ranks))
    checkpointer = MemoryCheckpointer(own.state(), args.checkpoint_dir, args.checkpoint_every)
    step = checkpointer.restore()
    resumed = {"resumed_from": step, "source": checkpointer.resumed_from}
    kept_s = 0.0  # how long the last checkpoint has kept the training waiting
    training = attach(step=step)
    while step < args.steps:
        began_s = time.monotonic()
        step += 1
        done = own.step(step)
        training.step(loss=done.loss, grad_norm=done.grad_norm, tokens=done.tokens / ranks)
        if dist.get_rank() == 0:
            log_step(args.step_log, step=step, attempt=attempt, ranks=ranks, **done._asdict(), **resumed, kept_s=kept_s)
        keeping_s = time.monotonic()
        checkpointer.capture(step)
        kept_s = time.monotonic() - keeping_s
        # A faster machine must not make the demonstration meaningless: steps take at least this long.
        time.sleep(max(0.0, args.step_seconds_min - (time.monotonic() - began_s)))
    checkpointer.close()
    dist.destroy_process_group()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens: means of micro-batches would weigh short samples more."""
    flat = logits.flatten(0, 1)
    return nn.functional.cross_entropy(flat, targets.flatten(), ignore_index=NO_TARGET, reduction="sum")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--collective-seconds-max", type=float, default=1800.0)  # torch's own default for Gloo
    parser.add_argument("--step-seconds-min", type=float, default=0.3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
