"""One job: does it make steps, what does a step consist of, which node is unlike the others."""

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
    bars,
    counted,
    lines,
    number,
    rows,
)

JOB = '{job="$job"}'  # Grafana escapes a single value for no pattern: a job may be called train[7]
ONSET = f"{Q}incident_onset_timestamp_seconds"


def build() -> Dashboard:
    """Return the dashboard."""
    return board(
        "job",
        "Eagle Eye / Job",
        "Steps, what they consist of, and the nodes that differ.",
        [
            Section("Now", _now()),
            Section("Training", _training()),
            Section("What a step consists of", _step()),
            Section("GPUs", _gpus()),
            Section("Checkpoints in memory", _checkpoints()),
            Section("Trouble", _trouble()),
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


def _now() -> Sequence[Panel]:
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


def _gpus() -> Sequence[Panel]:
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


def _trouble() -> Sequence[Panel]:
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
