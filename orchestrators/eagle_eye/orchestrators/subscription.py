"""The subscription at the server: it delivers our job's events here, and receives the job's state."""

from __future__ import annotations

import base64
import logging
import secrets as random_secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from eagle_eye.orchestrators.ledger import write_whole
from eagle_eye.orchestrators.protocol import RejectedError, ServerUnreachableError
from eagle_eye.orchestrators.server_client import BACKOFF_S, BACKOFF_S_MAX, ServerClient
from eagle_eye.schema.action import (
    ACTION_EXPIRED,
    ACTION_REQUESTED,
    ACTION_WITHDRAWN,
    NODE_READMITTED,
    PING,
    JobUpdate,
)
from eagle_eye.schema.backoff import Backoff

log = logging.getLogger(__name__)

TYPES = (ACTION_REQUESTED, ACTION_EXPIRED, ACTION_WITHDRAWN, NODE_READMITTED, PING)
PAUSED = "paused"  # the server's ended_reason
CHECK_EVERY_S = 15.0
LAST_WORD_S = 2.0
REASON_CHARS_MAX = 1_000  # the server's limit


@dataclass(frozen=True)
class WantedSubscription:
    """What to subscribe to: the receiver's URL and the jobs (none: all).

    ``lasting`` keeps the subscription beyond this process: deliveries meanwhile wait for the next one.
    """

    url: str
    jobs: tuple[str, ...]
    types: tuple[str, ...] = TYPES
    lasting: bool = False


class _Held(msgspec.Struct, frozen=True):
    id: str  # "": requested, no answer yet
    secret: str


