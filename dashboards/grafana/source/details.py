"""The dashboards of one job, and of one of its nodes."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.grafana.source.parts import (
    GREEN,
    ID_PX,
    MOMENT,
    MOMENT_PX,
    RED,
    YELLOW,
    Column,
    Dashboard,
    Panel,
    Q,
    Query,
    Section,
    bars,
    board,
    counted,
    lines,
    number,
    rows,
)

JOB = '{job="$job"}'  # Grafana escapes a single value for no pattern: a job may be called train[7]
ONSET = f"{Q}incident_onset_timestamp_seconds"


def job() -> Dashboard:
    """Return the dashboard of one job: does it make steps, what is a step made of, which node is unlike the others."""
    return board(
        "job",
        "Eagle Eye / Job",
        "Steps, what they consist of, and the nodes that differ.",
        [
            Section("Now", _job_now()),
            Section("Training", _training()),
            Section("What a step consists of", _step()),
            Section("GPUs", _job_gpus()),
            Section("Checkpoints in memory", _checkpoints()),
            Section("Trouble", _job_trouble()),
        ],
        job=True,
        one_job=True,
        span="now-3h",
    )


def spread(metric: str) -> list[Query]:
    """Return the least, the median and the most over a job's ranks or GPUs."""
    name = f"{Q}{metric}{JOB}"
    return [
        Query(f"max({name})", "most"),
        Query(f"quantile(0.5, {name})", "median"),
        Query(f"min({name})", "least"),
    ]


def _job_now() -> Sequence[Panel]:
    return [
        number(
            "Last step",
            f"max({Q}job_progress_age_seconds{JOB})",
            "s",
            about="How long ago it was seen to finish.",
            steps=[(None, GREEN), (60, YELLOW), (300, RED)],
        ),
        number("Step", f"max({Q}train_step{JOB})", "none"),
        number("Nodes", f"max({Q}job_nodes{JOB})", about="Nodes of the running attempt."),
        number("GPUs", f"max({Q}job_gpus{JOB})"),
        number(
            "Goodput",
            f"max({Q}job_goodput_ratio{JOB})",
            "percentunit",
            about="Share of the present run's time that was training at full speed.",
            steps=[(None, RED), (0.8, YELLOW), (0.9, GREEN)],
        ),
        number(
            "Effective training time",
            f"max({Q}job_effective_training_ratio{JOB})",
            "percentunit",
            about="ETTR: share of the present run's known time that was spent on steps that counted, also slow ones.",
        ),
    ]


def _training() -> Sequence[Panel]:
    return [
        lines("Step time", spread("train_step_seconds"), "s"),
        lines("Steps per second", [Query(f"max(deriv({Q}train_step{JOB}[$__rate_interval]))", "steps")], "short"),
        lines(
            "Loss",
            [Query(f"quantile(0.5, {Q}train_loss{JOB})", "median"), Query(f"max({Q}train_loss{JOB})", "most")],
            floor=None,
            about="Not finite is shown as +Inf, which no axis has: the line ends there.",
        ),
        lines(
            "Gradient norm",
            [
                Query(f"max({Q}train_grad_norm{JOB})", "after the reduction"),
                Query(f"max({Q}train_local_grad_norm{JOB})", "most before it"),
            ],
        ),
        lines("Tokens per second", [Query(f"sum({Q}train_tokens_per_second{JOB})", "all ranks")]),
        lines(
            "Goodput",
            [
                Query(f"max({Q}job_goodput_ratio{JOB})", "goodput"),
                Query(f"max({Q}job_effective_training_ratio{JOB})", "effective training time"),
            ],
            "percentunit",
            ceiling=1,
        ),
    ]


def _step() -> Sequence[Panel]:
    return [
        lines(
            "Compute", spread("train_compute_seconds"), "s", 8, about="A rank far above the median slows all others."
        ),
        lines("Wait for data", spread("train_data_wait_seconds"), "s", 8),
        lines(
            "Collectives", spread("nccl_collective_seconds"), "s", 8, about="The slow rank waits least: it comes last."
        ),
        bars(
            "Slowest nodes",
            f"sort_desc(topk(10, max by (node) ({Q}train_compute_seconds{JOB})))",
            "{{node}}",
            "s",
            about="By compute time of their slowest rank.",
        ),
        lines(
            "Collectives behind the first",
            [
                Query(
                    f"max({Q}nccl_completed_sequence{JOB}) - min({Q}nccl_completed_sequence{JOB})",
                    "completed",
                ),
                Query(f"max({Q}nccl_sequence{JOB}) - min({Q}nccl_sequence{JOB})", "enqueued"),
            ],
            width=8,
            about="How far the last rank is behind. It grows when a rank does not take part.",
        ),
        lines("Bus bandwidth", spread("nccl_bus_bandwidth_bytes_per_second"), "Bps", 8),
    ]


