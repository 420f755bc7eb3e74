"""Queries a Prometheus-compatible store over its HTTP API, with limits on the answers.

API: https://prometheus.io/docs/prometheus/latest/querying/api/
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np

from eagle_eye.server.history.remote_store.credentials import CredentialsUnreadable
from eagle_eye.server.model.errors import RemoteStoreSilent

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
