"""Instrument errors in the second physics: stale, coarse, stuck or wrong readings, missing metrics."""

from __future__ import annotations

import numpy as np

from eagle_eye.schema.metrics import BY_NAME, MetricKind
from eagle_eye.simulator.arrays import Floats, Integers, stream
from eagle_eye.simulator.physics import Physics

WHOLE_PERCENT = ("gpu_utilization_ratio", "gpu_tensor_active_ratio", "gpu_sm_active_ratio", "gpu_dram_active_ratio")
STUCK_S = (10.0, 120.0)
SOURCES = ("gpu_", "node_", "link_")  # what is asked apart; the training hook reports by itself


def read(values: dict[str, Floats], physics: Physics, interval_s: float) -> dict[str, Floats]:
    """Return metrics (K, N[, G]) as a site's instruments have them."""
    return {
        name: _stuck(
            name, _wrong(name, _old(name, _coarse(name, truth, physics), physics), physics), physics, interval_s
        )
        if name.startswith(SOURCES)
        else truth
        for name, truth in values.items()
        if name not in physics.absent
    }


def _coarse(name: str, values: Floats, physics: Physics) -> Floats:
    if physics.coarse and name in WHOLE_PERCENT:
        return np.round(values, 2)
    return np.round(values) if physics.coarse and name == "gpu_power_watts" else values


def _old(name: str, values: Floats, physics: Physics) -> Floats:
    """Return each row's value as it was when the source was last asked; sources of one kind are asked together."""
    if physics.refresh_rows == 1 and not physics.late_rows:
        return values
    rows, nodes = values.shape[:2]
    phase = stream(physics.seed, f"asked {name[:4]}").integers(0, physics.refresh_rows, nodes)
    row: Integers = np.arange(rows)[:, None]
    asked = row - (row + phase) % physics.refresh_rows - physics.late_rows
    old: Floats = values[np.maximum(asked, 0), np.arange(nodes)[None, :]]
    # What cannot be observed any more is no old value either.
    return np.where(np.isnan(values), np.nan, old).astype(values.dtype, copy=False)


def _wrong(name: str, values: Floats, physics: Physics) -> Floats:
    """Replace single readings of gauges by what cannot be: nothing, or several times as much."""
    spec = BY_NAME[name]
    if spec.kind is not MetricKind.GAUGE or spec.unit == "bool":
        return values
    rng = stream(physics.seed, f"wrong {name}")
    places = tuple(rng.integers(0, size, rng.poisson(physics.outlier_ratio * values.size)) for size in values.shape[:1])
    number = len(places[0])
    where = (places[0], *(rng.integers(0, size, number) for size in values.shape[1:]))
    factor = rng.choice([0.0, 0.0, 2.0, 5.0], number)
    result = values.copy()
    result[where] *= factor
    if spec.unit == "ratio":
        np.clip(result, 0.0, 1.0, out=result)
    return result


def _stuck(name: str, values: Floats, physics: Physics, interval_s: float) -> Floats:
    """Repeat one reading for a while, here and there."""
    if not name.startswith("gpu_"):
        return values
    rows, nodes, gpus = values.shape
    rng = stream(physics.seed, "stuck")  # all of a device's metrics at once
    times = int(rng.poisson(physics.stuck_per_device_hour * rows * interval_s / 3600.0 * nodes * gpus))
    result = values.copy() if times else values
    for _ in range(times):
        first, node, device = int(rng.integers(rows)), int(rng.integers(nodes)), int(rng.integers(gpus))
        last = first + max(1, int(rng.uniform(*STUCK_S) / interval_s))
        kept = result[first : last + 1, node, device]
        result[first : last + 1, node, device] = np.where(np.isnan(kept), np.nan, result[first, node, device])
    return result