def _job_gpus() -> Sequence[Panel]:
    return [
        lines("GPU utilization", spread("gpu_utilization_ratio"), "percentunit", ceiling=1),
        lines("Tensor cores active", spread("gpu_tensor_active_ratio"), "percentunit", ceiling=1),
        lines("SM clock", spread("gpu_sm_clock_hertz"), "hertz"),
        lines("GPU temperature", spread("gpu_temperature_celsius"), "celsius", floor=None),
        lines("GPU power", spread("gpu_power_watts"), "watt"),
        lines("GPU memory", spread("gpu_memory_used_bytes"), "bytes"),
    ]


def _checkpoints() -> Sequence[Panel]:
    kept = f"{Q}memory_checkpoint"
    blocked = f"sum(rate({kept}_blocked_seconds_total{JOB}[$__rate_interval]))"
    return [
        number(
            "Newest whole step",
            f"max({kept}_step{JOB})",
            "none",
            about="Whole in the nodes' memory, in all copies.",
        ),
        number(
            "Steps at risk",
            f"max({kept}_age_steps{JOB})",
            "none",
            about="Finished since that step: what a restart now would cost.",
            steps=[(None, GREEN), (10, YELLOW), (100, RED)],
        ),
        number(
            "Copies",
            f"sum({kept}_copies{JOB}) / sum({kept}_copies_wanted{JOB})",
            "percentunit",
            about="Of those that there should be of that step. Below 100% the loss of a node may cost steps.",
            steps=[(None, RED), (1, GREEN)],
        ),
        number("Newest step on storage", f"max({kept}_persisted_step{JOB})", "none"),
        number("Memory", f"sum({kept}_bytes{JOB})", "bytes", about="Reserved for copies on all nodes."),
        number(
            "Damaged copies",
            f"sum({kept}_damaged_total{JOB})",
            "none",
            about="Found by their checksums, and removed, since the stores began.",
            steps=[(None, GREEN), (1, RED)],
        ),
        lines("Steps at risk", [Query(f"max({kept}_age_steps{JOB})", "steps")], "none", 8),
        lines(
            "Captures",
            [
                Query(f"sum(rate({kept}_captures_total{JOB}[$__rate_interval]))", "captured"),
                Query(f"sum(rate({kept}_skips_total{JOB}[$__rate_interval]))", "skipped"),
            ],
            "cps",
            8,
            about="Of all ranks. A step is skipped while the one before is still on its way to other nodes.",
        ),
        lines(
            "Time spent on captures",
            [Query(f"{blocked} / max({Q}job_gpus{JOB})", "of ranks' time")],
            "percentunit",
            8,
            about="For which training stands still: ranks are held up while their state is copied.",
        ),
        lines(
            "Writing to storage",
            [Query(f"topk(5, max by (node) ({kept}_persist_seconds{JOB}))", "{{node}}")],
            "s",
            12,
            about="For how long a node has been writing its part of a step. What only grows hangs.",
        ),
        bars(
            "Steps at risk by node",
            f"sort_desc(topk(10, max by (node) ({kept}_age_steps{JOB})))",
            "{{node}}",
            "none",
            12,
            about="All alike, unless ranks or a store of one node are behind.",
        ),
    ]


def _job_trouble() -> Sequence[Panel]:
    return [
        rows(
            "Incidents of this job",
            [
                (
                    "onset",
                    f"max by (incident, fault, node, severity, state) ({ONSET}{JOB}) * 1000",
                )
            ],
            {
                "incident": Column(
                    "Incident", link="${page}/#/incidents/${__value.text:percentencode}", width_px=ID_PX
                ),
                "fault": Column("Fault"),
                "node": Column("Node", link="/d/eagle-eye-node?var-node=${__value.text:percentencode}"),
                "severity": Column("Severity"),
                "state": Column("State"),
                "onset": Column("Onset", MOMENT, width_px=MOMENT_PX),
            },
            16,
            descending="onset",
        ),
        bars(
            "GPU-hours lost",
            counted(f"sort_desc(sum by (part, fault) ({Q}job_lost_gpu_seconds{JOB}) / 3600)", "part"),
            "{{part}} {{fault}}",
            "h",
        ),
    ]


NODE = '{job=~"$job", node="$node"}'


def node() -> Dashboard:
    """Return the dashboard of one node: its GPUs, its host, its network, and what was found on it."""
    return board(
        "node",
        "Eagle Eye / Node",
        "One node's GPUs, host and network.",
        [
            Section("Now", _node_now()),
            Section("GPUs", _node_gpus()),
            Section("Errors and links", _errors()),
            Section("Host", _host()),
            Section("Network", _network()),
            Section("Trouble", _node_trouble()),
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


def _node_now() -> Sequence[Panel]:
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


def _node_gpus() -> Sequence[Panel]:
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


def _node_trouble() -> Sequence[Panel]:
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
