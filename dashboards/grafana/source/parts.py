"""What all dashboards are made of: queries, panels and their descriptions, rows, variables, annotations and links.

The classic dashboard model is built, not the newer one ("v2"), which only the newest Grafana reads.
"""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it only says that there is the newer model
    from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from eagle_eye.schema.metrics import BY_NAME

Panel: TypeAlias = stat.Panel | timeseries.Panel | table.Panel | bargauge.Panel
PanelT = TypeVar("PanelT", stat.Panel, timeseries.Panel)

SOURCE = shapes.DataSourceRef(type_val="prometheus", uid="${datasource}")
MOMENT = "dateTimeAsIso"  # milliseconds since 1970, as 2026-01-31 23:59:59
MOMENT_PX, ID_PX = 165, 180  # wide enough for a moment, and for an incident's or action's id
GREEN, YELLOW, RED, BLUE, PURPLE = "green", "yellow", "red", "blue", "purple"
Q = "eagle_eye_"
# What the nodes heard now are held against: of those ever known some have left the fleet for good.
MOST_HEARD = f"max(max_over_time({Q}nodes_fresh[6h]))"


class Query(NamedTuple):
    """One PromQL expression and how its series are called in the legend."""

    expr: str
    legend: str = ""


class Column(NamedTuple):
    """A column of a table: its title, and how it is shown."""

    title: str
    unit: str = ""
    steps: tuple[tuple[float | None, str], ...] = ()
    link: str = ""  # where its values lead
    width_px: int = 0  # 0: an equal share of what the others leave


def counted(expr: str, by: str = "") -> str:
    """Return the expression, or zero where nothing was ever counted while the server is scraped.

    A counter with labels exists once it has counted. Without this, "nothing was refused" looks like "nobody knows".
    The zero is called "none" where a legend shows the label ``by``.
    """
    zero = f"0 * max({Q}build_info)"
    return f"{expr} or on() " + (f'label_replace({zero}, "{by}", "none", "", "")' if by else zero)


def rate(name: str, by: str = "", matchers: str = "") -> str:
    """Return a counter's rate, summed by a label, or by several: "reason, outcome"."""
    chosen = f"{{{matchers}}}" if matchers else ""
    return counted(
        f"sum{f' by ({by})' if by else ''} (rate({Q}{name}{chosen}[$__rate_interval]))", by.partition(",")[0]
    )


def quantile(share: float, name: str) -> str:
    """Return a quantile of one of the server's histograms, nothing while nothing is measured.

    Then it is NaN, which a panel cannot scale an axis by: the comparison leaves it out.
    """
    return f"histogram_quantile({share}, sum by (le) (rate({Q}{name}_bucket[$__rate_interval]))) >= 0"


def lines(
    title: str,
    queries: Sequence[Query],
    unit: str = "short",
    width: int = 12,
    *,
    about: str = "",
    stacked: bool = False,
    floor: float | None = 0.0,
    ceiling: float | None = None,
    points: bool = False,
) -> timeseries.Panel:
    """Return a panel of series over time. ``floor`` None: the axis begins where the values do."""
    panel = (
        timeseries.Panel()
        .title(title)
        .unit(unit)
        .datasource(SOURCE)
        .span(width)
        .height(8)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
        .line_width(1)
        .fill_opacity(20 if stacked else 0)
        .show_points(shapes.VisibilityMode.ALWAYS if points else shapes.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(shapes.LegendDisplayMode.TABLE)
            .placement(shapes.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING))
    )
    if floor is not None:
        panel.min(floor)
    if ceiling is not None:
        panel.max(ceiling)
    if stacked:
        panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL))
    return _filled(panel, queries, about)


