"""Makes data frames of the server's answers; the one module that needs pd.

What was not observed is NaN or has no row, and never 0. The device -1 is the node itself, as in traces.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from eagle_eye.client.http_client import DataLacking, LimitReached, UnreadableAnswer
from eagle_eye.client.ranges import RangePart, RangeSeries, RangeSteps
from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.events import WHOLE_NODE
from eagle_eye.schema.frame import Block, decode_frame
from eagle_eye.schema.metrics import MetricSpec, Scope
from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.schema.recording import VERSION

POINTS_MAX = 20_000_000  # of a query's answer
CELLS_MAX = 50_000_000  # of a wide frame
SHOWN_MAX = 3  # gaps in the text of a warning; all of them are in ``attrs``

Array = np.ndarray[Any, np.dtype[Any]]
Key = tuple[str, Any]  # a node, and a device or link


class RecordingHead(msgspec.Struct):
    """Of a recording's first message, what matters here."""

    version: int
    known: bool
    gaps: list[tuple[float, float, str]] = []


class SeriesTable:
    """The points of many series as columns: ``keys[series[i]]`` had ``values[i]`` in the step ``steps[i]``."""

    def __init__(self, keys: Sequence[Key], series: Array, steps: Array, values: Array) -> None:
        # Devices are numbers and links names; an answer has one of them.
        order = sorted(range(len(keys)), key=keys.__getitem__)
        place = np.empty(len(keys), np.int64)
        place[order] = np.arange(len(keys))
        moved = place[series] if len(keys) else series
        rows = np.lexsort((steps, moved))
        self.keys = [keys[at] for at in order]
        self.series, self.steps, self.values = moved[rows], steps[rows], values[rows]

    def tidy(self, of: RangeSteps, key: str) -> pd.DataFrame:
        """Return a row for each point: time, node, ``key`` (device or link), value; by series, then by time."""
        return pd.DataFrame(
            {
                "time": _times(of, self.steps),
                "node": _category([node for node, _ in self.keys], self.series),
                key: _keys(key, [name for _, name in self.keys], self.series),
                "value": self.values,
            }
        )

    def wide(self, of: RangeSteps, key: str) -> pd.DataFrame:
        """Return a row for each step and a column for each series. Raises LimitReached."""
        if of.count * len(self.keys) > CELLS_MAX:
            many = f"{of.count} steps of {len(self.keys)} series"
            raise LimitReached(f"{many} are more than {CELLS_MAX} cells; take a longer step, or wide=False")
        cells = np.full((of.count, len(self.keys)), np.nan)
        cells[self.steps, self.series] = self.values
        nodes, names = [node for node, _ in self.keys], [name for _, name in self.keys]
        columns = pd.MultiIndex.from_arrays([nodes, names], names=["node", key])
        index = pd.DatetimeIndex(_times(of, np.arange(of.count)), name="time")
        return pd.DataFrame(cells, index=index, columns=columns)


def of_range(
    metric: str, parts: Iterable[tuple[int, int, RangePart]], steps: RangeSteps, *, wide: bool
) -> pd.DataFrame:
    """Return the parts of a range as one frame. Raises LimitReached; warns of what is lacking.

    ``attrs`` has the metric, its unit, the statistic and the step, what answered for which time, and ``problems``.
    """
    codes: dict[Key, int] = {}
    columns: list[tuple[Array, Array, Array]] = []
    attrs: dict[str, Any] = {"metric": metric, "step_seconds": steps.step_s, "resolutions": [], "problems": []}
    points = 0
    for low, high, part in parts:
        attrs |= {"unit": part.unit, "statistic": part.statistic}
        attrs["resolutions"] += part.resolutions
        attrs["problems"] += [source for source in part.sources if source.get("problem")]
        for one in part.series:
            at, values = _points(one, steps, low, high)
            name = WHOLE_NODE if one.device is None else one.device
            code = codes.setdefault((one.node, name), len(codes))
            columns.append((np.full(len(at), code), at, values))
            points += len(at)
        if points > POINTS_MAX:
            remedy = "take a longer step, a shorter range, or one node"
            raise LimitReached(f"the range has more than {POINTS_MAX} points; {remedy}")
    series, at, values = _together(columns)
    table = SeriesTable(list(codes), series, at, values)
    key = _key_of(catalogue.BY_NAME.get(metric), table.keys)
    frame = table.wide(steps, key) if wide else table.tidy(steps, key)
    frame.attrs = attrs
    _warn([(one["start"], one["end"], one["problem"]) for one in attrs["problems"]])
    return frame


def opening_of(stream: Iterator[bytes]) -> RecordingHead:
    """Return the first message of a recording, and warn of what is lacking. Raises UnreadableAnswer."""
    opening = msgspec.msgpack.decode(next(stream, b""), type=RecordingHead)
    if opening.version != VERSION:
        raise UnreadableAnswer(f"the recording has version {opening.version}; this client reads {VERSION}")
    _warn([(_shown(start_s), _shown(end_s), why) for start_s, end_s, why in opening.gaps])
    return opening


