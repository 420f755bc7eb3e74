"""One node: its GPUs, its host, its network, and what was found on it."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.grafana.source.boards import Dashboard, Section, board
from dashboards.grafana.source.parts import (
    GREEN,
    ID_PX,
    MOMENT,
    MOMENT_PX,
    RED,
    YELLOW,
    Column,
    Panel,
    Q,
    Query,
    counted,
    lines,
    number,
    rows,
)

NODE = '{job=~"$job", node="$node"}'


def build() -> Dashboard:
    """Return the dashboard."""
    return board(
        "node",
        "Eagle Eye / Node",
        "One node's GPUs, host and network.",
        [
            Section("Now", _now()),
            Section("GPUs", _gpus()),
            Section("Errors and links", _errors()),
            Section("Host", _host()),
            Section("Network", _network()),
            Section("Trouble", _trouble()),
        ],
        job=True,
        node=True,
        span="now-3h",
    )


def each(metric: str, legend: str = "GPU {{device}}") -> list[Query]:
    """Return a series for each of the node's devices."""
    return [Query(f"max by (device) ({Q}{metric}{NODE})", legend)]


def grown(metric: str, by: str = "device") -> str:
    """Return how much a counter grew lately."""
    return f"sum by ({by}) (increase({Q}{metric}{NODE}[5m]))"


def whole(metric: str, legend: str) -> Query:
    """Return a value of the node itself."""
    return Query(f"max({Q}{metric}{NODE})", legend)


def _now() -> Sequence[Panel]:
    open_ = f'{Q}incident_onset_timestamp_seconds{{job=~"$job", node="$node", state=~"confirmed|acting"}}'
    return [
        number("Open incidents", counted(f"count({open_})"), steps=[(None, GREEN), (1, RED)]),
        number("GPUs seen", f"count({Q}gpu_temperature_celsius{NODE})"),
        number(
            "Hottest GPU",
            f"max({Q}gpu_temperature_celsius{NODE})",
            "celsius",
            steps=[(None, GREEN), (80, YELLOW), (90, RED)],
        ),
        number("Power", f"sum({Q}gpu_power_watts{NODE})", "watt"),
        number(
            "Clock offset",
            f'max({Q}agent_clock_offset_seconds{{node="$node"}})',
            "s",
            about="The server's clock minus the node's.",
            decimals=3,
        ),
        number(
            "Recurrence score",
            counted(f'max({Q}node_recurrence_score{{node="$node"}})'),
            about="0: it is not among those that keep failing.",
            steps=[(None, GREEN), (1, YELLOW)],
        ),
    ]


def _gpus() -> Sequence[Panel]:
    return [
        lines("Utilization", each("gpu_utilization_ratio"), "percentunit", ceiling=1),
        lines("Compute time of a step", each("train_compute_seconds", "rank on GPU {{device}}"), "s"),
        lines("Temperature", each("gpu_temperature_celsius"), "celsius", 8, floor=None),
        lines("SM clock", each("gpu_sm_clock_hertz"), "hertz", 8, floor=None),
        lines("Power", each("gpu_power_watts"), "watt", 8),
        lines(
            "Throttle reasons",
            each("gpu_throttle_reasons"),
            "none",
            8,
            about="NVML's bit mask: 4 power cap, 8 hardware slowdown, 32 and 64 thermal, 128 power brake.",
        ),
        lines("Memory used", each("gpu_memory_used_bytes"), "bytes", 8),
        lines("Memory temperature", each("gpu_memory_temperature_celsius"), "celsius", 8, floor=None),
    ]


def _errors() -> Sequence[Panel]:
    return [
        lines(
            "ECC errors in 5 minutes",
            [
                Query(grown("gpu_ecc_corrected_total"), "corrected, GPU {{device}}"),
                Query(grown("gpu_ecc_uncorrected_total"), "uncorrected, GPU {{device}}"),
            ],
            width=8,
        ),
        lines(
            "Row remaps",
            [
                Query(f"max by (device) ({Q}gpu_remapped_rows_total{NODE})", "rows, GPU {{device}}"),
                Query(f"max by (device) ({Q}gpu_remap_pending{NODE})", "pending, GPU {{device}}"),
            ],
            width=8,
            about="A pending one waits for a reset of the GPU.",
        ),
        lines(
            "NVLink errors in 5 minutes, links up",
            [
                Query(grown("gpu_nvlink_errors_total"), "errors, GPU {{device}}"),
                Query(f"max by (device) ({Q}gpu_nvlinks_active{NODE})", "up, GPU {{device}}"),
            ],
            width=8,
        ),
        lines("PCIe lanes", each("gpu_pcie_link_width"), "none", 8),
        lines("PCIe replays in 5 minutes", [Query(grown("gpu_pcie_replays_total"), "GPU {{device}}")], width=8),
        lines(
            "PCIe traffic",
            [
                Query(f"sum({Q}gpu_pcie_rx_bytes_per_second{NODE})", "received"),
                Query(f"sum({Q}gpu_pcie_tx_bytes_per_second{NODE})", "sent"),
            ],
            "Bps",
            8,
        ),
    ]