def number(
    title: str,
    expr: str,
    unit: str = "short",
    width: int = 4,
    *,
    about: str = "",
    steps: Sequence[tuple[float | None, str]] = ((None, BLUE),),
    words: Mapping[str, tuple[str, str]] | None = None,
    decimals: int | None = None,
) -> stat.Panel:
    """Return one big number as of now. ``steps`` colour it, ``words`` replace values by (text, colour)."""
    panel = (
        stat.Panel()
        .title(title)
        .unit(unit)
        .datasource(SOURCE)
        .span(width)
        .height(4)
        .thresholds(_thresholds(steps))
        .color_scheme(_by_thresholds())
        .color_mode(shapes.BigValueColorMode.VALUE)
        .text_mode(shapes.BigValueTextMode.VALUE)
        .graph_mode(shapes.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    if decimals is not None:
        panel.decimals(decimals)
    if words:
        options = {value: model.ValueMappingResult(text=text, color=colour) for value, (text, colour) in words.items()}
        panel.mappings([model.ValueMap(options=options)])
    return _filled(panel, [Query(expr)], about)


def bars(
    title: str,
    expr: str,
    legend: str,
    unit: str = "short",
    width: int = 8,
    *,
    about: str = "",
    steps: Sequence[tuple[float | None, str]] = ((None, BLUE),),
) -> bargauge.Panel:
    """Return a bar for each series as of now, the longest first where the expression sorts."""
    panel = (
        bargauge.Panel()
        .title(title)
        .unit(unit)
        .datasource(SOURCE)
        .span(width)
        .height(8)
        .min(0)
        .orientation(shapes.VizOrientation.HORIZONTAL)
        .display_mode(shapes.BarGaugeDisplayMode.BASIC)
        # As a list: a single bar would fill the panel with letters so large that no name fits.
        .sizing(shapes.BarGaugeSizing.MANUAL)
        .min_viz_height(16)
        .max_viz_height(30)
        .name_placement(shapes.BarGaugeNamePlacement.LEFT)
        .text(common.VizTextDisplayOptions().value_size(14))
        .color_scheme(_by_thresholds())
        .thresholds(_thresholds(steps))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    if about:
        panel.description(about)
    return panel.with_target(_query("A", Query(expr, legend)).instant())


def rows(
    title: str,
    queries: Sequence[tuple[str, str]],
    columns: Mapping[str, Column],
    width: int = 24,
    height: int = 8,
    *,
    about: str = "",
    descending: str = "",
) -> table.Panel:
    """Return a table as of now: ``queries`` are (column, expression), joined by the labels that they share.

    Only ``columns`` are shown, in their order; a label's column has the label's name as its key.
    """
    panel = table.Panel().title(title).datasource(SOURCE).span(width).height(height).min_width(80)
    if about:
        panel.description(about)
    for column, expr in queries:
        panel.with_target(_query(column, Query(expr)).instant().format(PromQueryFormat.TABLE))
    renamed: dict[str, object] = {}
    if len(queries) > 1:
        panel.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
        renamed = {f"Value #{column}": columns[column].title for column, _ in queries}
    else:
        renamed = {"Value": columns[queries[0][0]].title}
    values = {column for column, _ in queries}
    renamed |= {label: shown.title for label, shown in columns.items() if label not in values}
    order = {title: place for place, title in enumerate(_raw_name(key, queries) for key in columns)}
    panel.with_transformation(
        model.DataTransformerConfig(
            id_val="organize",
            options={"indexByName": order, "renameByName": renamed, "includeByName": dict.fromkeys(order, True)},
        )
    )
    if descending:
        panel.sort_by([common.TableSortByFieldState().display_name(columns[descending].title).desc(True)])
    for shown in columns.values():
        properties = _properties(shown)
        if properties:
            panel.override_by_name(shown.title, properties)
    return panel


def _raw_name(key: str, queries: Sequence[tuple[str, str]]) -> str:
    if any(key == column for column, _ in queries):
        return f"Value #{key}" if len(queries) > 1 else "Value"
    return key


def _properties(column: Column) -> list[model.DynamicConfigValue]:
    found = []
    if column.unit:
        found.append(model.DynamicConfigValue(id_val="unit", value=column.unit))
    if column.steps:
        found.append(model.DynamicConfigValue(id_val="thresholds", value=_thresholds(column.steps).build()))
        found.append(model.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}))
    if column.width_px:
        found.append(model.DynamicConfigValue(id_val="custom.width", value=column.width_px))
    if column.link:
        link = {"title": "Look at it", "url": column.link}
        found.append(model.DynamicConfigValue(id_val="links", value=[link]))
    return found


def _filled(panel: PanelT, queries: Sequence[Query], about: str) -> PanelT:
    if about:
        panel.description(about)
    for place, query in enumerate(queries):
        panel.with_target(_query(chr(ord("A") + place), query).range())
    return panel


def _query(ref: str, query: Query) -> prometheus.Dataquery:
    built = prometheus.Dataquery().ref_id(ref).expr(query.expr).datasource(SOURCE)
    return built.legend_format(query.legend) if query.legend else built


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(value=value, color=colour) for value, colour in steps])
    )


def _by_thresholds() -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS)


# The skeleton that all dashboards share: variables, annotations of incidents and actions, links, rows of panels.

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


