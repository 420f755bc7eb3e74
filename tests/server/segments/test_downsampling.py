"""Buckets say of their values what the values themselves say, however they are put together."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.metrics import MetricKind
from eagle_eye.server.history.history import Summary, combine, joined, summarize, taken

NAN = math.nan
numbers = st.one_of(st.integers(0, 1 << 20).map(float), st.just(NAN), st.just(math.inf))
buckets = st.lists(st.lists(numbers, min_size=1, max_size=6), min_size=1, max_size=6)


def told(summary: Summary) -> list[tuple[Any, ...]]:
    return [
        tuple(None if math.isnan(value) else value for value in row) for row in zip(*map(list, summary), strict=True)
    ]


def directly(values: list[float], kind: MetricKind) -> tuple[float | None, ...]:
    """Return what a bucket with these values is, one value after the other."""
    seen = [value for value in values if not math.isnan(value)]
    if not seen:
        return (0, *[None] * 6)
    low: float | None = min(seen)
    high: float | None = max(seen)
    if kind is MetricKind.MASK:
        masks = [int(value) for value in seen if value < math.inf]
        low = high = None
        if masks:
            low, high = float(np.bitwise_and.reduce(masks)), float(np.bitwise_or.reduce(masks))
    mean = float(np.float32(sum(seen) / len(seen))) if kind in (MetricKind.GAUGE, MetricKind.MASK) else None
    increase = None
    if kind is MetricKind.COUNTER and max(seen) < math.inf:
        increase = sum(b if b < a else b - a for a, b in pairwise(seen))
    return len(seen), low, high, mean, seen[0], seen[-1], increase


def summary_of(parts: list[list[float]], kind: MetricKind) -> Summary:
    starts = np.cumsum([0, *map(len, parts)])[:-1]
    return summarize(np.concatenate([np.array(part) for part in parts]), starts, kind)


@given(kind=st.sampled_from(MetricKind), parts=buckets)
def test_a_bucket_is_what_its_values_are(kind: MetricKind, parts: list[list[float]]) -> None:
    assert told(summary_of(parts, kind)) == [directly(part, kind) for part in parts]


@given(kind=st.sampled_from(MetricKind), parts=buckets)
def test_buckets_combine_to_what_their_values_would_be(kind: MetricKind, parts: list[list[float]]) -> None:
    some = [part for part in parts if not all(map(math.isnan, part))]
    if not some:
        return
    fine = summary_of(some, kind)
    ((count, low, high, mean, first, last, increase),) = told(combine(fine, np.array([0]), kind))
    expected = directly([value for part in some for value in part], kind)
    assert (count, low, high, first, last, increase) == (*expected[:3], *expected[4:])
    assert mean == (None if expected[3] is None else pytest.approx(expected[3], rel=1e-6))


def test_a_counter_that_was_reset_grew_by_what_it_then_had() -> None:
    assert told(summary_of([[5, 8, 2, 3], [4, NAN, 4]], MetricKind.COUNTER))[0][-1] == 6
    whole = combine(
        summary_of([[5, 8, 2, 3], [4, NAN, 4], [1, 1]], MetricKind.COUNTER), np.array([0]), MetricKind.COUNTER
    )
    assert whole.increase.tolist() == [8]


def test_of_a_mask_the_least_are_the_bits_that_were_always_set_and_the_greatest_those_that_ever_were() -> None:
    ((_, low, high, *_),) = told(summary_of([[0b0110, 0b0011]], MetricKind.MASK))
    assert (low, high) == (0b0010, 0b0111)


def test_parts_of_a_summary_stay_what_they_were() -> None:
    whole = summary_of([[1.0], [2.0, 3.0], [NAN]], MetricKind.GAUGE)
    halves = joined([taken(whole, slice(0, 1)), taken(whole, slice(1, 3))])
    assert told(halves) == told(whole)
