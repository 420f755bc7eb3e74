"""What agents would measure of GPUs, hosts and links: when rows are taken, what GPUs did meanwhile, the values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eagle_eye.simulator.arrays import Booleans, Floats, normal, stream
from eagle_eye.simulator.story import Story
from eagle_eye.simulator.timing import Timeline
from eagle_eye.simulator.tracks import Quantity, Tracks

JITTER_MAX_SHARE = 0.45  # of the interval: rows stay in order


@dataclass(frozen=True, slots=True)
class Sampling:
    """``true_s`` and ``stamped_s`` (K, N): when a row was taken, in seconds from the start, and what its agent wrote.

    ``arrived`` (K, N): the row reached the server. ``device_arrived`` (K, N, G): so did the device's.
    """

    true_s: Floats
    stamped_s: Floats
    offset_s: Floats
    arrived: Booleans
    device_arrived: Booleans


def sample(story: Story, tracks: Tracks) -> Sampling:
    """Return the sampling times of the story's run."""
    scenario, layout = story.scenario, story.layout
    physics = story.physics
    rng = stream(scenario.seed, "sampling")
    rows, nodes = int(scenario.duration_s / scenario.interval_s), layout.nodes
    interval_s = scenario.interval_s
    phase_s = rng.uniform(0.0, interval_s, nodes)
    jitter_s = np.abs(rng.standard_normal((rows, nodes)))
    jitter_s *= min(physics.jitter_share * interval_s, physics.jitter_limit_s)
    np.minimum(jitter_s, JITTER_MAX_SHARE * interval_s, out=jitter_s)
    true_s = np.arange(rows)[:, None] * interval_s + phase_s + jitter_s
    skew_s = rng.standard_normal(nodes) * physics.clock_skew_s
    offset_s = skew_s + np.asarray(tracks.nodewise(Quantity.CLOCK_OFFSET, true_s)) + np.zeros_like(true_s)
    arrived = rng.random((rows, nodes)) >= physics.lost_ratio
    for _ in range(int(rng.poisson(physics.bursts_per_node_day * nodes * scenario.duration_s / 86_400))):
        first, node = int(rng.integers(rows)), int(rng.integers(nodes))
        arrived[first : first + int(rng.integers(2, 8)), node] = False
    device_arrived = np.ones((rows, nodes, layout.gpus), dtype=bool)
    for outage in story.outages:
        silent = (true_s[:, outage.node] >= outage.start_s) & (true_s[:, outage.node] < outage.end_s)
        if outage.device is None:
            arrived[silent, outage.node] = False
        else:
            device_arrived[silent, outage.node, outage.device] = False
    return Sampling(true_s, true_s + offset_s, offset_s, arrived, device_arrived)


# A GPU that waits in a collective spins in a kernel: it counts as utilised while its tensor cores are idle.

SPREAD_TRAFFIC = 0.8  # of the bytes that sharded parameters move before the step's end


@dataclass(frozen=True, slots=True)
class RowActivity:
    """Shares of each row's interval: ``busy``, ``idle`` (no kernel) (K, N, G); ``paused`` of ranks alive (K, N).

    ``steps`` (K, N): training steps' worth of traffic between nodes per second.
    """

    busy: Floats
    idle: Floats
    steps: Floats


def account(story: Story, timeline: Timeline, times_s: Floats, dead: Booleans) -> RowActivity:
    """Return the GPUs' activity between each row and the one before it."""
    interval_s = story.scenario.interval_s
    edges_s = np.vstack([times_s[:1] - interval_s, times_s])
    spans_s = np.diff(edges_s, axis=0)
    busy, idle = _integrals(timeline, edges_s)
    spans = spans_s[:, :, None]
    busy = (np.diff(busy, axis=0) / spans).astype(np.float32)
    idle = (np.diff(idle, axis=0) / spans).astype(np.float32)
    for begin_s, end_s, pause in timeline.pauses:
        share = overlap(edges_s[:-1], edges_s[1:], begin_s, end_s)[:, :, None].astype(np.float32)
        if pause.alone:
            busy[:, 0, :1] += share[:, 0] * pause.busy
        else:
            busy += share * pause.busy
        if pause.spins:
            idle[:, 0, :1] += share[:, 0] * (1.0 - pause.busy)
        else:
            idle += share * (1.0 - pause.busy)
    busy[dead] = 0.0
    idle[dead] = 1.0
    np.clip(busy, 0.0, 1.0, out=busy)
    np.clip(idle, 0.0, 1.0, out=idle)
    return RowActivity(busy, idle, np.diff(_traffic(story, timeline, edges_s), axis=0) / spans_s)


