"""The skeleton that all dashboards share: variables, annotations of incidents and actions, links, rows of panels."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it only says that there is the newer model
    from grafana_foundation_sdk.builders import dashboard, prometheus
from grafana_foundation_sdk.models import dashboard as model

from dashboards.grafana.source.parts import PURPLE, RED, SOURCE, Panel, Q

Dashboard: TypeAlias = dashboard.Dashboard

TAG = "eagle-eye"
PAGE = "http://127.0.0.1:8470"  # where a browser finds the server's own page, until somebody types another address
JOBS = f"label_values({Q}job_nodes, job)"
# Any of these: a fleet may have agents, or only dcgm-exporter. Asked of one metric a node, not of all series.
NODES = f'label_values({{__name__=~"{Q}node_cpu_utilization_ratio|{Q}gpu_utilization_ratio", job=~"$job"}}, node)'


class Section(NamedTuple):
    """Panels under a heading."""

    title: str
    panels: Sequence[Panel]


def board(
    name: str,
    title: str,
    about: str,
    sections: Sequence[Section],
    *,
    job: bool = False,
    node: bool = False,
    one_job: bool = False,
    refresh: str = "30s",
    span: str = "now-6h",
) -> Dashboard:
    """Return a dashboard. ``job`` and ``node`` are variables of it; ``one_job``: a single job, else any number."""
    built = (
        dashboard.Dashboard(title)
        .uid(f"eagle-eye-{name}")
        .description(about)
        .tags([TAG])
        .time(span, "now")
        .refresh(refresh)
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    if job:
        built.with_variable(_query_variable("job", "Job", JOBS, many=not one_job))
    if node:
        built.with_variable(_query_variable("node", "Node", NODES, many=False))
    built.with_variable(
        dashboard.TextBoxVariable("page")
        .label("Eagle Eye's page")
        .default_value(PAGE)
        .hide(model.VariableHide.HIDE_LABEL)
    )
    chosen = 'job=~"$job"' if job else ""
    if one_job:
        chosen = 'job="$job"'
    if node:
        chosen = 'job=~"$job", node=~"$node|"'
    built.annotation(_incidents(chosen)).annotation(_actions(chosen))
    built.link(
        dashboard.DashboardLink("Eagle Eye")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .keep_time(True)
    )
    built.link(
        dashboard.DashboardLink("Its own page").type(model.DashboardLinkType.LINK).url("${page}").target_blank(True)
    )
    number = itertools.count(1)
    for section in sections:
        built.with_row(dashboard.Row(section.title).id(next(number)))
        for panel in section.panels:
            built.with_panel(panel.id(next(number)))
    return built


def _query_variable(name: str, label: str, query: str, *, many: bool) -> dashboard.QueryVariable:
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": name, "qryType": 1})
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    if many:
        everything = model.VariableOption(selected=True, text="All", value="$__all")
        variable.multi(True).include_all(True).all_value(".*").current(everything)
    return variable


def _incidents(chosen: str) -> dashboard.AnnotationQuery:
    """Return regions: each incident for as long as it lasts."""
    confirmed = 'state=~"confirmed|acting"'
    matchers = f"{chosen}, {confirmed}" if chosen else confirmed
    return _annotation(
        "Incidents",
        f"max by (incident, job, node, fault, severity) ({Q}incident_onset_timestamp_seconds{{{matchers}}})",
        RED,
        "{{fault}} {{node}}",
        "{{severity}}: {{fault}} in {{job}} ({{incident}})",
        "fault,severity",
    )


def _actions(chosen: str) -> dashboard.AnnotationQuery:
    """Return a mark for each action at the moment when it was asked for."""
    matchers = f"{{{chosen}}}" if chosen else ""
    asked = f"{Q}action_asked_timestamp_seconds{matchers}"
    return _annotation(
        "Actions",
        f"max by (action, incident, job, node, kind, fault) ({asked}) * 1000",
        PURPLE,
        "{{kind}} {{node}}",
        "{{kind}} because of {{fault}} in {{job}} ({{action}})",
        "kind",
    ).use_value_for_time(True)


def _annotation(name: str, expr: str, colour: str, title: str, text: str, tags: str) -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .icon_color(colour)
        .expr(expr)
        .target(prometheus.Dataquery().ref_id(name).expr(expr).range())
        .step("15s")
        .title_format(title)
        .text_format(text)
        .tag_keys(tags)
    )
