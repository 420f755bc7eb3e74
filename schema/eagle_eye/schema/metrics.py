"""The metric catalogue: every metric that may cross the wire, as one table.

A metric that is not in this table does not exist: the agent may not send it, the server does not
store it, dashboards may not ask for it. Names follow Prometheus: base units, ``_total`` for
counters, ratios between 0 and 1.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

PROMETHEUS_PREFIX = "eagle_eye_"


class Scope(str, Enum):
    """What one row of a metric describes."""

    DEVICE = "device"  # one GPU, or the rank that uses it; without GPUs, one local rank
    NODE = "node"
    LINK = "link"  # one RDMA port or network interface


class MetricKind(str, Enum):
    """How a metric moves; counters and sequences are kept as float64, the rest as float32."""

    GAUGE = "gauge"
    COUNTER = "counter"  # only grows, until its source restarts
    SEQUENCE = "sequence"  # a position in an ordered stream: a step, a collective
    MASK = "mask"  # a bit set


class MetricSpec(NamedTuple):
    """One metric: its name, unit, kind, scope and what it says."""

    name: str
    unit: str
    kind: MetricKind
    scope: Scope
    help: str

    @property
    def exact(self) -> bool:
        """Whether float32 would lose information (it stops counting at 2**24)."""
        return self.kind in (MetricKind.COUNTER, MetricKind.SEQUENCE)


def _device(name: str, unit: str, text: str, kind: MetricKind = MetricKind.GAUGE) -> MetricSpec:
    return MetricSpec(name, unit, kind, Scope.DEVICE, text)


def _node(name: str, unit: str, text: str, kind: MetricKind = MetricKind.GAUGE) -> MetricSpec:
    return MetricSpec(name, unit, kind, Scope.NODE, text)


def _link(name: str, unit: str, text: str, kind: MetricKind = MetricKind.GAUGE) -> MetricSpec:
    return MetricSpec(name, unit, kind, Scope.LINK, text)


METRICS: tuple[MetricSpec, ...] = (
    _device("gpu_utilization_ratio", "ratio", "Share of time with any kernel running; spinning NCCL counts."),
    _device("gpu_tensor_active_ratio", "ratio", "Share of cycles with the tensor pipes active."),
    _device("gpu_sm_active_ratio", "ratio", "Share of cycles with at least one warp on an SM."),
    _device("gpu_dram_active_ratio", "ratio", "Share of cycles with device memory transferring."),
    _device("gpu_memory_used_bytes", "bytes", "Device memory in use."),
    _device("gpu_power_watts", "watts", "Power drawn."),
    _device("gpu_power_limit_watts", "watts", "Power limit in force."),
    _device("gpu_temperature_celsius", "celsius", "Core temperature."),
    _device("gpu_memory_temperature_celsius", "celsius", "Memory temperature."),
    _device("gpu_sm_clock_hertz", "hertz", "SM clock."),
    _device("gpu_memory_clock_hertz", "hertz", "Memory clock."),
    _device("gpu_throttle_reasons", "bitmask", "NVML's clocks-event-reasons bit mask.", MetricKind.MASK),
    _device("gpu_ecc_corrected_total", "errors", "Corrected ECC errors since boot.", MetricKind.COUNTER),
    _device("gpu_ecc_uncorrected_total", "errors", "Uncorrected ECC errors since boot.", MetricKind.COUNTER),
    _device("gpu_remapped_rows_total", "rows", "Memory rows remapped in the GPU's life.", MetricKind.COUNTER),
    _device("gpu_remap_pending", "bool", "1 when a row remap waits for a GPU reset."),
    _device("gpu_pcie_rx_bytes_per_second", "bytes_per_second", "Received over PCIe."),
    _device("gpu_pcie_tx_bytes_per_second", "bytes_per_second", "Sent over PCIe."),
    _device("gpu_pcie_link_width", "lanes", "PCIe lanes in use."),
    _device("gpu_pcie_link_generation", "generation", "PCIe generation in use."),
    _device("gpu_pcie_replays_total", "replays", "PCIe packets sent again.", MetricKind.COUNTER),
    _device("gpu_nvlink_rx_bytes_per_second", "bytes_per_second", "Received over all NVLinks."),
    _device("gpu_nvlink_tx_bytes_per_second", "bytes_per_second", "Sent over all NVLinks."),
    _device(
        "gpu_nvlink_bytes_per_second", "bytes_per_second", "Received and sent over all NVLinks, where the sum is known."
    ),
    _device("gpu_nvlink_errors_total", "errors", "NVLink errors over all links.", MetricKind.COUNTER),
    _device("gpu_nvlinks_active", "links", "NVLinks that are up."),
    _device("train_step", "steps", "Last finished training step.", MetricKind.SEQUENCE),
    _device("train_step_seconds", "seconds", "Duration of a step."),
    _device("train_compute_seconds", "seconds", "Part of a step in neither a collective nor a wait for data."),
    _device("train_data_wait_seconds", "seconds", "Part of a step that waited for data."),
    _device("train_loss", "1", "Loss as the rank sees it; +inf when it was not finite."),
    _device("train_grad_norm", "1", "Gradient norm after the reduction; +inf when it was not finite."),
    _device("train_local_grad_norm", "1", "Gradient norm before the reduction; +inf when it was not finite."),
    _device("train_parameter_checksum", "1", "Must agree between data-parallel replicas.", MetricKind.SEQUENCE),
    _device("train_tokens_per_second", "tokens_per_second", "Tokens the rank consumed."),
    _device("train_log_lines_since_step", "lines", "Lines of the rank's log since the last one that names a step."),
    _device("train_work_units", "1", "What the step's work should scale with."),
    _device("train_quorum", "quorums", "Quorum of replica groups that the rank is in (torchft).", MetricKind.SEQUENCE),
    _device("nccl_sequence", "collectives", "Highest collective enqueued, widest group.", MetricKind.SEQUENCE),
    _device(
        "nccl_completed_sequence", "collectives", "Highest collective completed, widest group.", MetricKind.SEQUENCE
    ),
    _device("nccl_collective_seconds", "seconds", "Part of a step spent in collectives."),
    _device("nccl_reduce_scatter_seconds", "seconds", "Duration of a reduce-scatter."),
    _device("nccl_bus_bandwidth_bytes_per_second", "bytes_per_second", "Bus bandwidth of collectives."),
    _device(
        "rank_cpu_seconds_total", "seconds", "CPU time of the rank's process and its children.", MetricKind.COUNTER
    ),
    _device(
        "rank_io_bytes_total", "bytes", "Read and written by the rank's process and its children.", MetricKind.COUNTER
    ),
    _device("rank_blocked_ratio", "ratio", "1 when the process is held by the kernel (uninterruptible sleep)."),
    _device("rank_stopped_ratio", "ratio", "1 when a silent rank's process is stopped by a signal, 0 when it is not."),
    _node("node_cpu_utilization_ratio", "ratio", "Busy share of all CPUs."),
    _node("node_cpu_steal_ratio", "ratio", "Share of CPU time stolen by the hypervisor."),
    _node("node_cpu_pressure_ratio", "ratio", "Share of time some task waited for a CPU (PSI)."),
    _node("node_memory_used_ratio", "ratio", "Memory in use."),
    _node("node_memory_pressure_ratio", "ratio", "Share of time some task waited for memory (PSI)."),
    _node("node_io_pressure_ratio", "ratio", "Share of time some task waited for I/O (PSI)."),
    _node("node_iowait_ratio", "ratio", "Share of CPU time idle with I/O outstanding."),
    _node("node_blocked_tasks", "tasks", "Tasks in uninterruptible sleep."),
    _node("node_clock_offset_seconds", "seconds", "Node clock minus true time."),
    _node("node_disk_read_bytes_per_second", "bytes_per_second", "Read from disks."),
    _node("node_disk_write_bytes_per_second", "bytes_per_second", "Written to disks."),
    _node("node_network_rx_bytes_per_second", "bytes_per_second", "Received, all interfaces but loopback."),
    _node("node_network_tx_bytes_per_second", "bytes_per_second", "Sent, all interfaces but loopback."),
    _node("node_rdma_rx_bytes_per_second", "bytes_per_second", "Received over RDMA, sum of ports."),
    _node("node_rdma_tx_bytes_per_second", "bytes_per_second", "Sent over RDMA, sum of ports."),
    _node("node_rdma_errors_total", "errors", "RDMA errors, sum of ports.", MetricKind.COUNTER),
    _node("node_rdma_link_downed_total", "events", "RDMA links gone down, sum of ports.", MetricKind.COUNTER),
    _node("node_pfc_tx_pause_packets_per_second", "packets_per_second", "PFC pauses sent, sum of ports."),
    _node("node_pfc_rx_pause_packets_per_second", "packets_per_second", "PFC pauses received, sum of ports."),
    _node("node_congestion_notifications_total", "packets", "Congestion notifications.", MetricKind.COUNTER),
    _node("node_tcp_retransmits_per_second", "segments_per_second", "TCP segments sent again."),
    _node("node_mounts_unresponsive", "mounts", "Network filesystems that do not answer."),
    _node("node_temperature_celsius", "celsius", "Hottest thermal zone or CPU sensor."),
    _node("memory_checkpoint_step", "steps", "Newest step that is whole in the nodes' memory.", MetricKind.SEQUENCE),
    _node("memory_checkpoint_age_steps", "steps", "Steps that ranks have finished since that one."),
    _node("memory_checkpoint_previous_step", "steps", "Newest whole step before that one.", MetricKind.SEQUENCE),
    _node("memory_checkpoint_previous_age_seconds", "seconds", "How long ago this node captured it."),
    _node("memory_checkpoint_second_oldest_step", "steps", "Second oldest whole step in memory.", MetricKind.SEQUENCE),
    _node("memory_checkpoint_second_oldest_age_seconds", "seconds", "How long ago this node captured it."),
    _node("memory_checkpoint_oldest_step", "steps", "Oldest whole step in memory.", MetricKind.SEQUENCE),
    _node("memory_checkpoint_oldest_age_seconds", "seconds", "How long ago this node captured it."),
    _node("memory_checkpoint_copies", "copies", "Verified shards of that step here, other nodes' too."),
    _node("memory_checkpoint_copies_wanted", "copies", "How many there should be."),
    _node("memory_checkpoint_captures_total", "captures", "Steps captured, of each rank.", MetricKind.COUNTER),
    _node(
        "memory_checkpoint_skips_total", "captures", "Steps that were not captured, of each rank.", MetricKind.COUNTER
    ),
    _node(
        "memory_checkpoint_blocked_seconds_total", "seconds", "Ranks held up by captures, summed.", MetricKind.COUNTER
    ),
    _node("memory_checkpoint_bytes", "bytes", "Shared memory reserved for copies."),
    _node(
        "memory_checkpoint_persisted_step",
        "steps",
        "Newest step on storage; of a job's first node.",
        MetricKind.SEQUENCE,
    ),
    _node(
        "memory_checkpoint_persist_seconds", "seconds", "For how long it has been writing a step to storage; 0: not."
    ),
    _node("memory_checkpoint_damaged_total", "copies", "Copies found damaged, and removed.", MetricKind.COUNTER),
    _link("link_up", "bool", "1 when the link is up."),
    _link("link_rx_bytes_per_second", "bytes_per_second", "Received."),
    _link("link_tx_bytes_per_second", "bytes_per_second", "Sent."),
    _link("link_errors_total", "errors", "Errors of all kinds.", MetricKind.COUNTER),
    _link("link_downed_total", "events", "Times the link went down.", MetricKind.COUNTER),
    _link("link_pfc_tx_pause_packets_per_second", "packets_per_second", "PFC pauses sent."),
    _link("link_pfc_rx_pause_packets_per_second", "packets_per_second", "PFC pauses received."),
)

BY_NAME = MappingProxyType({spec.name: spec for spec in METRICS})


def names(scope: Scope) -> tuple[str, ...]:
    """Return the names of a scope's metrics, in catalogue order."""
    return tuple(spec.name for spec in METRICS if spec.scope is scope)
