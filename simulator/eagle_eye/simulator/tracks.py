"""Physical causes over time: what changes, where, from when, how fast. Symptoms are derived elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from eagle_eye.simulator.arrays import Floats


class Quantity(Enum):
    """What a track changes, and how its value applies: "times" scales, "plus" adds, "bits" sets bits."""

    # Of a training step, on a rank.
    COMPUTE = ("compute", "times")  # the GPU is busy this much longer
    STALL = ("stall", "plus")  # seconds a step in which the GPU lacks work: late launches, garbage collection
    DATA_WAIT = ("data_wait", "plus")  # seconds a step
    NETWORK = ("network", "times")  # time of collectives across nodes that include the rank
    NVLINK_TIME = ("nvlink_time", "times")  # time of collectives inside the node
    LOSS = ("loss", "times")
    GRAD_NORM = ("grad_norm", "times")
    LOCAL_GRAD = ("local_grad", "times")
    CHECKSUM = ("checksum", "plus")
    TOKENS = ("tokens", "times")
    CPUS = ("cpus", "times")  # that the rank's process uses
    HELD = ("held", "plus")  # share of time in which the kernel holds the process
    # Of a GPU.
    UTILIZATION = ("utilization", "times")
    TENSOR = ("tensor", "times")  # tensor activity while busy
    CLOCK = ("clock", "times")
    MEMORY_CLOCK = ("memory_clock", "times")
    POWER_LIMIT = ("power_limit", "times")
    AMBIENT = ("ambient", "plus")  # degrees that cooling lacks, core
    MEMORY_AMBIENT = ("memory_ambient", "plus")
    THROTTLE_BITS = ("throttle_bits", "bits")
    MEMORY = ("memory", "plus")  # share of device memory
    ECC_CORRECTED_RATE = ("ecc_corrected_rate", "plus")  # per second
    ECC_CORRECTED = ("ecc_corrected", "plus")
    ECC_UNCORRECTED = ("ecc_uncorrected", "plus")
    REMAPPED = ("remapped", "plus")
    REMAP_PENDING = ("remap_pending", "plus")
    PCIE = ("pcie", "times")  # throughput
    PCIE_WIDTH = ("pcie_width", "times")
    PCIE_GENERATION = ("pcie_generation", "plus")
    PCIE_REPLAY_RATE = ("pcie_replay_rate", "plus")
    NVLINK = ("nvlink", "times")  # throughput
    NVLINKS = ("nvlinks", "plus")
    NVLINK_ERROR_RATE = ("nvlink_error_rate", "plus")
    # Of a node.
    CPU = ("cpu", "plus")
    STEAL = ("steal", "plus")
    CPU_PRESSURE = ("cpu_pressure", "plus")
    HOST_MEMORY = ("host_memory", "plus")
    MEMORY_PRESSURE = ("memory_pressure", "plus")
    IO_PRESSURE = ("io_pressure", "plus")
    IOWAIT = ("iowait", "plus")
    BLOCKED = ("blocked", "plus")
    DISK_READ = ("disk_read", "plus")
    DISK_WRITE = ("disk_write", "plus")
    NETWORK_RX = ("network_rx", "plus")
    NETWORK_TX = ("network_tx", "plus")
    RETRANSMITS = ("retransmits", "plus")
    CLOCK_OFFSET = ("clock_offset", "plus")
    CONGESTION_RATE = ("congestion_rate", "plus")
    # Of a link (``device`` is the link's position).
    LINK_UP = ("link_up", "times")
    LINK_RATE = ("link_rate", "times")
    LINK_SENT = ("link_sent", "plus")  # bytes per second beside the steps' traffic
    LINK_ERROR_RATE = ("link_error_rate", "plus")
    LINK_DOWNED = ("link_downed", "plus")
    PFC_TX = ("pfc_tx", "plus")
    PFC_RX = ("pfc_rx", "plus")


@dataclass(frozen=True, slots=True)
class Track:
    """One cause: a quantity changes by ``value`` from ``start_s`` to ``end_s``, in full after ``rise_s``.

    Seconds count from the trace's start. ``nodes`` None means all; ``device`` None all GPUs (or links) of the nodes.
    ``period_s`` with ``duty`` switches the cause on and off: it acts in the first part of each period.
    """

    quantity: Quantity
    value: float
    start_s: float = -math.inf
    end_s: float = math.inf
    rise_s: float = 0.0
    nodes: tuple[int, ...] | None = None
    device: int | None = None
    period_s: float = 0.0
    duty: float = 1.0

    def share(self, times_s: Floats) -> Floats:
        """Return how much of the cause acts at each time, 0..1, shape of ``times_s``."""
        acting = ((times_s >= self.start_s) & (times_s < self.end_s)).astype(np.float64)
        if self.rise_s > 0:
            acting *= np.clip((times_s - self.start_s) / self.rise_s, 0.0, 1.0)
        if self.period_s > 0:
            acting *= ((times_s - self.start_s) % self.period_s) < self.duty * self.period_s
        return acting


class Tracks:
    """All causes of a run, asked for by quantity."""

    def __init__(self, tracks: Iterable[Track], nodes: int, gpus: int) -> None:
        self._nodes = nodes
        self._gpus = gpus
        self._by: dict[Quantity, list[Track]] = {}
        for track in tracks:
            self._by.setdefault(track.quantity, []).append(track)

    def has(self, quantity: Quantity) -> bool:
        """Whether anything ever changes this quantity."""
        return quantity in self._by

    def now(self, quantity: Quantity, time_s: float) -> Floats | float:
        """Return the change at one moment: the neutral number, or an array (N, G)."""
        return self._combine(quantity, np.full((1, self._nodes), time_s), self._gpus, acting_only=True)

    def devices(self, quantity: Quantity, times_s: Floats) -> Floats | float:
        """Return the change at each node's own times (K, N): the neutral number, or (K, N, G)."""
        return self._combine(quantity, times_s, self._gpus)

    def nodewise(self, quantity: Quantity, times_s: Floats) -> Floats | float:
        """Return the change at each node's own times (K, N): the neutral number, or (K, N)."""
        found = self._combine(quantity, times_s, 1)
        return found if isinstance(found, float) else found[..., 0]

    def links(self, quantity: Quantity, times_s: Floats, links: int) -> Floats | float:
        """Return the change at each node's own times (K, N): the neutral number, or (K, N, L)."""
        return self._combine(quantity, times_s, links)

    def bits(self, quantity: Quantity, times_s: Floats) -> Floats | None:
        """Return the bits that are set, (K, N, G) as integers in float64; None where no track sets any."""
        if quantity not in self._by:
            return None
        result = np.zeros((*times_s.shape, self._gpus), dtype=np.int64)
        for track in self._by[quantity]:
            where, share = self._where(track, times_s)
            result[where] |= (share > 0.5).astype(np.int64)[..., None] * int(track.value)
        return result.astype(np.float64)

    def _combine(self, quantity: Quantity, times_s: Floats, width: int, *, acting_only: bool = False) -> Floats | float:
        times = quantity.value[1] == "times"
        neutral = 1.0 if times else 0.0
        tracks = self._by.get(quantity, ())
        if acting_only:
            tracks = [t for t in tracks if t.start_s <= times_s[0, 0] < t.end_s]
        if not tracks:
            return neutral
        result: Floats = np.full((*times_s.shape, width), neutral)
        for track in tracks:
            where, share = self._where(track, times_s)
            change = share[..., None]
            if times and math.isinf(track.value):
                result[where] = np.where(change > 0, math.inf, result[where])
            elif times:
                result[where] *= 1.0 + (track.value - 1.0) * change
            else:
                result[where] += track.value * change
        return result[0] if acting_only else result

    def _where(self, track: Track, times_s: Floats) -> tuple[tuple[Any, ...], Floats]:
        # Nodes of a track are contiguous or few: a list index copies, a slice does not; both may be assigned to.
        nodes: Any = slice(None) if track.nodes is None else list(track.nodes)
        device = slice(None) if track.device is None else slice(track.device, track.device + 1)
        share = track.share(times_s if track.nodes is None else times_s[:, list(track.nodes)])
        return (slice(None), nodes, device), share
