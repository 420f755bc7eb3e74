"""Supervises the sender process: starts it when segments wait, turns its reports into metrics and log lines."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from eagle_eye.server.history.embedded_history import HISTORY_FILE
from eagle_eye.server.history.remote_store.credentials import access_of
from eagle_eye.server.history.remote_store.position import PositionFile, begin, mark_of
from eagle_eye.server.history.remote_store.remote_store_metrics import Figures
from eagle_eye.server.history.remote_store.sender_messages import Order, SenderReport
from eagle_eye.server.history.remote_store.settings import RemoteStoreSettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.telemetry.endings import how_it_ended, in_words

LOOK_S = 5.0  # how often to check whether there is something to send
STALLED_S = 900.0  # a sender without output for this long is killed; while the store is away it reports each attempt
FAILED_WAIT_S = 30.0  # after it ended with an error
COMMAND = (sys.executable, "-m", "eagle_eye.server.history.remote_store.sender")

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
            position = begin(kept, self._order, mark_of(reader))
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
                    self.take(decoder.decode(line))
                said = process.stderr.read(2_000).decode(errors="replace").strip()
                code = process.wait()
            finally:
                self._process = None
                process.kill()
        if code != 0 and not self._stop.is_set():
            self._failed(f"the sender {how_it_ended(code, said)}")

    def take(self, report: SenderReport) -> None:
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