def of_recording(
    stream: Iterator[bytes], metrics: Sequence[MetricSpec], key: str, rows_max: int
) -> Iterator[pd.DataFrame]:
    """Yield a recording's rows as frames of at most ``rows_max`` rows, or those of one message if it has more.

    A row for each (time, node, device or link), as the agents sent them. Raises BadFrame.
    """
    rows = _Rows(metrics, key)
    for raw in stream:
        frame = decode_frame(raw)
        for block in frame.blocks:
            if not rows.takes(block):
                continue
            if rows.count and rows.count + len(block.keys) > rows_max:
                yield rows.frame()
                rows = _Rows(metrics, key)
            rows.add(frame.time_s, frame.node, block)
    if rows.count:
        yield rows.frame()


class _Rows:
    """Rows of a recording, gathered until they are enough for a frame."""

    def __init__(self, metrics: Sequence[MetricSpec], key: str) -> None:
        self.count = 0
        self._metrics = metrics
        self._place = {spec.name: at for at, spec in enumerate(metrics)}
        self._scopes = {spec.scope for spec in metrics}
        self._key = key
        self._nodes: dict[str, int] = {}
        self._times_s: list[float] = []
        self._codes: list[int] = []
        self._names: list[Any] = []
        self._cells: list[Array] = []

    def takes(self, block: Block) -> bool:
        """Return whether the block's rows are of the kind that was asked for."""
        return block.scope in self._scopes and bool(block.keys)

    def add(self, time_s: float, node: str, block: Block) -> None:
        """Add a block's rows, one for each key."""
        rows = len(block.keys)
        cells = np.full((rows, len(self._metrics)), np.nan)
        wanted = [(self._place[name], at) for at, name in enumerate(block.metrics) if name in self._place]
        if wanted:
            values = np.frombuffer(block.values, "<f8").reshape(len(block.metrics), rows)
            cells[:, [to for to, _ in wanted]] = values[[at for _, at in wanted]].T
        self._cells.append(cells)
        self._times_s += [time_s] * rows
        self._codes += [self._nodes.setdefault(node, len(self._nodes))] * rows
        self._names += block.keys
        self.count += rows

    def frame(self) -> pd.DataFrame:
        """Return the rows as a frame."""
        cells = np.concatenate(self._cells)
        microseconds = np.round(np.array(self._times_s) * 1e6).astype(np.int64)
        names: dict[Any, int] = {}
        codes = np.array([names.setdefault(name, len(names)) for name in self._names])
        return pd.DataFrame(
            {
                "time": pd.to_datetime(microseconds, unit="us", utc=True),
                "node": _category(list(self._nodes), np.array(self._codes)),
                self._key: _keys(self._key, list(names), codes),
                **{
                    spec.name: cells[:, at].astype(np.float64 if spec.exact else np.float32)
                    for at, spec in enumerate(self._metrics)
                },
            }
        )


def _points(series: RangeSeries, steps: RangeSteps, low: int, high: int) -> tuple[Array, Array]:
    """Return the steps and values of a series' points, as far as they lie in the part from ``low`` to ``high``."""
    times = pd.to_datetime([time for time, _ in series.points], utc=True, format="ISO8601").as_unit("ms")
    milliseconds = times.tz_localize(None).to_numpy().astype(np.int64)
    at = np.round((milliseconds / 1e3 - steps.start_s) / steps.step_s).astype(np.int64)
    values = np.array([float(value) for _, value in series.points], np.float64)
    inside = (at >= low) & (at < high)
    return at[inside], values[inside]


def _together(columns: Sequence[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array]:
    if not columns:
        none = np.empty(0, np.int64)
        return none, none, np.empty(0, np.float64)
    series, at, values = zip(*columns, strict=True)
    return np.concatenate(series), np.concatenate(at), np.concatenate(values)


def _times(of: RangeSteps, at: Array) -> pd.DatetimeIndex:
    microseconds = round(of.start_s * 1e6) + np.round(at * (of.step_s * 1e6)).astype(np.int64)
    return pd.to_datetime(microseconds, unit="us", utc=True)


def _category(names: Sequence[str], codes: Array) -> pd.Categorical:
    """Return a name for each code; a name may stand for several."""
    unique = sorted(set(names))
    places = {name: at for at, name in enumerate(unique)}
    place = np.array([places[name] for name in names], np.int64)
    categories = pd.Index(unique, dtype="str")
    return pd.Categorical.from_codes(place[codes] if len(names) else codes, categories=categories)


def _keys(key: str, names: Sequence[Any], codes: Array) -> Any:
    if key == "link":
        return _category(names, codes)
    return np.array(names, np.int16)[codes] if len(names) else np.empty(0, np.int16)


def _key_of(spec: MetricSpec | None, keys: Sequence[Key]) -> str:
    """Return what the series of a metric are told apart by; of a metric that only the server knows, by what it sent."""
    link = any(isinstance(name, str) for _, name in keys) if spec is None else spec.scope is Scope.LINK
    return "link" if link else "device"


def _shown(time_s: float) -> str:
    return str(pd.Timestamp(round(time_s), unit="s", tz="UTC"))


def _warn(gaps: Sequence[tuple[str, str, str]]) -> None:
    if gaps:
        told = "; ".join(f"{start} to {end}: {why}" for start, end, why in gaps[:SHOWN_MAX])
        more = f"; and {len(gaps) - SHOWN_MAX} more" if len(gaps) > SHOWN_MAX else ""
        warnings.warn(f"values are lacking: {told}{more}", DataLacking, stacklevel=4)


prepare_record_types()  # for those who import this module late
