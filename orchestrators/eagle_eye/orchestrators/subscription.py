"""The standing arrangement with the server: it delivers our job's events here, and hears how the job is."""

from __future__ import annotations

import base64
import logging
import secrets as random_secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from eagle_eye.orchestrators.backoff import Backoff
from eagle_eye.orchestrators.errors import RejectedError, ServerUnreachableError
from eagle_eye.orchestrators.server_client import ServerClient
from eagle_eye.orchestrators.whole_file import write_whole
from eagle_eye.schema.action import (
    ACTION_EXPIRED,
    ACTION_REQUESTED,
    ACTION_WITHDRAWN,
    NODE_READMITTED,
    PING,
    JobUpdate,
)

log = logging.getLogger(__name__)

TYPES = (ACTION_REQUESTED, ACTION_EXPIRED, ACTION_WITHDRAWN, NODE_READMITTED, PING)
CHECK_EVERY_S = 15.0
LAST_WORD_S = 2.0


@dataclass(frozen=True)
class Wanted:
    """What to subscribe to: where the receiver can be reached and for which jobs."""

    url: str
    jobs: tuple[str, ...]
    types: tuple[str, ...] = TYPES


class _Held(msgspec.Struct, frozen=True):
    id: str
    secret: str


class Subscription:
    """Keeps one subscription alive and the server's picture of the jobs current, on a thread of its own.

    The secret is made here and sent along, so that not even the first ping arrives before it is known. The
    file keeps it, and lets a later process remove what an earlier one left at the server.
    """

    def __init__(
        self,
        client: ServerClient,
        wanted: Wanted,
        file: Path,
        check_every_s: float = CHECK_EVERY_S,
        backoff: Backoff | None = None,
    ) -> None:
        self._client = client
        self._wanted = wanted
        self._file = file
        self._check_every_s = check_every_s
        self._backoff = backoff or Backoff()
        self._proposed = "whsec_" + base64.b64encode(random_secrets.token_bytes(32)).decode()
        self._held: _Held | None = None
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[JobUpdate, bool]] = {}  # by job: the latest word, and whether it arrived
        self._wake = threading.Event()
        self._stopping = False
        self._in_touch = False
        self._complained = ""
        self._thread = threading.Thread(target=self._run, name="subscription", daemon=True)

    @property
    def in_touch(self) -> bool:
        """Whether the server knew the subscription when last asked."""
        return self._in_touch

    def secrets(self) -> Sequence[str]:
        """Return the secrets whose signatures count."""
        held = self._held
        return [held.secret, self._proposed] if held else [self._proposed]

    def attempt_of(self, job: str) -> int:
        """Return the attempt that the server knows of, 0 where it knows none or does not answer at once."""
        try:
            answer = self._client.call("GET", f"/api/v1/jobs/{quote(job, safe='')}", timeout_s=LAST_WORD_S)
        except ServerUnreachableError as error:
            if not (isinstance(error, RejectedError) and error.status == 404):
                log.warning("server: %s; it may know of later attempts", error)
            return 0
        attempt = answer.get("attempt") if isinstance(answer, dict) else None
        return attempt if isinstance(attempt, int) else 0

    def start(self) -> None:
        """The subscription is being made and kept."""
        self._thread.start()

    def tell(self, job: str, update: JobUpdate) -> None:
        """The server will hear of the job's state; an earlier word that has not arrived is replaced."""
        with self._lock:
            self._jobs[job] = (update, False)
        self._wake.set()

    def flush(self, within_s: float) -> bool:
        """Return whether everything told has arrived, waiting for it up to ``within_s``."""
        until_s = time.monotonic() + within_s
        while not (arrived := self._all_told()) and time.monotonic() < until_s and self._thread.is_alive():
            time.sleep(0.01)
        return arrived

    def stop(self) -> None:
        """The server delivers nothing here any more, if it can be reached; the thread has ended."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        if self._held is not None:
            self._remove(self._held.id)
            self._held = None

    def _run(self) -> None:
        self._remove_leftover()
        check_due_s = time.monotonic()
        while not self._stopping:
            self._wake.clear()
            try:
                self._tell_all()
                if time.monotonic() >= check_due_s:
                    self._keep()
                    self._tell_all()
                    check_due_s = time.monotonic() + self._check_every_s
            except (ServerUnreachableError, OSError) as error:
                self._in_touch = False
                check_due_s = time.monotonic()
                self._complain(str(error))
                # Not the event: what is told meanwhile would only meet the same server.
                self._pause(self._backoff.next_s())
            else:
                self._in_touch = True
                self._complain("")
                self._backoff.reset()
                self._wake.wait(self._check_every_s)

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not self._stopping and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))

    def _complain(self, message: str) -> None:
        """Once for each new trouble, not once for each try."""
        if message != self._complained:
            if message:
                log.warning("server: %s; will try again", message)
            else:
                log.info("server: in touch again")
        self._complained = message

    def _keep(self) -> None:
        if self._held is not None and not self._known(self._held.id):
            log.warning("the server has lost the subscription; subscribing again")
            self._held = None
            # A server that forgot the subscription may have forgotten the jobs as well.
            self._tell_again()
        if self._held is None:
            self._held = self._create()

    def _known(self, identifier: str) -> bool:
        """Whether the server would deliver: it ends a subscription that did not answer for too long."""
        try:
            answer = self._client.call("GET", f"/api/v1/subscriptions/{quote(identifier, safe='')}")
        except RejectedError as error:
            if error.status not in (404, 410):
                raise
            return False
        return not isinstance(answer, dict) or answer.get("active") is not False

    def _create(self) -> _Held:
        body = {
            "url": self._wanted.url,
            "types": list(self._wanted.types),
            "jobs": list(self._wanted.jobs),
            "format": "cloudevents",
            "secret": self._proposed,
        }
        answer = self._client.call("POST", "/api/v1/subscriptions", body)
        identifier = answer.get("id") if isinstance(answer, dict) else None
        if not isinstance(identifier, str | int) or not str(identifier):
            raise ServerUnreachableError("POST /api/v1/subscriptions: the answer has no id")
        secret = answer.get("secret")
        held = _Held(str(identifier), secret if isinstance(secret, str) and secret else self._proposed)
        write_whole(self._file, msgspec.json.encode(held))
        return held

    def _tell_all(self) -> None:
        with self._lock:
            owed = [(job, update) for job, (update, arrived) in self._jobs.items() if not arrived]
        for job, update in owed:
            try:
                self._client.call("PUT", f"/api/v1/jobs/{quote(job, safe='')}", msgspec.to_builtins(update))
            except RejectedError as error:
                if error.status >= 500 or error.status in (401, 403, 404, 408, 429):
                    raise
                log.warning("the server does not take the state of job %s: %s", job, error)
            with self._lock:
                if self._jobs[job][0] is update:
                    self._jobs[job] = (update, True)

    def _tell_again(self) -> None:
        with self._lock:
            self._jobs = {job: (update, False) for job, (update, _) in self._jobs.items()}

    def _all_told(self) -> bool:
        with self._lock:
            return all(arrived for _, arrived in self._jobs.values())

    def _remove_leftover(self) -> None:
        try:
            left = msgspec.json.decode(self._file.read_bytes(), type=_Held)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read (%s); an old subscription may stay", self._file, error)
            return
        self._remove(left.id)

    def _remove(self, identifier: str) -> None:
        try:
            self._client.call("DELETE", f"/api/v1/subscriptions/{quote(identifier, safe='')}", timeout_s=LAST_WORD_S)
        except ServerUnreachableError as error:
            if not (isinstance(error, RejectedError) and error.status in (404, 410)):
                log.warning("the subscription stays at the server: %s", error)
                return
        self._file.unlink(missing_ok=True)
