"""The sender: sends the history's segments to the remote store, in a process of its own.

``python -m eagle_eye.server.history.remote_sender DATA`` reads an Order from standard input, sends every unsent segment
in the order in which they were written, and reports progress as JSON lines on standard output. It does not change the
history. As a separate process it takes no CPU core from clients waiting for the server.

Delivery is at least once: a moment (the samples of one interval, one per series) counts as sent when the store has
answered for all of it. One that is sent again has the same samples, which Prometheus accepts as duplicates.
"""

from __future__ import annotations

import functools
import os
import random
import sqlite3
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.backoff import Backoff
from eagle_eye.schema.events import WHOLE_NODE
from eagle_eye.schema.frame import Frame, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.server.history import remote_series
from eagle_eye.server.history.embedded_history import HISTORY_FILE, HISTORY_FOLDER
from eagle_eye.server.history.history import runs_of
from eagle_eye.server.history.processes import end_with_parent
from eagle_eye.server.history.remote_history import CredentialsUnreadable, http_client
from eagle_eye.server.history.remote_series import SeriesSubject, labels_of
from eagle_eye.server.history.remote_store import HistoryMark, Order, PositionFile, SenderReport, beginning, mark_of
from eagle_eye.server.history.segment_files import OURS, whole
from eagle_eye.server.history.segment_tables import FACTS_FILE, FRAMES_FILE, LINKS_FILE, RAW_FOLDER, SAMPLES_FILE
from eagle_eye.server.model.errors import ServerError, in_words

# A segment's values as samples: one per series and interval, interval by interval ("moments"). Read column by column,
# some row groups at a time. The same segment with the same settings gives the same moments in the same order, so that a
# position among them can be saved.

ROWS_AT_ONCE = 100_000  # of samples.parquet: some minutes of some dozen nodes, a hundred megabytes when not thinned
HEADS_MAX = 100_000  # cached: those of some hundred nodes, half a kilobyte each

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

_ranks_decoder = msgspec.json.Decoder(list[Rank])


class IntervalSamples(NamedTuple):
    """Samples of one interval, one per series: heads and samples as encoded by ``remote_series``."""

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
            found = self._known[place] = remote_series.head(labels_of(place, self._external))
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
    times_ms = np.clip(np.rint(points.times_s[order] * 1000.0), 0, remote_series.TIME_MS_MAX - 1).astype(np.int64)
    encoded = remote_series.samples(times_ms, points.values[order])
    series, cells = points.series[order].tolist(), cells[order]
    bounds = [*np.flatnonzero(np.r_[True, cells[1:] != cells[:-1]]).tolist(), len(series)] if series else []
    for low, high in pairwise(bounds):
        yield IntervalSamples([known[one] for one in series[low:high]], encoded[low:high])


def _cells(times_s: Floats, interval_s: float) -> Integers:
    """Return the interval number of each time; with ``interval_s`` 0, each millisecond is an interval."""
    return np.floor(times_s / (interval_s or 0.001)).astype(np.int64)


# Samples are sent until each is accepted or rejected for good. Temporary failures (no connection, 429, 5xx, wrong
# credentials or address) are retried indefinitely. Rejections of the samples themselves (400, 409, 413, 422) are not:
# the request is split until the rejected samples are isolated, so that all others are stored.

BACKOFF_BASE_S = 0.5
BACKOFF_MAX_S = 60.0
RETRY_AFTER_S_MAX = 300.0
TRIES_MAX = 64  # maximum number of requests made out of one rejected request
HOPELESS_TRIES = 15  # after this many with nothing accepted the rest is given up: eight parts were all rejected
REASON_BYTES_MAX = 4_096

_ABOUT_SAMPLES = frozenset({400, 409, 413, 422})
_REASONS = (
    ("out of order", "out_of_order"),
    ("out-of-order", "out_of_order"),
    ("out of bounds", "too_old"),
    ("too old", "too_old"),
    ("duplicate", "duplicate"),
)
_HEADERS = {
    "Content-Type": remote_series.CONTENT_TYPE,
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": remote_series.VERSION,
    "User-Agent": "eagle-eye",
}


class Unwanted(ServerError):
    """The samples need not be sent any more: the server has stopped."""


@dataclass(slots=True)
class Brought:
    """The result of sending samples, and the store's first complaint."""

    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    complaint: str = ""


