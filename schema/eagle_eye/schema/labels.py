"""What people read for states, metrics and reasons of throttling: one label for each, wherever it is shown. Pure.

The web page has the same table: ``.venv/bin/python -m tests.page.api_types`` writes it from this one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

AWAITING = "awaiting"

# States whose label is their name with spaces are left out.
STATE_LABELS: Mapping[str, str] = MappingProxyType(
    {
        # incidents
        "acting": "action requested",  # as much as is known of one without its action
        "false": "false alarm",
        # actions
        "would_act": "would have acted",
        AWAITING: "awaiting approval",
        # jobs
        "observed": "running",
        "timeout": "timed out",
        # what is on record of a fault, for the next mode of policy
        "suffices": "enough",
        "falls_short": "not yet",
        "acts": "acts already",
    }
)


# Who set something, where that is no person's name and no token's id.
AUTHOR_LABELS: Mapping[str, str] = MappingProxyType(
    {"server": "Eagle Eye (an action that was carried out)", "local": "local (somebody on the server's host)"}
)


def author_label(who: str) -> str:
    """Return what people read for the author of a change."""
    return AUTHOR_LABELS.get(who, who)


def state_label(state: str) -> str:
    """Return what people read for the state."""
    return STATE_LABELS.get(state, state.replace("_", " "))


def shown_state(incident_state: str, action_state: str) -> str:
    """Return the state that an incident is shown in, given that of its newest action ("" for unknown).

    An incident whose action was requested is shown as how far that has come: nobody may have taken it up.
    """
    if incident_state != "acting" or not action_state:
        return incident_state
    return action_state if action_state == AWAITING else f"action_{action_state}"


# Titles of the catalogue's metrics, and of what detectors derive from them or read in logs.
METRIC_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "gpu_utilization_ratio": "GPU utilization",
        "gpu_tensor_active_ratio": "Tensor cores active",
        "gpu_sm_active_ratio": "SMs active",
        "gpu_dram_active_ratio": "GPU memory active",
        "gpu_memory_used_bytes": "GPU memory in use",
        "gpu_power_watts": "GPU power",
        "gpu_power_limit_watts": "GPU power limit",
        "gpu_temperature_celsius": "GPU temperature",
        "gpu_memory_temperature_celsius": "GPU memory temperature",
        "gpu_sm_clock_hertz": "SM clock",
        "gpu_memory_clock_hertz": "GPU memory clock",
        "gpu_throttle_reasons": "Clock held down by",
        "gpu_ecc_corrected_total": "Corrected ECC errors",
        "gpu_ecc_uncorrected_total": "Uncorrected ECC errors",
        "gpu_remapped_rows_total": "Remapped memory rows",
        "gpu_remap_pending": "Row remap pending",
        "gpu_pcie_rx_bytes_per_second": "PCIe received",
        "gpu_pcie_tx_bytes_per_second": "PCIe sent",
        "gpu_pcie_link_width": "PCIe link width",
        "gpu_pcie_link_generation": "PCIe generation",
        "gpu_pcie_replays_total": "PCIe replays",
        "gpu_nvlink_rx_bytes_per_second": "NVLink received",
        "gpu_nvlink_tx_bytes_per_second": "NVLink sent",
        "gpu_nvlink_bytes_per_second": "NVLink received and sent",
        "gpu_nvlink_errors_total": "NVLink errors",
        "gpu_nvlinks_active": "NVLinks up",
        "train_step": "Last finished step",
        "train_step_seconds": "Step time",
        "train_compute_seconds": "Compute time in a step",
        "train_data_wait_seconds": "Wait for data in a step",
        "train_loss": "Loss",
        "train_grad_norm": "Gradient norm",
        "train_local_grad_norm": "Gradient norm before the reduction",
        "train_parameter_checksum": "Checksum of the parameters",
        "train_tokens_per_second": "Throughput",
        "train_log_lines_since_step": "Log lines since a step was read",
        "train_work_units": "Work in a step",
        "train_quorum": "torchft quorum",
        "nccl_sequence": "NCCL collectives enqueued",
        "nccl_completed_sequence": "NCCL collectives completed",
        "nccl_collective_seconds": "Time in collectives in a step",
        "nccl_reduce_scatter_seconds": "Reduce-scatter time",
        "nccl_bus_bandwidth_bytes_per_second": "NCCL bus bandwidth",
        "rank_cpu_seconds_total": "CPU time of the rank",
        "rank_io_bytes_total": "Disk I/O of the rank",
        "rank_blocked_ratio": "Rank blocked in the kernel",
        "rank_stopped_ratio": "Rank stopped by a signal",
        "node_cpu_utilization_ratio": "CPU utilization",
        "node_cpu_steal_ratio": "CPU time stolen by the hypervisor",
        "node_cpu_pressure_ratio": "CPU pressure",
        "node_memory_used_ratio": "Memory in use",
        "node_memory_pressure_ratio": "Memory pressure",
        "node_io_pressure_ratio": "I/O pressure",
        "node_iowait_ratio": "CPU time waiting for I/O",
        "node_blocked_tasks": "Blocked tasks",
        "node_clock_offset_seconds": "Clock offset",
        "node_disk_read_bytes_per_second": "Disk read",
        "node_disk_write_bytes_per_second": "Disk written",
        "node_network_rx_bytes_per_second": "Network received",
        "node_network_tx_bytes_per_second": "Network sent",
        "node_rdma_rx_bytes_per_second": "RDMA received",
        "node_rdma_tx_bytes_per_second": "RDMA sent",
        "node_rdma_errors_total": "RDMA errors",
        "node_rdma_link_downed_total": "RDMA links gone down",
        "node_pfc_tx_pause_packets_per_second": "PFC pauses sent",
        "node_pfc_rx_pause_packets_per_second": "PFC pauses received",
        "node_congestion_notifications_total": "Congestion notifications",
        "node_tcp_retransmits_per_second": "TCP retransmits",
        "node_mounts_unresponsive": "Mounts that do not answer",
        "node_temperature_celsius": "Node temperature",
        "memory_checkpoint_step": "Newest step in memory",
        "memory_checkpoint_age_steps": "Steps since the newest one in memory",
        "memory_checkpoint_previous_step": "Step in memory before the newest",
        "memory_checkpoint_previous_age_seconds": "Age of the step in memory before the newest",
        "memory_checkpoint_second_oldest_step": "Second oldest step in memory",
        "memory_checkpoint_second_oldest_age_seconds": "Age of the second oldest step in memory",
        "memory_checkpoint_oldest_step": "Oldest step in memory",
        "memory_checkpoint_oldest_age_seconds": "Age of the oldest step in memory",
        "memory_checkpoint_copies": "Copies in memory",
        "memory_checkpoint_copies_wanted": "Copies wanted in memory",
        "memory_checkpoint_captures_total": "Steps captured in memory",
        "memory_checkpoint_skips_total": "Steps not captured in memory",
        "memory_checkpoint_blocked_seconds_total": "Ranks held up by captures",
        "memory_checkpoint_bytes": "Memory reserved for copies",
        "memory_checkpoint_persisted_step": "Newest step on storage",
        "memory_checkpoint_persist_seconds": "Writing a step to storage for",
        "memory_checkpoint_damaged_total": "Damaged copies in memory",
        "link_up": "Link up",
        "link_rx_bytes_per_second": "Link received",
        "link_tx_bytes_per_second": "Link sent",
        "link_errors_total": "Link errors",
        "link_downed_total": "Link went down",
        "link_pfc_tx_pause_packets_per_second": "PFC pauses sent by the link",
        "link_pfc_rx_pause_packets_per_second": "PFC pauses received by the link",
        # derived by detectors
        "change_point_likelihood": "Likelihood of a change",
        "culprit_incidents": "Incidents that accused it",
        "deviating_steps": "Steps that deviate",
        "gpu_idle_seconds": "GPU idle for",
        "gpu_silence_seconds": "GPU not reported for",
        "learned_alarms_per_1000_node_days": "Alarms of the learned model per 1,000 node-days",
        "lost_step_share": "Share of each step lost",
        "nccl_sequence_lag": "Behind the furthest rank",
        "node_silence_seconds": "Node silent for",
        "rank_silence_seconds": "Rank silent for",
        "ranks_missing": "Ranks missing",
        "relative_compute": "Compute time against its peers",
        "job_activity_slowdown": "Job slower than before, by its GPUs' activity",
        "slowest_node_share": "Share of steps in which it is the slowest",
        "steps_since_change": "Steps since the change",
        "train_loss_zero_ranks": "Ranks with a loss of zero",
        "train_step_standstill_seconds": "No step for",
        "unreached_starts": "Starts that did not reach it",
        # read in logs
        "error": "Error",
        "exception": "Exception",
        "gpu_lost": "GPU lost",
        "host_error": "Host error",
        "kernel_panic": "Kernel panic",
        "link_down": "Link down",
        "machine_check": "Machine check",
        "nccl_warning": "Warning of NCCL",
        "oom_kill": "Killed for lack of memory",
        "process_exit": "Process ended",
        "process_exits": "Processes ended",
        "sxid": "SXid of an NVSwitch",
        "traceback": "Traceback",
        "training_error": "Error of the training program",
        "xid": "XID",
    }
)
METRIC_ENDINGS: Mapping[str, str] = MappingProxyType(
    {
        "_usual": ", usual",
        "_reports_up": ", reported to rise",
        "_not_finite_ranks": ", ranks where it is not finite",
        "_over_before": ", relative to before",
    }
)
# Of a chart that draws something else than a metric's values, by its form.
CHART_ENDINGS: Mapping[str, str] = MappingProxyType(
    {"growth": ", increase since the chart begins", "behind": ", behind the furthest rank"}
)

# NVML's clocks-event-reasons (nvml.h), lowest bit first.
THROTTLE_REASONS: Mapping[int, str] = MappingProxyType(
    {
        0x1: "idle GPU",
        0x2: "clocks set by a user",
        0x4: "software power cap",
        0x8: "hardware slowdown",
        0x10: "sync boost",
        0x20: "software thermal slowdown",
        0x40: "hardware thermal slowdown",
        0x80: "hardware power brake",
        0x100: "display clock setting",
    }
)


def metric_label(name: str) -> str:
    """Return the title of a metric, or of what a detector derived from one."""
    for ending, words in METRIC_ENDINGS.items():
        base = name.removesuffix(ending)
        if base != name and base in METRIC_LABELS:
            return METRIC_LABELS[base] + words
    return METRIC_LABELS.get(name, name.replace("_", " "))


def chart_label(name: str, form: str) -> str:
    """Return the title of a chart that draws a metric in this form."""
    return metric_label(name) + CHART_ENDINGS.get(form, "")


def throttled_by(bits: int) -> str:
    """Return the reasons of a bit mask of clocks-event-reasons, "no reason" for none."""
    known = [reason for bit, reason in THROTTLE_REASONS.items() if bits & bit]
    rest = bits & ~sum(THROTTLE_REASONS)
    return ", ".join([*known, *([f"bits {rest:#x}"] if rest else [])]) or "no reason"


_UNITS = {
    "seconds": "s",
    "bytes": "B",
    "bytes_per_second": "B/s",
    "hertz": "Hz",
    "watts": "W",
    "celsius": "°C",
    "ratio": "",
    "1": "",
    "bool": "",
    "bitmask": "",
    "steps": "",
}
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SCALED = frozenset({"bytes", "bytes_per_second", "hertz"})
_COUNTED = frozenset({"collectives", "errors", "ranks"})  # one of them is singular


def number(value: float, unit: str) -> str:
    """Return the value in common notation, with its unit."""
    word = _UNITS.get(unit, unit.replace("_", " "))
    if unit in _COUNTED and value == 1:
        word = word.removesuffix("s")
    if not math.isfinite(value):
        return "not finite"
    for size, prefix in _PREFIXES if unit in _SCALED else ():
        if abs(value) >= size:
            return f"{_short(value / size)} {prefix}{word}"
    return f"{_short(value)} {word}".rstrip()


def figure(value: float | str, unit: str) -> str:
    """Return an observed value with its unit; a bit mask, also one in hexadecimal, as the reasons that it holds."""
    if unit == "bitmask" and isinstance(value, str) and value.startswith("0x"):
        value = int(value, 16)
    if isinstance(value, str):
        return value
    return throttled_by(int(value)) if unit == "bitmask" else number(value, unit)


def _short(value: float) -> str:
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.4g}"
