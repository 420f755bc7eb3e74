"""Site profiles: which of a run's metrics, events and names the site's instruments record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from eagle_eye.schema.metrics import METRICS, Scope
from eagle_eye.simulator.names import FAULTS
from eagle_eye.simulator.scenario import WrongScenario


class RankKnowledge(Enum):
    """What the site knows about the job's ranks."""

    LAYOUT = "layout"  # rank, node, device and the place in the parallel groups: the hook says so
    RANKS = "ranks"  # rank, node and device: the launcher's environment
    NODES = "nodes"  # only the scheduler's list of nodes


@dataclass(frozen=True, slots=True)
class SiteProfile:
    """One kind of site.

    ``metrics`` and ``events`` are what it has. ``scraped``: a Prometheus reads exporters (reads.py) and XIDs come as
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
