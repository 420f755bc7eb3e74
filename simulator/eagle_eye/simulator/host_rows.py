"""Node and link telemetry: what /proc, /sys/class/infiniband and the NIC's counters would report."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eagle_eye.simulator.activity import RowActivity, overlap
from eagle_eye.simulator.arrays import Booleans, Floats, normal, stream
from eagle_eye.simulator.sampling import Sampling
from eagle_eye.simulator.story import Story
from eagle_eye.simulator.timing import Timeline
from eagle_eye.simulator.tracks import Quantity, Tracks

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