def overlap(from_s: Floats, to_s: Floats, begin_s: float, end_s: float) -> Floats:
    """Return the share of each interval that lies between two moments."""
    inside = np.minimum(to_s, end_s) - np.maximum(from_s, begin_s)
    shares: Floats = np.clip(inside, 0.0, None) / (to_s - from_s)
    return shares


def _integrals(timeline: Timeline, edges_s: Floats) -> tuple[Floats, Floats]:
    """Return the seconds that each rank was busy, and without work, up to each edge, (K+1, N, G)."""
    compute = timeline.compute_s
    work = compute if timeline.stall_s is None else compute - timeline.stall_s
    without = timeline.data_wait_s if timeline.stall_s is None else timeline.data_wait_s + timeline.stall_s
    current = np.searchsorted(timeline.start_s, edges_s, side="right") - 1
    early = (current < 0)[:, :, None]
    current = np.maximum(current, 0)
    nodes, devices = compute.shape[1:]
    at = (current[:, :, None], np.arange(nodes)[None, :, None], np.arange(devices)[None, None, :])
    into_s = (edges_s - timeline.start_s[current])[:, :, None]
    wait_s, arrival_s = timeline.data_wait_s[at], timeline.arrival_s[at]
    # From the data's arrival to the last reduce-scatter a rank computes at an even rate, then it waits.
    progress = np.clip((into_s - wait_s) / np.maximum(arrival_s - wait_s, 1e-6), 0.0, 1.0)
    busy = _before(work)[at] + work[at] * progress
    idle = _before(without)[at] + np.minimum(into_s, wait_s)
    if timeline.stall_s is not None:
        idle += timeline.stall_s[at] * progress
    return np.where(early, 0.0, busy), np.where(early, 0.0, idle)


def _before(per_step: Floats) -> Floats:
    """Return the sum over all earlier steps, same shape, float64."""
    total = np.cumsum(per_step, axis=0, dtype=np.float64)
    total[1:] = total[:-1]
    total[:1] = 0.0
    return total


def _traffic(story: Story, timeline: Timeline, edges_s: Floats) -> Floats:
    """Return how many steps' traffic has crossed the network up to each edge, (K+1, N)."""
    early = SPREAD_TRAFFIC if story.job.spread_collectives else 0.15
    knots_s, amounts = [], []
    total = 0.0
    finish = np.where(timeline.finished, timeline.end_s, np.nan)
    for index, (start_s, end_s) in enumerate(zip(timeline.start_s, finish, strict=True)):
        if np.isnan(end_s):
            stop = timeline.attempts[int(timeline.attempt[index])].stop
            stop_s = start_s if stop is None else max(stop.time_s, start_s)
            knots_s += [start_s, stop_s + 1e-6]
            amounts += [total, total + 0.5 * early]
            total += 0.5 * early
            continue
        exchange_s = min(float(timeline.communication_s[index]), 0.95 * (end_s - start_s))
        knots_s += [start_s, end_s - exchange_s, end_s]
        amounts += [total, total + early, total + 1.0]
        total += 1.0
    return np.interp(edges_s, knots_s, amounts)


# What NVML and DCGM would report, derived from activity. Resolutions are the sources': whole degrees, clocks in 15 MHz
# steps, ratios to a thousandth (DCGM field documentation).

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


LINE_BYTES_PER_S = 50e9  # one 400 Gb/s port
LINK_SHARE = 0.75  # of line rate that collectives reach
CPU_IDLE = 0.02  # busy share of all CPUs without training processes
HOST_CELSIUS = 42.0  # the hottest thermal zone of an idle host
BLOCKED_BY_A_MOUNT = 8.0  # so many tasks at once wait for nothing but shared storage


