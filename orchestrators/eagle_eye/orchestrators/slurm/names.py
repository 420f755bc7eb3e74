"""Maps a job's name to a Slurm job: by the server's job source, by its last word, else the name as an id."""

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
    """The part of a server client that is needed here."""

    def call(self, method: str, path: str, body: object = None, timeout_s: float = ASK_S) -> object:
        """Return the answer's JSON."""


class JobNames:
    """Slurm ids of jobs that may use another name (EAGLE_EYE_JOB); thread-safe."""

    def __init__(self, server: Asks, monotonic: Callable[[], float]) -> None:
        self._server = server
        self._monotonic = monotonic
        self._kept: dict[str, tuple[float, int | None]] = {}
        self._lock = threading.Lock()

    def id_of(self, job: str) -> int | None:
        """Return the id, None for a job that is not Slurm's. Raises SlurmError where that is unknown."""
        now_s = self._monotonic()
        with self._lock:
            kept = self._kept.get(job)
        if kept is not None and now_s - kept[0] < KEPT_S:
            return kept[1]
        try:
            found = self._ask(job)
        except (RejectedError, ServerUnreachableError) as error:
            # An action must not wait for a server that is away: what the name meant before still holds, and a number is
            # an id, for agents take it from Slurm. Whether that job runs where the action says, Slurm itself tells.
            found = _id(job) if kept is None else kept[1]
            if found is None:
                raise SlurmError(f"which of Slurm's jobs {job!r} is: {error}") from None
        with self._lock:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[job] = (now_s, found)
        return found

    def _ask(self, job: str) -> int | None:
        """Ask the server first: agents may name a job by a number that is not a Slurm id.

        Raises RejectedError, ServerUnreachableError.
        """
        try:
            answer = self._server.call("GET", f"/api/v1/jobs/{quote(job, safe='')}", timeout_s=ASK_S)
        except RejectedError as error:
            if error.status != 404:
                raise
            answer = None
        said = answer.get("scheduled_as") if isinstance(answer, dict) else None
        if isinstance(said, str) and said:
            return _id(said.removeprefix(SOURCE)) if said.startswith(SOURCE) else None
        return _id(job)


def _id(text: str) -> int | None:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else 0
    return number if 0 < number < ID_MAX else None