def _host() -> Sequence[Panel]:
    return [
        lines(
            "CPU",
            [
                whole("node_cpu_utilization_ratio", "busy"),
                whole("node_cpu_steal_ratio", "stolen"),
                whole("node_iowait_ratio", "waits for I/O"),
            ],
            "percentunit",
            8,
            ceiling=1,
        ),
        lines(
            "Pressure (PSI)",
            [
                whole("node_cpu_pressure_ratio", "CPU"),
                whole("node_memory_pressure_ratio", "memory"),
                whole("node_io_pressure_ratio", "I/O"),
            ],
            "percentunit",
            8,
        ),
        lines("Memory used", [whole("node_memory_used_ratio", "memory")], "percentunit", 8, ceiling=1),
        lines(
            "Disks",
            [whole("node_disk_read_bytes_per_second", "read"), whole("node_disk_write_bytes_per_second", "written")],
            "Bps",
            8,
        ),
        lines("Blocked tasks", [whole("node_blocked_tasks", "tasks")], "none", 8),
        lines(
            "Clock offset",
            [Query(f'max({Q}agent_clock_offset_seconds{{node="$node"}})', "server minus node")],
            "s",
            8,
            floor=None,
        ),
    ]


def _network() -> Sequence[Panel]:
    return [
        lines(
            "RDMA",
            [whole("node_rdma_rx_bytes_per_second", "received"), whole("node_rdma_tx_bytes_per_second", "sent")],
            "Bps",
            8,
        ),
        lines(
            "RDMA errors in 5 minutes",
            [
                Query(grown("node_rdma_errors_total", "node"), "errors"),
                Query(grown("node_rdma_link_downed_total", "node"), "links gone down"),
            ],
            width=8,
        ),
        lines(
            "PFC pauses",
            [
                whole("node_pfc_rx_pause_packets_per_second", "received"),
                whole("node_pfc_tx_pause_packets_per_second", "sent"),
            ],
            "pps",
            8,
            about="Who sends pauses cannot take in what comes: look there.",
        ),
        lines(
            "Ethernet and IP",
            [whole("node_network_rx_bytes_per_second", "received"), whole("node_network_tx_bytes_per_second", "sent")],
            "Bps",
            8,
        ),
        lines("TCP retransmits", [whole("node_tcp_retransmits_per_second", "segments")], "pps", 8),
        lines(
            "Congestion notifications in 5 minutes",
            [Query(grown("node_congestion_notifications_total", "node"), "notifications")],
            width=8,
        ),
    ]


def _trouble() -> Sequence[Panel]:
    chosen = '{node="$node"}'
    onset = f"max by (incident, job, fault, severity, state) ({Q}incident_onset_timestamp_seconds{chosen})"
    asked = f"max by (action, job, kind, fault, state) ({Q}action_asked_timestamp_seconds{chosen})"
    return [
        rows(
            "Incidents of this node",
            [("onset", f"{onset} * 1000")],
            {
                "incident": Column(
                    "Incident", link="${page}/#/incidents/${__value.text:percentencode}", width_px=ID_PX
                ),
                "job": Column("Job", link="/d/eagle-eye-job?var-job=${__value.text:percentencode}"),
                "fault": Column("Fault"),
                "severity": Column("Severity"),
                "state": Column("State"),
                "onset": Column("Onset", MOMENT, width_px=MOMENT_PX),
            },
            12,
            descending="onset",
        ),
        rows(
            "Actions of the last hour",
            [("asked", f"{asked} * 1000")],
            {
                "action": Column("Action", width_px=ID_PX),
                "kind": Column("Kind"),
                "fault": Column("Fault"),
                "job": Column("Job"),
                "state": Column("State"),
                "asked": Column("Asked for", MOMENT, width_px=MOMENT_PX),
            },
            12,
            descending="asked",
        ),
    ]
