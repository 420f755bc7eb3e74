"""Reads a trace folder as data frames. Touches: the folder's files."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from eagle_eye.schema.events import WHOLE_NODE
from eagle_eye.server.backtest.trace import (
    EVENTS_FILE,
    LABELS_FILE,
    LINKS_FILE,
    SAMPLES_FILE,
    BadTrace,
    Header,
    Label,
    TableRows,
    TraceEvent,
    link_rows,
    read_header,
    read_lines,
    sample_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BadTrace", "Trace", "read"]


class Trace:
    """A trace's tables as data frames, each read when it is first asked for. Raises BadTrace where one is unusable.

    ``header`` is trace.json: job, interval_s, start, end, nodes, ranks. Values that were not observed are NaN, those
    that were not finite +inf; no row: the agent sent nothing. Times are UTC, as they are in the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header: Header = read_header(folder)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """Rows of devices and nodes: time, node, device (-1: the node itself), and the metrics that the file has.

        In order of time, node and device; of duplicates the last. ``attrs["ignored"]`` counts what was left out, by
        reason. Times are ends of intervals.
        """
        return _table(sample_rows(self.folder / SAMPLES_FILE), "device")

    @cached_property
    def links(self) -> pd.DataFrame:
        """Rows of links: time, node, link, and the metrics that the file has; empty where there is no file."""
        path = self.folder / LINKS_FILE
        if not path.exists():
            return pd.DataFrame({"time": utc_times([]), "node": pd.Categorical([]), "link": pd.Categorical([])})
        return _table(link_rows(path), "link")

    @cached_property
    def events(self) -> pd.DataFrame:
        """Events in order of time: time, node (None: the whole job), device (-1: the node itself), kind, attributes."""
        found = sorted(read_lines(self.folder / EVENTS_FILE, TraceEvent), key=lambda event: event.time)
        devices = [WHOLE_NODE if event.device is None else event.device for event in found]
        return pd.DataFrame(
            {
                "time": utc_times([event.time for event in found]),
                "node": pd.Series([event.node for event in found], dtype=object),
                "device": np.array(devices, np.int16),
                "kind": pd.Series([event.kind for event in found], dtype="str"),
                "attributes": pd.Series([event.attributes for event in found], dtype=object),
            }
        )

    @cached_property
    def faults(self) -> pd.DataFrame | None:
        """Labels: start, end, nodes, fault, expect. None where the trace has none; empty: it says that all was well."""
        path = self.folder / LABELS_FILE
        if not path.exists():
            return None
        found = read_lines(path, Label)
        return pd.DataFrame(
            {
                "start": utc_times([label.start for label in found]),
                "end": utc_times([label.end for label in found]),
                "nodes": pd.Series([label.nodes for label in found], dtype=object),
                "fault": pd.Series([label.fault for label in found], dtype="str"),
                "expect": pd.Series([label.expect for label in found], dtype="str"),
            }
        )

    def plot(self, metric: str, *, device: int | str | None = None, ax: Axes | None = None) -> Axes:
        """Draw a metric of every node and return the axes; ``device`` (or a link's name) leaves out all others.

        A line for each node and device or link; of more than 128 without a label their median and range. Labelled
        nodes stand out in their fault's colour, and its time is shaded. The axes span the whole trace: where nothing
        was observed is a gap, and nodes without any observation are counted in the legend. Crosses at the top: not
        finite. Counters are drawn from their first value on.

        Raises ValueError where the metric was not observed, ImportError without matplotlib (extra ``reports``).
        """
        from eagle_eye.traces.trace_plot import TraceTables, plot

        tables = TraceTables(self.folder, self.header, self.samples, self.links, self.faults)
        return plot(tables, metric, device, ax)


def read(folder: str | Path) -> Trace:
    """Return the trace in a folder. Raises BadTrace where it is none."""
    return Trace(Path(folder))


def _table(rows: TableRows, key: str) -> pd.DataFrame:
    ignored: Counter[str] = Counter()
    found = rows.columns(ignored)
    nodes = pd.Categorical.from_codes(found.node_of, categories=pd.Index(found.nodes, dtype="str"))
    names: Any = found.key_of.astype(np.int16)
    if found.names is not None:
        names = pd.Categorical.from_codes(found.key_of, categories=pd.Index(found.names, dtype="str"))
    frame = pd.DataFrame({"time": utc_times(found.times_s), "node": nodes, key: names, **found.values})
    frame.attrs["ignored"] = dict(ignored)
    return frame


def utc_times(times_s: Any) -> pd.DatetimeIndex:
    """Return Unix seconds as times in UTC, to the microsecond."""
    microseconds = np.round(np.asarray(times_s, np.float64) * 1e6).astype(np.int64)
    return pd.to_datetime(microseconds, unit="us", utc=True)
