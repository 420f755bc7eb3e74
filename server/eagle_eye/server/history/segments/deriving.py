"""Raw segments into the buckets of a level: every value of the window counts once.

One metric of all the window's rows is in memory at a time, and where the buckets are among the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_eye.schema.frame import Frame
from eagle_eye.schema.metrics import BY_NAME, METRICS, Scope
from eagle_eye.server.history.history import runs_of
from eagle_eye.server.history.segments.buckets import BucketRows, Buckets, Column
from eagle_eye.server.history.segments.downsampling import Floats, Integers
from eagle_eye.server.history.segments.frames import whole
from eagle_eye.server.history.segments.layout import FRAMES_FILE, LINKS_FILE, SAMPLES_FILE
from eagle_eye.server.history.segments.levels import Book, Level, Rows
from eagle_eye.server.history.segments.reader import overlaps, reading

SLICE_ROWS = 8  # rows that lie together in the mean, for them to be taken as slices

_Pick = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
_Odd = tuple[Frame, float, int]  # a frame that was kept whole, its corrected time, its jobs' number


class _RankJob(msgspec.Struct):
    job: str


_ranks_decoder = msgspec.json.Decoder(list[_RankJob])


def derive(folders: Sequence[Path], level: Level, start_s: float, book: Book) -> Iterator[tuple[str, Rows]]:
    """Yield the metrics that the segments have values of in the window at ``start_s``, by name, with their buckets.

    Raises BrokenSegment.
    """
    end_s = start_s + level.window_s
    tables = {scope: Buckets(level, book) for scope in Scope}
    for folder in folders:
        with reading(folder.name):
            jobs, odd = _jobs(folder, start_s, end_s, book)
            for scope, source in (
                *_of_file(folder / SAMPLES_FILE, (Scope.NODE, Scope.DEVICE), jobs, start_s, end_s, book),
                *_of_file(folder / LINKS_FILE, (Scope.LINK,), jobs, start_s, end_s, book),
                *_of_odd(odd, book),
            ):
                tables[scope].add(source)
    for table in tables.values():
        table.close()
    for spec in sorted(METRICS):
        rows = tables[spec.scope].rows(spec.name, spec.kind)
        if rows is not None:
            yield spec.name, rows


def _jobs(folder: Path, start_s: float, end_s: float, book: Book) -> tuple[Integers, list[_Odd]]:
    """Return the number of each frame's jobs, and the frames of the window that were kept whole, with time and job."""
    with pq.ParquetFile(
        folder / FRAMES_FILE, page_checksum_verification=True, read_dictionary=["job", "ranks"]
    ) as file:
        jobs = np.full(file.metadata.num_rows, -1, dtype=np.int64)
        groups = list(_row_groups(file, start_s, end_s))
        if not groups:
            return jobs, []
        table = file.read_row_groups([number for _, number in groups], columns=["job", "ranks"], use_threads=False)
        named, ranks = (table[name].unify_dictionaries().combine_chunks() for name in ("job", "ranks"))
        texts = [[*column.dictionary.to_pylist(), None] for column in (named, ranks)]
        codes = [_places(column, len(column.dictionary)) for column in (named, ranks)]
        pairs = codes[0].astype(np.int64) << 32 | codes[1]
        begins = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1]))  # a node says the same for long
        known: dict[int, int] = {}
        for pair in set(pairs[begins].tolist()):
            known[pair] = int(book.jobs([_job(texts[0][pair >> 32], texts[1][pair & 0xFFFFFFFF])])[0])
        numbers = np.array([known[pair] for pair in pairs[begins].tolist()], dtype=np.int64)
        read = np.repeat(numbers, np.diff(begins, append=len(pairs)))
        odd: list[_Odd] = []
        low = 0
        for first, number in groups:
            rows = file.metadata.row_group(number).num_rows
            jobs[first : first + rows] = read[low : low + rows]
            low += rows
            odd += _odd(file, number, start_s, end_s, book)
        return jobs, odd


def _odd(file: pq.ParquetFile, number: int, start_s: float, end_s: float, book: Book) -> Iterator[_Odd]:
    """Yield the frames of a row group that were kept whole, of those in the window."""
    of = file.metadata.row_group(number).column(file.schema_arrow.names.index("raw")).statistics
    if of is not None and of.has_null_count and of.null_count == file.metadata.row_group(number).num_rows:
        return
    for row in file.read_row_group(number, columns=["raw", "time"], use_threads=False).to_pylist():
        frame = whole(row["raw"]) if row["raw"] is not None and start_s <= row["time"] < end_s else None
        if frame is not None:
            named = {frame.job, *(rank.job for rank in frame.ranks)} - {None}
            yield frame, row["time"], int(book.jobs([_line_each(named)])[0])


def _places(column: pa.DictionaryArray, nothing: int) -> np.ndarray[Any, Any]:
    """Return the places of a column's texts in its dictionary; where there is none, ``nothing``."""
    indices = column.indices if column.null_count == 0 else column.indices.fill_null(nothing)
    places: np.ndarray[Any, Any] = indices.to_numpy()
    return places


def _job(named: str | None, ranks: str | None) -> str | None:
    """Return whom a frame with this job and these ranks (JSON) speaks of."""
    return _line_each({named, *(rank.job for rank in (_ranks_decoder.decode(ranks) if ranks else []))} - {None})


def _line_each(jobs: set[Any]) -> str | None:
    return "\n".join(sorted(jobs)) or None  # no name has a line's end in it


