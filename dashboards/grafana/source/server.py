"""The server itself: does it take in, judge, tell and keep."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.grafana.source.parts import (
    GREEN,
    MOST_HEARD,
    RED,
    YELLOW,
    Dashboard,
    Panel,
    Q,
    Query,
    Section,
    board,
    counted,
    lines,
    number,
    quantile,
    rate,
)


def build() -> Dashboard:
    """Return the dashboard."""
    return board(
        "server",
        "Eagle Eye / Server",
        "Does the server take in, judge, tell and keep.",
        [
            Section("Now", _now()),
            Section("Ingest", _taking_in()),
            Section("Detection", _judging()),
            Section("Delivery", _telling()),
            Section("Storage", _keeping()),
            Section("The process and its connections", _process()),
        ],
        span="now-3h",
    )


def _now() -> Sequence[Panel]:
    return [
        number(
            "Can judge",
            f"max({Q}ready)",
            steps=[(None, RED), (1, GREEN)],
            words={"0": ("blind", RED), "1": ("yes", GREEN)},
        ),
        number(
            "Last report from any node",
            f"max({Q}ingest_age_seconds)",
            "s",
            steps=[(None, GREEN), (30, YELLOW), (60, RED)],
        ),
        number("Detection pass, p99", quantile(0.99, "detection_seconds"), "s", steps=[(None, GREEN), (1, YELLOW)]),
        number(
            "Oldest undelivered",
            counted(f"max({Q}webhook_oldest_pending_seconds)"),
            "s",
            steps=[(None, GREEN), (300, RED)],
        ),
        number(
            "Free disk space",
            f"min({Q}data_dir_free_bytes) / min({Q}data_dir_size_bytes)",
            "percentunit",
            steps=[(None, RED), (0.05, YELLOW), (0.15, GREEN)],
        ),
        number(
            "Unforeseen errors in 1 h",
            counted(f"sum(increase({Q}internal_errors_total[1h]))"),
            steps=[(None, GREEN), (1, RED)],
        ),
    ]


def _taking_in() -> Sequence[Panel]:
    return [
        lines(
            "Frames",
            [
                Query(f"sum(rate({Q}ingest_frames_total[$__rate_interval]))", "stored"),
                Query(f"sum(rate({Q}ingest_duplicates_total[$__rate_interval]))", "duplicates"),
                Query(f"sum(rate({Q}ingest_late_frames_total[$__rate_interval]))", "late"),
            ],
            "cps",
            8,
        ),
        lines("Bytes", [Query(f"sum(rate({Q}ingest_bytes_total[$__rate_interval]))", "accepted")], "Bps", 8),
        lines(
            "Ingest latency",
            [Query(quantile(0.5, "ingest_seconds"), "p50"), Query(quantile(0.99, "ingest_seconds"), "p99")],
            "s",
            8,
        ),
        lines("Refused, by reason", [Query(rate("ingest_rejected_total", "reason"), "{{reason}}")], "cps", 8),
        lines(
            "Remote write: samples",
            [
                Query(f"sum(rate({Q}remote_write_samples_total[$__rate_interval]))", "taken"),
                Query(rate("remote_write_left_out_total", "reason"), "left out: {{reason}}"),
            ],
            "cps",
            8,
        ),
        lines(
            "Nodes",
            [
                Query(f"max({Q}nodes_known)", "ever heard of"),
                Query(MOST_HEARD, "most in six hours"),
                Query(f"max({Q}nodes_fresh)", "reporting now"),
            ],
            width=8,
        ),
    ]


def _judging() -> Sequence[Panel]:
    return [
        lines(
            "Duration of a detection pass",
            [Query(quantile(0.5, "detection_seconds"), "p50"), Query(quantile(0.99, "detection_seconds"), "p99")],
            "s",
            8,
        ),
        lines(
            "Blind detectors",
            [Query(counted(f"sum by (detector) ({Q}detector_blind)", "detector"), "{{detector}}")],
            width=8,
            stacked=True,
            about="They could judge nothing in the last look. /readyz says why.",
        ),
        lines(
            "Left out of windows",
            [Query(counted(f"sum by (reason) ({Q}window_drops)", "reason"), "{{reason}}")],
            width=8,
        ),
        lines(
            "Evidence and checks that agents answered",
            [
                Query(rate("evidence_total", "state"), "evidence {{state}}"),
                Query(rate("node_checks_total", "state"), "check {{state}}"),
            ],
            "cps",
            8,
        ),
        lines(
            "Questions to schedulers",
            [Query(rate("job_source_answers_total", "source, outcome"), "{{source}} {{outcome}}")],
            "cps",
            8,
        ),
        lines("Jobs", [Query(f"max({Q}jobs_running)", "running")], width=8),
    ]


def _telling() -> Sequence[Panel]:
    return [
        lines("Attempts to deliver", [Query(rate("webhook_attempts_total", "outcome"), "{{outcome}}")], "cps", 8),
        lines(
            "Oldest waiting delivery",
            [
                Query(
                    counted(f"max by (subscription) ({Q}webhook_oldest_pending_seconds)", "subscription"),
                    "{{subscription}}",
                )
            ],
            "s",
            8,
        ),
        lines(
            "Failing for",
            [Query(counted(f"max by (subscription) ({Q}webhook_failing_seconds)", "subscription"), "{{subscription}}")],
            "s",
            8,
        ),
        lines("Failed deliveries", [Query(rate("webhook_failures_total", "reason"), "{{reason}}")], "cps", 8),
        lines(
            "Duration of an attempt (0: none)",
            [
                Query(counted(quantile(0.5, "webhook_seconds")), "p50"),
                Query(counted(quantile(0.99, "webhook_seconds")), "p99"),
            ],
            "s",
            8,
        ),
        lines("Readers of live events", [Query(f"max({Q}event_streams)", "readers")], width=8),
    ]


def _keeping() -> Sequence[Panel]:
    return [
        lines(
            "Disk",
            [Query(f"min({Q}data_dir_free_bytes)", "free"), Query(f"max({Q}history_segment_bytes)", "segments")],
            "bytes",
            8,
        ),
        lines("Frames waiting for the disk", [Query(f"max({Q}history_waiting_bytes)", "waiting")], "bytes", 8),
        lines(
            "History",
            [
                Query(f"max({Q}history_ok)", "takes frames"),
                Query(f"sum({Q}history_compaction_failures_total)", "compactions that failed"),
                Query(f"sum({Q}history_set_aside_segments_total)", "broken segments set aside"),
            ],
            "none",
            8,
        ),
    ]


def _process() -> Sequence[Panel]:
    own = f"* on (instance) group_left () max by (instance) ({Q}build_info)"
    return [
        lines("CPU", [Query(f"rate(process_cpu_seconds_total[$__rate_interval]) {own}", "cores")], "none", 8),
        lines("Memory", [Query(f"process_resident_memory_bytes {own}", "resident")], "bytes", 8),
        lines("Open files", [Query(f"process_open_fds {own}", "files")], "none", 8),
        lines("Connections", [Query(f"sum by (client) ({Q}connections)", "{{client}}")], width=8),
        lines(
            "Refused connections",
            [
                Query(rate("connections_refused_total", "reason"), "connection: {{reason}}"),
                Query(rate("http_refused_total", "reason"), "request: {{reason}}"),
                Query(rate("rate_limited_total", "by"), "too often, by {{by}}"),
            ],
            "cps",
            8,
        ),
        lines("Unforeseen errors", [Query(rate("internal_errors_total", "place"), "{{place}}")], "cps", 8),
    ]
