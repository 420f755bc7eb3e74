"""Reads from the remote store what the embedded history no longer has: points of a query, and frames of a job.

First: access to a Prometheus-compatible store, and queries over its HTTP API. Last: a query's answer, completed.
"""

from __future__ import annotations

import json
import logging
import math
import ssl
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge

from eagle_eye.schema.frame import WIRE_VERSION, Frame, block
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX, MetricSpec, Scope
from eagle_eye.server.history.history import Recorded, UnreadableRange
from eagle_eye.server.history.remote_series import JOB, NAME, NODE, SeriesSubject, place_of
from eagle_eye.server.history.settings import RemoteStoreSettings
from eagle_eye.server.model.clock import rfc3339
from eagle_eye.server.model.errors import RemoteStoreSilent, ServerError

# Credential files are read for each request, as they may be rotated.

CREDENTIAL_BYTES_MAX = 64 << 10
CONNECT_S = 10.0


class CredentialsUnreadable(ServerError):
    """A file with a token, a password or certificates cannot be read; the message names it."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials sent with each request; "" or {} for those not used."""

    headers: Mapping[str, str] = {}
    bearer_token_file: str = ""
    basic_auth_user: str = ""
    basic_auth_password_file: str = ""
    ca_file: str = ""  # CA certificates that are trusted in place of the system's


def access_of(settings: RemoteStoreSettings) -> Access:
    """Return the credentials for requests to the store."""
    return Access(
        headers=settings.headers,
        bearer_token_file=settings.bearer_token_file,
        basic_auth_user=settings.basic_auth_user,
        basic_auth_password_file=settings.basic_auth_password_file,
        ca_file=settings.ca_file,
    )


def http_client(access: Access, timeout_s: float) -> httpx.Client:
    """Return a client for any thread that follows no redirects. Raises CredentialsUnreadable for the CA file."""
    verify: ssl.SSLContext | bool = True
    if access.ca_file:
        try:
            verify = ssl.create_default_context(cafile=access.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise CredentialsUnreadable(f"{access.ca_file} holds no certificates that can be read: {error}") from None
    return httpx.Client(
        headers=dict(access.headers),
        auth=_Auth(access) if access.bearer_token_file or access.basic_auth_user else None,
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S)),
        verify=verify,
        trust_env=False,
    )


