"""Reads a segment's values as samples for the store: one per series and interval, interval by interval ("moments").

Read column by column, some row groups at a time. The same segment with the same settings gives the same moments in the
same order, so that a position among them can be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.events import WHOLE_NODE
from eagle_eye.schema.frame import Frame, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.history.history import runs_of
from eagle_eye.server.history.remote_store import encoding
from eagle_eye.server.history.remote_store.series_names import SeriesSubject, labels_of
from eagle_eye.server.history.segments.frames import whole
from eagle_eye.server.history.segments.layout import FRAMES_FILE, LINKS_FILE, SAMPLES_FILE

ROWS_AT_ONCE = 100_000  # of samples.parquet: some minutes of some dozen nodes, a hundred megabytes when not thinned
HEADS_MAX = 100_000  # cached: those of some hundred nodes, half a kilobyte each

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

_ranks_decoder = msgspec.json.Decoder(list[Rank])


class IntervalSamples(NamedTuple):
    """Samples of one interval, one per series: heads and samples as encoded by ``encoding``."""

    heads: list[bytes]
    samples: list[bytes]


class SeriesHeads:
    """Encoded heads of series, cached between segments."""

    def __init__(self, external: Mapping[str, str]) -> None:
        self._external = external
        self._known: dict[SeriesSubject, bytes] = {}

    def of(self, place: SeriesSubject) -> bytes:
        """Return the encoded head of the place's series."""
        found = self._known.get(place)
        if found is None:
            if len(self._known) >= HEADS_MAX:
                self._known.clear()
            found = self._known[place] = encoding.head(labels_of(place, self._external))
        return found


class _Points(NamedTuple):
    """Values of some metric as parallel arrays; ``series`` are indexes into a list of places."""

    series: Integers
    times_s: Floats
    values: Floats


def moments(
    folder: Path, wanted: Callable[[str], bool], interval_s: float, heads: SeriesHeads
) -> Iterator[IntervalSamples]:
    """Yield the segment's moments; ``wanted(metric)`` selects metrics, ``interval_s`` 0 keeps every sample.

    Raises OSError, ValueError, KeyError or a pyarrow error where the segment cannot be read.
    """
    spoken = ["job", "ranks"]  # mostly equal between frames, and long: kept once in memory
    with pq.ParquetFile(folder / FRAMES_FILE, page_checksum_verification=True, read_dictionary=spoken) as file:
        frames = file.read(columns=["time", *spoken, "raw"], use_threads=False).unify_dictionaries()
    jobs = _Jobs(frames)
    for name, key in ((SAMPLES_FILE, "device"), (LINKS_FILE, "link")):
        if (folder / name).exists():
            with pq.ParquetFile(folder / name, page_checksum_verification=True) as file:
                for groups in _batches(file):
                    yield from _moments(*_thinned(file, groups, key, jobs, wanted, interval_s), interval_s, heads)
    kept_whole = frames.filter(pc.is_valid(frames["raw"])).select(["time", "raw"])
    for row in kept_whole.to_pylist():
        frame = whole(row["raw"])
        if frame is not None:
            yield from _moments(*_of_whole(frame, row["time"], wanted), interval_s, heads)


class _Jobs:
    """The job of each row of a segment: from its device's rank, else from its frame. ``names[0]`` is None."""

    def __init__(self, frames: pa.Table) -> None:
        self.names: list[str | None] = [None]
        self._codes: dict[str | None, int] = {None: 0}
        spoken = [frames[name].combine_chunks() for name in ("job", "ranks")]
        of_frame, of_ranks = (text.indices.fill_null(len(text.dictionary)).to_numpy() for text in spoken)
        self._frame_jobs: list[str | None] = [*spoken[0].dictionary.to_pylist(), None]
        self._ranks = [
            {rank.device: rank.job for rank in _ranks_decoder.decode(text)} for text in spoken[1].dictionary.to_pylist()
        ]
        self._ranks.append({})
        self._said: Integers = of_frame.astype(np.int64) * len(self._ranks) + of_ranks

    def of(self, frames: Integers, keys: Integers) -> Integers:
        """Return the rows' jobs as indexes into ``names``; ``keys`` are devices, WHOLE_NODE for all other rows."""
        pairs, places = np.unique(self._said[frames] << 32 | (keys + 1), return_inverse=True)
        codes = [self._code(pair >> 32, (pair & 0xFFFFFFFF) - 1) for pair in pairs.tolist()]
        return np.array(codes, dtype=np.int64)[places]

    def _code(self, said: int, device: int) -> int:
        of_frame, of_ranks = divmod(said, len(self._ranks))
        return self._index(_job(self._frame_jobs[of_frame], self._ranks[of_ranks], device))

    def _index(self, job: str | None) -> int:
        if job not in self._codes:
            self._codes[job] = len(self.names)
            self.names.append(job)
        return self._codes[job]


def _job(of_frame: str | None, of_ranks: Mapping[int, str], device: int) -> str | None:
    """Return a device's job; for WHOLE_NODE the frame's job, or the ranks' job if they all have the same."""
    if device in of_ranks:
        return of_ranks[device]
    several = set(of_ranks.values())
    return of_frame or (several.pop() if device == WHOLE_NODE and len(several) == 1 else None)


def _batches(file: pq.ParquetFile) -> Iterator[list[int]]:
    groups: list[int] = []
    rows = 0
    for number in range(file.metadata.num_row_groups):
        more = file.metadata.row_group(number).num_rows
        if groups and rows + more > ROWS_AT_ONCE:
            yield groups
            groups, rows = [], 0
        groups.append(number)
        rows += more
    if groups:
        yield groups


