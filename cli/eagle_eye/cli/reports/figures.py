"""An incident's chart as SVG: the accused against its peers, threshold, and the moments that matter."""

from __future__ import annotations

import datetime as dt
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from eagle_eye.cli.reports.incident import Mark
from eagle_eye.schema.notation import number
from eagle_eye.schema.times import unix_seconds

ACCUSED, PEERS, THRESHOLD = "#c8324b", "#7d8ba1", "#b3730a"  # legible on white and on dark
INK = "#010203"  # replaced by the page's own text colour, light or dark
SIZE_INCHES = (8.4, 2.9)
NAME_SHARE = 0.01  # of the width, that a character of a moment's name takes
# Texts stay texts, "$" is no formula, and the same numbers make the same file.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "eagle-eye",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


def svg(chart: Mapping[str, Any], marks: Sequence[Mark]) -> str:
    """Return the chart as an SVG element; what was not observed is a gap, what was not finite is left out of it."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.subplots()
        _draw(axes, chart)
        _mark(axes, chart, marks)
        return _svg(figure)


def bars(names: Sequence[str], amounts: Sequence[float], unit: str) -> str:
    """Return a horizontal bar for each amount, the first on top, as an SVG element."""
    figure = Figure(figsize=(SIZE_INCHES[0], 0.6 + 0.28 * len(names)), layout="constrained")
    with mpl.rc_context(_STYLE):
        axes = figure.subplots()
        places = range(len(names))
        drawn = axes.barh(places, amounts, color=ACCUSED, height=0.7)
        axes.bar_label(drawn, [f"{amount:,.2f}" for amount in amounts], padding=3)
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    sink = io.StringIO()
    figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = sink.getvalue().replace(INK, "currentColor")
    return text[text.index("<svg") :]


def _draw(axes: Axes, chart: Mapping[str, Any]) -> None:
    columns, unit = chart["columns"], chart["unit"]
    moments = [_moment(time_s) for time_s in columns["time"]]
    low, median, high, accused = (_finite(columns[name]) for name in ("low", "median", "high", "accused"))
    if any(map(math.isfinite, median)):
        label = f"{chart['peers']['nodes']} peers: median, range"
        axes.fill_between(moments, low, high, color=PEERS, alpha=0.25, linewidth=0)  # type: ignore[arg-type]
        axes.plot(moments, median, color=PEERS, linewidth=1.2, label=label)  # type: ignore[arg-type]
    axes.plot(moments, accused, color=ACCUSED, linewidth=2.2, label=chart["name"])  # type: ignore[arg-type]
    if chart["threshold"] is not None:
        label = f"threshold {number(chart['threshold'], unit)}"
        axes.axhline(chart["threshold"], color=THRESHOLD, linewidth=1.2, linestyle=(0, (5, 3)), label=label)
    locator = AutoDateLocator(minticks=3)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=dt.timezone.utc))  # type: ignore[no-untyped-call]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, unit)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(_moment(unix_seconds(chart["start"])), _moment(unix_seconds(chart["end"])))  # type: ignore[arg-type]
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=3, frameon=False, borderaxespad=0)


def _mark(axes: Axes, chart: Mapping[str, Any], marks: Sequence[Mark]) -> None:
    """Draw the moments within the chart as lines, named above it; names that would overlap take another row."""
    start_s = unix_seconds(chart["start"])
    length_s = max(unix_seconds(chart["end"]) - start_s, 1e-9)
    ends: list[float] = []  # of the last name in each row, in shares of the width
    for mark in sorted(marks):
        share = (mark.time_s - start_s) / length_s
        if not 0 <= share <= 1:
            continue
        width = NAME_SHARE * (len(mark.name) + 3)
        begin = min(share, 1 - width)
        row = next((at for at, end in enumerate(ends) if begin > end), len(ends))
        ends[row : row + 1] = [begin + width]
        axes.axvline(_moment(mark.time_s), color=INK, linewidth=0.8, linestyle=":")  # type: ignore[arg-type]
        axes.annotate(
            mark.name, (begin, 1), xycoords="axes fraction", xytext=(2, 2 + 11 * row), textcoords="offset points",
            fontsize=8, annotation_clip=False,
        )  # fmt: skip


def _finite(values: Sequence[float | str | None]) -> list[float]:
    return [value if isinstance(value, int | float) else math.nan for value in values]


def _moment(time_s: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(time_s, dt.timezone.utc)
