"""Requests of remote write, as whoever reads them does."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.schema.metrics import BY_NAME
from eagle_eye.server.history import remote_series
from eagle_eye.server.history.remote_series import SeriesSubject, labels_of, place_of
from eagle_eye.server.ingest.remote_write import wire
from tests.server.remote_write.requests import Written, v1

LABELS = st.dictionaries(st.text(min_size=1), st.text(min_size=1), max_size=4)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(LABELS, st.integers(0, remote_series.TIME_MS_MAX - 1), st.floats(allow_nan=False)),
        min_size=1,
        max_size=5,
    )
)
def test_a_request_says_what_it_was_made_of(written: list[tuple[dict[str, str], int, float]]) -> None:
    heads = [remote_series.head({**labels, "__name__": "m"}) for labels, _, _ in written]
    times_ms = np.array([time_ms for _, time_ms, _ in written], dtype=np.int64)
    body = remote_series.request(heads, remote_series.samples(times_ms, np.array([value for _, _, value in written])))
    read = wire.read_v1(wire.uncompressed(body, wire.announced_bytes(body)), {b"m"}, 10)
    said = [(wire.labels(one.key), *one.samples) for one in read.series]
    assert said == [({**labels, "__name__": "m"}, (time_ms, value)) for labels, time_ms, value in written]


def test_the_bytes_are_those_of_the_specification() -> None:
    head = remote_series.head({"node": "n1", "__name__": "eagle_eye_gpu_power_watts", "job": "", "device": "3"})
    [sample] = remote_series.samples(np.array([1_700_000_000_123]), np.array([412.5]))
    labels = {"node": "n1", "__name__": "eagle_eye_gpu_power_watts", "device": "3"}
    assert head + sample == v1(Written(labels, [(1_700_000_000.123, 412.5)]))


def test_infinity_is_a_value() -> None:
    [sample] = remote_series.samples(np.array([1]), np.array([math.inf]))
    body = remote_series.head({"__name__": "m"}) + sample
    assert wire.read_v1(body, {b"m"}, 1).series[0].samples == [(1, math.inf)]


def test_a_series_speaks_of_the_row_that_it_was_named_for() -> None:
    for name, key in (("gpu_power_watts", 3), ("node_cpu_steal_ratio", -1), ("link_up", "mlx5_0:2")):
        place = SeriesSubject(BY_NAME[name], "n1", key, "train")
        assert place_of(labels_of(place, {"cluster": "a"})) == place
        assert place_of(labels_of(place._replace(job=None), {})) == place._replace(job=None)


def test_what_is_none_of_ours_speaks_of_nothing() -> None:
    good = {"__name__": "eagle_eye_gpu_power_watts", "node": "n1", "device": "0"}
    for bad in ({"__name__": "up"}, {"node": ""}, {"device": "x"}, {"device": "99999"}, {"job": "a\nb"}):
        assert place_of({**good, **bad}) is None


def test_a_scraped_series_has_our_job_beside_prometheus_own() -> None:
    labels = {"__name__": "eagle_eye_link_up", "node": "n1", "link": "l", "job": "eagle-eye", "exported_job": "train"}
    place = place_of(labels)
    assert place is not None
    assert place.job == "train"
