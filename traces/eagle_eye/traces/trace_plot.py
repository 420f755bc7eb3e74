"""Draws a metric of a trace: every node, the labelled ones standing out, and the times of the labelled faults."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from eagle_eye.schema.labels import metric_label, number
from eagle_eye.schema.metrics import BY_NAME, MetricKind, Scope
from eagle_eye.schema.names import did_you_mean
from eagle_eye.server.backtest.trace import Header

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.ticker import FuncFormatter
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    needs = f'Trace.plot needs: pip install "eagle-eye[client,reports]" (no module {missing})'
    raise ImportError(needs) from None

PEERS = "#7d8ba1"
FAULTS = ("#c8324b", "#1f6fb2", "#b3730a", "#6d4bb8", "#2a8a57")  # again from the first where there are more
LINES_MAX = 128  # of nodes without a label; of more series their median and range are drawn
BAND_STEPS = 1_000
GAP_STEPS = 2.5  # a series' usual times between two observations; after more its line breaks
NODES_NAMED_MAX = 3  # in a line of the legend
DAY_S = 86_400.0
NOT_FINITE_AT = 0.98  # of the height


class TraceTables(NamedTuple):
    """What is drawn of a trace, as ``Trace`` has it."""

    folder: Path
    header: Header
    samples: pd.DataFrame
    links: pd.DataFrame
    faults: pd.DataFrame | None


class LabelledFault(NamedTuple):
    """A label as it is drawn: Unix times as matplotlib's days, the fault's name and colour."""

    start: float
    end: float
    fault: str
    nodes: Sequence[str]
    colour: str


def plot(trace: TraceTables, metric: str, device: int | str | None, ax: Axes | None) -> Axes:
    """Draw as ``Trace.plot`` says."""
    rows = _rows(trace, metric, device)
    faults = tuple(_labelled(trace))
    if ax is None:
        _, ax = plt.subplots(figsize=(9.0, 3.6), layout="constrained")
    header = trace.header
    accused = {node for fault in faults for node in fault.nodes}
    seen = set(rows["node"].unique())
    others = (seen | {node.node for node in header.nodes}) - accused
    there = others & seen
    lacking = f", {len(others) - len(there)} more not observed" if len(there) < len(others) else ""
    name = f"{len(there)} {'other ' if accused else ''}node{'' if len(there) == 1 else 's'}{lacking}"
    peers = rows[rows["node"].isin(there)]
    if peers["series"].nunique() <= LINES_MAX:
        _draw(ax, peers, header.interval_s, PEERS, 0.8, name, 2)
    else:
        _band(ax, peers, max(header.interval_s, (header.end - header.start) / BAND_STEPS), name)
    drawn: set[str] = set()
    for fault in faults:
        mine = rows[rows["node"].isin([node for node in fault.nodes if node not in drawn])]
        drawn.update(fault.nodes)
        name = _legend(fault, [node for node in fault.nodes if node not in seen])
        _draw(ax, mine, header.interval_s, fault.colour, 1.8, name, 3)
        ax.axvspan(fault.start, fault.end, color=fault.colour, alpha=0.12, linewidth=0, zorder=0)
        ax.axvline(fault.start, color=fault.colour, linewidth=1.0, linestyle=":", zorder=1)
    _not_finite(ax, rows)
    _dress(ax, metric, (header.start / DAY_S, header.end / DAY_S))
    return ax


def _rows(trace: TraceTables, metric: str, device: int | str | None) -> pd.DataFrame:
    """Return what was observed of the metric: at (matplotlib's days), node, series (a number), value; in order.

    Raises ValueError where nothing was.
    """
    spec = BY_NAME.get(metric)
    table, key = (trace.links, "link") if spec is not None and spec.scope is Scope.LINK else (trace.samples, "device")
    if spec is None or metric not in table.columns:
        known = [name for frame in (trace.samples, trace.links) for name in frame.columns if name in BY_NAME]
        raise ValueError(f"{trace.folder} has no metric {metric!r}{did_you_mean(metric, known)}")
    found = table.loc[table[metric].notna(), ["time", "node", key, metric]]
    if device is not None and not found.empty:
        keys = sorted(found[key].unique())
        found = found[found[key] == device]
        if found.empty:
            named = ", ".join(map(str, keys[:8])) + (", ..." if len(keys) > 8 else "")
            raise ValueError(f"{trace.folder}: {metric} was observed of no {key} {device!r}; of {named} it was")
    if found.empty:
        raise ValueError(f"{trace.folder}: {metric} was never observed")
    series = found.groupby(["node", key], observed=True).ngroup().to_numpy()
    rows = pd.DataFrame({"at": _days(found["time"]), "node": found["node"].array, "series": series})
    rows["value"] = found[metric].to_numpy(np.float64)
    rows = rows.sort_values(["series", "at"], kind="stable")
    if spec.kind is MetricKind.COUNTER:
        rows["value"] -= rows.groupby("series")["value"].transform("first")
    return rows


def _labelled(trace: TraceTables) -> Iterator[LabelledFault]:
    if trace.faults is None:
        return
    for row, colour in zip(trace.faults.itertuples(index=False), cycle(FAULTS), strict=False):
        yield LabelledFault(_days(row.start), _days(row.end), row.fault, row.nodes, colour)


def _legend(fault: LabelledFault, unseen: Sequence[str]) -> str:
    name = fault.fault.replace("_", " ")
    missing = f" (not observed: {_named(unseen)})" if unseen else ""
    return f"{name}: {_named(fault.nodes) or 'no single node'}{missing}"


def _named(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - NODES_NAMED_MAX} more" if len(nodes) > NODES_NAMED_MAX else ""
    return ", ".join(nodes[:NODES_NAMED_MAX]) + more


def _draw(ax: Axes, rows: pd.DataFrame, interval_s: float, colour: str, width: float, name: str, zorder: int) -> None:
    """Draw a line for each series, broken where observations are far apart; an observation by itself is a dot."""
    rows = rows[np.isfinite(rows["value"])]
    at, series = rows["at"].to_numpy(), rows["series"]
    steps = rows.groupby("series")["at"].diff()  # NaN at the first of each series
    usual = steps.groupby(series).transform("median").fillna(0.0).to_numpy()
    far = ~(steps.to_numpy() <= GAP_STEPS * np.maximum(usual, interval_s / DAY_S))
    pieces = np.split(np.column_stack([at, rows["value"].to_numpy()]), np.flatnonzero(far)[1:])
    alone = [piece[0] for piece in pieces if len(piece) == 1]
    lines = LineCollection([piece for piece in pieces if len(piece) > 1], colors=colour, linewidths=width)
    lines.set(label=name, zorder=zorder)
    ax.add_collection(lines)
    if alone:
        ax.plot(*np.transpose(alone), ".", color=colour, markersize=3 * width, zorder=zorder)


def _band(ax: Axes, rows: pd.DataFrame, step_s: float, name: str) -> None:
    """Draw the median and the range of many series, in steps; a step in which none was observed is a gap."""
    rows = rows[np.isfinite(rows["value"])]
    if rows.empty:
        return
    step = step_s / DAY_S
    first = rows["at"].min()
    at = np.rint((rows["at"] - first) / step).astype(np.int64)  # rows that are a step apart lie amid their steps
    found = rows.groupby(at)["value"].agg(["min", "median", "max"])
    found = found.reindex(range(int(at.max()) + 1))
    times = first + found.index.to_numpy() * step
    ax.fill_between(times, found["min"], found["max"], color=PEERS, alpha=0.3, linewidth=0, zorder=2)
    ax.plot(times, found["median"], color=PEERS, linewidth=1.2, zorder=2, label=f"{name}: median, range")


def _not_finite(ax: Axes, rows: pd.DataFrame) -> None:
    """Mark when the quantity was not finite, at the top, as there is no place for it on the scale."""
    moments = rows.loc[~np.isfinite(rows["value"]), "at"].unique()
    if len(moments):
        top = np.full(len(moments), NOT_FINITE_AT)
        ax.plot(moments, top, "x", color="black", transform=ax.get_xaxis_transform(), label="not finite")


def _dress(ax: Axes, metric: str, span: tuple[float, float]) -> None:
    spec = BY_NAME[metric]
    locator: Any = AutoDateLocator(minticks=3)  # type: ignore[no-untyped-call]
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=dt.timezone.utc))  # type: ignore[no-untyped-call]
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, spec.unit)))
    ax.autoscale_view(scalex=False)
    if span[0] < span[1]:
        ax.set_xlim(*span)  # also where nothing was observed
    since = ", since its first value" if spec.kind is MetricKind.COUNTER else ""
    ax.set_title(metric_label(metric) + since, loc="left")
    ax.set_xlabel("UTC")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3, frameon=False, borderaxespad=0)


def _days(times: Any) -> Any:
    """Return times as matplotlib has them: days since 1970."""
    return (times - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)
