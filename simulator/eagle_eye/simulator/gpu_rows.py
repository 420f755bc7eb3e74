"""GPU telemetry derived from activity: what NVML and DCGM would report.

Resolutions are the sources': whole degrees, clocks in 15 MHz steps, ratios to a thousandth (DCGM field documentation).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eagle_eye.simulator.activity import RowActivity
from eagle_eye.simulator.arrays import Booleans, Floats, normal, stream
from eagle_eye.simulator.story import Story
from eagle_eye.simulator.tracks import Quantity, Tracks

# NVML's clocks-event-reasons bits (nvml.h).
IDLE_BIT, SOFTWARE_POWER_BIT = 0x1, 0x4
SPIN_DRAM = (0.02, 0.06, 0.15)  # some of NCCL's protocols poll flags in device memory
CLOCK_STEP_HZ = 15e6


class GpuRows:
    """The gpu_* metrics of all rows of a run, (K, N, G) each."""

    def __init__(self, story: Story, tracks: Tracks, times_s: Floats, activity: RowActivity, dead: Booleans) -> None:
        self._story = story
        self._physics = story.physics
        self._tracks = tracks
        self._times_s = times_s
        self._activity = activity
        self._dead = dead
        self._rng = stream(story.scenario.seed, "gpus")
        polling = float(stream(story.scenario.seed, "polling").choice(SPIN_DRAM))
        self._spin_dram = polling if self._physics.spin_dram is None else self._physics.spin_dram
        self._shape = dead.shape
        models = story.layout.models

        def per_node(values: list[float]) -> Floats:
            return np.array(values, dtype=np.float32)[None, :, None]

        self._idle_w = per_node([m.idle_w for m in models])
        self._limit_w = per_node([m.power_limit_w for m in models])
        self._boost_hz = per_node([m.boost_hz for m in models])
        self._memory_hz = per_node([m.memory_hz for m in models])
        self._memory_bytes = per_node([m.memory_bytes for m in models])
        self._nvlinks = per_node([float(m.nvlinks) for m in models])
        self._generation = per_node([float(m.pcie_generation) for m in models])

    def metrics(self) -> Iterator[tuple[str, Floats]]:
        """Yield (name, values)."""
        rng, shape, physics = self._rng, self._shape, self._physics
        busy = self._activity.busy * self._drift()
        spinning = np.clip(1.0 - self._activity.busy - self._activity.idle, 0.0, 1.0)
        awake = self._awake(spinning)
        utilization = np.clip(awake - np.abs(physics.noise(rng, shape, 0.008)), 0.0, 1.0)
        yield "gpu_utilization_ratio", np.round(utilization, 2)
        level = self._story.job.tensor_active * self._spread(0.012) * self._change(Quantity.TENSOR)
        tensor = busy * level * physics.noise(rng, shape, 0.012, 1.0)
        yield "gpu_tensor_active_ratio", np.round(np.clip(tensor, 0.0, 1.0), 4)
        spinning = spinning * np.minimum(self._change(Quantity.UTILIZATION), 1.0)
        sm = busy * physics.busy_sm * self._spread(0.01) + spinning * physics.spin_sm
        yield "gpu_sm_active_ratio", np.round(np.clip(sm * physics.noise(rng, shape, 0.008, 1.0), 0.0, 1.0), 4)
        dram = (busy * physics.busy_dram * self._spread(0.015) + spinning * self._spin_dram) * physics.noise(
            rng, shape, 0.015, 1.0
        )
        yield "gpu_dram_active_ratio", np.round(np.clip(dram, 0.0, 1.0), 4)
        yield "gpu_memory_used_bytes", self._memory()
        yield from self._power_and_heat(busy, spinning)
        yield from self._reliability()
        yield from self._wires()

    def _power_and_heat(self, busy: Floats, spinning: Floats) -> Iterator[tuple[str, Floats]]:
        rng, shape, physics = self._rng, self._shape, self._physics
        clock = np.clip(self._change(Quantity.CLOCK), 0.05, 1.0)
        limit_w = self._limit_w * self._change(Quantity.POWER_LIMIT) * np.ones(shape, dtype=np.float32)
        span_w = self._limit_w - self._idle_w
        # Power follows voltage squared times frequency; near the top of the curve that is about clock ** 2.
        load = busy * physics.full_power * self._spread(0.02) * np.square(clock) + spinning * physics.spin_power * clock
        power_w = (self._idle_w * self._spread(0.05) + span_w * load) * physics.noise(rng, shape, 0.012, 1.0)
        capped = power_w > 0.985 * limit_w
        power_w = np.minimum(power_w, limit_w * physics.noise(rng, shape, 0.002, 0.997))
        yield "gpu_power_watts", np.round(power_w, 1)
        yield "gpu_power_limit_watts", limit_w
        heat = power_w / self._limit_w
        inlet_c = physics.inlet_c + normal(rng, (1, shape[1], 1), 1.5) + normal(rng, (1, shape[1], shape[2]), 1.2)
        if physics.room_drift_c:
            inlet_c = inlet_c + physics.room_c(self._times_s)[:, :, None].astype(np.float32)
        core_c = inlet_c + physics.core_rise_c * self._spread(0.03) * self._lagged(heat, physics.cooling_s)
        core_c = core_c + self._change(Quantity.AMBIENT)
        yield "gpu_temperature_celsius", np.round(core_c)
        memory_c = inlet_c + physics.memory_rise_c * self._spread(0.03) * self._lagged(heat, physics.memory_cooling_s)
        memory_c = memory_c + self._change(Quantity.AMBIENT) * 0.8 + self._change(Quantity.MEMORY_AMBIENT)
        yield "gpu_memory_temperature_celsius", np.round(memory_c)
        running = (busy + spinning) > 0.02
        # At the power limit clocks give a few steps; one that runs no kernel keeps its clocks for a while.
        droop = np.where(running, 1.0 - 0.03 * busy * np.abs(physics.noise(rng, shape, 1.0)), 0.98)
        clock_hz = self._boost_hz * clock * np.where(self._dead, 0.18, droop)
        yield "gpu_sm_clock_hertz", np.round(clock_hz / CLOCK_STEP_HZ) * CLOCK_STEP_HZ
        yield "gpu_memory_clock_hertz", self._memory_hz * self._change(Quantity.MEMORY_CLOCK) * np.ones(shape)
        bits = np.where(running, 0.0, float(IDLE_BIT))
        # At full load the software power cap flickers on every healthy GPU.
        flicker = capped | (running & (rng.random(shape, dtype=np.float32) < 0.10 * busy))
        bits = np.where(flicker, bits + SOFTWARE_POWER_BIT, bits)
        forced = self._tracks.bits(Quantity.THROTTLE_BITS, self._times_s)
        if forced is not None:
            bits = (bits.astype(np.int64) | forced.astype(np.int64)).astype(np.float64)
        yield "gpu_throttle_reasons", bits

    def _reliability(self) -> Iterator[tuple[str, Floats]]:
        rng, nodes, gpus = self._rng, *self._shape[1:]
        past = rng.poisson(2.0, (1, nodes, gpus)).astype(np.float64)
        corrected = past + self._count(self._physics.corrected_per_gpu_day / 86_400, Quantity.ECC_CORRECTED_RATE)
        yield "gpu_ecc_corrected_total", corrected + np.floor(self._change(Quantity.ECC_CORRECTED))
        yield "gpu_ecc_uncorrected_total", np.zeros(self._shape) + np.floor(self._change(Quantity.ECC_UNCORRECTED))
        remapped = (rng.random((1, nodes, gpus)) < 0.03).astype(np.float64)
        yield "gpu_remapped_rows_total", remapped + np.zeros(self._shape) + self._change(Quantity.REMAPPED)
        yield "gpu_remap_pending", np.zeros(self._shape) + self._change(Quantity.REMAP_PENDING)

    def _wires(self) -> Iterator[tuple[str, Floats]]:
        rng, shape, busy, physics = self._rng, self._shape, self._activity.busy, self._physics
        ones = np.ones(shape, dtype=np.float32)
        # Between nodes GPUs reach their NIC over PCIe; the hosts' own copies are small.
        line = 2.0e9 * self._generation
        between = self._activity.steps[:, :, None] * self._story.job.communication_s
        pcie = (line * (0.02 * busy + between) + 1e5) * np.minimum(self._change(Quantity.PCIE), 1.0)
        for way in ("rx", "tx"):
            yield f"gpu_pcie_{way}_bytes_per_second", pcie * physics.noise(rng, shape, 0.03, 1.0)
        yield "gpu_pcie_link_width", 16.0 * self._change(Quantity.PCIE_WIDTH) * ones
        yield "gpu_pcie_link_generation", (self._generation + self._change(Quantity.PCIE_GENERATION)) * ones
        replays = rng.poisson(0.4, (1, *shape[1:])).astype(np.float64)
        yield (
            "gpu_pcie_replays_total",
            replays + self._count(physics.replays_per_gpu_day / 86_400, Quantity.PCIE_REPLAY_RATE),
        )
        nvlink = self._nvlinks * 25e9 * 0.22 * busy * self._spread(0.01) * self._change(Quantity.NVLINK)
        for way in ("rx", "tx"):
            yield f"gpu_nvlink_{way}_bytes_per_second", nvlink * physics.noise(rng, shape, 0.015, 1.0)
        yield "gpu_nvlink_errors_total", np.zeros(shape) + self._count(0.05 / 86_400, Quantity.NVLINK_ERROR_RATE)
        yield "gpu_nvlinks_active", (self._nvlinks + np.ceil(self._change(Quantity.NVLINKS))) * ones

    def _memory(self) -> Floats:
        used = self._rng.uniform(0.72, 0.92) * self._spread(0.01)
        share = np.where(self._dead, 0.008, used) + self._change(Quantity.MEMORY)
        return np.clip(share, 0.0, 0.995) * self._memory_bytes

    def _change(self, quantity: Quantity) -> Floats | float:
        found = self._tracks.devices(quantity, self._times_s)
        return found if isinstance(found, float) else found.astype(np.float32)

    def _spread(self, deviation: float) -> Floats:
        """Return what distinguishes one GPU from the next, (1, N, G)."""
        return self._physics.spread(self._rng, (1, *self._shape[1:]), deviation)

    def _awake(self, spinning: Floats) -> Floats:
        """Return the share of time with a kernel on the device."""
        change, physics = self._change(Quantity.UTILIZATION), self._physics
        if physics.waits_spin:
            return np.asarray((1.0 - self._activity.idle) * change)
        # Where waiting leaves the GPU without a kernel, one that is stuck is the one that still has one.
        waits = np.where(np.asarray(change) < 0.5, 1.0, physics.spin_utilization)
        return np.asarray(self._activity.busy + spinning * waits)

    def _drift(self) -> Floats | float:
        if not self._physics.load_drift:
            return 1.0
        return np.asarray(self._physics.load(self._times_s)[:, :, None], dtype=np.float32)

    def _lagged(self, drive: Floats, time_constant_s: float) -> Floats:
        """Return a first-order lag of (K, N, G) along time, settled at the start."""
        result = np.empty(drive.shape, dtype=np.float32)
        state = np.where(self._dead[0], drive[0], drive[:30].mean(axis=0))
        spans_s = np.diff(self._times_s, axis=0, prepend=self._times_s[:1] - self._story.scenario.interval_s)
        weights = (1.0 - np.exp(-spans_s / time_constant_s)).astype(np.float32)[:, :, None]
        for row, weight in enumerate(weights):
            state = state + weight * (drive[row] - state)
            result[row] = state
        return result

    def _count(self, per_second: float, quantity: Quantity) -> Floats:
        """Return a counter of random single events, (K, N, G), or (1, N, G) of zeros where nothing happened."""
        spans_s = self._story.scenario.interval_s
        extra = self._tracks.devices(quantity, self._times_s)
        rows, nodes, gpus = self._shape
        expected = per_second * spans_s * rows * nodes * gpus
        number = int(self._rng.poisson(expected))
        where = tuple(self._rng.integers(0, size, number) for size in self._shape)
        if not number and isinstance(extra, float):
            return np.zeros(self._shape)
        counts = np.zeros(self._shape)
        np.add.at(counts, where, 1.0)
        if not isinstance(extra, float):
            places = np.nonzero(extra)
            counts[places] += self._rng.poisson(extra[places] * spans_s)
        return np.cumsum(counts, axis=0)
