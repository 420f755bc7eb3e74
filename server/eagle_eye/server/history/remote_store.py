"""The remote store component of a server: writing, reading, or both, as configured.

Before it: what the server and the sender process (``remote_sender``) tell each other, how far the history has been
sent, and how the server starts the sender and turns its reports into metrics and log lines.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.history.embedded_history import HISTORY_FILE
from eagle_eye.server.history.remote_history import (
    Access,
    CredentialsUnreadable,
    Figures,
    RemoteHistory,
    access_of,
    http_client,
)
from eagle_eye.server.history.settings import RemoteStoreSettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable, how_it_ended, in_words
from eagle_eye.server.store import database


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, and where to."""

    url: str
    access: Access
    external_labels: dict[str, str]
    metrics: tuple[str, ...]  # globs
    interval_s: float
    request_samples_max: int
    timeout_s: float

    def wants(self, metric: str) -> bool:
        """Return whether a metric of the catalogue is sent; globs name it with or without the prefix."""
        names = (metric, PROMETHEUS_PREFIX + metric)
        return any(fnmatch.fnmatchcase(name, glob) for glob in self.metrics for name in names)

    def cut(self) -> str:
        """Return a text that is equal as long as a segment gives the same moments."""
        said = msgspec.json.encode((sorted(self.external_labels.items()), self.metrics, self.interval_s))
        return hashlib.sha256(said).hexdigest()[:16]


class SenderReport(msgspec.Struct, frozen=True, kw_only=True):
    """A line of standard output: what happened since the previous one.

    ``refused`` counts samples by reason, ``retries`` attempts, ``lost`` segments by reason. ``problem`` is None if
    unchanged and "" if it is over.
    """

    taken: int = 0
    refused: dict[str, int] = {}
    complaint: str = ""
    retries: dict[str, int] = {}
    lost: dict[str, int] = {}
    problem: str | None = None


# How far the history has been sent, in a file that only the sender writes. Killing the process loses nothing. After a
# power cut it may be a few requests behind; these are sent again.

POSITION_FILE = "remote-store.db"
_MIGRATIONS = (
    """
    CREATE TABLE position (one INTEGER PRIMARY KEY CHECK (one = 1), record TEXT NOT NULL);
    CREATE TABLE sent (name TEXT PRIMARY KEY) WITHOUT ROWID;
    """,
)


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """All segments up to number ``segment`` are sent, and the first ``moments`` moments of the one named ``partial``.

    Valid for the store at ``url``, the history of ``journal`` and requests split as in ``cut``.
    """

    url: str
    journal: str
    segment: int = 0
    partial: str = ""
    moments: int = 0
    cut: str = ""


class HistoryMark(NamedTuple):
    """Identifies a history: its journal's id, and the highest segment number it ever had."""

    journal: str
    newest: int


def mark_of(reader: sqlite3.Connection) -> HistoryMark:
    """Return which history the file of a connection holds."""
    row = reader.execute(
        "SELECT id, coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'segments'), 0) FROM journal"
    ).fetchone()
    return HistoryMark(*row)


def beginning(kept: Position | None, order: Order, history: HistoryMark) -> Position:
    """Return where to continue: at the oldest segment for another store, or another or an earlier history."""
    if kept is None or (kept.url, kept.journal) != (order.url, history.journal) or kept.segment > history.newest:
        return Position(url=order.url, journal=history.journal, cut=order.cut())
    if kept.cut != order.cut():
        return msgspec.structs.replace(kept, partial="", moments=0)
    return kept


