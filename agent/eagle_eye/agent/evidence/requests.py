"""Serves evidence requests from the server's replies to frames: accepts, gathers and uploads. Touches: threads.

It is also a collector that collects nothing: its state in every frame tells the server that it accepts requests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from eagle_eye.agent.clock import Clock
from eagle_eye.agent.collector import CollectFailed, Drops, Observed
from eagle_eye.agent.evidence.gather import BUG_REPORT, EVIDENCE, HANGING_MAX, CannotGather, EvidenceGatherer
from eagle_eye.agent.evidence.source import BUNDLE_BYTES_MAX, BundleStuck
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.transport.servers import SYSTEMS, Servers, Trust, connect, path_on
from eagle_eye.schema.backoff import Backoff

PATH = "/api/v1/evidence"
BUNDLE_TYPE = "application/gzip"
FAILURE_TYPE = "application/json"
ANSWER_BYTES_MAX = 1 << 16
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.1, 5.0
PASSING = frozenset({401, 408, 429, 500, 502, 503, 504})  # transient: worth retrying; 401: a token that changes


@dataclass(frozen=True)
class UploadTarget:
    """Where bundles go, with the uplink's own settings. ``token`` returns the node's, "" where there is none."""

    servers: Servers
    token: Callable[[], str]
    trust: Trust = SYSTEMS
    connect_s: float = 2.0
    answer_s: float = 5.0


class _Answer(NamedTuple):
    status: int
    detail: str


class Upload:
    """Retries with backoff until the server has it, rejects it for good, or time is up."""

    def __init__(
        self, place: UploadTarget, clock: Clock, jitter: Callable[[], float] = random.random, path: str = PATH
    ) -> None:
        """``path`` plus a request's id is where it is uploaded."""
        self._place = place
        self._path = path
        self._clock = clock
        self._jitter = jitter

    def send(self, request_id: str, content: bytes, content_type: str, within_s: float, stop: threading.Event) -> str:
        """Return "" once the server has it, else why not. Gives up when ``stop`` is set."""
        until_s = self._clock.monotonic_s() + within_s
        backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX, self._jitter)
        while True:
            try:
                answer = self._put(request_id, content, content_type, until_s)
            except (OSError, http.client.HTTPException) as error:
                said = f"the server cannot be reached: {type(error).__name__}: {error}"
            else:
                if answer.status == 200:
                    return ""
                said = f"the server answered {answer.status}: {answer.detail}".rstrip(": ")
                if answer.status not in PASSING:
                    return said
            wait_s = backoff.next_s()
            if self._clock.monotonic_s() + wait_s >= until_s or self._clock.wait(stop, wait_s):
                return said

    def _put(self, request_id: str, content: bytes, content_type: str, until_s: float) -> _Answer:
        place = self._place
        server = place.servers.current
        with contextlib.closing(connect(server, place.trust, place.connect_s, place.answer_s)) as connection:
            connection.sock.settimeout(max(0.01, until_s - self._clock.monotonic_s()))  # for the whole body
            headers = {"Content-Type": content_type}
            if token := place.token():
                headers["Authorization"] = f"Bearer {token}"
            # A server that rejects a request answers before it has read everything, and closes: its answer says why.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("PUT", path_on(server, f"{self._path}/{request_id}"), body=content, headers=headers)
            connection.sock.settimeout(place.answer_s)
            response = connection.getresponse()
            return _Answer(response.status, _detail(response.read(ANSWER_BYTES_MAX)))


def _detail(content: bytes) -> str:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    detail = fields.get("detail") if isinstance(fields, dict) else None
    return detail[:300] if isinstance(detail, str) else ""


REQUESTS_MAX = 16  # read per answer
WAITING_MAX = 4  # of each kind; the server repeats a request with its next answer
REMEMBERED_MAX = 256  # ids already accepted: the server repeats a request until it has the bundle
DEADLINE_S_MIN = 0.5
DEADLINE_S_MAX: Mapping[str, float] = {EVIDENCE: 60.0, BUG_REPORT: 900.0}
UPLOAD_S = 120.0  # evidence that arrives after the restart is still evidence
REPORT_S = 10.0  # the report that there is none is only useful while the server waits
ANSWER_KEY = "requests"
NODE_CHECK = "node_check"  # a kind served elsewhere

# Sends something to the server, as ``Upload.send`` does: id, content, content type, seconds, and a stop event.
Send = Callable[[str, bytes, str, float, threading.Event], str]

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_log = logging.getLogger("eagle_eye.agent")


class _Request(msgspec.Struct, frozen=True):
    """A request as in the server's answer; unknown keys are ignored.

    ``deadline_s`` counts from its arrival, ``bytes_max`` is the server's limit.
    """

    id: str
    kind: str
    deadline_s: float
    job: str = ""
    attempt: int | None = None
    bytes_max: int = BUNDLE_BYTES_MAX


class _Taken(NamedTuple):
    request: _Request
    until_s: float