class HostRows:
    """The node_* metrics (K, N) and link_* metrics (K, N, L) of all rows of a run."""

    def __init__(
        self,
        story: Story,
        tracks: Tracks,
        timeline: Timeline,
        sampling: Sampling,
        activity: RowActivity,
        dead: Booleans,
    ) -> None:
        self._story = story
        self._physics = story.physics
        self._tracks = tracks
        self._timeline = timeline
        self._sampling = sampling
        self._times_s = sampling.true_s
        self._shape = sampling.true_s.shape
        self._busy = activity.busy.mean(axis=2)
        self._idle = activity.idle.mean(axis=2)
        self._steps = activity.steps
        self._alive = 1.0 - dead.mean(axis=2)
        self._rng = stream(story.scenario.seed, "hosts")
        self._links = self._link_metrics()

    def links(self) -> dict[str, Floats]:
        """Return the link metrics."""
        return self._links

    def metrics(self) -> Iterator[tuple[str, Floats]]:
        """Yield (name, values) of the node metrics."""
        rng, shape, physics = self._rng, self._shape, self._physics
        spinning = np.clip(1.0 - self._busy - self._idle, 0.0, 1.0)
        # The training process keeps one core a GPU at full load; data loaders come on top while steps go on.
        load = CPU_IDLE + self._alive * physics.cpu_training * (
            0.45 + 0.55 * np.clip(self._busy + 0.3 * spinning, 0, 1)
        )
        cpu = load * self._spread(0.06) * physics.noise(rng, shape, 0.04, 1.0) + self._change(Quantity.CPU)
        yield "node_cpu_utilization_ratio", np.round(np.clip(cpu, 0.0, 1.0), 4)
        yield "node_cpu_steal_ratio", np.clip(self._change(Quantity.STEAL) + 0.0 * self._busy, 0, 1)
        yield "node_cpu_pressure_ratio", self._ratio(0.004, Quantity.CPU_PRESSURE)
        used = self._rng.uniform(0.2, 0.45) * self._spread(0.04) * (0.3 + 0.7 * self._alive)
        memory = used + self._change(Quantity.HOST_MEMORY) + physics.noise(rng, shape, 0.001)
        yield "node_memory_used_ratio", np.round(np.clip(memory, 0.0, 0.999), 4)
        yield "node_memory_pressure_ratio", self._ratio(0.0005, Quantity.MEMORY_PRESSURE)
        writing, written = self._checkpoints()
        yield "node_io_pressure_ratio", self._ratio(0.003, Quantity.IO_PRESSURE, 0.3 * writing)
        yield "node_iowait_ratio", self._ratio(0.001, Quantity.IOWAIT, 0.05 * writing)
        blocked = rng.poisson(0.05, shape) + np.round(self._change(Quantity.BLOCKED) + 2.0 * writing)
        yield "node_blocked_tasks", blocked.astype(np.float64)
        yield "node_clock_offset_seconds", self._sampling.offset_s + normal(rng, shape, 0.0005)
        reading = 3e7 * self._alive * (0.2 + self._busy) * np.exp(normal(rng, shape, 0.5))
        yield "node_disk_read_bytes_per_second", reading + self._change(Quantity.DISK_READ)
        yield (
            "node_disk_write_bytes_per_second",
            (2e6 * np.exp(normal(rng, shape, 0.8)) + self._change(Quantity.DISK_WRITE) + written),
        )
        for way, quantity in (("rx", Quantity.NETWORK_RX), ("tx", Quantity.NETWORK_TX)):
            ethernet = 2e7 * self._alive * (0.1 + self._busy) * np.exp(normal(rng, shape, 0.4)) + 2e5
            yield f"node_network_{way}_bytes_per_second", ethernet + self._change(quantity)
        links = self._links
        for way in ("rx", "tx"):
            yield f"node_rdma_{way}_bytes_per_second", links[f"link_{way}_bytes_per_second"].sum(axis=2)
        yield "node_rdma_errors_total", links["link_errors_total"].sum(axis=2)
        yield "node_rdma_link_downed_total", links["link_downed_total"].sum(axis=2)
        for way in ("tx", "rx"):
            name = f"pfc_{way}_pause_packets_per_second"
            yield f"node_{name}", links[f"link_{name}"].sum(axis=2)
        rate = physics.congestion_per_s * np.minimum(self._steps * self._story.job.step_s, 1.5)
        noted = rng.poisson((rate + self._change(Quantity.CONGESTION_RATE)) * self._story.scenario.interval_s)
        yield "node_congestion_notifications_total", np.cumsum(noted, axis=0) + rng.integers(0, 10**6, (1, shape[1]))
        retransmits = rng.poisson(physics.retransmits_per_s, shape) + self._change(Quantity.RETRANSMITS)
        yield "node_tcp_retransmits_per_second", retransmits
        stuck = np.broadcast_to(self._change(Quantity.BLOCKED), shape) >= BLOCKED_BY_A_MOUNT
        yield "node_mounts_unresponsive", stuck.astype(np.float64)
        heat = HOST_CELSIUS + 20.0 * np.clip(cpu, 0.0, 1.0) + normal(rng, shape, 0.5)
        yield "node_temperature_celsius", np.round(heat)

    def _link_metrics(self) -> dict[str, Floats]:
        rng, tracks, times_s, physics = self._rng, self._tracks, self._times_s, self._physics
        rows, nodes = self._shape
        width = len(self._story.layout.links)
        shape = (rows, nodes, width)

        def change(quantity: Quantity) -> Floats | float:
            return tracks.links(quantity, times_s, width)

        up = np.ones(shape, dtype=np.float32) * change(Quantity.LINK_UP)
        speed = (LINE_BYTES_PER_S * LINK_SHARE * self._story.job.communication_s * self._steps).astype(np.float32)
        speed *= float(nodes > 1)  # one node alone keeps its traffic inside
        speed *= self._story.layout.gpus / width if width < self._story.layout.gpus else 1.0
        speed = np.minimum(speed, LINE_BYTES_PER_S * 0.97)[:, :, None] * up * np.minimum(change(Quantity.LINK_RATE), 1)
        result: dict[str, Floats] = {"link_up": up}
        for way in ("rx", "tx"):
            idle = 1e3 * rng.exponential(1.0, shape) + change(Quantity.LINK_SENT)
            result[f"link_{way}_bytes_per_second"] = np.maximum(
                speed * physics.noise(rng, shape, 0.01, 1.0) + idle, 0.0
            )
        result["link_errors_total"] = self._errors(shape, change(Quantity.LINK_ERROR_RATE))
        downed = rng.poisson(0.2, (1, nodes, width)).astype(np.float64)
        result["link_downed_total"] = downed + np.zeros(shape) + np.floor(change(Quantity.LINK_DOWNED))
        for way, quantity in (("tx", Quantity.PFC_TX), ("rx", Quantity.PFC_RX)):
            # Healthy lossless fabrics pause now and then, in bursts, on whoever receives at the moment.
            burst = (rng.random(shape, dtype=np.float32) < physics.pause_bursts) * rng.exponential(
                physics.pause_height, shape
            ).astype(np.float32)
            result[f"link_pfc_{way}_pause_packets_per_second"] = np.round(burst + change(quantity) * (speed > 1e6), 1)
        return result

    def _errors(self, shape: tuple[int, ...], extra: Floats | float) -> Floats:
        rng, interval_s = self._rng, self._story.scenario.interval_s
        start = rng.poisson(1.0, (1, *shape[1:])).astype(np.float64)
        counts = np.zeros(shape)
        number = int(rng.poisson(self._physics.link_errors_per_day / 86_400 * interval_s * counts.size))
        np.add.at(counts, tuple(rng.integers(0, size, number) for size in shape), 1.0)
        if not isinstance(extra, float):
            places = np.nonzero(extra)
            counts[places] += rng.poisson(extra[places] * interval_s)
        return start + np.cumsum(counts, axis=0)

    def _checkpoints(self) -> tuple[Floats, Floats]:
        """Return the share of each row spent writing checkpoints, and the bytes per second written, (K, N)."""
        writing, written = np.zeros(self._shape), np.zeros(self._shape)
        edges_s = np.vstack([self._times_s[:1] - self._story.scenario.interval_s, self._times_s])
        for begin_s, end_s, pause in self._timeline.pauses:
            if pause.disk_bytes_per_s:
                share = overlap(edges_s[:-1], edges_s[1:], begin_s, end_s)
                if pause.alone:
                    share[:, 1:] = 0.0
                writing += share
                written += share * pause.disk_bytes_per_s
        return writing, written

    def _ratio(self, usual: float, quantity: Quantity, extra: Floats | float = 0.0) -> Floats:
        noise = self._rng.exponential(usual * self._physics.pressure_scale, self._shape)
        return np.round(np.clip(noise + extra + self._change(quantity), 0.0, 1.0), 4)

    def _change(self, quantity: Quantity) -> Floats | float:
        return self._tracks.nodewise(quantity, self._times_s)

    def _spread(self, deviation: float) -> Floats:
        return self._physics.spread(self._rng, (1, self._shape[1]), deviation)