def _thinned(
    file: pq.ParquetFile,
    groups: list[int],
    key: str,
    jobs: _Jobs,
    wanted: Callable[[str], bool],
    interval_s: float,
) -> tuple[list[SeriesSubject], _Points]:
    """Return the last value per series and interval in the row groups, and the series."""
    rows = file.read_row_groups(groups, columns=["time", "node", key, "frame"], use_threads=False)
    times_s: Floats = rows["time"].to_numpy()
    codes = [rows[name].combine_chunks().dictionary_encode() for name in ("node", key)]
    nodes, keys = (code.dictionary.to_pylist() for code in codes)
    node_of, key_of = (code.indices.to_numpy().astype(np.int64) for code in codes)
    linked = key == "link"
    devices = np.full(len(times_s), WHOLE_NODE) if linked else rows[key].to_numpy().astype(np.int64)
    job_of = jobs.of(rows["frame"].to_numpy(), devices)
    ids, row_of = np.unique((node_of * len(keys) + key_of) * len(jobs.names) + job_of, return_inverse=True)
    cells = _cells(times_s, interval_s)
    places: list[SeriesSubject] = []
    parts: list[_Points] = []
    lasts: dict[bytes, tuple[Integers, Integers, Integers]] = {}  # most metrics are missing in the same rows
    for name in file.schema_arrow.names:
        spec = catalogue.BY_NAME.get(name)
        if spec is None or not wanted(name):
            continue
        column = file.read_row_groups(groups, columns=[name], use_threads=False)[name]
        values = column.to_numpy()
        none = np.isnan(values)
        if none.all():
            continue
        pattern = np.packbits(none).tobytes()
        if pattern not in lasts:
            lasts[pattern] = _last(np.flatnonzero(~none), row_of, cells)
        last, series, seen = lasts[pattern]
        parts.append(_Points(series + len(places), times_s[last], _exactly(values[last])))
        for id_ in ids[seen].tolist():
            rest, job = divmod(id_, len(jobs.names))
            node, place = divmod(rest, len(keys))
            places.append(SeriesSubject(spec, nodes[node], keys[place], jobs.names[job]))
    if not parts:
        return [], _Points(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))
    return places, _Points(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _last(chosen: Integers, row_of: Integers, cells: Integers) -> tuple[Integers, Integers, Integers]:
    """Return the last row in ``chosen`` for each series and interval, their series, and the distinct series.

    Rows are ordered by node, key and time, so a series' last row of an interval comes before its next interval's first.
    """
    series, at = row_of[chosen], cells[chosen]
    last = chosen[np.r_[(series[1:] != series[:-1]) | (at[1:] != at[:-1]), True]]
    seen, series = np.unique(row_of[last], return_inverse=True)
    return last, series, seen


def _exactly(values: np.ndarray[Any, Any]) -> Floats:
    """Return float64; a float32 becomes the shortest decimal that it represents: 0.83, not 0.829999983."""
    if values.dtype == np.float32:
        found: Floats = pc.cast(pc.cast(pa.array(values), pa.string()), pa.float64()).to_numpy()
        return found
    return values.astype(np.float64)


def _of_whole(frame: Frame, time_s: float, wanted: Callable[[str], bool]) -> tuple[list[SeriesSubject], _Points]:
    """Return the values of a frame that was stored whole because no columns could hold it."""
    of_ranks = {rank.device: rank.job for rank in frame.ranks}
    places: list[SeriesSubject] = []
    values: list[float] = []
    for name in {name: None for block in frame.blocks for name in block.metrics}:
        for run in runs_of([(frame, time_s)], catalogue.BY_NAME[name]) if wanted(name) else ():
            spec = catalogue.BY_NAME[name]
            device = run.key if isinstance(run.key, int) and spec.scope is Scope.DEVICE else WHOLE_NODE
            places.append(SeriesSubject(spec, run.node, run.key, _job(frame.job, of_ranks, device)))
            values.append(float(run.values[0]))
    return places, _Points(np.arange(len(places)), np.full(len(places), time_s), np.array(values))


def _moments(
    places: list[SeriesSubject], points: _Points, interval_s: float, heads: SeriesHeads
) -> Iterator[IntervalSamples]:
    known = [heads.of(place) for place in places]
    cells = _cells(points.times_s, interval_s)
    order = np.lexsort((points.times_s, points.series, cells))
    if len(order):  # for a node in two row groups, the last of an interval counts
        same = (np.diff(points.series[order]) == 0) & (np.diff(cells[order]) == 0)
        order = order[np.r_[~same, True]]
    times_ms = np.clip(np.rint(points.times_s[order] * 1000.0), 0, encoding.TIME_MS_MAX - 1).astype(np.int64)
    encoded = encoding.samples(times_ms, points.values[order])
    series, cells = points.series[order].tolist(), cells[order]
    bounds = [*np.flatnonzero(np.r_[True, cells[1:] != cells[:-1]]).tolist(), len(series)] if series else []
    for low, high in pairwise(bounds):
        yield IntervalSamples([known[one] for one in series[low:high]], encoded[low:high])


def _cells(times_s: Floats, interval_s: float) -> Integers:
    """Return the interval number of each time; with ``interval_s`` 0, each millisecond is an interval."""
    return np.floor(times_s / (interval_s or 0.001)).astype(np.int64)