# The description of a panel that has none of its own: what its metrics mean, in the words of their documentation.

PREFIX = "eagle_eye_"
GAP = "A gap is time in which nothing was observed, which is never zero."
# Of panels that count, derive or list something else than their metrics mean.
OWN: Mapping[str, str] = MappingProxyType({
    "Actions in this range": "Actions of the time shown, by kind, whatever became of them.",
    "Actions of the last hour, by outcome": "In mode observe they would have been asked for: would_act.",
    "CPU": "Cores that the server uses.",
    "Flapping": "Open incidents that recover and return: people hear less of them.",
    "Confirmed or acting": "Open incidents that are certain enough to act on.",
    "GPUs": "GPUs of the running attempt.",
    "GPUs seen": "GPUs of this node that report a temperature. Fewer than it has: one is lost, or was never seen.",
    "Goodput": "Shares of the present run's time: training at full speed, and on steps that counted.",
    "Incidents of this job": "Open incidents, and for a quarter of an hour those that have recovered.",
    "Incidents of this node": "Open incidents that accuse it, and for a quarter of an hour those that have recovered.",
    "Memory": "Memory that the server holds.",
    "Nodes": "Nodes known, and those heard of just now.",
    "Failing for": "For how long no delivery has reached a subscription: its receiver is down, or refuses.",
    "Oldest open": "How long ago the oldest critical one began.",
    "Oldest undelivered": "How long the oldest event waits for a subscription.",
    "Open files": "Files and connections that the server has open.",
    "Open incidents by fault": "Open incidents, and for a quarter of an hour those that have recovered.",
    "Free disk space": "Free share of the file system that holds the server's data.",
    "Steps per second": "How fast the furthest rank's step number grows.",
    "Awaiting approval": "Actions that nobody has approved or rejected yet; they expire.",
    "Oldest waiting delivery": "How long the oldest event of each subscription waits.",
})  # fmt: skip
_DOCUMENTED = Path(__file__).parents[3] / "docs/reference/metrics.md"
_METRIC = re.compile(rf"\b{PREFIX}\w+")
_ROW = re.compile(r"^\| (?P<names>`[^|]+`) \|[^|]*\| (?P<what>.+) \|$")
_LINKS = (re.compile(r" ?\(\[[^]]+\]\([^)]+\)\)"), ""), (re.compile(r"\[([^]]+)\]\([^)]+\)"), r"\1")
_ALWAYS_THERE = {f"{PREFIX}build_info"}  # stands for zero where nothing was counted
_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def described(panel: Mapping[str, Any]) -> str:
    """Return the description. Raises ValueError for a metric that is documented nowhere."""
    title, over_time = panel["title"], panel["type"] == "timeseries"
    if title in OWN:
        return OWN[title]
    found = dict.fromkeys(
        name for target in panel["targets"] for name in _METRIC.findall(target["expr"]) if name not in _ALWAYS_THERE
    )
    texts = {name: _meaning(name) for name in found}
    if len(texts) == 1:
        sentences = [_sentence(next(iter(texts.values())))]
    else:
        sentences = [f"- `{name.removeprefix(PREFIX)}`: {text}" for name, text in texts.items()]
    observed = over_time and any(name.removeprefix(PREFIX) in BY_NAME for name in texts)
    return "\n".join([*sentences, *(["", GAP] if observed else [])])


def _meaning(name: str) -> str:
    known = BY_NAME.get(name.removeprefix(PREFIX))
    if known is not None:
        return known.help.rstrip(".")
    documented = _documented()
    text = documented.get(name) or documented.get(_HISTOGRAM.sub("", name))
    if text is None:
        raise ValueError(f"{name}: expected a metric of the catalogue or of {_DOCUMENTED.name}; document it there")
    return text


@functools.cache
def _documented() -> Mapping[str, str]:
    """Return the server's own metrics by name: a row of several names has as many texts, or one for all."""
    found: dict[str, str] = {}
    for line in _DOCUMENTED.read_text(encoding="utf-8").splitlines():
        row = _ROW.match(line)
        if row is None:
            continue
        text = row["what"].removeprefix("histogram: ").removeprefix("histogram, ")
        for link, replacement in _LINKS:
            text = link.sub(replacement, text)
        names = re.findall(r"`(\w+)`", row["names"])
        texts = _split(text, len(names))
        found.update(zip(names, texts, strict=True))
    return found


def _split(text: str, parts: int) -> Iterable[str]:
    texts = text.split("; ")
    return texts if len(texts) == parts else [text] * parts


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
