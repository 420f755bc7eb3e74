"""What all dashboards are made of: queries, panels, variables, annotations and links, as this project wants them.

The classic dashboard model is built, not the newer one ("v2"), which only the newest Grafana reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it only says that there is the newer model
    from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

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
