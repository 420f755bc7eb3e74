"""The learning signals: loss, gradient norms, checksums, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle_eye.simulator.arrays import Floats, normal, stream
from eagle_eye.simulator.story import Story
from eagle_eye.simulator.timing import Timeline
from eagle_eye.simulator.tracks import Quantity, Tracks

LOSS_FLOOR, LOSS_START, LOSS_STEPS = 1.75, 9.0, 2500.0  # a language model's curve: floor + power law of steps


@dataclass(frozen=True, slots=True)
class Signals:
    """Per step: ``loss`` and ``grad_norm`` (S,), the same on all ranks; ``local_grad`` (S, N, G), before the reduction.

    Not finite numbers stand as +inf. ``checksum`` is (S, stages, lanes): replicas agree; ``deviation`` (S, N, G) is
    what corrupted replicas add, None where none is.
    """

    loss: Floats
    grad_norm: Floats
    local_grad: Floats
    checksum: Floats
    deviation: Floats | None


def learn(story: Story, timeline: Timeline, tracks: Tracks) -> Signals:
    """Return the learning signals of all steps."""
    layout, physics = story.layout, story.physics
    rng = stream(story.scenario.seed, "learning")
    steps = len(timeline.start_s)
    trend = LOSS_FLOOR + (LOSS_START - LOSS_FLOOR) * (1.0 + timeline.step / LOSS_STEPS) ** -0.7
    loss = trend * (1.0 + physics.loss_noise * rng.standard_normal(steps))
    grad_norm = 0.35 * np.exp(physics.grad_noise * rng.standard_normal(steps))
    starts_s = np.repeat(timeline.start_s[:, None], layout.nodes, axis=1)
    loss = loss * _jobwide(tracks.devices(Quantity.LOSS, starts_s))
    grad_norm = grad_norm * _jobwide(tracks.devices(Quantity.GRAD_NORM, starts_s))
    # The mean of dp independent gradients is smaller than each of them.
    local = normal(rng, (steps, layout.nodes, layout.gpus), 0.06, 1.0)
    local *= (grad_norm * math.sqrt(min(layout.dp, 16)))[:, None, None]
    local = local * np.asarray(tracks.devices(Quantity.LOCAL_GRAD, starts_s), dtype=np.float32)
    broken = ~np.isfinite(loss)
    local[broken] = np.inf
    grad_norm[broken] = np.inf
    start = rng.standard_normal((1, layout.pp, layout.tp)) * 1e4
    walk = np.cumsum(rng.standard_normal((steps, layout.pp, layout.tp)), axis=0)
    deviation = tracks.devices(Quantity.CHECKSUM, starts_s)
    return Signals(loss, grad_norm, local, start + walk, None if isinstance(deviation, float) else deviation)


def _jobwide(change: Floats | float) -> Floats | float:
    """Return the change of the first rank: these quantities are the same on all."""
    return change if isinstance(change, float) else change[:, 0, 0]
