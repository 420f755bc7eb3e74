"""The second physics: shapes and parameters drawn for each trace, to measure how overfitted detectors are to the first.

Nothing is tuned on it. Its ranges come from papers, vendors and recorded data, each with its reason, never from a
detector's threshold; where no number is published the reason says what was assumed. Its instruments err, too: readings
are stale, coarse, stuck or wrong, and metrics are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.schema.metrics import BY_NAME, MetricKind
from eagle_eye.simulator.arrays import Floats, Integers, stream
from eagle_eye.simulator.physics import OWN, Physics
from eagle_eye.simulator.scenario import Scenario


class Range(NamedTuple):
    """Where a number of the second physics is drawn from; ``log``: evenly in its logarithm."""

    low: float
    high: float
    why: str
    log: bool = False


class Choice(NamedTuple):
    """What one of several is drawn from, with its odds."""

    values: tuple[Any, ...]
    odds: tuple[float, ...]
    why: str


class Optional(NamedTuple):
    """Metrics that a site may lack, and in which share of traces it does."""

    metrics: tuple[str, ...]
    share: float
    why: str


RANGES: Mapping[str, Range] = {
    "busy_sm": Range(0.45, 0.97, "DCGM's SM activity of training: below 1 by kernel gaps and tails; assumed width"),
    "busy_dram": Range(0.10, 0.75, "by batch size and fusion: compute-bound to memory-bound; assumed width"),
    "full_power": Range(0.70, 1.02, "H100 SXM trains at 650-700 of 700 W (vendors); less where memory-bound"),
    "spin_power": Range(0.17, 0.72, "NCCL's spinning kernels at 25-75% of full power, idle being a tenth; assumed"),
    "kept_sm": Range(0.05, 0.90, "of the busy activity, kept by NCCL's kernels while they spin; assumed"),
    "kept_dram": Range(0.05, 0.90, "the same of device memory, by where a protocol polls; assumed"),
    "tensor_low": Range(0.12, 0.60, "MegaScale: 55% model FLOPS use; less for small models"),
    "inlet_c": Range(16.0, 34.0, "cold to warm aisles; assumed"),
    "core_rise_c": Range(18.0, 44.0, "liquid to air: Delta's H100 run at 37 C on average at 41% use; hot ones assumed"),
    "memory_rise_c": Range(28.0, 58.0, "an idle A100 of a public log: core 28 C, memory 45 C; assumed width"),
    "cooling_s": Range(5.0, 60.0, "water blocks to large air coolers; assumed", log=True),
    "memory_cooling_s": Range(15.0, 150.0, "slower than the core's; assumed", log=True),
    "limit_c": Range(83.0, 92.0, "clocks give at 83-87 C, by other sources 84-95 C"),
    "noise_scale": Range(
        0.7, 4.0, "own noise is 0.8-1.5%; recorded step times vary by 1-2.3% within a worker", log=True
    ),
    "correlation": Range(0.0, 0.9, "lag-1 correlation of hosts' metrics in SMD: 0.14-0.9, of steps at Alibaba 0.5-0.9"),
    "spread_scale": Range(1.0, 5.0, "several percent between GPUs of a fleet, where own spreads are 1-5%", log=True),
    "load_drift": Range(0.0, 0.04, "daily swing of 1-2% at Llama 3; more where batches vary"),
    "room_drift_c": Range(0.0, 4.0, "air conditioning that switches; assumed"),
    "drift_period_s": Range(300.0, 7200.0, "from a chiller's cycle to hours; assumed", log=True),
    "node_spread": Range(0.003, 0.012, "stage peers within 0.990-1.004 in public timelines, fleets 1-2% apart"),
    "gpu_spread": Range(0.001, 0.006, "as above, inside a node"),
    "rank_noise": Range(0.002, 0.023, "within-worker variation 0.9-2.4% (ByteDance), 1.0-2.3% (Alibaba)", log=True),
    "step_noise": Range(0.003, 0.03, "whole steps: 0.5% (fixed length) to 2.3%; MLPerf logs alike", log=True),
    "step_correlation": Range(0.0, 0.85, "lag-1 correlation of Alibaba's workers: 0.52-0.88"),
    "network_noise": Range(0.01, 0.25, "collectives vary with others' traffic; assumed", log=True),
    "hiccup_probability": Range(0.0005, 0.02, "collector pauses, page faults: every 50th to 2,000th step", log=True),
    "hiccup_steps": Range(0.1, 2.0, "a stumble of a tenth of a step to two steps; assumed", log=True),
    "communication_low": Range(0.02, 0.15, "1% to a third of a step is exposed communication, by size and fabric"),
    "data_wait_high": Range(0.002, 0.06, "prefetched to barely keeping up; assumed", log=True),
    "checkpoint_high": Range(
        8.0, 90.0, "asynchronous seconds to 49 s (faults' table) and more on slow storage", log=True
    ),
    "checkpoint_odds": Range(0.2, 0.7, "of ten-minute traces that hold one; intervals of minutes to an hour"),
    "announced_odds": Range(0.2, 0.9, "loops that say what they do, and those that do not"),
    "other_pauses": Range(0.5, 12.0, "evaluations and collections an hour", log=True),
    "other_pause_high": Range(5.0, 90.0, "an evaluation takes seconds to minutes", log=True),
    "other_pause_busy": Range(0.0, 0.9, "evaluation computes, loading and compiling do not"),
    "loss_noise": Range(0.002, 0.04, "large batches to small ones", log=True),
    "grad_noise": Range(0.05, 0.35, "the same of gradient norms", log=True),
    "corrected_per_gpu_day": Range(0.03, 30.0, "memory differs by orders of magnitude between modules", log=True),
    "replays_per_gpu_day": Range(0.1, 200.0, "0 since reset on good boards, bursts on others", log=True),
    "link_errors_per_day": Range(0.05, 50.0, "symbol errors of cables and optics", log=True),
    "congestion_per_s": Range(0.05, 150.0, "none on InfiniBand to hundreds on shared Ethernet", log=True),
    "retransmits_per_s": Range(0.02, 5.0, "management networks; assumed", log=True),
    "pause_bursts": Range(0.001, 0.15, "share of readings with PFC pauses on a healthy fabric", log=True),
    "pause_height": Range(5.0, 300.0, "packets a second in such a burst", log=True),
    "pressure_scale": Range(0.3, 12.0, "hosts that do little else, and busy ones", log=True),
    "cpu_training": Range(0.04, 0.5, "192 cores with light loaders to 64 with heavy ones"),
    "compute_bound": Range(0.55, 1.0, "at 85 C 5-10% of the clock is lost, at 90 C 30-40%: slower by less or as much"),
    "symptom_scale": Range(0.15, 4.0, "counters' units and sampling differ by vendor", log=True),
    "symptom_delay_s": Range(0.0, 15.0, "exporters cache for up to 30 s, drivers for seconds"),
    "symptom_rise": Range(0.2, 4.0, "how steeply it grows, against own", log=True),
    "kernel_delay_s": Range(0.05, 8.0, "log shipping: at once to seconds", log=True),
    "hook_delay_s": Range(0.02, 6.0, "exceptions unwind, launchers poll", log=True),
    "lost_ratio": Range(0.0002, 0.015, "scrapes that fail", log=True),
    "bursts_per_node_day": Range(1.0, 40.0, "several in a row", log=True),
    "clock_skew_s": Range(0.001, 0.4, "PTP to lazy NTP", log=True),
    "jitter_share": Range(0.01, 0.2, "of the interval", log=True),
    "outlier_ratio": Range(1e-6, 3e-4, "readings of 0 or beyond what is possible; assumed", log=True),
    "stuck_per_device_hour": Range(0.001, 0.3, "a driver that answers with its last value; assumed", log=True),
}
CHOICES: Mapping[str, Choice] = {
    "waits_spin": Choice(
        (True, False), (0.75, 0.25), "NCCL spins; blocking waits and other libraries leave the GPU idle"
    ),
    "tails": Choice(("student", "lognormal"), (0.6, 0.4), "hosts' metrics in SMD: kurtosis 5 to several hundred"),
    "uneven_experts": Choice(
        (0.0, 0.03, 0.08, 0.15), (0.7, 0.1, 0.1, 0.1), "dense, and mixtures of experts by how well they are balanced"
    ),
    "spare_nodes": Choice((0, 1, 2), (0.8, 0.15, 0.05), "warm standbys: 2-4 in 1,024 nodes; small jobs keep one"),
    "symptoms_missing": Choice((0, 1, 2, 3), (0.4, 0.3, 0.2, 0.1), "not every counter moves"),
    "victims_share": Choice((0.0, 0.05, 0.3), (0.5, 0.3, 0.2), "pauses, retries and notifications reach neighbours"),
    "xid_repeats": Choice((1, 3, 25), (0.6, 0.25, 0.15), "one node logged 800,000 lines, 29 of them distinct"),
    "xid_silent": Choice((False, True), (0.88, 0.12), "exporters and containers without the kernel's log"),
    "coarse": Choice((False, True), (0.5, 0.5), "NVML's percent and watts; DCGM's fractions"),
    "refresh_rows": Choice((1, 2, 3), (0.6, 0.25, 0.15), "sources slower than the agent: a value repeats"),
    "late_rows": Choice((0, 1), (0.75, 0.25), "what an exporter answers may be a reading older"),
}
OPTIONAL: tuple[Optional, ...] = (
    Optional(("gpu_tensor_active_ratio",), 0.15, "profiling counters need privileges"),
    Optional(("gpu_sm_active_ratio",), 0.2, "off by default in dcgm-exporter"),
    Optional(("gpu_dram_active_ratio",), 0.15, "profiling counters need privileges"),
    Optional(("gpu_memory_temperature_celsius",), 0.3, "not on every board"),
    Optional(("gpu_throttle_reasons",), 0.2, "off by default in dcgm-exporter"),
    Optional(("gpu_power_limit_watts",), 0.3, "no field of dcgm-exporter's defaults"),
    Optional(("gpu_pcie_link_width", "gpu_pcie_link_generation"), 0.2, "no field of dcgm-exporter's defaults"),
    Optional(("gpu_pcie_replays_total",), 0.1, "older drivers"),
    Optional(("gpu_nvlink_errors_total",), 0.2, "off by default in dcgm-exporter"),
    Optional(("gpu_nvlinks_active",), 0.2, "no field of dcgm-exporter's defaults"),
    Optional(("gpu_ecc_corrected_total",), 0.2, "off by default in dcgm-exporter"),
    Optional(
        ("node_cpu_pressure_ratio", "node_io_pressure_ratio", "node_memory_pressure_ratio"), 0.3, "kernels without PSI"
    ),
    Optional(("node_cpu_steal_ratio",), 0.1, "bare metal has none"),
    Optional(("node_blocked_tasks", "node_mounts_unresponsive"), 0.15, "sites without the collector"),
    Optional(
        (
            "node_pfc_tx_pause_packets_per_second", "node_pfc_rx_pause_packets_per_second",
            "link_pfc_tx_pause_packets_per_second", "link_pfc_rx_pause_packets_per_second",
        ), 0.35, "InfiniBand has none",
    ),
    Optional(("node_congestion_notifications_total",), 0.3, "vendor counters"),
    Optional(("node_tcp_retransmits_per_second",), 0.15, "sites without the collector"),
    Optional(("node_clock_offset_seconds",), 0.3, "sites without the collector"),
    Optional(("node_temperature_celsius",), 0.3, "no sensor in containers"),
    Optional(("nccl_reduce_scatter_seconds", "nccl_bus_bandwidth_bytes_per_second"), 0.35, "needs the profiler plugin"),
    Optional(("nccl_collective_seconds",), 0.25, "needs the hook's events"),
    Optional(("nccl_sequence", "nccl_completed_sequence"), 0.15, "needs the flight recorder"),
    Optional(("train_data_wait_seconds",), 0.15, "loops that do not say"),
    Optional(("train_tokens_per_second",), 0.25, "loops that do not say"),
)  # fmt: skip


def physics_of(scenario: Scenario) -> Physics:
    """Return the physics of a scenario."""
    return OWN if scenario.physics == OWN.name else drawn(scenario.seed)


@lru_cache(maxsize=64)
def drawn(seed: int) -> Physics:
    """Return the second physics as this seed draws it; each number from a stream of its own."""
    found: dict[str, Any] = {}
    for name, span in RANGES.items():
        share = float(stream(seed, f"physics {name}").random())
        ratio = span.high / span.low if span.log else 0.0
        found[name] = span.low * ratio**share if span.log else span.low + (span.high - span.low) * share
    for name, choice in CHOICES.items():
        number = int(stream(seed, f"physics {name}").choice(len(choice.values), p=choice.odds))
        found[name] = choice.values[number]
    student = found["tails"] == "student"
    weight = float(stream(seed, "physics tail weight").random())
    base_c = found["inlet_c"] + found["core_rise_c"] * found["full_power"]
    heat_c = max(found.pop("limit_c") - base_c, 3.0)
    tensor, communication = found.pop("tensor_low"), found.pop("communication_low")
    return Physics(
        name="second",
        seed=seed,
        # A fourth moment that does not exist (t with 2.5 degrees) to one near the normal's.
        tail_weight=2.5 + 4.5 * weight if student else 0.3 + 0.6 * weight,
        spin_sm=found["busy_sm"] * found.pop("kept_sm") * found["waits_spin"],
        spin_dram=found["busy_dram"] * found.pop("kept_dram") * found["waits_spin"],
        spin_power=found.pop("spin_power") * (1.0 if found["waits_spin"] else 0.08),
        spin_utilization=1.0 if found["waits_spin"] else 0.04,
        tensor_active=(tensor, min(tensor + 0.1, 0.7)),
        heat_c=(heat_c, heat_c + 3.0),
        heat_s=(5.0, 200.0),  # from a pump that stops to a filter that clogs; assumed
        lighter_c=0.85 * found["core_rise_c"],
        communication=(communication, communication + 0.15),
        data_wait=(0.0002, found.pop("data_wait_high")),
        checkpoint_s=(2.0, found.pop("checkpoint_high")),
        other_pause_s=(1.0, found.pop("other_pause_high")),
        node_spread_limit=3 * found["node_spread"],
        jitter_limit_s=15.0,  # none but the share
        worse_loss=(2.0, 5.0),  # up to ByteRobust's fivefold
        absent=_absent(seed),
        continuous_strength=True,
        any_tensor_parallel=True,
        **found,
    )


def _absent(seed: int) -> frozenset[str]:
    """Return the metrics that this trace's site does not have."""
    rng = stream(seed, "absent")
    return frozenset(name for part in OPTIONAL if rng.random() < part.share for name in part.metrics)


WHOLE_PERCENT = ("gpu_utilization_ratio", "gpu_tensor_active_ratio", "gpu_sm_active_ratio", "gpu_dram_active_ratio")
STUCK_S = (10.0, 120.0)
SOURCES = ("gpu_", "node_", "link_")  # what is asked apart; the training hook reports by itself


def read_instruments(values: dict[str, Floats], physics: Physics, interval_s: float) -> dict[str, Floats]:
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
