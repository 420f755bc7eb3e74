"""A metric over time, asked for in as few requests as the server's limits allow. No pandas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from eagle_eye.client.http_client import HttpClient, LimitReached, Refused

PATH = "/api/v1/query_range"
STEP_MIN_S = 0.01  # the answer's times have milliseconds
REQUESTS_MAX = 400
TOO_MUCH = "too_much"  # the reason of a refusal that a shorter range avoids
# The history keeps old values in buckets of an hour and a minute; a part of the range never cuts one in two.
BUCKETS_MS = (3_600_000, 60_000)


class RangeSeries(msgspec.Struct):
    """One series: a node's, and there a device's or a link's. ``device`` None: of the node itself."""

    node: str
    device: int | str | None
    points: list[tuple[str, float | str]]


class RangePart(msgspec.Struct):
    """The server's answer for a part of the range."""

    unit: str
    statistic: str
    series: list[RangeSeries]
    resolutions: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []


@dataclass(frozen=True)
class RangeSteps:
    """``count`` steps of ``step_s`` from ``start_s`` on, a multiple of a step; later than ``end_s`` is left out."""

    start_s: float
    step_s: float
    count: int
    end_s: float

    @classmethod
    def between(cls, start_s: float, end_s: float, step_s: float) -> RangeSteps:
        """Return the steps that the range touches. Raises ValueError for a step that is none."""
        if not STEP_MIN_S <= step_s <= 86_400.0:
            raise ValueError(f"step: expected {STEP_MIN_S} to 86400 seconds, got {step_s!r}")
        first = math.floor(start_s / step_s)
        return cls(first * step_s, step_s, math.ceil(end_s / step_s) - first, end_s)

    def time_s(self, index: int) -> float:
        """Return when a step begins."""
        return self.start_s + index * self.step_s

    def middle(self, low: int, high: int) -> int:
        """Return where to cut the steps from ``low`` to ``high``: in the middle, and if possible between buckets."""
        middle = (low + high) // 2
        first, step_ms = round(self.start_s / self.step_s), round(self.step_s * 1e3)
        for bucket_ms in BUCKETS_MS if math.isclose(step_ms, self.step_s * 1e3) else ():
            apart = bucket_ms // math.gcd(step_ms, bucket_ms)  # steps from one border of buckets to the next
            before = middle - (first + middle) % apart
            for border in (before, before + apart):
                if low < border < high:
                    return border
        return middle


def parts(client: HttpClient, query: Mapping[str, Any], steps: RangeSteps) -> Iterator[tuple[int, int, RangePart]]:
    """Yield the range in parts, in order of time: the steps from, up to but without, and what the server answered.

    A part that is refused as too much, or whose answer is too large, is asked for in halves. Points of other steps may
    come along. A counter's increase needs the value before each step, so its range is not divided. Raises ClientError.
    """
    todo = [(0, steps.count)]
    asked = 0
    while todo:
        low, high = todo.pop()
        asked += 1
        if asked > REQUESTS_MAX:
            remedy = "take a longer step, a shorter range, or one node"
            raise LimitReached(f"the range takes more than {REQUESTS_MAX} requests; {remedy}")
        end_s = steps.end_s if high == steps.count else steps.time_s(high)
        # Not RFC 3339: its milliseconds would cut the ends.
        span = {"start": repr(steps.time_s(low)), "end": repr(end_s), "step": repr(steps.step_s)}
        try:
            answer = client.read("GET", PATH, {**query, **span})
        except (Refused, LimitReached) as error:
            divisible = high - low > 1 and query.get("statistic") != "increase"
            if not divisible or (isinstance(error, Refused) and error.reason != TOO_MUCH):
                raise
            middle = steps.middle(low, high)
            todo += [(middle, high), (low, middle)]
            continue
        yield low, high, client.decoded(answer, RangePart)