class EvidenceResponder:
    """Serves requests, one at a time of each kind, each once. No thread starts until the first request."""

    name = "evidence"

    def __init__(
        self,
        gatherer: EvidenceGatherer,
        processes: Callable[[], Iterable[TrainingProcess]],
        send: Send,
        drops: Drops,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gatherer = gatherer
        self._processes = processes
        self._send = send
        self._drops = drops
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._seen: dict[str, None] = {}  # in order of arrival
        self._stop = threading.Event()
        self._waiting: dict[str, queue.Queue[_Taken | None]] = {}

    def answered(self, answer: Mapping[str, object]) -> None:
        """Accept the requests in the server's answer to frames. Returns at once, never raises; thread-safe."""
        asked = answer.get(ANSWER_KEY)
        if not isinstance(asked, list):
            return
        for item in asked[:REQUESTS_MAX]:
            try:
                request = msgspec.convert(item, _Request)
            except msgspec.ValidationError:
                self._drops.count("evidence_malformed")
                continue
            if request.kind == NODE_CHECK:
                continue
            with self._lock:
                if request.id not in self._seen:
                    self._take(request)

    def collect(self, now_s: float) -> Observed:  # noqa: ARG002 - there is nothing to collect
        """Return nothing. Raises CollectFailed while nothing could be gathered."""
        hanging = self._gatherer.hanging()
        if hanging >= HANGING_MAX:
            raise CollectFailed(f"{hanging} threads of earlier gatherings hang: no evidence can be gathered")
        return Observed()

    def close(self) -> None:
        """Accept no more requests and abandon those in progress."""
        self._stop.set()
        with self._lock:
            lanes = list(self._waiting.values())
        for waiting in lanes:
            with contextlib.suppress(queue.Full):  # a full queue wakes up anyway, and checks ``_stop``
                waiting.put_nowait(None)

    def _take(self, request: _Request) -> None:
        if request.kind not in DEADLINE_S_MAX or not _ID.fullmatch(request.id) or self._stop.is_set():
            self._drops.count("evidence_not_understood")
            return
        waiting = self._lane(request.kind)
        if waiting is None:
            self._drops.count("evidence_failed")
            return
        deadline_s = DEADLINE_S_MIN
        if request.deadline_s > DEADLINE_S_MIN:  # False for NaN
            deadline_s = min(request.deadline_s, DEADLINE_S_MAX[request.kind])
        try:
            waiting.put_nowait(_Taken(request, self._monotonic_s() + deadline_s))
        except queue.Full:
            self._drops.count("evidence_too_many")
            return
        self._seen[request.id] = None
        if len(self._seen) > REMEMBERED_MAX:
            del self._seen[next(iter(self._seen))]

    def _lane(self, kind: str) -> queue.Queue[_Taken | None] | None:
        """Return the queue of the kind's thread, started on first use; None where it cannot start."""
        waiting = self._waiting.get(kind)
        if waiting is None:
            waiting = queue.Queue(WAITING_MAX)
            thread = threading.Thread(target=self._run, args=(waiting,), name=f"evidence-{kind}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the host's limit on threads
                return None
            self._waiting[kind] = waiting
        return waiting

    def _run(self, waiting: queue.Queue[_Taken | None]) -> None:
        while True:
            taken = waiting.get()
            if taken is None or self._stop.is_set():
                return
            try:
                self._serve(taken)
            except Exception:  # noqa: BLE001 - the next request is to find somebody here
                self._drops.count("evidence_failed")
                _log.exception("evidence %s failed because of a bug in the agent", taken.request.id)

    def _serve(self, taken: _Taken) -> None:
        request = taken.request
        # A request that waited for earlier ones may run out of time; the minimum keeps the host from being rushed.
        left_s = max(DEADLINE_S_MIN, taken.until_s - self._monotonic_s())
        try:
            manifest, content = self._gatherer.gather(
                request.kind, self._processes(), left_s, request.job, request.attempt, request.bytes_max
            )
        except (CannotGather, BundleStuck) as error:
            self._drops.count("evidence_failed")
            _log.warning("evidence %s: %s", request.id, error)
            self._report(request.id, str(error))
            return
        _log.info(
            "evidence %s: %d pieces in %d bytes, %d missing",
            request.id,
            len(manifest.files),
            len(content),
            len(manifest.missing),
        )
        problem = self._send(request.id, content, BUNDLE_TYPE, UPLOAD_S, self._stop)
        if problem:
            self._drops.count("evidence_not_delivered")
            _log.warning("evidence %s is lost: %s", request.id, problem)
            self._report(request.id, f"the bundle of {len(content)} bytes did not arrive: {problem}")

    def _report(self, request_id: str, why: str) -> None:
        """Tell the server that there will be no bundle, so that it stops waiting."""
        content = msgspec.json.encode({"failed": why})
        self._send(request_id, content, FAILURE_TYPE, REPORT_S, self._stop)
