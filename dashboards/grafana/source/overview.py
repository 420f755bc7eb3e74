"""The dashboards across jobs: the fleet, and incidents and actions."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.grafana.source.parts import (
    BLUE,
    GREEN,
    ID_PX,
    MOMENT,
    MOMENT_PX,
    MOST_HEARD,
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
    rate,
    rows,
)

OPEN = f'sum({Q}incidents{{state=~"suspected|confirmed|acting"}})'


def fleet() -> Dashboard:
    """Return the dashboard of the fleet: is it judged, which jobs suffer, what is lost to what."""
    return board(
        "fleet",
        "Eagle Eye / Fleet",
        "Which jobs suffer, and whether anybody could tell.",
        [
            Section("Now", _fleet_now()),
            Section("Jobs", _jobs()),
            Section("Nodes", _nodes()),
            Section("Racks and switches", _places()),
            Section("Budgets", _budgets()),
        ],
        job=True,
    )


def _fleet_now() -> Sequence[Panel]:
    return [
        number(
            "Can judge",
            f"max({Q}ready)",
            about="0: faults are not seen. /readyz says why.",
            steps=[(None, RED), (1, GREEN)],
            words={"0": ("blind", RED), "1": ("yes", GREEN)},
        ),
        number(
            "Nodes reporting",
            f"max({Q}nodes_fresh) / ({MOST_HEARD} > 0)",
            "percentunit",
            about="Of the most that were heard at a time within six hours: nodes that left for good are no loss.",
            steps=[(None, RED), (0.98, YELLOW), (0.999, GREEN)],
        ),
        number("Jobs running", f"max({Q}jobs_running)"),
        number("Open incidents", counted(OPEN), steps=[(None, GREEN), (1, YELLOW)]),
        number(
            "Escalated",
            f"max({Q}incidents_escalated)",
            about="Incidents whose action failed, expired or is not reported on.",
            steps=[(None, GREEN), (1, RED)],
        ),
        number(
            "GPU-hours lost",
            counted(f'sum({Q}job_lost_gpu_seconds{{job=~"$job"}}) / 3600'),
            about="In the present runs of the jobs that go on.",
            decimals=1,
        ),
    ]


def _jobs() -> Sequence[Panel]:
    chosen = '{job=~"$job"}'
    return [
        rows(
            "Running jobs by age of their last step",
            [
                ("age", f"max by (job) ({Q}job_progress_age_seconds{chosen})"),
                ("nodes", f"max by (job) ({Q}job_nodes{chosen})"),
                ("gpus", f"max by (job) ({Q}job_gpus{chosen})"),
                ("goodput", f"max by (job) ({Q}job_goodput_ratio{chosen})"),
                ("lost", f"sum by (job) ({Q}job_lost_gpu_seconds{chosen}) / 3600"),
            ],
            {
                "job": Column("Job", link="/d/eagle-eye-job?var-job=${__value.text:percentencode}"),
                "age": Column("Last step", "s", ((None, GREEN), (60, YELLOW), (300, RED))),
                "nodes": Column("Nodes"),
                "gpus": Column("GPUs"),
                "goodput": Column("Goodput", "percentunit", ((None, RED), (0.8, YELLOW), (0.9, GREEN))),
                "lost": Column("GPU-hours lost"),
            },
            descending="age",
            about="A job that is not here reports no steps: no hook and no training log.",
        ),
        lines(
            "Time since the last step",
            [Query(f"max by (job) ({Q}job_progress_age_seconds{chosen})", "{{job}}")],
            "s",
            8,
        ),
        lines(
            "Goodput", [Query(f"max by (job) ({Q}job_goodput_ratio{chosen})", "{{job}}")], "percentunit", 8, ceiling=1
        ),
        lines(
            "Effective training time",
            [Query(f"max by (job) ({Q}job_effective_training_ratio{chosen})", "{{job}}")],
            "percentunit",
            8,
            ceiling=1,
            about="ETTR: share of the present run's known time that was spent on steps that counted, also slow ones.",
        ),
        lines(
            "GPU-hours lost, by cause",
            [
                Query(
                    counted(f"sum by (part, fault) ({Q}job_lost_gpu_seconds{chosen}) / 3600", "part"),
                    "{{part}} {{fault}}",
                )
            ],
            "h",
            stacked=True,
        ),
        lines(
            "GPU utilization",
            [Query(f"avg by (job) ({Q}gpu_utilization_ratio{chosen})", "{{job}}")],
            "percentunit",
            ceiling=1,
            about="A GPU that spins in a collective is busy, too: the job's steps say whether it trains.",
        ),
        lines("GPU power", [Query(f"sum by (job) ({Q}gpu_power_watts{chosen})", "{{job}}")], "watt", stacked=True),
        lines(
            "Incidents",
            [Query(counted(f"sum by (state) ({Q}incidents)", "state"), "{{state}}")],
            stacked=True,
        ),
    ]


def _nodes() -> Sequence[Panel]:
    hottest = f'topk(10, max by (node) ({Q}gpu_temperature_celsius{{job=~"$job"}}))'
    return [
        lines(
            "Nodes",
            [Query(MOST_HEARD, "most in six hours"), Query(f"max({Q}nodes_fresh)", "reporting now")],
            width=8,
        ),
        bars(
            "Nodes that keep failing",
            f"sort_desc({counted(f'topk(10, max by (node) ({Q}node_recurrence_score))', 'node')})",
            "{{node}}",
            about="By recurrence score.",
            steps=[(None, YELLOW)],
        ),
        bars(
            "Hottest GPU of a node",
            f"sort_desc({hottest})",
            "{{node}}",
            "celsius",
            steps=[(None, BLUE), (80, YELLOW), (90, RED)],
        ),
    ]


def _places() -> Sequence[Panel]:
    trouble = 'standing=~"accused|suspected|excluded|draining|silent"'
    needs = "Needs topology_file; without it nobody can tell, and nothing is here."
    found: list[Panel] = []
    for kind, title in (("rack", "Racks"), ("switch", "Switches")):
        nodes = f"{Q}{kind}_nodes"
        found += [
            bars(
                f"{title} with nodes in trouble",
                f"sort_desc(topk(15, sum by ({kind}) ({nodes}{{{trouble}}}) > 0)"
                f' or on() label_replace(0 * max({nodes}), "{kind}", "none", "", ""))',
                f"{{{{{kind}}}}}",
                width=6,
                about=f"Nodes that are accused, suspected, excluded, draining or silent, the worst 15. {needs}",
                steps=[(None, YELLOW), (2, RED)],
            ),
            lines(
                f"{title} with nodes in trouble, over time",
                [
                    Query(
                        f"count(sum by ({kind}) ({nodes}{{{trouble}}}) > 0) or 0 * count({nodes})", "one node or more"
                    ),
                    Query(
                        f"count(sum by ({kind}) ({nodes}{{{trouble}}}) > 1) or 0 * count({nodes})",
                        "several",
                    ),
                ],
                width=6,
                about=f"Several nodes of one {kind} at the same time speak of what they share. {needs}",
            ),
        ]
    return found


def _budgets() -> Sequence[Panel]:
    used, limit = f"{Q}fleet_budget_used", f"{Q}fleet_budget_limit"
    about = "Within policy.window_s, a day by default. In mode observe what would have been done counts."
    return [
        *(
            lines(
                title,
                [
                    Query(f'max({limit}{{budget="{budget}"}})', "budget"),
                    Query(f'max({used}{{budget="{budget}"}})', "used"),
                ],
                width=10,
                about=f"{what}. {about}",
            )
            for title, budget, what in (
                ("Exclusion budget", "exclusions", "Exclusions and drains of the fleet, and how many there may be"),
                ("Restart budget", "restarts", "Restarts of jobs, and how many there may be"),
            )
        ),
        number(
            "Exclusions left",
            f'max({limit}{{budget="exclusions"}}) - max({used}{{budget="exclusions"}})',
            about=f"None left: policy holds further exclusions back. {about}",
            steps=[(None, RED), (1, YELLOW), (2, GREEN)],
        ),
    ]


JOB = '{job=~"$job"}'
ONSET = f"{Q}incident_onset_timestamp_seconds"
ASKED = f"{Q}action_asked_timestamp_seconds"


def incidents() -> Dashboard:
    """Return the dashboard of all jobs' incidents and actions: what is open, what holds it, who was notified."""
    return board(
        "incidents",
        "Eagle Eye / Incidents",
        "What is open, what holds it back, what was requested, who was notified.",
        [
            Section("Now", _incidents_now()),
            Section("Incidents and actions", _lists()),
            Section("Over time", _course()),
            Section("Speed and precision", _response()),
        ],
        job=True,
    )


def _incidents_now() -> Sequence[Panel]:
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