class SubscriptionKeeper:
    """Keeps one subscription alive and the server's job states current, on its own thread.

    The secret is created here and sent along, so that it is known before even the first ping arrives. It is saved in
    the file, so that a later process can continue or remove an earlier one's subscription. ``wanted`` None: the
    subscription is made elsewhere, and only the jobs' states are sent. ``changed`` is called once when contact is lost,
    or missing at the start, with the reason and 0.0, and once when it is back, with "" and the seconds without contact;
    on the subscription's thread.
    """

    def __init__(
        self,
        client: ServerClient,
        wanted: WantedSubscription | None,
        file: Path,
        check_every_s: float = CHECK_EVERY_S,
        backoff: Backoff | None = None,
        changed: Callable[[str, float], None] = lambda _reason, _away_s: None,
    ) -> None:
        self._changed = changed
        self._lost_at_s: float | None = None  # on the monotonic clock
        self._client = client
        self._wanted = wanted
        self._file = file
        self._check_every_s = check_every_s
        self._backoff = backoff or Backoff(BACKOFF_S, BACKOFF_S_MAX)
        self._proposed = "whsec_" + base64.b64encode(random_secrets.token_bytes(32)).decode()
        self._held: _Held | None = None
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[JobUpdate, bool]] = {}  # by job: the latest state, and whether it was delivered
        self._unfit: dict[str, str] = {}  # why each node is to be counted as out, until delivered
        self._wake = threading.Event()
        self._stopping = False
        self._in_touch = False
        self._complained = ""
        self._thread = threading.Thread(target=self._run, name="subscription", daemon=True)

    @property
    def in_touch(self) -> bool:
        """Whether the server knew the subscription, and delivered to it, when last queried."""
        return self._in_touch

    @property
    def out_of_touch_s(self) -> float:
        """For how long the server has not delivered here, 0.0 where it does."""
        lost_at_s = self._lost_at_s
        return 0.0 if lost_at_s is None else time.monotonic() - lost_at_s

    def secrets(self) -> Sequence[str]:
        """Return the valid signing secrets."""
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

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start making and keeping the subscription."""
        self._thread.start()

    def report_job(self, job: str, update: JobUpdate) -> None:
        """Send the job's state to the server; replaces an earlier one that is not delivered yet."""
        with self._lock:
            self._jobs[job] = (update, False)
        self._wake.set()

    def take_out(self, node: str, reason: str) -> None:
        """Have the server count the node as out of service until it is readmitted, if it knows the node."""
        with self._lock:
            self._unfit[node] = reason
        self._wake.set()

    def flush(self, within_s: float) -> bool:
        """Return whether everything was delivered, waiting up to ``within_s``."""
        until_s = time.monotonic() + within_s
        while not (arrived := self._all_reported()) and time.monotonic() < until_s and self._thread.is_alive():
            time.sleep(0.01)
        return arrived

    def stop(self) -> None:
        """End the subscription, if the server can be reached, and the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        if self._held is not None and not (self._wanted and self._wanted.lasting):
            self._remove(self._held.id)
            self._held = None

    def _run(self) -> None:
        if self._wanted and self._wanted.lasting:
            self._take_up_leftover()
        elif self._wanted:
            self._remove_leftover()
        check_due_s = time.monotonic()
        while not self._stopping:
            self._wake.clear()
            try:
                self._tell_all()
                if time.monotonic() >= check_due_s:
                    self._in_touch = self._keep()
                    self._tell_all()
                    check_due_s = time.monotonic() + self._check_every_s
            except (ServerUnreachableError, OSError) as error:
                self._in_touch = False
                check_due_s = time.monotonic()
                self._complain(str(error))
                # Not the event: what is sent meanwhile would meet the same server.
                self._pause(self._backoff.next_s())
            else:
                if self._in_touch:
                    self._complain("")
                self._backoff.reset()
                self._wake.wait(self._check_every_s)

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not self._stopping and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))

    def _complain(self, message: str) -> None:
        """Log each new problem once, not on every retry."""
        if message != self._complained:
            if message:
                log.warning("server: %s; will try again", message)
            else:
                log.info("server: in touch again")
        self._complained = message
        away_s = self.out_of_touch_s
        if message and self._lost_at_s is None:
            self._lost_at_s = time.monotonic()
            self._changed(message, 0.0)
        elif not message and self._lost_at_s is not None:
            self._lost_at_s = None
            self._changed("", away_s)

    def _keep(self) -> bool:
        """Make sure that the subscription exists; return whether the server delivers to it."""
        if self._wanted is None:
            self._client.call("GET", "/healthz")
            return True
        if self._held is not None and self._held.id:
            found = self._found(self._held.id)
            if found is not None and found.get("ended_reason") == PAUSED:
                # It was paused on purpose. Subscribing again would circumvent that.
                self._complain(f"subscription {self._held.id} is paused there; nothing is delivered here")
                return False
            if found is not None and found.get("active") is not False:
                self._adapt(self._held.id, self._wanted, found)
                return True
            log.warning("the server has lost the subscription; subscribing again")
            self._held = None
            # A server that forgot the subscription may have forgotten the jobs as well.
            self._tell_again()
        self._held = self._create(self._wanted)
        return True

    def _found(self, identifier: str) -> dict[str, Any] | None:
        """Return the server's subscription, None where there is none: it ends those that never answer."""
        try:
            answer = self._client.call("GET", f"/api/v1/subscriptions/{quote(identifier, safe='')}")
        except RejectedError as error:
            if error.status not in (404, 410):
                raise
            return None
        return answer if isinstance(answer, dict) else {}

    def _adapt(self, identifier: str, wanted: WantedSubscription, found: dict[str, Any]) -> None:
        """Update a subscription of an earlier process with other flags: its waiting deliveries come here."""
        wishes = {"url": wanted.url, "jobs": list(wanted.jobs), "types": list(wanted.types)}
        changed = {name: wish for name, wish in wishes.items() if name in found and found[name] != wish}
        if changed:
            self._client.call("PATCH", f"/api/v1/subscriptions/{quote(identifier, safe='')}", changed)

    def _create(self, wanted: WantedSubscription) -> _Held:
        # On disk before it is sent: after a crash the request is repeated with the same secret, which makes no second
        # subscription.
        write_whole(self._file, msgspec.json.encode(_Held("", self._proposed)))
        body = {
            "url": wanted.url,
            "types": list(wanted.types),
            "jobs": list(wanted.jobs),
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
            unfit = list(self._unfit.items())
        for job, update in owed:
            try:
                self._client.call("PUT", f"/api/v1/jobs/{quote(job, safe='')}", msgspec.to_builtins(update))
            except RejectedError as error:
                if error.may_pass or error.status == 404:
                    raise
                log.warning("the server does not take the state of job %s: %s", job, error)
            with self._lock:
                if self._jobs[job][0] is update:
                    self._jobs[job] = (update, True)
        for node, reason in unfit:
            self._tell_unfit(node, reason)

    def _tell_unfit(self, node: str, reason: str) -> None:
        try:
            path = f"/api/v1/nodes/{quote(node, safe='')}/exclude?reason={quote(reason[:REASON_CHARS_MAX])}"
            self._client.call("POST", path)
        except RejectedError as error:
            if error.may_pass:
                raise
            log.warning("the server does not count %s as out of service: %s", node, error)  # 404: it has no agent
        with self._lock:
            if self._unfit.get(node) == reason:
                del self._unfit[node]

    def _tell_again(self) -> None:
        with self._lock:
            self._jobs = {job: (update, False) for job, (update, _) in self._jobs.items()}

    def _all_reported(self) -> bool:
        with self._lock:
            return not self._unfit and all(arrived for _, arrived in self._jobs.values())

    def _leftover(self) -> _Held | None:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Held)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read (%s); an old subscription may stay", self._file, error)
            return None

    def _take_up_leftover(self) -> None:
        left = self._leftover()
        if left is not None:
            self._proposed = left.secret
            self._held = left if left.id else None

    def _remove_leftover(self) -> None:
        left = self._leftover()
        if left is not None and left.id:
            self._remove(left.id)

    def _remove(self, identifier: str) -> None:
        try:
            self._client.call("DELETE", f"/api/v1/subscriptions/{quote(identifier, safe='')}", timeout_s=LAST_WORD_S)
        except ServerUnreachableError as error:
            if not (isinstance(error, RejectedError) and error.status in (404, 410)):
                log.warning("the subscription stays at the server: %s", error)
                return
        self._file.unlink(missing_ok=True)