def _row_groups(file: pq.ParquetFile, start_s: float, end_s: float) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of each row group that may hold rows of the time."""
    at, first = file.schema_arrow.names.index("time"), 0
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        if overlaps(group.column(at).statistics, start_s, end_s):
            yield first, number
        first += group.num_rows


def _of_file(
    path: Path, scopes: tuple[Scope, ...], jobs: Integers, start_s: float, end_s: float, book: Book
) -> Iterator[tuple[Scope, BucketRows]]:
    """Yield the rows of the window, each scope's apart."""
    if not path.exists():
        return
    linked = scopes == (Scope.LINK,)
    texts = ["node", "link"] if linked else ["node"]
    file = pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=texts, pre_buffer=False)
    numbers = [number for _, number in _row_groups(file, start_s, end_s)]
    if not numbers:
        return
    names = ["time", "node", "link" if linked else "device", "frame"]
    table = file.read_row_groups(numbers, columns=names, use_threads=False)
    times_s = table["time"].to_numpy()
    inside = (times_s >= start_s) & (times_s < end_s)
    nodes = _codes(table["node"], book.nodes)
    keys = _codes(table["link"], book.links) if linked else table["device"].to_numpy().astype(np.int64)
    series, job = book.series(nodes, keys), jobs[table["frame"].to_numpy()]
    for scope in scopes:
        # What is not of the node has other keys than -1, or no server would have taken it.
        own = np.ones(len(keys), dtype=bool) if linked else (keys == -1) == (scope is Scope.NODE)
        pick = _picking(np.flatnonzero(own & inside), len(keys))
        if pick is not None:
            column = _reading(path.parent.name, file, numbers, pick, int(np.count_nonzero(own)))
            yield scope, BucketRows(pick(series), pick(times_s), pick(job), column)


def _picking(places: Integers, length: int) -> _Pick | None:
    """Return a function that takes these places of a column of this length; None: there are none."""
    if not len(places):
        return None
    if len(places) == length:
        return lambda column: column
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    if len(breaks) * SLICE_ROWS > len(places):
        return lambda column: column[places]
    # Rows of a scope lie together: copying slices costs a tenth of looking up places, which need not be kept then.
    ends = np.append(places[breaks - 1], places[-1]) + 1
    slices = [slice(low, high) for low, high in zip(places[np.append(0, breaks)].tolist(), ends.tolist(), strict=True)]
    return lambda column: np.concatenate([column[one] for one in slices])


def _reading(name: str, file: pq.ParquetFile, numbers: list[int], pick: _Pick, own: int) -> Column:
    """Return a function that gives what is picked of a column, ``own`` of whose rows are of the metric's scope.

    It reads only columns whose statistics do not tell already that they are empty, or all the same.
    """
    place = {name: at for at, name in enumerate(file.schema_arrow.names)}
    total = sum(file.metadata.row_group(number).num_rows for number in numbers)

    def column(metric: str) -> tuple[np.ndarray[Any, Any], int] | float | None:
        at = place.get(metric)
        known = [file.metadata.row_group(number).column(at).statistics for number in numbers] if at is not None else []
        if known and all(one is not None and one.has_null_count for one in known):
            present = total - sum(one.null_count for one in known)
            if present == own and all(one.has_min_max for one in known if one.num_values):
                ends = {end for one in known if one.num_values for end in (one.min, one.max)}
                if len(ends) == 1:
                    return float(ends.pop())
        elif known:
            present = None
        if not known or present == 0:
            return None
        with reading(name):
            cells = file.read_row_groups(numbers, columns=[metric], use_threads=False)[metric]
        if total - cells.null_count == own:
            return pick(_with_any_nulls(cells)), 0
        values = pick(cells.to_numpy())
        return values, int(np.count_nonzero(np.isnan(values)))

    return column


def _with_any_nulls(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return the values, and where there is none, anything."""
    kind = column.type.to_pandas_dtype()
    parts = [np.frombuffer(one.buffers()[1], kind)[one.offset :][: len(one)] for one in column.chunks if len(one)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _codes(column: pa.ChunkedArray, number: Callable[[list[str]], Integers]) -> Integers:
    """Return the numbers of a dictionary column's texts."""
    parts = [number(chunk.dictionary.to_pylist())[chunk.indices.to_numpy()] for chunk in column.chunks]
    return np.concatenate(parts)


def _of_odd(frames: list[_Odd], book: Book) -> Iterator[tuple[Scope, BucketRows]]:
    """Yield what frames hold that were kept whole, since no columns could: a row for each value."""
    rows: dict[Scope, list[tuple[int, float, int]]] = {}
    cells: dict[str, list[tuple[int, float]]] = {}
    for frame, time_s, job in frames:
        node = book.nodes([frame.node])
        for name in sorted({name for block in frame.blocks for name in block.metrics} & BY_NAME.keys()):
            own = rows.setdefault(BY_NAME[name].scope, [])
            for run in runs_of(frame, time_s, BY_NAME[name]):
                keys = book.links([run.key]) if isinstance(run.key, str) else np.array([run.key], dtype=np.int64)
                cells.setdefault(name, []).append((len(own), float(run.values[0])))
                own.append((int(book.series(node, keys)[0]), time_s, job))
    for scope, own in rows.items():
        if own:
            series, times_s, jobs = zip(*own, strict=True)
            column = _of_cells(cells, np.array(times_s))
            yield scope, BucketRows(np.array(series, np.int64), np.array(times_s), np.array(jobs, np.int64), column)


def _of_cells(cells: dict[str, list[tuple[int, float]]], times_s: Floats) -> Column:
    length = len(times_s)

    def column(metric: str) -> tuple[np.ndarray[Any, Any], int] | None:
        if metric == "time":
            return times_s, 0
        if metric not in cells:
            return None
        values = np.full(length, np.nan)
        places, held = zip(*cells[metric], strict=True)
        values[list(places)] = held
        return values, length - len(held)

    return column