class PositionFile:
    """The position file. Raises StoreUnavailable from every method when it cannot be read or written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / POSITION_FILE
        self._connection = database.connect(self._path)
        database.migrate(self._connection, _MIGRATIONS, self._path)
        self._connection.execute(
            "PRAGMA synchronous = NORMAL"
        )  # repeating a request is cheaper than waiting for a disk

    def read(self) -> Position | None:
        """Return the last position kept; None if nothing was ever sent."""
        try:
            row = self._connection.execute("SELECT record FROM position").fetchone()
            return msgspec.json.decode(row[0], type=Position) if row else None
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise StoreUnavailable(f"{self._path} cannot be read: {error}") from error

    def keep(self, position: Position, sent: str = "") -> None:
        """Keep a position; ``sent`` is the name of a segment now sent completely."""
        self._change(
            (
                "INSERT OR REPLACE INTO position (one, record) VALUES (1, ?)",
                (msgspec.json.encode(position).decode(),),
            ),
            *([("INSERT OR IGNORE INTO sent (name) VALUES (?)", (sent,))] if sent else []),
        )

    def unsent(self, names: Sequence[str]) -> int:
        """Return how many of the segments were never sent completely."""
        try:
            known = sum(
                bool(self._connection.execute("SELECT 1 FROM sent WHERE name = ?", (name,)).fetchone())
                for name in names
            )
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._path} cannot be read: {error}") from error
        return len(names) - known

    def forget(self, but: Sequence[str]) -> None:
        """Forget the names of segments that are not in ``but``."""
        text = msgspec.json.encode(list(but)).decode()
        self._change(("DELETE FROM sent WHERE name NOT IN (SELECT value FROM json_each(?))", (text,)))

    def _change(self, *statements: tuple[str, tuple[str, ...]]) -> None:
        try:
            with database.transaction(self._connection):
                for statement, values in statements:
                    self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._path} cannot be written: {error}") from error

    def close(self) -> None:
        """Release the file."""
        self._connection.close()


LOOK_S = 5.0  # how often to check whether there is something to send
STALLED_S = 900.0  # a sender without output for this long is killed; while the store is away it reports each attempt
FAILED_WAIT_S = 30.0  # after it ended with an error
COMMAND = (sys.executable, "-m", "eagle_eye.server.history.remote_sender")

_log = logging.getLogger(__name__)


def order_of(settings: RemoteStoreSettings) -> Order:
    """Return the order for the sender."""
    return Order(
        url=settings.write_url,
        access=access_of(settings),
        external_labels=settings.external_labels,
        metrics=settings.metrics,
        interval_s=settings.interval_s,
        request_samples_max=settings.request_samples_max,
        timeout_s=settings.timeout_s,
    )


class Sending:
    """Sends the history of ``data`` to the store. ``start`` returns at once, ``stop`` when the sender has ended."""

    def __init__(
        self,
        data: Path,
        settings: RemoteStoreSettings,
        clock: Clock,
        figures: Figures,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._data = data
        self._order = order_of(settings)
        self._clock = clock
        self._figures = figures
        self._command = (*command, str(data))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before_s = float("-inf")
        self._problem = ""
        self._complained: set[str] = set()

    def start(self) -> None:
        """Start sending."""
        self._thread = threading.Thread(target=self._run, name="remote store", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; requests in progress are sent again next time."""
        self._stop.set()
        process = self._process
        if process is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                if self.waiting() and self._clock.monotonic_s() >= self._not_before_s:
                    self.send()
                    self.waiting()
            except (StoreUnavailable, sqlite3.Error, OSError, msgspec.MsgspecError) as error:
                self._failed(in_words(error))
            except Exception:  # noqa: BLE001 - a bug must not end sending for ever, or data is lost to retention
                _log.exception("sending to the remote store failed and is tried again")
                self._failed("a bug")

    def waiting(self) -> int:
        """Return how many segments wait, and update the metrics. Raises StoreUnavailable, sqlite3.Error."""
        with closing(PositionFile(self._data)) as file:
            kept = file.read()
        uri = f"file:{self._data / HISTORY_FILE}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as reader:
            position = beginning(kept, self._order, mark_of(reader))
            count, oldest_s = reader.execute(
                "SELECT count(*), min(received_s) FROM segments WHERE id > ?", (position.segment,)
            ).fetchone()
        self._figures.waiting.set(count)
        self._figures.lag.set(max(0.0, self._clock.now_s() - oldest_s) if count else 0.0)
        return int(count)

    def send(self) -> None:
        """Run the sender until it has sent all that exists now. Raises OSError."""
        decoder = msgspec.json.Decoder(SenderReport)
        with subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            self._process = process
            if self._stop.is_set():
                process.kill()
            assert process.stdin is not None  # noqa: S101 - for the type checker
            assert process.stderr is not None  # noqa: S101
            try:
                process.stdin.write(msgspec.json.encode(self._order))
                process.stdin.close()
                while line := self._line(process):
                    self.count_report(decoder.decode(line))
                said = process.stderr.read(2_000).decode(errors="replace").strip()
                code = process.wait()
            finally:
                self._process = None
                process.kill()
        if code != 0 and not self._stop.is_set():
            self._failed(f"the sender {how_it_ended(code, said)}")

    def count_report(self, report: SenderReport) -> None:
        """Count the sender's report, and log new problems in it."""
        self._figures.samples.inc(report.taken)
        for reason, count in report.refused.items():
            self._figures.refused.labels(reason).inc(count)
            if reason not in self._complained:
                self._complained.add(reason)
                _log.warning(
                    "the remote store refuses samples (%s); they are left out and counted, this is said once: %s",
                    reason,
                    report.complaint,
                )
        for reason, count in report.retries.items():
            self._figures.retries.labels(reason).inc(count)
        for reason, count in report.lost.items():
            self._figures.lost.labels(reason).inc(count)
            _log.error("%d segments of the history (%s) could not be sent to the remote store", count, reason)
        if report.problem is not None and report.problem != self._problem:
            if report.problem:
                _log.warning("the remote store takes nothing at the moment; it is tried again: %s", report.problem)
            else:
                _log.info("the remote store takes samples again")
            self._problem = report.problem
            self._figures.ok.set(not report.problem)

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None  # noqa: S101 - for the type checker
        watchdog = threading.Timer(STALLED_S, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            return process.stdout.readline()
        finally:
            watchdog.cancel()

    def _failed(self, reason: str) -> None:
        self._figures.failures.inc()
        self._not_before_s = self._clock.monotonic_s() + FAILED_WAIT_S
        _log.error("the history could not be sent to the remote store; it is tried again: %s", reason)


class RemoteStore:
    """The remote store. ``past`` is None if no read URL is configured. Raises ConfigurationError."""

    def __init__(self, data: Path, settings: RemoteStoreSettings, clock: Clock, registry: CollectorRegistry) -> None:
        self._sending: Sending | None = None
        self._client = None
        self.past: RemoteHistory | None = None
        if not settings.write_url and not settings.read_url:
            return
        figures = Figures(registry)
        try:
            self._client = http_client(access_of(settings), settings.timeout_s)
        except CredentialsUnreadable as error:
            raise ConfigurationError(f"remote_store.ca_file: {error}") from None
        if settings.write_url:
            self._sending = Sending(data, settings, clock, figures)
        if settings.read_url:
            self.past = RemoteHistory(self._client, settings, figures)

    def start(self) -> None:
        """Start sending what is not sent yet."""
        if self._sending is not None:
            self._sending.start()

    def close(self) -> None:
        """Stop; requests in progress are sent again next time."""
        if self._sending is not None:
            self._sending.stop()
        if self._client is not None:
            self._client.close()
