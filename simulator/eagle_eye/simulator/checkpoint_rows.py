"""What agents tell of checkpoints in the memory of a job's nodes: captured at each step, whole in the next one.

Some jobs keep them, chosen by their seed; nothing is drawn for it, so that every other row is as it would be without.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eagle_eye.simulator.arrays import Floats
from eagle_eye.simulator.scenario import Scenario

ONE_OF, WHICH = 8, 6  # jobs, by their seeds
REPLICAS = 2
PERSIST_EVERY_STEPS = 500
BLOCKED_S = 0.02  # a capture
SHARD_BYTES = 4e9  # of a rank; two whole steps are kept, one arrives


def keeps(scenario: Scenario) -> bool:
    """Whether the scenario's job keeps its steps in memory."""
    return scenario.seed % ONE_OF == WHICH


def checkpoint_rows(train_step: Floats) -> Iterator[tuple[str, Floats]]:
    """Yield (name, values (K, N)) of a job whose ranks had come to these steps (K, N, G); NaN where nobody says it."""
    step: Floats = np.fmax.reduce(train_step, axis=2)
    nodes, gpus = train_step.shape[1:]
    whole = np.maximum(step - 1.0, 0.0)
    known = np.where(np.isfinite(step), 0.0, np.nan)
    copies = known + gpus * min(REPLICAS, nodes)
    captures = gpus * np.fmax.accumulate(step, axis=0)
    yield "memory_checkpoint_step", whole
    yield "memory_checkpoint_age_steps", step - whole
    yield "memory_checkpoint_copies", copies
    yield "memory_checkpoint_copies_wanted", copies
    yield "memory_checkpoint_captures_total", captures
    yield "memory_checkpoint_skips_total", known
    yield "memory_checkpoint_blocked_seconds_total", BLOCKED_S * captures
    yield "memory_checkpoint_bytes", 3 * SHARD_BYTES * copies
    persisted = np.full_like(step, np.nan)
    persisted[:, 0] = whole[:, 0] // PERSIST_EVERY_STEPS * PERSIST_EVERY_STEPS  # the first node's store tells
    yield "memory_checkpoint_persisted_step", persisted
    yield "memory_checkpoint_persist_seconds", known
    yield "memory_checkpoint_damaged_total", known
