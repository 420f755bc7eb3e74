"""The sender: sends the history's segments to the store, in a process of its own.

``python -m eagle_eye.server.history.remote_store.sender DATA`` reads an Order from standard input, sends every unsent
segment in the order in which they were written, and reports progress as JSON lines on standard output. It does not
change the history. As a separate process it takes no CPU core from clients waiting for the server.

Delivery is at least once: a moment counts as sent when the store has answered for all of it. One that is sent again has
the same samples, which Prometheus accepts as duplicates.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa

from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.server.history.embedded_history import HISTORY_FILE, HISTORY_FOLDER
from eagle_eye.server.history.remote_store.credentials import client
from eagle_eye.server.history.remote_store.position import HistoryMark, PositionFile, begin, mark_of
from eagle_eye.server.history.remote_store.post import Brought, Post, Unwanted
from eagle_eye.server.history.remote_store.segment_samples import IntervalSamples, SeriesHeads, moments
from eagle_eye.server.history.remote_store.sender_messages import Order, SenderReport
from eagle_eye.server.history.segments.facts import FACTS_FILE, RAW_FOLDER
from eagle_eye.server.history.segments.processes import end_with_parent
from eagle_eye.server.history.segments.reader import OURS
from eagle_eye.server.telemetry.endings import in_words

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
    position = begin(file.read(), order, manifest.history())
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
        with client(order.access, order.timeout_s) as http:
            post = Post(http, order.url, wait, troubled)
            send(order, data / HISTORY_FOLDER / RAW_FOLDER, manifest, file, post, tell)
    except Exception as error:  # noqa: BLE001 - whatever the error, the server must get it
        sys.stderr.write(f"{in_words(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    prepare_record_types()
    sys.exit(main(sys.argv[1:]))
