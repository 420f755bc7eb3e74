"""A subscriber's reports to the server: durable, in order, until confirmed or useless."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from eagle_eye.orchestrators.cloudevent import unix_seconds
from eagle_eye.orchestrators.errors import RejectedError, ServerUnreachableError
from eagle_eye.orchestrators.ledger import Ledger, OwedReport
from eagle_eye.orchestrators.server_client import BACKOFF_S, BACKOFF_S_MAX, ServerClient
from eagle_eye.schema.action import ActionRequest, Report, ReportState
from eagle_eye.schema.backoff import Backoff

log = logging.getLogger(__name__)

# The report is of interest to people long after the action itself has expired.
KEEP_AFTER_EXPIRY_S = 3_600.0
DETAIL_CHARACTERS_MAX = 2_000


class Reporter:
    """Sends pending reports on its own thread, from ``start`` to ``stop``; an earlier process's first."""

    def __init__(
        self,
        client: ServerClient,
        ledger: Ledger,
        clock: Callable[[], float] = time.time,
        backoff: Backoff | None = None,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._clock = clock
        self._backoff = backoff or Backoff(BACKOFF_S, BACKOFF_S_MAX)
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)

    def __call__(self, action: ActionRequest, state: ReportState, detail: str) -> None:
        """Store the report durably; it will be sent."""
        path, named = self._client.report_path(action)
        if not named:
            log.warning("action %s: report_to is not our server's; using %s", action.action_id, path)
        until_s = max(self._clock(), unix_seconds(action.expires, "expires")) + KEEP_AFTER_EXPIRY_S
        self._ledger.owe(action.action_id, path, Report(state, detail[:DETAIL_CHARACTERS_MAX]), until_s)
        self._wake.set()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start sending pending reports."""
        self._thread.start()

    def stop(self, within_s: float) -> bool:
        """Stop sending; return whether all was delivered. Waits for pending reports, up to ``within_s``."""
        until_s = time.monotonic() + within_s
        while self._thread.is_alive() and self._ledger.owed() and time.monotonic() < until_s:
            time.sleep(0.02)
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        return not self._ledger.owed()

    def _run(self) -> None:
        while not self._stopping:
            # Cleared before looking, so that a report made meanwhile wakes the next wait.
            self._wake.clear()
            try:
                all_sent = self._send_owed()
            except Exception:
                log.exception("reports")  # the ledger; it may recover, this thread would not
                all_sent = False
            if all_sent:
                self._backoff.reset()
                self._wake.wait()
            else:
                # A new report does not shorten the wait: it would meet the same server.
                self._pause(self._backoff.next_s())

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not self._stopping and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.1))

    def _send_owed(self) -> bool:
        """Send in order until one fails; return whether nothing is left."""
        for owed in self._ledger.owed():
            if self._stopping:
                return False
            if self._clock() > owed.until_s:
                log.error("report %r on action %s was never delivered", owed.report.state, owed.action_id)
                self._ledger.settle(owed.sequence, "expired")
            elif not self._send(owed):
                return False
        return True

    def _send(self, owed: OwedReport) -> bool:
        try:
            self._client.call("POST", owed.path, msgspec.to_builtins(owed.report))
        except RejectedError as error:
            if error.may_pass:
                log.warning("report on action %s: %s; will try again", owed.action_id, error)
                return False
            log.warning("report %r on action %s was rejected: %s", owed.report.state, owed.action_id, error)
            self._ledger.settle(owed.sequence, "rejected")
            return True
        except ServerUnreachableError as error:
            log.warning("report on action %s: %s; will try again", owed.action_id, error)
            return False
        self._ledger.settle(owed.sequence, "delivered")
        return True
