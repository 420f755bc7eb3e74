"""Incidents and actions of all jobs: what is open, what holds it, what was requested, who was notified."""

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
    rate,
    rows,
)

JOB = '{job=~"$job"}'
ONSET = f"{Q}incident_onset_timestamp_seconds"
ASKED = f"{Q}action_asked_timestamp_seconds"


def build() -> Dashboard:
    """Return the dashboard."""
    return board(
        "incidents",
        "Eagle Eye / Incidents",
        "What is open, what holds it back, what was requested, who was notified.",
        [
            Section("Now", _now()),
            Section("Incidents and actions", _lists()),
            Section("Over time", _course()),
            Section("Speed and precision", _response()),
        ],
        job=True,
    )


def _now() -> Sequence[Panel]:
    open_ = 'job=~"$job", state=~"confirmed|acting"'
    return [
        number("Confirmed or acting", counted(f"count({ONSET}{{{open_}}})"), steps=[(None, GREEN), (1, YELLOW)]),
        number(
            "Critical, not acknowledged",
            counted(f'count({ONSET}{{{open_}, severity="critical", acknowledged="false"}})'),
            about="Acknowledge an incident on Eagle Eye's page, or with `eagle-eye incidents acknowledge`.",
            steps=[(None, GREEN), (1, RED)],
        ),
        number(
            "Oldest open",
            counted(f'time() - min({ONSET}{{{open_}, severity="critical", acknowledged="false"}})'),
            "s",
            steps=[(None, GREEN), (600, YELLOW), (1800, RED)],
        ),
        number("Escalated", f"max({Q}incidents_escalated)", steps=[(None, GREEN), (1, RED)]),
        number("Flapping", f"max({Q}incidents_flapping)", steps=[(None, GREEN), (1, YELLOW)]),
        number(
            "Awaiting approval",
            counted(f'count({ASKED}{{job=~"$job", state="awaiting"}})'),
            steps=[(None, GREEN), (1, RED)],
        ),
    ]


def _lists() -> Sequence[Panel]:
    return [
        rows(
            "Open incidents",
            [("onset", f"max by (incident, job, node, fault, severity, state, acknowledged) ({ONSET}{JOB}) * 1000")],
            {
                "severity": Column("Severity"),
                "job": Column("Job", link="/d/eagle-eye-job?var-job=${__value.text:percentencode}"),
                "node": Column("Node", link="/d/eagle-eye-node?var-node=${__value.text:percentencode}"),
                "fault": Column("Fault"),
                "state": Column("State"),
                "acknowledged": Column("Acknowledged"),
                "onset": Column("Onset", MOMENT, width_px=MOMENT_PX),
                "incident": Column(
                    "Incident", link="${page}/#/incidents/${__value.text:percentencode}", width_px=ID_PX
                ),
            },
            descending="onset",
            about="No node: nobody knows which, or several. Recovered ones stay for a quarter of an hour.",
        ),
        rows(
            "Actions of the last hour",
            [("asked", f"max by (action, incident, job, node, kind, fault, state) ({ASKED}{JOB}) * 1000")],
            {
                "kind": Column("Kind"),
                "job": Column("Job"),
                "node": Column("Node"),
                "fault": Column("Fault"),
                "state": Column("State"),
                "asked": Column("Asked for", MOMENT, width_px=MOMENT_PX),
                "action": Column("Action", width_px=ID_PX),
            },
            descending="asked",
            about="would_act: what would have been asked for in mode act.",
        ),
    ]


def _course() -> Sequence[Panel]:
    return [
        lines("Open incidents", [Query(counted(f"sum by (state) ({Q}incidents)", "state"), "{{state}}")], stacked=True),
        lines(
            "Open incidents by fault",
            [Query(counted(f"count by (fault) ({ONSET}{JOB})", "fault"), "{{fault}}")],
            stacked=True,
        ),
        lines(
            "Held back, by rule of policy",
            [Query(counted(f"sum by (rule) ({Q}incidents_held)", "rule"), "{{rule}}")],
            stacked=True,
            about="docs/reference/policy.md says what each rule means.",
        ),
        lines(
            "Actions of the last hour, by outcome",
            [Query(counted(f"count by (kind, state) ({ASKED}{JOB})", "kind"), "{{kind}} {{state}}")],
            stacked=True,
        ),
        bars(
            "Actions in this range",
            counted(f"count by (kind) (count by (action, kind) (last_over_time({ASKED}{JOB}[$__range])))", "kind"),
            "{{kind}}",
        ),
        lines("Finished deliveries", [Query(rate("webhook_deliveries_total", "state"), "{{state}}")], "cps", 8),
        lines(
            "Escalations, events kept back",
            [
                Query(f"increase({Q}incident_escalations_total[1h])", "escalations in 1 h"),
                Query(f"increase({Q}incident_events_suppressed_total[1h])", "events kept back in 1 h"),
            ],
            width=8,
        ),
    ]


def _response() -> Sequence[Panel]:
    decisions = f"{Q}ledger_decisions"
    known = f'{decisions}{{standing=~"right|wrong"}}'
    return [
        *(
            lines(
                title,
                [
                    Query(f'max by (fault) ({Q}{name}{{quantile="0.5"}})', "{{fault}} median"),
                    Query(f'max by (fault) ({Q}{name}{{quantile="0.95"}})', "{{fault}} 95%"),
                ],
                "s",
                about=about,
            )
            for title, name, about in (
                (
                    "Time to detect",
                    "time_to_detect_seconds",
                    "From onset to verdict, of the last seven days' incidents that nobody called false alarms.",
                ),
                (
                    "Time to recover",
                    "time_to_recover_seconds",
                    "From onset until it was over: a stopped job made its first new step. Of seven days, likewise.",
                ),
            )
        ),
        lines(
            "Precision by the ledger",
            [
                Query(
                    f'sum by (fault) ({decisions}{{standing="right"}}) / (sum by (fault) ({known}) > 0)', "{{fault}}"
                ),
                Query(f"max by (fault) ({Q}ledger_precision_low_ratio)", "{{fault}} at least"),
            ],
            "percentunit",
            ceiling=1,
            about="Right among decisions of 90 days with a known outcome, and the lower end of its 95% interval."
            " No line: no outcome is known, and nobody can tell. docs/explanation/accounts.md, Trust in steps.",
        ),
        bars(
            "Decisions in hindsight",
            counted(f"sort_desc(sum by (fault, standing) ({decisions}) > 0)", "fault"),
            "{{fault}} {{standing}}",
            width=12,
            about="Incidents of 90 days for which policy wanted an action, by whether that was right.",
        ),
    ]