class _Auth(httpx.Auth):
    def __init__(self, access: Access) -> None:
        self._access = access

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the current credentials. Raises CredentialsUnreadable."""
        access = self._access
        if access.bearer_token_file:
            request.headers["Authorization"] = f"Bearer {_credential(access.bearer_token_file)}"
            yield request
            return
        password = _credential(access.basic_auth_password_file) if access.basic_auth_password_file else ""
        yield from httpx.BasicAuth(access.basic_auth_user, password).auth_flow(request)


def _credential(file: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            return opened.read(CREDENTIAL_BYTES_MAX).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsUnreadable(f"{file} cannot be read: {error}") from None


# Queries, with limits on the answers; see https://prometheus.io/docs/prometheus/latest/querying/api/

MILLISECOND_S = 0.001
SAID_CHARS_MAX = 300

Labels = Mapping[str, str]


class RemoteSeries(NamedTuple):
    """A series and its samples in order of time; values may be infinite and NaN."""

    labels: Labels
    times_s: np.ndarray[Any, np.dtype[np.float64]]
    values: np.ndarray[Any, np.dtype[np.float64]]


class _Series(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]] = []


class _Matrix(msgspec.Struct):
    result: list[_Series] = []


class _Answer(msgspec.Struct):
    """The fields of every answer; ``data`` stays encoded."""

    status: str = ""
    error: str = ""
    data: msgspec.Raw = msgspec.Raw(b"null")


_answer_decoder = msgspec.json.Decoder(_Answer)
_matrix_decoder = msgspec.json.Decoder(_Matrix)


class PromQl:
    """Queries the store at ``url``, the part before ``/api/v1``. Every method raises RemoteStoreSilent."""

    def __init__(self, client: httpx.Client, url: str, answer_bytes_max: int) -> None:
        self._client = client
        self._url = url.rstrip("/")
        self._answer_bytes_max = answer_bytes_max

    def steps(self, query: str, start_s: float, end_s: float, step_s: float) -> list[RemoteSeries]:
        """Return the query's values at ``start_s``, each step after it, and up to ``end_s``."""
        asked = {"query": query, "start": _time(start_s), "end": _time(end_s), "step": f"{step_s:.3f}"}
        return _courses(self._ask("query_range", asked))

    def raw(self, selector: str, start_s: float, end_s: float) -> list[RemoteSeries]:
        """Return all samples of the series from ``start_s`` to before ``end_s``, as they were stored."""
        # Servers differ in whether a range includes its beginning.
        length_ms = max(1, round((end_s - start_s) * 1000.0))
        asked = {"query": f"{selector}[{length_ms}ms]", "time": _time(end_s - MILLISECOND_S)}
        found = []
        for course in _courses(self._ask("query", asked)):
            within = (course.times_s >= start_s - MILLISECOND_S / 2) & (course.times_s < end_s - MILLISECOND_S / 2)
            if within.any():
                found.append(RemoteSeries(course.labels, course.times_s[within], course.values[within]))
        return found

    def thinned(self, selector: str, start_s: float, end_s: float, step_s: float) -> list[RemoteSeries]:
        """Return each series' last sample in each step from ``start_s`` to before ``end_s``, dated at the step's end.

        Metric names are kept: last_over_time() preserves them.
        """
        steps = max(1, round((end_s - start_s) / step_s))
        query = f"last_over_time({selector}[{max(1, round(step_s * 1000.0))}ms])"
        # A step excludes its end, a PromQL range its beginning or nothing: shifted by a millisecond they agree.
        first_s = start_s + step_s - MILLISECOND_S
        return self.steps(query, first_s, first_s + (steps - 1) * step_s, step_s)

    def _ask(self, what: str, asked: Mapping[str, str]) -> msgspec.Raw:
        url = f"{self._url}/api/v1/{what}"
        try:
            request = self._client.build_request("POST", url, data=dict(asked))  # as a form: URLs have a limit
            response = self._client.send(request, stream=True)
            try:
                body = self._read(response)
            finally:
                response.close()
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise RemoteStoreSilent(f"{self._url} gave no answer: {why}") from None
        except CredentialsUnreadable as error:
            raise RemoteStoreSilent(str(error)) from None
        try:
            answer = _answer_decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            answer = _Answer(error=f"no Prometheus answers like that: {_line(body)}")
        if response.is_success and answer.status == "success":
            return answer.data
        # VictoriaMetrics repeats the query first, which is long.
        said = answer.error if len(answer.error) <= SAID_CHARS_MAX else f"... {answer.error[-SAID_CHARS_MAX:]}"
        raise RemoteStoreSilent(
            f"{self._url} answered HTTP {response.status_code}: {said}", too_large=_is_too_large(answer.error)
        )

    def _read(self, response: httpx.Response) -> bytes:
        found = bytearray()
        for part in response.iter_bytes():
            found += part
            if len(found) > self._answer_bytes_max:
                raise RemoteStoreSilent(
                    f"{self._url} answers with more than {self._answer_bytes_max} bytes; ask for less at a time",
                    too_large=True,
                )
        return bytes(found)


def selector(name: str, labels: Mapping[str, str], patterns: Mapping[str, str]) -> str:
    """Return a series selector: name ("": any), label values, and RE2 regular expressions."""
    parts = [f"{label}={_quoted(value)}" for label, value in labels.items()]
    parts += [f"{label}=~{_quoted(pattern)}" for label, pattern in patterns.items()]
    return f"{name}{{{','.join(parts)}}}"


def any_of(texts: Iterable[str]) -> str:
    """Return an RE2 regular expression that matches exactly these texts."""
    return "|".join(_literal(text) for text in texts)


