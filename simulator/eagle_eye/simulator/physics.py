"""Numeric parameters of hardware, fabric and instruments; the defaults are the simulator's own physics.

The other, drawn anew for each trace, is in second_physics.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eagle_eye.simulator.arrays import Floats, normal, stream
from eagle_eye.simulator.tracks import Quantity, Track

TAIL_LIMIT = 12.0  # standard deviations: beyond is a wrong reading, which is drawn apart


@dataclass(frozen=True, slots=True)
class Physics:
    """One set of shapes and parameters. Shares of power are of the range from idle to limit, at full clocks."""

    name: str = "own"
    seed: int = 0

    # A GPU at work, and one that waits in a collective.
    busy_sm: float = 0.82
    busy_dram: float = 0.42
    full_power: float = 1.01  # that compute would draw; the power limit holds it
    waits_spin: bool = True  # a kernel spins while it waits; else the GPU has no kernel meanwhile
    spin_utilization: float = 1.0
    spin_power: float = 0.22
    spin_sm: float = 0.14
    spin_dram: float | None = None  # one of a few, by the trace's seed
    tensor_active: tuple[float, float] = (0.38, 0.62)  # while busy

    # Heat, in degrees and seconds.
    inlet_c: float = 26.0
    core_rise_c: float = 38.0
    memory_rise_c: float = 52.0
    cooling_s: float = 22.0
    memory_cooling_s: float = 60.0
    heat_c: tuple[float, float] = (24.0, 29.0)  # that failed cooling adds until the clocks give
    heat_s: tuple[float, float] = (20.0, 60.0)
    lighter_c: float = 32.0  # of the die at full power above the air, which lower clocks save

    # Noise and drift.
    tails: str = "normal"
    tail_weight: float = 0.0  # degrees of freedom of Student's t, or sigma of the lognormal
    noise_scale: float = 1.0
    correlation: float = 0.0  # of one reading's noise with the next one's
    spread_scale: float = 1.0  # of what distinguishes one GPU's or node's readings from the next one's
    load_drift: float = 0.0
    room_drift_c: float = 0.0
    drift_period_s: float = 1800.0

    # Steps. Compute against the stage peers' median is 0.990 (1%) to 1.004 (99%) in healthy workers, a worker's own
    # variation from step to step 0.9% (Lin et al., OSDI 2025); fleets differ by 1-2% from node to node.
    node_spread: float = 0.006
    node_spread_limit: float = 0.015
    gpu_spread: float = 0.003
    rank_noise: float = 0.004
    step_noise: float = 0.005
    step_correlation: float = 0.0
    network_noise: float = 0.01
    hiccup_probability: float = 0.0  # that some rank stumbles in a step
    hiccup_steps: float = 0.0  # by how much of a step
    communication: tuple[float, float] = (0.05, 0.14)  # of a step
    data_wait: tuple[float, float] = (0.001, 0.008)
    checkpoint_s: tuple[float, float] = (3.0, 25.0)
    checkpoint_odds: float = 0.3
    announced_odds: float = 0.6
    other_pauses: float = 0.0  # an hour
    other_pause_s: tuple[float, float] = (2.0, 60.0)
    other_pause_busy: float = 0.6
    uneven_experts: float = 0.0  # by how much ranks' work differs, slowly changing
    any_tensor_parallel: bool = False
    spare_nodes: int = 0  # that the job has and does not use

    # Loss.
    loss_noise: float = 0.008  # step to step: large batches differ little
    grad_noise: float = 0.12
    # Production systems suspend a job when loss or gradient norm jump fivefold (ByteRobust, SOSP 2025). A language
    # model that knows nothing has a loss of 11, so that late in training the loss itself cannot grow much more.
    worse_loss: tuple[float, float] = (2.5, 4.5)

    # What counters of healthy hardware do.
    corrected_per_gpu_day: float = 0.3
    replays_per_gpu_day: float = 1.0
    link_errors_per_day: float = 0.5
    congestion_per_s: float = 6.0
    retransmits_per_s: float = 0.15
    pause_bursts: float = 0.02  # share of rows
    pause_height: float = 30.0
    pressure_scale: float = 1.0
    cpu_training: float = 0.13

    # What a fault shows.
    continuous_strength: bool = False
    compute_bound: float = 0.9  # part of a step's compute whose duration is inverse to the clock
    symptom_scale: float = 1.0
    symptom_delay_s: float = 0.0
    symptom_rise: float = 1.0
    symptoms_missing: int = 0  # how many of the symptoms never show
    victims_share: float = 0.0  # of a culprit's counters, on everybody else
    xid_repeats: int = 1
    xid_silent: bool = False
    kernel_delay_s: float = 0.0
    hook_delay_s: float = 0.0

    # Agents and their clocks.
    lost_ratio: float = 0.001
    bursts_per_node_day: float = 2.0
    clock_skew_s: float = 0.02
    jitter_share: float = 0.02
    jitter_limit_s: float = 0.05
    coarse: bool = False  # whole percent, whole watts
    refresh_rows: int = 1  # a source is asked anew in every so many rows
    late_rows: int = 0
    outlier_ratio: float = 0.0
    stuck_per_device_hour: float = 0.0
    absent: frozenset[str] = frozenset()  # metrics that the site does not have

    @property
    def own(self) -> bool:
        """Whether these are the simulator's own numbers."""
        return self.name == "own"

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...], deviation: float, mean: float = 0.0) -> Floats:
        """Return noise of the given standard deviation, times along the first axis."""
        if self.own:
            return normal(rng, shape, deviation, mean)
        noise = self.tail(rng, shape)
        kept = self.correlation
        fresh = np.float32(np.sqrt(1.0 - kept**2))
        for row in range(1, len(noise)):
            noise[row] = kept * noise[row - 1] + fresh * noise[row]
        return np.asarray(noise * np.float32(deviation * self.noise_scale) + np.float32(mean), dtype=np.float32)

    def tail(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Return independent float32 noise of mean 0 and deviation 1, with this physics' tails."""
        if self.tails == "student":
            drawn = rng.standard_t(self.tail_weight, shape) * np.sqrt(1.0 - 2.0 / self.tail_weight)
        elif self.tails == "lognormal":
            square = self.tail_weight**2
            raw = np.exp(self.tail_weight * rng.standard_normal(shape) - square / 2) - 1.0
            drawn = raw / np.sqrt(np.expm1(square))
        else:
            return rng.standard_normal(shape, dtype=np.float32)
        return np.asarray(np.clip(drawn, -TAIL_LIMIT, TAIL_LIMIT), dtype=np.float32)

    def spread(self, rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Floats:
        """Return what distinguishes one GPU (1, N, G), or node (1, N), from the next: factors around 1."""
        if self.own:
            return normal(rng, shape, deviation, 1.0)
        # Half of it is the node's: its air, its board, its supply.
        scale = deviation * self.spread_scale * np.sqrt(0.5)
        node = normal(rng, (*shape[:2], *[1] * (len(shape) - 2)), scale)
        return np.asarray(np.clip(1.0 + node + normal(rng, shape, scale), 0.5, 1.5))

    def load(self, times_s: Floats | float) -> Any:
        """Return the factor by which the job's load differs from its mean at these times."""
        return 1.0 + self.load_drift * np.sin(2 * np.pi * (times_s / self.drift_period_s + self.seed % 97 / 97))

    def room_c(self, times_s: Floats) -> Any:
        """Return by how many degrees the room differs from its mean."""
        return self.room_drift_c * np.sin(2 * np.pi * (times_s / (1.7 * self.drift_period_s) + self.seed % 89 / 89))

    def shown(self, track: Track) -> list[Track]:
        """Return what is seen of a cause: itself, or its symptom in another strength, later, nowhere, on others too."""
        if self.own or track.quantity not in SYMPTOMS:
            return [track]
        rng = stream(self.seed, "missing")
        missing = rng.choice(len(MAY_MISS), self.symptoms_missing, replace=False)
        if any(track.quantity is MAY_MISS[number] for number in missing):
            return []
        rate = track.quantity in RATES
        seen = replace(
            track,
            value=track.value * self.symptom_scale if rate else track.value,
            start_s=track.start_s + self.symptom_delay_s,
            rise_s=track.rise_s * self.symptom_rise,
        )
        if not rate or not self.victims_share or track.nodes is None:
            return [seen]
        others = replace(
            seen,
            nodes=None,
            device=None,
            value=seen.value * self.victims_share,
            start_s=seen.start_s + self.symptom_delay_s,
        )
        return [seen, others]

    def heard_s(self, kind: str, time_s: float) -> list[float]:
        """Return when an event that happens at ``time_s`` is reported: never, once, or again and again."""
        if self.own:
            return [time_s]
        if kind == "xid":
            first_s = time_s + self.kernel_delay_s
            return [] if self.xid_silent else [first_s + 0.7 * number for number in range(self.xid_repeats)]
        if kind in ("gpu_lost", "link_down", "link_up", "oom_kill"):
            return [time_s + self.kernel_delay_s]
        if kind in ("training_error", "process_exit"):
            return [time_s + self.hook_delay_s]
        return [time_s]


# What instruments show of a fault, unlike what makes steps longer. Rates vary in strength and reach others.
RATES = frozenset(
    {Quantity.ECC_CORRECTED_RATE, Quantity.PCIE_REPLAY_RATE, Quantity.NVLINK_ERROR_RATE, Quantity.LINK_ERROR_RATE,
     Quantity.PFC_TX, Quantity.PFC_RX, Quantity.CONGESTION_RATE, Quantity.RETRANSMITS}
)  # fmt: skip
MAY_MISS = (
    Quantity.PCIE_REPLAY_RATE, Quantity.NVLINK_ERROR_RATE, Quantity.LINK_ERROR_RATE, Quantity.PFC_TX, Quantity.PFC_RX,
    Quantity.CONGESTION_RATE, Quantity.RETRANSMITS, Quantity.CPU_PRESSURE, Quantity.IO_PRESSURE, Quantity.IOWAIT,
    Quantity.BLOCKED, Quantity.MEMORY_PRESSURE, Quantity.THROTTLE_BITS, Quantity.ECC_CORRECTED_RATE,
)  # fmt: skip
SYMPTOMS = (
    RATES | set(MAY_MISS) | {Quantity.ECC_UNCORRECTED, Quantity.REMAPPED, Quantity.REMAP_PENDING, Quantity.UTILIZATION}
)

OWN = Physics()
