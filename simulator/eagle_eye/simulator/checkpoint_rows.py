"""Agents' metrics of in-memory checkpoints: captured at each step, whole in the next one.

Some jobs keep them, chosen by their seed; no random number is drawn for it, so that all other rows are unaffected.
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
SHARD_BYTES = 4e9  # of a rank; four whole steps are kept, one arrives
SPACED_STEPS = 100  # between the older ones of them


def keeps(scenario: Scenario) -> bool:
    """Whether the scenario's job keeps its steps in memory."""
    return scenario.seed % ONE_OF == WHICH


def checkpoint_rows(train_step: Floats, interval_s: float) -> Iterator[tuple[str, Floats]]:
    """Yield (name, values (K, N)) of a job whose ranks had come to these steps (K, N, G); NaN where nobody says it."""
    step: Floats = np.fmax.reduce(train_step, axis=2)
    nodes, gpus = train_step.shape[1:]
    whole = np.maximum(step - 1.0, 0.0)
    known = np.where(np.isfinite(step), 0.0, np.nan)
    copies = known + gpus * min(REPLICAS, nodes)
    captures = gpus * np.fmax.accumulate(step, axis=0)
    yield "memory_checkpoint_step", whole
    yield "memory_checkpoint_age_steps", step - whole
    first = np.nanmin(step, initial=np.inf)
    spaced = np.maximum(whole // SPACED_STEPS * SPACED_STEPS, first)
    older = {
        "previous": whole - 1.0,
        "second_oldest": spaced,
        "oldest": np.maximum(spaced - SPACED_STEPS, first),
    }
    for which, kept in older.items():
        kept[~((kept >= 0) & (kept < whole))] = np.nan
        yield f"memory_checkpoint_{which}_step", kept
        yield f"memory_checkpoint_{which}_age_seconds", _rows_since(step, kept) * interval_s
    yield "memory_checkpoint_copies", copies
    yield "memory_checkpoint_copies_wanted", copies
    yield "memory_checkpoint_captures_total", captures
    yield "memory_checkpoint_skips_total", known
    yield "memory_checkpoint_blocked_seconds_total", BLOCKED_S * captures
    yield "memory_checkpoint_bytes", 5 * SHARD_BYTES * copies
    persisted = np.full_like(step, np.nan)
    persisted[:, 0] = whole[:, 0] // PERSIST_EVERY_STEPS * PERSIST_EVERY_STEPS  # the first node's store tells
    yield "memory_checkpoint_persisted_step", persisted
    yield "memory_checkpoint_persist_seconds", known
    yield "memory_checkpoint_damaged_total", known


def _rows_since(step: Floats, kept: Floats) -> Floats:
    """Return for how many rows each node had come to the step that it keeps (K, N); NaN where it keeps none."""
    rows = np.arange(len(step))
    found = np.full_like(kept, np.nan)
    for node in range(step.shape[1]):
        reached = np.fmax.accumulate(np.nan_to_num(step[:, node], nan=-1.0))
        found[:, node] = rows - np.searchsorted(reached, kept[:, node])
    return np.where(np.isfinite(kept), found, np.nan)