class _Answer(Exception):
    """The store did not accept the request; ``retry_s`` None means that it never will."""

    def __init__(self, reason: str, detail: str, retry_s: float | None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retry_s = retry_s


class Post:
    """Sends requests to ``url``; for any thread.

    ``wait(seconds)`` sleeps, and raises Unwanted once sending is no longer wanted. ``troubled(reason, detail)`` is
    called for every attempt that will be repeated, ``troubled("", "")`` for the first answered one after that.
    """

    def __init__(
        self,
        client: httpx.Client,
        url: str,
        wait: Callable[[float], None],
        troubled: Callable[[str, str], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._url = url
        self._wait = wait
        self._troubled = troubled
        self._jitter = jitter

    def bring(self, moment: IntervalSamples) -> Brought:
        """Return once the store has accepted or rejected every sample. Raises Unwanted."""
        brought = Brought()
        waiting = deque([moment])
        tries = 0
        while waiting:
            part = waiting.popleft()
            size = len(part.heads)
            tries += 1
            no = self._answered(remote_series.request(part.heads, part.samples))
            if no is None:
                brought.taken += size
                continue
            brought.complaint = brought.complaint or str(no)
            hopeless = tries >= HOPELESS_TRIES and brought.taken == 0
            if size == 1 or tries + len(waiting) >= TRIES_MAX or hopeless:
                brought.refused[no.reason] += size
            else:
                half = size // 2
                waiting.append(IntervalSamples(part.heads[:half], part.samples[:half]))
                waiting.append(IntervalSamples(part.heads[half:], part.samples[half:]))
        return brought

    def _answered(self, body: bytes) -> _Answer | None:
        """Return None once the store has accepted the body, or why it never will."""
        backoff = Backoff(BACKOFF_BASE_S, BACKOFF_MAX_S, self._jitter)
        while True:
            try:
                self._try(body)
            except _Answer as answer:
                if answer.retry_s is None:
                    return self._settled(answer, backoff)
                self._troubled(answer.reason, str(answer))
                self._wait(max(answer.retry_s, backoff.next_s()))
            else:
                return self._settled(None, backoff)

    def _settled(self, answer: _Answer | None, backoff: Backoff) -> _Answer | None:
        if backoff.failures:
            self._troubled("", "")
        return answer

    def _try(self, body: bytes) -> None:
        """Return if the store accepted the body. Raises _Answer."""
        try:
            with self._client.stream("POST", self._url, content=body, headers=_HEADERS) as response:
                if response.is_success:
                    return
                said = _beginning(response)
                status = response.status_code
                after = response.headers.get("Retry-After", "")
        except httpx.HTTPError as error:
            raise _Answer("unreachable", f"the store cannot be reached: {type(error).__name__}", 0.0) from None
        except CredentialsUnreadable as error:
            raise _Answer("credentials", str(error), 0.0) from None
        detail = f"the store answered HTTP {status}: {said}"
        if status in _ABOUT_SAMPLES:
            raise _Answer(_reason(status, said), detail, None)
        retry_s = min(float(after), RETRY_AFTER_S_MAX) if after.isascii() and after.isdigit() else 0.0
        raise _Answer("busy" if status == 429 or status >= 500 else "configuration", detail, retry_s)


def _beginning(response: httpx.Response) -> str:
    """Return the beginning of the store's response, in one line."""
    found = b""
    for part in response.iter_bytes(REASON_BYTES_MAX):
        found += part
        if len(found) >= REASON_BYTES_MAX:
            break
    return " ".join(found[:500].decode(errors="replace").split())


def _reason(status: int, said: str) -> str:
    if status == 413:
        return "too_large"
    return next((reason for text, reason in _REASONS if text in said.lower()), "refused")


# All unsent segments, in order

NICENESS = 10  # yields to the server and all other processes
BUSY_S = 5.0
CONNECTIONS = 4  # concurrent, for parts of one moment: no series is in two of them
WAIT_STEP_S = 1.0  # how often a waiting sender checks whether it is still wanted
_BROKEN = (OSError, ValueError, KeyError, IndexError, pa.ArrowException, msgspec.MsgspecError)


class _Sources(msgspec.Struct):
    """The part of a segment's facts that names the segments it was merged from, which need not be sent again."""

    sources: tuple[str, ...] = ()


_sources_decoder = msgspec.json.Decoder(_Sources)


class _Unreadable(Exception):
    """A segment that is broken or was deleted."""


class RawSegment(NamedTuple):
    """A raw segment of the manifest; ``problem`` says why it cannot be read."""

    id: int
    name: str
    problem: str | None


class SegmentManifest:
    """The history's list of segments, as the sender reads it."""

    def __init__(self, journal: Path) -> None:
        self._connection = sqlite3.connect(
            f"file:{journal}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )

    def history(self) -> HistoryMark:
        """Return which history it is."""
        return mark_of(self._connection)

    def after(self, segment: int) -> RawSegment | None:
        """Return the next raw segment after ``segment``; None if there is none."""
        row = self._connection.execute(
            "SELECT id, name, problem FROM segments WHERE id > ? ORDER BY id LIMIT 1", (segment,)
        ).fetchone()
        return RawSegment(*row) if row else None

    def has(self, segment: int) -> bool:
        """Return whether the segment still exists and is readable."""
        row = self._connection.execute("SELECT problem FROM segments WHERE id = ?", (segment,)).fetchone()
        return row is not None and row[0] is None

    def names(self) -> list[str]:
        """Return the names of all raw segments."""
        return [name for (name,) in self._connection.execute("SELECT name FROM segments")]

    def close(self) -> None:
        """Release the file."""
        self._connection.close()


def send(
    order: Order,
    folder: Path,
    manifest: SegmentManifest,
    file: PositionFile,
    post: Post,
    tell: Callable[[SenderReport], None],
) -> None:
    """Send all segments that exist. Raises Unwanted, StoreUnavailable, sqlite3.Error."""
    position = beginning(file.read(), order, manifest.history())
    heads = SeriesHeads(order.external_labels)
    missing = 0  # segments that existed once, or that others were merged from, and were never sent
    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="post") as pool:
        while (segment := manifest.after(position.segment)) is not None:
            missing += segment.id - position.segment - 1 if position.segment else 0
            sources = _sources(folder / segment.name)
            unsent = file.unsent(sources)
            missing -= max(unsent - 1, 0)  # a merged segment has the number of its newest source
            if segment.problem is not None:
                tell(SenderReport(lost={"broken": 1}))
            elif not sources or unsent:
                skip = position.moments if position.partial == segment.name else 0
                read = _readable(moments(folder / segment.name, order.wants, order.interval_s, heads))
                try:
                    for number, moment in enumerate(islice(read, skip, None), start=skip + 1):
                        _bring(pool, post, moment, order.request_samples_max, tell)
                        file.keep(
                            msgspec.structs.replace(position, partial=segment.name, moments=number, cut=order.cut())
                        )
                except _Unreadable:
                    tell(SenderReport(lost={"broken" if manifest.has(segment.id) else "retired": 1}))
            position = msgspec.structs.replace(position, segment=segment.id, partial="", moments=0, cut=order.cut())
            file.keep(position, segment.name)
    if missing > 0:
        tell(SenderReport(lost={"retired": missing}))
    file.forget(manifest.names())


def _sources(folder: Path) -> tuple[str, ...]:
    """Return the names of the segments that one was merged from; () if none, or unreadable."""
    try:
        return _sources_decoder.decode((folder / FACTS_FILE).read_bytes()).sources
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return ()


def _readable(read: Iterator[IntervalSamples]) -> Iterator[IntervalSamples]:
    """Yield the moments. Raises _Unreadable if the segment is at fault rather than this process."""
    while True:
        try:
            moment = next(read, None)
        except _BROKEN as error:
            if isinstance(error, OSError) and error.errno in OURS:
                raise
            raise _Unreadable from error
        if moment is None:
            return
        yield moment


def _bring(
    pool: ThreadPoolExecutor,
    post: Post,
    moment: IntervalSamples,
    samples_max: int,
    tell: Callable[[SenderReport], None],
) -> None:
    for brought in pool.map(post.bring, _parts(moment, samples_max)):
        tell(told_of(brought))


def told_of(brought: Brought) -> SenderReport:
    """Return the report line about samples that were sent."""
    return SenderReport(taken=brought.taken, refused=dict(brought.refused), complaint=brought.complaint)


def _parts(moment: IntervalSamples, samples_max: int) -> Iterator[IntervalSamples]:
    for low in range(0, len(moment.heads), samples_max):
        yield IntervalSamples(moment.heads[low : low + samples_max], moment.samples[low : low + samples_max])


def _tell(lock: threading.Lock, report: SenderReport) -> None:
    with lock:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()


def main(arguments: Sequence[str]) -> int:
    """Send; return 0 when nothing is left, 1 on failure, with the reason on standard error."""
    data = Path(arguments[0])
    end_with_parent()
    os.nice(NICENESS)
    pa.set_cpu_count(1)
    server = os.getppid()
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    tell = functools.partial(_tell, threading.Lock())

    def wait(seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if os.getppid() != server:  # a restarted server has a sender of its own
                raise Unwanted("the server has ended")
            time.sleep(min(left_s, WAIT_STEP_S))

    def troubled(reason: str, detail: str) -> None:
        tell(SenderReport(retries=dict(Counter([reason] if reason else [])), problem=detail))

    try:
        manifest, file = SegmentManifest(data / HISTORY_FILE), PositionFile(data)
        with http_client(order.access, order.timeout_s) as http:
            post = Post(http, order.url, wait, troubled)
            send(order, data / HISTORY_FOLDER / RAW_FOLDER, manifest, file, post, tell)
    except Exception as error:  # noqa: BLE001 - whatever the error, the server must get it
        sys.stderr.write(f"{in_words(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    prepare_record_types()
    sys.exit(main(sys.argv[1:]))
