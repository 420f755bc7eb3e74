"""Sites: which of a run's metrics, events and names their instruments record, and when they read their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from eagle_eye.schema.metrics import METRICS, Scope
from eagle_eye.simulator.arrays import Booleans, Floats, Integers, stream
from eagle_eye.simulator.names import FAULTS
from eagle_eye.simulator.scenario import WrongScenario
from eagle_eye.simulator.second_physics import Choice, Range
from eagle_eye.simulator.simulate import Recording


class RankKnowledge(Enum):
    """What the site knows about the job's ranks."""

    LAYOUT = "layout"  # rank, node, device and the place in the parallel groups: the hook says so
    RANKS = "ranks"  # rank, node and device: the launcher's environment
    NODES = "nodes"  # only the scheduler's list of nodes


@dataclass(frozen=True, slots=True)
class SiteProfile:
    """One kind of site.

    ``metrics`` and ``events`` are what it has. ``scraped``: a Prometheus reads exporters (see below) and XIDs come as
    a gauge of the last one; else an agent reads all. ``hidden`` are the faults that it cannot show, by physics.
    """

    name: str
    help: str
    metrics: frozenset[str]
    events: frozenset[str]
    membership: RankKnowledge
    scraped: bool = False
    hidden: frozenset[str] = frozenset()


_ALL = frozenset(spec.name for spec in METRICS)
_PROFILING = frozenset({"gpu_tensor_active_ratio", "gpu_sm_active_ratio", "gpu_dram_active_ratio"})
_HOOK = frozenset(name for name in _ALL if name.startswith(("train_", "nccl_")))
_HOST_EVENTS = frozenset(
    {"xid", "sxid", "gpu_lost", "machine_check", "kernel_panic", "host_error", "oom_kill", "link_down", "link_up",
     "agent_start", "agent_stop", "job_state"}
)  # fmt: skip
_HOOK_EVENTS = frozenset({"phase", "training_error", "checkpoint_begin", "checkpoint_end", "process_exit"})
# dcgm-exporter's default counters have no throttle reasons, ECC and NVLink error counters, link states or limits.
_DCGM = frozenset(
    {
        "gpu_utilization_ratio",
        "gpu_tensor_active_ratio",
        "gpu_dram_active_ratio",
        "gpu_memory_used_bytes",
        "gpu_power_watts",
        "gpu_temperature_celsius",
        "gpu_memory_temperature_celsius",
        "gpu_sm_clock_hertz",
        "gpu_memory_clock_hertz",
        "gpu_remapped_rows_total",
        "gpu_pcie_rx_bytes_per_second",
        "gpu_pcie_tx_bytes_per_second",
        "gpu_pcie_replays_total",
        "gpu_nvlink_rx_bytes_per_second",
        "gpu_nvlink_tx_bytes_per_second",
    }
)
# node_exporter's default collectors read no PFC pauses and no congestion notifications.
_NODE_EXPORTER = frozenset(
    spec.name
    for spec in METRICS
    if spec.scope is not Scope.DEVICE and "pfc" not in spec.name and "congestion" not in spec.name
)
# Without the hook nobody sees a loss, a gradient, a checksum, an exception, an exit code or a step's parts; nor how
# much work a rank or a step has, so that a slow rank looks like one with more to do, and a slow job like one that
# does something else.
_NEEDS_HOOK = frozenset(
    {
        "silent_data_corruption",
        "loss_not_finite",
        "loss_divergence",
        "loss_spike",
        "out_of_memory",
        "workload_imbalance",
        "recurrent_node",
        "straggler",
        "throughput_drop",
    }
)

PROFILES: tuple[SiteProfile, ...] = (
    SiteProfile("full", "agent, hook and profiling counters", _ALL, _HOST_EVENTS | _HOOK_EVENTS, RankKnowledge.LAYOUT),
    SiteProfile(
        "no_profiling",
        "agent and hook; no tensor, SM and DRAM activity",
        _ALL - _PROFILING,
        _HOST_EVENTS | _HOOK_EVENTS,
        RankKnowledge.LAYOUT,
    ),
    SiteProfile(
        "no_hook",
        "agent alone: nodes, GPUs, the kernel log",
        _ALL - _HOOK,
        _HOST_EVENTS,
        RankKnowledge.RANKS,
        hidden=_NEEDS_HOOK,
    ),
    SiteProfile(
        "remote_write",
        "dcgm-exporter and node_exporter through Prometheus",
        _DCGM | _NODE_EXPORTER,
        frozenset({"xid", "job_state"}),
        RankKnowledge.NODES,
        scraped=True,
        # No XID for certain (exporters may leave it out), no throttle bits, link widths or pauses by which these
        # would differ from a job that is slow or stands still for any other reason.
        hidden=_NEEDS_HOOK
        | {
            "gpu_memory_error",
            "network_hang",
            "nic_degraded",
            "nvlink_degraded",
            "pcie_degraded",
            "network_congestion",
            "process_crash",
        },
    ),
)


