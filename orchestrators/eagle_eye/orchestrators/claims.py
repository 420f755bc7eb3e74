"""Claims actions at the server before anything is changed: of several subscribers one begins, and none in vain."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from eagle_eye.orchestrators.cloudevent import unix_seconds
from eagle_eye.orchestrators.errors import RejectedError, ServerUnreachableError
from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.server_client import TIMEOUT_S, ServerClient
from eagle_eye.schema.action import ActionClaim, ActionRequest

LEASES = 2.0  # how long nobody may answer: meanwhile another server leads, if there is one
AGAIN_S = 0.5
_UNKNOWN = 404  # to the server, whose records were lost: it asks for the action anew
_NO = (_UNKNOWN, 409)  # not known, or not to begin

log = logging.getLogger(__name__)


class StoppingError(Exception):
    """The process is stopping; waiting work is left to the next one."""


class Claims:
    """Asks for each action, for two of the server's leases where nobody answers; once where the server is alone.

    Then it is begun unclaimed, unless the ledger has begun the same before: the same kind, job, attempt and nodes.
    ``count`` is called with each outcome, one word.
    """

    def __init__(
        self,
        client: ServerClient,
        ledger: Ledger,
        count: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._count = count
        self._clock = clock
        self._monotonic_s = monotonic_s

    def __call__(self, action: ActionRequest, stopping: threading.Event) -> str | None:
        """Return why the action must not be begun, None where it may. Raises StoppingError."""
        path, _ = self._client.report_path(action)
        body = msgspec.to_builtins(ActionClaim("accepted", "about to begin", self._ledger.name, action.epoch))
        until_s = self._monotonic_s() + LEASES * action.lease_seconds
        timeout_s = min(TIMEOUT_S, action.lease_seconds or TIMEOUT_S)
        while True:
            try:
                self._client.call("POST", path, body, timeout_s)
            except RejectedError as error:
                if error.status in _NO:
                    if error.status == _UNKNOWN:
                        self._ledger.let_go(action.action_id)
                        log.warning("action %s is not begun: %s", action.action_id, error)
                    self._count("refused")
                    return str(error)
                problem = str(error)
            except ServerUnreachableError as error:
                problem = str(error)
            else:
                self._count("granted")
                return None
            if self._monotonic_s() + AGAIN_S >= until_s:
                return self._unanswered(action, problem)
            log.warning("action %s cannot be claimed: %s; will ask again", action.action_id, problem)
            if stopping.wait(AGAIN_S):
                raise StoppingError

    def _unanswered(self, action: ActionRequest, problem: str) -> str | None:
        same = self._ledger.begun_as(action)
        if same is None and self._clock() < unix_seconds(action.expires, "expires"):
            self._count("unanswered")
            log.warning("action %s is begun unclaimed: %s", action.action_id, problem)
            return None
        self._count("refused")
        return f"{problem}; " + ("it has expired" if same is None else f"the same was begun as action {same}")
