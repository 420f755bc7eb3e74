"""Splits a long time range into requests, each with an answer within the limit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from eagle_eye.server.history.remote_store.promql import RemoteSeries
from eagle_eye.server.model.errors import RemoteStoreSilent

FIRST_S = 120.0
LEAST_S = 1.0
MOST_S = 86_400.0
SAMPLES_AIM = 300_000  # in one answer: some ten megabytes
CHANGE_MAX = 4.0  # maximum growth or shrinkage of the next piece


class Slice(NamedTuple):
    """The data from ``start_s`` to before ``end_s``."""

    start_s: float
    end_s: float
    courses: list[RemoteSeries]


def slices(
    start_s: float, end_s: float, ask: Callable[[float, float], list[RemoteSeries]], most_s: float = MOST_S
) -> Iterator[Slice]:
    """Yield the whole range in order; ``ask(start_s, end_s)`` returns the data of one request. Raises its errors.

    A piece too large for one answer is requested again in smaller pieces.
    """
    length_s = min(FIRST_S, most_s)
    at_s = start_s
    while at_s < end_s:
        until_s = min(at_s + length_s, end_s)
        try:
            courses = ask(at_s, until_s)
        except RemoteStoreSilent as error:
            if not error.too_large or length_s <= LEAST_S:
                raise
            length_s = max(length_s / CHANGE_MAX, LEAST_S)
            continue
        yield Slice(at_s, until_s, courses)
        samples = sum(len(course.times_s) for course in courses)
        change = min(max(SAMPLES_AIM / max(samples, 1), 1.0 / CHANGE_MAX), CHANGE_MAX)
        length_s = min(max(length_s * change, LEAST_S), most_s)
        at_s = until_s