def _literal(text: str) -> str:
    return "".join(f"\\{one}" if one in r"\.+*?()|[]{}^$" else one for one in text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _time(time_s: float) -> str:
    return f"{time_s:.3f}"


def _courses(data: msgspec.Raw) -> list[RemoteSeries]:
    try:
        matrix = _matrix_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteStoreSilent(f"the answer is not what a Prometheus answers: {error}") from None
    found = []
    for one in matrix.result:
        times_s = np.array([time_s for time_s, _ in one.values], dtype=np.float64)
        try:
            values = np.array([float(value) for _, value in one.values], dtype=np.float64)
        except ValueError:
            values = np.array([math.nan] * len(one.values))
        found.append(RemoteSeries(one.metric, times_s, values))
    return found


def _is_too_large(error: str) -> bool:
    """Return whether the store rejected the query as too large (Prometheus, then VictoriaMetrics)."""
    return any(text in error for text in ("too many samples", "exceeded maximum resolution", "-search.max"))


def _line(body: bytes) -> str:
    return " ".join(body[:80].decode(errors="replace").split())


# A long time range in several requests, each with an answer within the limit

FIRST_SLICE_S = 120.0
LEAST_SLICE_S = 1.0
MOST_SLICE_S = 86_400.0
SAMPLES_AIM = 300_000  # in one answer: some ten megabytes
CHANGE_MAX = 4.0  # maximum growth or shrinkage of the next piece


class Slice(NamedTuple):
    """The data from ``start_s`` to before ``end_s``."""

    start_s: float
    end_s: float
    courses: list[RemoteSeries]


def slices(
    start_s: float, end_s: float, ask: Callable[[float, float], list[RemoteSeries]], most_s: float = MOST_SLICE_S
) -> Iterator[Slice]:
    """Yield the whole range in order; ``ask(start_s, end_s)`` returns the data of one request. Raises its errors.

    A piece too large for one answer is requested again in smaller pieces.
    """
    length_s = min(FIRST_SLICE_S, most_s)
    at_s = start_s
    while at_s < end_s:
        until_s = min(at_s + length_s, end_s)
        try:
            courses = ask(at_s, until_s)
        except RemoteStoreSilent as error:
            if not error.too_large or length_s <= LEAST_SLICE_S:
                raise
            length_s = max(length_s / CHANGE_MAX, LEAST_SLICE_S)
            continue
        yield Slice(at_s, until_s, courses)
        samples = sum(len(course.times_s) for course in courses)
        change = min(max(SAMPLES_AIM / max(samples, 1), 1.0 / CHANGE_MAX), CHANGE_MAX)
        length_s = min(max(length_s * change, LEAST_SLICE_S), most_s)
        at_s = until_s


def _figure_name(name: str) -> str:
    return f"{PROMETHEUS_PREFIX}remote_store_{name}"


class Figures:
    """Counters and gauges, registered with ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.samples = Counter(_figure_name("samples"), "Samples that the remote store has taken.", registry=registry)
        self.refused = Counter(
            _figure_name("refused_samples"),
            "Samples that the remote store will never take, by reason.",
            ["reason"],
            registry=registry,
        )
        self.retries = Counter(
            _figure_name("retries"), "Requests that will be tried again, by reason.", ["reason"], registry=registry
        )
        self.lost = Counter(
            _figure_name("lost_segments"),
            "Segments of the history that could not be sent, by reason.",
            ["reason"],
            registry=registry,
        )
        self.failures = Counter(
            _figure_name("sender_failures"), "Times that the sender ended before all was sent.", registry=registry
        )
        self.ok = Gauge(
            _figure_name("ok"), "1 when the last request to the remote store was answered.", registry=registry
        )
        self.ok.set(1)
        self.waiting = Gauge(_figure_name("waiting_segments"), "Segments that are not sent yet.", registry=registry)
        self.lag = Gauge(
            _figure_name("lag_seconds"), "Age of the oldest segment that is not sent; 0: none is.", registry=registry
        )
        self.read_failures = Counter(
            _figure_name("read_failures"), "Questions that the remote store did not answer.", registry=registry
        )


SENDER = "remote store"  # the agent version in reconstructed frames
BOOT_UNKNOWN = "unknown"
QUESTIONS_MAX = 8  # concurrent queries: a store that hangs must not block every API thread

_log = logging.getLogger(__name__)

Series = dict[tuple[str, int | str], dict[int, float]]  # by node and key: the value in each step that has one


class SeriesQuery(NamedTuple):
    """A query of one metric's last value in each step; None: any node, any job."""

    spec: MetricSpec
    node: str | None
    job: str | None
    start_s: float
    step_s: float


class Reach(NamedTuple):
    """The steps of a query that the store answers (the first ``steps``, before ``seam_s``), and the result."""

    steps: int
    seam_s: float
    series: Series
    problem: str | None


class RemoteHistory:
    """Reads the store; for any thread."""

    def __init__(self, client: httpx.Client, settings: RemoteStoreSettings, figures: Figures) -> None:
        self._promql = PromQl(client, settings.read_url, settings.answer_bytes_max)
        self._external = settings.external_labels
        self._interval_s = settings.interval_s
        self._figures = figures
        self._turns = threading.BoundedSemaphore(QUESTIONS_MAX)

    def points(self, asked: SeriesQuery, steps: int) -> Series:
        """Return the last value in each of the first ``steps`` steps that has one. Raises RemoteStoreSilent."""
        if steps == 0:
            return {}
        labels = dict(self._external)
        labels |= {label: value for label, value in ((NODE, asked.node), (JOB, asked.job)) if value is not None}
        of = selector(PROMETHEUS_PREFIX + asked.spec.name, labels, {})
        end_s = asked.start_s + steps * asked.step_s
        found: Series = {}
        for course in self._counted(lambda: self._promql.thinned(of, asked.start_s, end_s, asked.step_s)):
            place = place_of({**course.labels, NAME: PROMETHEUS_PREFIX + asked.spec.name})
            if place is None:
                continue
            of_series = found.setdefault((place.node, place.key), {})
            numbers = (np.rint((course.times_s - asked.start_s) / asked.step_s).astype(int) - 1).tolist()
            of_series.update(
                (number, value)
                for number, value in zip(numbers, course.values.tolist(), strict=True)
                if not math.isnan(value)
            )
        return {key: points for key, points in found.items() if points}

    def before(self, seam_s: float | None, asked: SeriesQuery, steps: int) -> Reach:
        """Return the points of all steps that begin before ``seam_s`` (None: of all steps).

        If the store does not answer, they are empty and the problem is given, so that embedded data can still be shown.
        """
        end_s = asked.start_s + steps * asked.step_s
        reached = steps
        if seam_s is not None:
            reached = min(max(math.ceil((seam_s - asked.start_s) / asked.step_s), 0), steps)
        seam_s = min(asked.start_s + reached * asked.step_s, end_s)
        try:
            return Reach(reached, seam_s, self.points(asked, reached), None)
        except RemoteStoreSilent as error:
            return Reach(reached, seam_s, {}, str(error))

    def frames(self, job: str, start_s: float, end_s: float) -> Iterator[Recorded]:
        """Yield the job's rows from ``start_s`` to before ``end_s`` as frames, in pieces as they are read.

        They contain no ranks and no events: the store holds only numbers. Raises RemoteStoreSilent.
        """
        of = selector("", {**self._external, JOB: job}, {NAME: f"{PROMETHEUS_PREFIX}.+"})

        def ask(begin_s: float, until_s: float) -> list[RemoteSeries]:
            return self._counted(lambda: self._promql.raw(of, begin_s, until_s))

        sequence = 0
        for piece in slices(start_s, end_s, ask):
            for frame in frames_of(piece.courses, self._interval_s or 1.0, sequence):
                sequence = frame.sequence
                yield Recorded(frame, frame.time_s, 0.0)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._turns.acquire(blocking=False):
            raise RemoteStoreSilent(f"{QUESTIONS_MAX} other questions wait for the remote store; ask again later")
        try:
            yield
        finally:
            self._turns.release()

    def _counted(self, ask: Callable[[], list[RemoteSeries]]) -> list[RemoteSeries]:
        try:
            with self._turn():
                return ask()
        except RemoteStoreSilent as error:
            self._figures.read_failures.inc()
            _log.warning("the remote store was asked in vain: %s", error)
            raise


def frames_of(courses: list[RemoteSeries], interval_s: float, sequence: int) -> Iterator[Frame]:
    """Yield the series' samples as frames of nodes in order of time, numbered from ``sequence`` + 1."""
    rows: dict[tuple[float, str, str | None], dict[Scope, dict[int | str, dict[str, float]]]] = {}
    for course in courses:
        place = place_of(course.labels)
        if place is not None:
            _gather(rows, place, course)
    for (time_s, node, job), scopes in sorted(rows.items(), key=lambda item: item[0][:2]):
        sequence += 1
        yield Frame(
            version=WIRE_VERSION,
            node=node,
            boot_id=BOOT_UNKNOWN,
            stream=SENDER,
            sequence=sequence,
            time_s=time_s,
            interval_s=interval_s,
            agent_version=SENDER,
            job=job,
            blocks=[block(scope, keys) for scope, keys in scopes.items()],  # type: ignore[arg-type]
        )


def _gather(
    rows: dict[tuple[float, str, str | None], dict[Scope, dict[int | str, dict[str, float]]]],
    place: SeriesSubject,
    course: RemoteSeries,
) -> None:
    name, scope = place.spec.name, place.spec.scope
    for time_s, value in zip(course.times_s.tolist(), course.values.tolist(), strict=True):
        if not math.isnan(value):
            of_node = rows.setdefault((time_s, place.node, place.job), {})
            of_node.setdefault(scope, {}).setdefault(place.key, {})[name] = value


# A query's answer, merged with older data from the store

EMBEDDED = "embedded"
REMOTE_STORE = "remote_store"

Body = dict[str, Any]


def with_past(
    body: Body,
    past: RemoteHistory | None,
    begins_s: float | None,
    asked: SeriesQuery,
    steps: int,
    shown: Callable[[float], object],
    gaps: Sequence[UnreadableRange] = (),
) -> Body:
    """Return the answer with the steps before ``begins_s`` (None: all) from the store, and the sources named.

    ``body["series"]`` is the embedded history's answer for the first ``steps`` steps; ``shown`` converts a value to
    JSON. Each step of a series comes from one source. A store that does not answer is listed among the sources with its
    problem; so is each of ``gaps``, ranges in which the embedded history lost data.
    """
    end_s = asked.start_s + steps * asked.step_s
    if past is None:
        return {**body, "sources": _embedded_sources(asked.start_s, end_s, gaps)}
    reach = past.before(begins_s, asked, steps)
    sources = _embedded_sources(reach.seam_s, end_s, gaps) if reach.seam_s < end_s else []
    if asked.start_s < reach.seam_s:
        sources.insert(0, _source(REMOTE_STORE, asked.start_s, reach.seam_s, reach.problem))
    if not reach.series:
        return {**body, "sources": sources}
    return {
        **body,
        "series": _merged_series(body["series"], reach.series, reach.seam_s, asked, shown),
        "sources": sources,
    }


def _embedded_sources(start_s: float, end_s: float, gaps: Sequence[UnreadableRange]) -> list[Body]:
    """Return the embedded history's entries among the sources, in order, with a problem where data was lost."""
    parts = []
    at_s = start_s
    for gap in gaps:
        low_s, high_s = max(gap.start_s, at_s), min(gap.end_s, end_s)
        if low_s <= high_s:
            if at_s < low_s:
                parts.append(_source(EMBEDDED, at_s, low_s))
            parts.append(_source(EMBEDDED, low_s, high_s, gap.problem))
            at_s = high_s
    if at_s < end_s or not parts:
        parts.append(_source(EMBEDDED, at_s, end_s))
    return parts


def _source(source: str, start_s: float, end_s: float, problem: str | None = None) -> Body:
    return {"source": source, "start": rfc3339(start_s), "end": rfc3339(end_s), "problem": problem}


def _merged_series(
    embedded: list[Body], earlier: Series, seam_s: float, asked: SeriesQuery, shown: Callable[[float], object]
) -> list[Body]:
    seam = rfc3339(seam_s)  # all times are UTC texts of equal length, so they compare as text
    found: dict[tuple[str, object], Body] = {}
    for (node, key), points in earlier.items():
        device = None if asked.spec.scope is Scope.NODE else key
        answered = [[rfc3339(asked.start_s + at * asked.step_s), shown(value)] for at, value in sorted(points.items())]
        found[node, device] = {"node": node, "device": device, "points": answered}
    for series in embedded:
        before = found.get((series["node"], series["device"]))
        if before is not None:
            own = [point for point in series["points"] if point[0] >= seam]
            series = {**series, "points": before["points"] + own}  # noqa: PLW2901 - the same series, longer
        found[series["node"], series["device"]] = series
    in_order = sorted(found.items(), key=lambda item: (item[0][0], str(item[0][1])))
    return [series for _, series in in_order if series["points"]]
