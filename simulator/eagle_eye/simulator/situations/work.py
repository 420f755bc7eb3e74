"""Situations in which the work is uneven or changes, and the nodes are well."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from eagle_eye.simulator.job import stage_compute_s
from eagle_eye.simulator.layout import MODELS, Model
from eagle_eye.simulator.story import Place, Story
from eagle_eye.simulator.tracks import Quantity


def packed_sequences(story: Story) -> None:
    """Packed data: every step another replica has the most work; the code says how much (units) or not (silent)."""
    units = story.variant("units", "silent") == "units"
    story.job = replace(story.job, packed_from_s=-math.inf, says_work_units=units)


def uneven_last_stage(story: Story) -> None:
    """The last pipeline stage has more to do than the others, on every replica, from the start."""
    layout, job = story.layout, story.job
    if layout.pp == 1:
        return
    weights = [1.0] * (layout.pp - 1) + [float(story.rng.uniform(1.3, 1.65))]
    compute_s = stage_compute_s(job.step_s, job.communication_s / job.step_s, weights, job.microbatches)
    story.job = replace(job, stage_weights=tuple(weights), compute_s=compute_s)


def hot_expert(story: Story) -> None:
    """Mixture of experts: the router gives every rank another load, and one of them lastingly more from a moment on."""
    onset_s, at = story.onset(), story.culprit()
    story.job = replace(story.job, expert_spread=float(story.rng.uniform(0.05, 0.12)))
    story.change(Quantity.COMPUTE, float(story.rng.uniform(1.25, 1.7)), onset_s, at=at)


def long_documents(story: Story) -> None:
    """One replica's shard of packed data has longer documents from a moment on; nobody says how much work that is."""
    onset_s, layout = story.onset(), story.layout
    story.job = replace(story.job, packed_from_s=-math.inf, says_work_units=False)
    longer, replica = float(story.rng.uniform(1.25, 1.7)), layout.replica()
    for node, device in np.argwhere(replica == story.rng.integers(layout.dp)).tolist():
        story.change(Quantity.COMPUTE, longer, onset_s, at=Place(node, device))


def batch_size_change(story: Story) -> None:
    """A schedule raises the batch: all steps are longer from one moment on, and do more."""
    onset_s = story.onset()
    factor = float(story.rng.choice([1.25, 1.5, 2.0]))
    story.change(Quantity.COMPUTE, factor, onset_s)
    story.change(Quantity.TOKENS, factor, onset_s)


def mixed_gpu_models(story: Story) -> None:
    """Some nodes have another GPU model, slower by its data sheet; they are slow and healthy."""
    layout = story.layout
    fast, slow = Model(*MODELS[0]), Model(*MODELS[2])
    number = max(1, layout.nodes // 4)
    places = set(story.rng.choice(layout.nodes, number, replace=False).tolist())
    models = tuple(slow if n in places else fast for n in range(layout.nodes))
    story.layout = replace(layout, models=models)
