"""Metric values of a whole fleet, fresh per node and interval, vectorized over ranges of nodes.

Thirty metrics per GPU, in float32 where the catalogue allows it, else in float64. A job's state is computed only from
the job and the time, so that its nodes agree without shared state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.metrics import Scope
from eagle_eye.simulator.load.readings import COUNTERS_PER_DAY, GAUGES

Single = NDArray[np.float32]
Double = NDArray[np.float64]
Integers = NDArray[np.int64]

LOAD_KEPT, HEAT_KEPT = 0.7, 0.965  # of load and heat from one interval to the next, at 1 Hz
SOFTWARE_POWER_BIT = 4.0  # NVML's clocks-event-reasons bit (nvml.h)
CAPPED_W = 680.0
TRAINED = ("train_step_seconds", "train_compute_seconds", "train_loss", "train_grad_norm")
STEP_JITTER = 0.015  # of a step's length
COMPUTE_SHARE = 0.71

_used = {gauge.name for gauge in GAUGES} | set(COUNTERS_PER_DAY) | {"train_step", "gpu_throttle_reasons", *TRAINED}
_names = [name for name in catalogue.names(Scope.DEVICE) if name in _used]
EXACT = tuple(name for name in _names if catalogue.BY_NAME[name].exact)
PLAIN = tuple(name for name in _names if not catalogue.BY_NAME[name].exact)
METRICS = (*EXACT, *PLAIN)


class Readings(NamedTuple):
    """A range of nodes in one interval: ``exact`` (nodes, EXACT, gpus) and ``plain`` (nodes, PLAIN, gpus)."""

    exact: Double
    plain: Single


class FleetValues:
    """What ``nodes`` hosts of ``gpus`` GPUs read, interval by interval. The same seed gives the same values.

    ``jobs`` (nodes,) numbers each node's job. Steps take ``step_s`` and began at ``start_s``, Unix seconds.
    """

    def __init__(
        self, jobs: Integers, gpus: int, interval_s: float, step_s: float, start_s: float, seed: int = 0
    ) -> None:
        nodes = len(jobs)
        self._rng = np.random.Generator(np.random.SFC64(seed))
        self._jobs = jobs.astype(np.uint64)
        self._step_s = step_s
        self._start_s = start_s
        shape = (nodes, 1, gpus)
        self._ranks = np.arange(nodes * gpus, dtype=np.uint64).reshape(nodes, gpus)
        self._load = self._rng.standard_normal(shape, dtype=np.float32)
        self._heat = self._rng.standard_normal(shape, dtype=np.float32)
        self._kept = np.float32(LOAD_KEPT**interval_s), np.float32(HEAT_KEPT**interval_s)
        gauges = sorted(GAUGES, key=lambda gauge: PLAIN.index(gauge.name))
        self._places = np.array([PLAIN.index(gauge.name) for gauge in gauges])

        def column(name: str) -> Single:
            return np.array([getattr(gauge, name) for gauge in gauges], dtype=np.float32)[None, :, None]

        self._gain, self._heat_gain, self._noise = column("load"), column("heat"), column("noise")
        step, self._low, self._high = column("step"), column("low"), column("high")
        # Parts of one are divided by whole numbers, as who reads percent does: 98 of 100 is nearer to 0.98 so.
        self._parts = np.rint(1.0 / np.minimum(step, 1.0)).astype(np.float32)
        self._units = np.maximum(step, 1.0)
        spread = self._rng.standard_normal((nodes, len(gauges), gpus), dtype=np.float32)
        self._base: Single = column("level") + column("device") * spread
        self._power = PLAIN.index("gpu_power_watts")
        self._throttle = PLAIN.index("gpu_throttle_reasons")
        self._trained = [PLAIN.index(name) for name in TRAINED]
        self._steps = EXACT.index("train_step")
        self._counters = np.zeros((nodes, len(EXACT), gpus))
        rates = np.array([COUNTERS_PER_DAY.get(name, 0.0) for name in EXACT]) / 86_400.0 * interval_s
        self._rates = rates[None, :, None]
        past = self._rng.poisson(np.where(self._rates > 0.0, 2.0, 0.0), self._counters.shape)
        self._counters += past

    def assign(self, node: int, job: int) -> None:
        """Assign a node to another job from now on."""
        self._jobs[node] = job

    def read(self, first: int, last: int, time_s: float) -> Readings:
        """Return the next readings of nodes ``first`` to before ``last``, of the interval that ended at ``time_s``."""
        here = slice(first, last)
        rng, base = self._rng, self._base[here]
        load, heat = self._load[here], self._heat[here]
        load *= self._kept[0]
        load += np.sqrt(1 - self._kept[0] ** 2) * rng.standard_normal(load.shape, dtype=np.float32)
        heat *= self._kept[1]
        heat += np.sqrt(1 - self._kept[1] ** 2) * load
        gauges = rng.standard_normal(base.shape, dtype=np.float32)
        gauges *= self._noise
        gauges += base
        gauges += load * self._gain
        gauges += heat * self._heat_gain
        gauges *= self._parts
        gauges /= self._units
        np.rint(gauges, out=gauges)
        gauges *= self._units
        gauges /= self._parts
        np.clip(gauges, self._low, self._high, out=gauges)
        plain = np.empty((last - first, len(PLAIN), base.shape[2]), dtype=np.float32)
        plain[:, self._places] = gauges
        plain[:, self._throttle] = np.where(plain[:, self._power] > CAPPED_W, SOFTWARE_POWER_BIT, 0.0)
        exact = self._counters[here]
        exact += rng.random(exact.shape) < self._rates
        done = self._train(here, time_s, plain)
        exact[:, self._steps] = done[:, None]
        return Readings(exact.copy(), plain)

    def _train(self, here: slice, time_s: float, plain: Single) -> Double:
        """Fill in what training says of the last finished step; return its number (nodes,)."""
        jobs, ranks = self._jobs[here], self._ranks[here]
        # Jobs did not begin at the same moment.
        age = (time_s - self._start_s) / self._step_s + 100.0 + _uniform(jobs, 11) * 50.0
        done = np.floor(age)
        steps = done.astype(np.uint64)
        jitter = STEP_JITTER * (_noise(jobs, steps) - _noise(jobs, steps - np.uint64(1)))
        seconds = self._step_s * (1.0 + jitter)[:, None]
        own = _noise(ranks, steps[:, None])
        decay = np.exp(-done / 4_000.0)[:, None]
        columns = (
            np.round(seconds + 2e-4 * own, 6),
            np.round(seconds * COMPUTE_SHARE * (1.0 + 0.004 * own), 6),
            np.round(1.9 + 3.0 * decay + 0.03 * own, 5),
            np.round(0.4 + decay + 0.02 * _noise(jobs, steps + np.uint64(1 << 40))[:, None], 5),
        )
        for place, values in zip(self._trained, columns, strict=True):
            plain[:, place] = values
        return done


def _mixed(one: NDArray[np.uint64], other: Any) -> NDArray[np.uint64]:
    """Return well-mixed bits of two numbers (the finaliser of SplitMix64; wraps around as it should)."""
    with np.errstate(over="ignore"):
        bits = one * np.uint64(0x9E3779B97F4A7C15) + np.uint64(other) * np.uint64(0xD1B54A32D192ED03)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _uniform(one: NDArray[np.uint64], other: Any) -> Double:
    return (_mixed(one, other) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _noise(one: NDArray[np.uint64], other: Any) -> Double:
    """Return noise of mean 0 and deviation 1 that depends on the two numbers alone."""
    bits = _mixed(one, other)
    parts = [((bits >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.float64) for shift in (0, 16, 32, 48)]
    return np.asarray((sum(parts) / 65_535.0 - 2.0) * np.sqrt(3.0))
