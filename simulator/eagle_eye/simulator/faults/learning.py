"""What the model learns goes wrong: corrupted on one rank, or everywhere at once."""

from __future__ import annotations

import math
from dataclasses import replace

from eagle_eye.simulator.story import Story
from eagle_eye.simulator.tracks import Quantity


def silent_data_corruption(story: Story) -> None:
    """One rank computes wrongly: its gradient before the reduction (gradient) or its parameters (checksum) deviate."""
    variant = story.variant("gradient", "checksum", odds=(0.7, 0.3))
    at, onset_s = story.culprit(), story.onset()
    story.label(onset_s, (at.node,), "silent_data_corruption", "exclude")
    if variant == "checksum":
        story.job = replace(story.job, says_checksum=True)
        story.change(Quantity.CHECKSUM, float(story.rng.uniform(0.5, 50.0)), onset_s, at=at)
        return
    story.job = replace(story.job, says_local_grad=True)
    factor = (1.5, 4.0, 12.0, 80.0)[("faint", "weak", "medium", "strong").index(story.scenario.strength)]
    story.change(Quantity.LOCAL_GRAD, factor, onset_s, at=at)
    # The mean over all replicas thins it: one of R shows by sqrt(1 + (f^2 - 1) / R).
    visible = math.sqrt(1.0 + (factor**2 - 1.0) / (story.layout.dp * story.layout.tp))
    story.change(Quantity.GRAD_NORM, visible, onset_s)
    delay_s = max(6 * story.job.step_s, 4 * story.scenario.interval_s)
    if story.rng.random() < 0.5 and factor > 2:
        story.change(
            Quantity.LOSS,
            float(story.rng.uniform(*story.physics.worse_loss)),
            onset_s + delay_s,
            rise_s=8 * story.job.step_s,
        )
    elif factor > 2:
        story.change(Quantity.LOSS, math.inf, onset_s + 2 * delay_s)


def loss_not_finite(story: Story) -> None:
    """The loss is NaN on all ranks from one step to the next; training goes on in vain."""
    onset_s = story.onset()
    story.change(Quantity.LOSS, math.inf, onset_s)
    story.label(onset_s, (), "loss_not_finite", "restart")


def loss_divergence(story: Story) -> None:
    """Loss and gradient norm grow on all ranks and do not come back."""
    onset_s = story.onset(0.3, 0.4)
    rise_s = float(story.rng.uniform(0.1, 0.25)) * story.scenario.duration_s
    story.change(Quantity.LOSS, float(story.rng.uniform(*story.physics.worse_loss)), onset_s, rise_s=rise_s)
    story.change(Quantity.GRAD_NORM, float(story.rng.uniform(10.0, 60.0)), onset_s, rise_s=0.4 * rise_s)
    story.label(onset_s, (), "loss_divergence", "restart")


def loss_spike(story: Story) -> None:
    """Bad data: loss and gradient norm jump on all ranks, and recover within some tens of steps."""
    onset_s = story.onset()
    lasts_s = max(float(story.rng.uniform(5, 15)) * story.job.step_s, 3 * story.scenario.interval_s)
    height = float(story.rng.uniform(1.5, 3.0))
    for share, part in ((1.0, height), (2.0, 1.15)):
        story.change(Quantity.LOSS, part, onset_s, end_s=onset_s + share * lasts_s)
        story.change(Quantity.GRAD_NORM, 1.0 + 4.0 * (part - 1.0), onset_s, end_s=onset_s + share * lasts_s)
    story.label(onset_s, (), "loss_spike", "job")