def profile(name: str) -> SiteProfile:
    """Return the profile of this name. Raises WrongScenario for an unknown one."""
    for known in PROFILES:
        if known.name == name:
            return known
    raise WrongScenario(f"profile is {name!r}; expected one of {', '.join(p.name for p in PROFILES)}")


def visible_faults(name: str) -> tuple[str, ...]:
    """Return the faults whose evidence a profile keeps, whatever the variant."""
    hidden = profile(name).hidden
    return tuple(fault for fault in FAULTS if fault != "none" and fault not in hidden)


# An agent reads all of a node's sources at once. A Prometheus spreads its targets over their scrape interval, so that
# the exporters of one node are read at different moments, at intervals of their own, and each may miss scrapes that the
# other does not.

# Exporters, by what they read.
GPU_EXPORTER, NODE_EXPORTER = "dcgm-exporter", "node_exporter"
INTERVALS_S: Mapping[str, Choice] = {
    GPU_EXPORTER: Choice((15.0, 30.0), (0.7, 0.3), "15 s in vendors' examples; 30 s is its own collecting interval"),
    NODE_EXPORTER: Choice((15.0, 30.0, 60.0), (0.7, 0.2, 0.1), "15 s in examples to Prometheus' default of a minute"),
}
RANGES: Mapping[str, Range] = {
    "jitter_s": Range(0.001, 0.5, "within 2 ms timestamps are aligned; busy servers are later; assumed", log=True),
    "missed_ratio": Range(0.0003, 0.03, "scrapes that time out, beside the node's lost rows; assumed", log=True),
    "restarts_per_day": Range(0.05, 3.0, "of an exporter: upgrades, evictions, its own crashes; assumed", log=True),
    "restart_s": Range(5.0, 120.0, "from a process to a pod whose image is pulled; assumed", log=True),
}


class Scraping(NamedTuple):
    """How a site's Prometheus scrapes one kind of exporter."""

    interval_s: float
    jitter_s: float  # standard deviation
    missed_ratio: float
    restarts_per_day: float
    restart_s: float


class Reads(NamedTuple):
    """When one source of each node is read: (R, N).

    ``row`` is the recording's row that it shows, ``time`` when, in Unix seconds, ``here`` whether an answer came.
    ``rows`` is over how many rows counters have grown since the last answer.
    """

    row: Integers
    time: Floats
    here: Booleans
    rows: Integers


def with_each_row(recording: Recording) -> Reads:
    """Return the reads of an agent, which writes its clock's time."""
    row = np.broadcast_to(np.arange(len(recording.time))[:, None], recording.time.shape)
    return Reads(row, recording.time, recording.arrived, np.ones_like(row))


def scraping(seed: int, exporter: str) -> Scraping:
    """Return how the site of this seed scrapes an exporter; each number from a stream of its own."""
    choice = INTERVALS_S[exporter]
    every = int(stream(seed, f"{exporter} interval_s").choice(len(choice.values), p=choice.odds))
    drawn = {
        name: span.low * (span.high / span.low) ** float(stream(seed, f"{exporter} {name}").random())
        for name, span in RANGES.items()
    }
    return Scraping(interval_s=choice.values[every], **drawn)


def of_exporter(recording: Recording, exporter: str, how: Scraping) -> Reads:
    """Return the scrapes of one exporter of each node, at moments that Prometheus' clock gives."""
    true_s = recording.true_time - recording.start
    nodes = true_s.shape[1]
    seconds, interval_s = recording.scenario.duration_s, max(how.interval_s, recording.scenario.interval_s)
    count = int(seconds / interval_s)
    rng = stream(recording.scenario.seed, f"{exporter} scrapes")
    offset_s = rng.uniform(0.0, interval_s, nodes)
    late_s = np.abs(rng.normal(0.0, how.jitter_s, (count, nodes)))
    time_s = np.arange(count)[:, None] * interval_s + offset_s + np.minimum(late_s, interval_s / 3)
    row = np.stack([np.searchsorted(true_s[:, n], time_s[:, n], side="right") - 1 for n in range(nodes)], axis=1)
    here = (row >= 0) & (time_s < seconds) & (rng.random(time_s.shape) >= how.missed_ratio)
    for _ in range(int(rng.poisson(how.restarts_per_day * nodes * seconds / 86_400))):
        node, begin_s = int(rng.integers(nodes)), float(rng.uniform(0.0, seconds))
        here[(time_s[:, node] >= begin_s) & (time_s[:, node] < begin_s + how.restart_s), node] = False
    row = np.maximum(row, 0)
    here &= np.take_along_axis(recording.arrived, row, axis=0)
    return Reads(row, np.round(recording.start + time_s, 3), here, _since_last(row, here))


def _since_last(row: Integers, here: Booleans) -> Integers:
    """Return over how many rows a counter has grown since the last answer: (R, N), at least one."""
    answered = np.maximum.accumulate(np.where(here, row, -1), axis=0)
    before = np.vstack([np.full_like(row[:1], -1), answered[:-1]])
    grown: Integers = np.maximum(row - before, 1)
    return grown
