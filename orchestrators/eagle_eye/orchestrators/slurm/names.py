"""Which of Slurm's jobs is meant by a job's name: what the server's job source found, else the name as an id."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol
from urllib.parse import quote

from eagle_eye.orchestrators.errors import RejectedError, ServerUnreachableError
from eagle_eye.orchestrators.slurm.answers import ID_MAX
from eagle_eye.orchestrators.slurm.errors import SlurmError

KEPT_S = 10.0
KEPT_MAX = 10_000
ASK_S = 2.0
SOURCE = "slurm:"


class Asks(Protocol):
    """A server's client, as far as it is needed here."""

    def call(self, method: str, path: str, body: object = None, timeout_s: float = ASK_S) -> object:
        """Return the answer's JSON."""


class JobNames:
    """Slurm's ids of jobs that may go by another name (EAGLE_EYE_JOB); from any thread."""

    def __init__(self, server: Asks, monotonic: Callable[[], float]) -> None:
        self._server = server
        self._monotonic = monotonic
        self._kept: dict[str, tuple[float, int | None]] = {}
        self._lock = threading.Lock()

    def id_of(self, job: str) -> int | None:
        """Return the id, None for a job that is none of Slurm's. Raises SlurmError where that cannot be told."""
        now_s = self._monotonic()
        with self._lock:
            kept = self._kept.get(job)
        if kept is not None and now_s - kept[0] < KEPT_S:
            return kept[1]
        found = self._ask(job)
        with self._lock:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[job] = (now_s, found)
        return found

    def _ask(self, job: str) -> int | None:
        """Agents may call a job by a number that is no id of Slurm's, so the server's word counts first."""
        try:
            answer = self._server.call("GET", f"/api/v1/jobs/{quote(job, safe='')}", timeout_s=ASK_S)
        except RejectedError as error:
            if error.status != 404:
                raise SlurmError(f"which of Slurm's jobs {job!r} is: {error}") from None
            answer = None
        except ServerUnreachableError as error:
            raise SlurmError(f"which of Slurm's jobs {job!r} is: {error}") from None
        said = answer.get("scheduled_as") if isinstance(answer, dict) else None
        if isinstance(said, str) and said:
            return _id(said.removeprefix(SOURCE)) if said.startswith(SOURCE) else None
        return _id(job)


def _id(text: str) -> int | None:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else 0
    return number if 0 < number < ID_MAX else None
