"""A metric over time as a data frame, from a real server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from eagle_eye.client import Client, DataLacking, LimitReached, Refused, frames, ranges
from eagle_eye.client.ranges import RangeSteps
from eagle_eye.schema.frame import Frame, Rank, block
from eagle_eye.schema.metrics import Scope
from tests.server.builders import NOW, FakeClock, Running, body, frame, running

NODES = {"n1": (0, 1), "n2": (0,), "n10": (0, 1, 2)}  # which devices each has
SECONDS = 6


def sent(node: str, second: int) -> Frame:
    """Return one second of a node: power by node, device and second; of n2 every other second is lacking."""
    power = {
        device: {"gpu_power_watts": 100.0 * (place + 1) + 10 * device + second, "train_loss": math.inf}
        for place, devices in enumerate(NODES.values())
        for device in devices
        if list(NODES)[place] == node
    }
    blocks = [
        block(Scope.DEVICE, power),
        block(Scope.NODE, {-1: {"node_iowait_ratio": 0.0 if node == "n2" else 0.5}}),
        block(Scope.LINK, {"mlx5_0": {"link_up": 1.0}, "eth0": {"link_up": 0.0}}),
    ]
    ranks = [Rank("job", 0, 1, 0)] if node != "n10" else []
    return frame(second, node, NOW + second, blocks=blocks, job="job" if ranks else None, ranks=ranks)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("ranges"), FakeClock(NOW + SECONDS)) as started:
        for node in NODES:
            seconds = range(1, SECONDS + 1, 2 if node == "n2" else 1)
            started.send(body(*(sent(node, second) for second in seconds), sent_s=NOW + SECONDS))
        yield started


@pytest.fixture
def client(server: Running) -> Client:
    return Client(server.url)


def power(client: Client, **more: object) -> pd.DataFrame:
    query: dict[str, object] = {"start": NOW, "end": NOW + SECONDS + 1, **more}
    return client.query_range("gpu_power_watts", **query)  # type: ignore[arg-type]


def test_a_frame_is_tidy(client: Client) -> None:
    found = power(client, job="job")
    assert list(found.columns) == ["time", "node", "device", "value"]
    assert [str(kind) for kind in found.dtypes] == ["datetime64[us, UTC]", "category", "int16", "float64"]
    first = found.iloc[0]
    assert first["time"] == pd.Timestamp(NOW + 1, unit="s", tz="UTC")
    assert (first["node"], first["device"], first["value"]) == ("n1", 0, 101.0)
    assert list(found["node"].cat.categories) == ["n1", "n2"]  # n10 has no rank of the job
    assert found.attrs["unit"] == "watts"
    assert found.attrs["problems"] == []


def test_a_step_without_an_observation_has_no_row_and_no_value(client: Client) -> None:
    found = power(client)
    assert len(found[found["node"] == "n2"]) == SECONDS // 2
    wide = power(client, wide=True)
    assert wide["n2", 0].isna().to_list() == [True, False, True, False, True, False, True]
    assert wide["n1", 1].isna().to_list() == [True, *[False] * SECONDS]
    assert not (wide == 0.0).any(axis=None)


def test_a_wide_frame_has_a_column_for_each_node_and_device_and_a_row_for_each_step(client: Client) -> None:
    wide = power(client, wide=True)
    assert wide.columns.names == ["node", "device"]
    assert list(wide.columns) == [("n1", 0), ("n1", 1), ("n10", 0), ("n10", 1), ("n10", 2), ("n2", 0)]
    assert str(wide.index.dtype) == "datetime64[us, UTC]"
    assert wide.index.name == "time"
    assert list(wide.index.astype(np.int64) / 1e6) == [NOW + second for second in range(SECONDS + 1)]
    assert wide.loc[pd.Timestamp(NOW + 2, unit="s", tz="UTC"), ("n10", 2)] == 322.0
    assert wide.attrs["unit"] == "watts"


def test_what_was_not_finite_is_infinite(client: Client) -> None:
    found = client.query_range("train_loss", start=NOW, end=NOW + 10, node="n2")
    assert found["value"].to_list() == [math.inf] * 3


def test_a_zero_that_was_observed_is_one(client: Client) -> None:
    found = client.query_range("node_iowait_ratio", start=NOW, end=NOW + 10)
    assert found[found["node"] == "n2"]["value"].to_list() == [0.0] * 3


def test_the_node_itself_is_device_minus_one(client: Client) -> None:
    found = client.query_range("node_iowait_ratio", start=NOW, end=NOW + 10)
    assert set(found["device"]) == {-1}
    assert len(found.groupby(["node", "device"], observed=True)) == len(NODES)


def test_links_are_named(client: Client) -> None:
    found = client.query_range("link_up", start=NOW, end=NOW + 10, node="n1", step=10)
    assert found[["node", "link", "value"]].to_numpy().tolist() == [["n1", "eth0", 0.0], ["n1", "mlx5_0", 1.0]]
    wide = client.query_range("link_up", start=NOW, end=NOW + 10, node="n1", step=10, wide=True)
    assert wide.columns.names == ["node", "link"]


def test_statistics_are_the_servers(client: Client) -> None:
    found = power(client, node="n1", statistic="max", step=10)
    assert found["value"].to_list() == [106.0, 116.0]
    with pytest.raises(Refused, match="has no increase"):
        power(client, statistic="increase")


def test_times_are_taken_as_a_person_has_them(client: Client) -> None:
    east = timezone(timedelta(hours=2))
    start = datetime.fromtimestamp(NOW + 2, east)
    whole = power(client, start=NOW + 2, end=NOW + 5)
    for begin in (start, start.isoformat(), pd.Timestamp(start), "2023-11-14T22:13:22Z"):
        pd.testing.assert_frame_equal(power(client, start=begin, end=NOW + 5), whole)
    with pytest.warns(DataLacking, match="no node reported"):  # the machine's clock is far from the test's
        assert power(client, start="-1h", end="now").empty


@pytest.mark.parametrize(
    ("start", "end", "told"),
    [
        (datetime(2026, 1, 1), NOW, "start: .* no time zone"),  # noqa: DTZ001 - that is the claim
        ("yesterday", NOW, "start: expected RFC 3339"),
        (NOW, NOW, "start: expected a time before end"),
        (NOW * 1e3, NOW, "start: .*milliseconds"),
        (NOW, [], "end: "),
    ],
)
def test_a_time_that_is_none_is_named(client: Client, start: object, end: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        power(client, start=start, end=end)


@pytest.mark.parametrize("step", [0.0, -1.0, math.nan, 0.001, 86_401])
def test_a_step_that_is_none_is_named(client: Client, step: float) -> None:
    with pytest.raises(ValueError, match=r"step: expected 0.01 to 86400"):
        power(client, step=step)


def test_steps_begin_at_their_multiples_so_that_frames_join(client: Client) -> None:
    found = power(client, node="n1", start=NOW + 1.7, step=2)
    seconds = sorted(set(found["time"].astype(np.int64) / 1e6 - NOW))
    assert seconds == [0.0, 2.0, 4.0, 6.0]


def test_names_that_nobody_knows_are_no_empty_frames(client: Client) -> None:
    with pytest.raises(Refused, match="nobody") as refused:
        power(client, job="nobody")
    assert refused.value.status == 404
    with pytest.raises(Refused, match="n3"):
        power(client, node="n3")
    with pytest.raises(Refused, match="catalogue"):
        client.query_range("gpu_mood", start=NOW, end=NOW + 1)
    query: dict[str, Any] = {"metric": "gpu_ecc_corrected_total", "job": "job", "start": NOW, "end": NOW + 9}
    with pytest.warns(DataLacking, match="no node reported gpu_ecc_corrected_total"):
        assert client.query_range(**query).empty
    with pytest.warns(DataLacking, match="no node reported gpu_ecc_corrected_total"):
        assert client.query_range(**query, wide=True).shape == (9, 0)


@pytest.mark.parametrize("wide", [False, True])
def test_a_range_that_the_server_refuses_as_too_much_is_asked_for_in_parts(tmp_path: Path, wide: bool) -> None:
    with running(tmp_path, FakeClock(NOW + 64), history__query_frames_max=20) as server:
        for node in ("n1", "n2"):
            numbers = [number for number in range(1, 64) if number % 7]
            server.send(body(*(sent(node, number) for number in numbers), sent_s=NOW + 64))
        query: dict[str, Any] = {"metric": "gpu_power_watts", "start": NOW, "end": NOW + 64, "step": 1}
        assert server.client.get("/api/v1/query_range", params=query).json()["reason"] == "too_much"
        found = power(Client(server.url), end=NOW + 64, wide=wide)
        once = []
        for second in range(64):
            step = {**query, "start": NOW + second, "end": NOW + second + 0.5}
            once.append(server.client.get("/api/v1/query_range", params=step).json())
    points = {
        (point[0], series["node"], series["device"]): point[1]
        for one in once
        for series in one["series"]
        for point in series["points"]
    }
    assert len(points) == 54 * 3
    if wide:
        found = found.stack(["node", "device"]).rename("value").dropna().reset_index()
    times = found["time"].dt.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    assert dict(zip(zip(times, found["node"], found["device"], strict=True), found["value"], strict=True)) == points
    assert len(found) == len(points)


def test_an_answer_that_is_too_large_is_asked_for_in_parts(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = power(client)
    monkeypatch.setattr("eagle_eye.client.http_client.ANSWER_BYTES_MAX", 1_200)
    parts = power(client)
    pd.testing.assert_frame_equal(parts, whole)
    assert len(parts.attrs["resolutions"]) > 1
    monkeypatch.setattr("eagle_eye.client.http_client.ANSWER_BYTES_MAX", 300)
    with pytest.raises(LimitReached, match="ask for less"):
        power(client)


def test_limits_are_said_with_what_to_do(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "CELLS_MAX", 10)
    with pytest.raises(LimitReached, match="7 steps of 6 series are more than 10 cells; take a longer step"):
        power(client, wide=True)
    monkeypatch.setattr(frames, "POINTS_MAX", 20)
    with pytest.raises(LimitReached, match="more than 20 points; take a longer step"):
        power(client)
    monkeypatch.setattr(ranges, "REQUESTS_MAX", 3)
    monkeypatch.setattr("eagle_eye.client.http_client.ANSWER_BYTES_MAX", 900)
    with pytest.raises(LimitReached, match="more than 3 requests; take a longer step"):
        power(client)


def test_an_increase_is_not_divided(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.client.http_client.ANSWER_BYTES_MAX", 100)
    with pytest.raises(LimitReached, match="ask for less"):
        client.query_range("gpu_ecc_corrected_total", start=NOW, end=NOW + 9, statistic="increase")


def test_what_the_server_says_is_lacking_is_a_warning(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def answered(_client: object, _query: object, steps: RangeSteps) -> Iterator[tuple[int, int, ranges.RangePart]]:
        gap = {"source": "embedded", "start": "a", "end": "b", "problem": "a segment is damaged"}
        yield 0, steps.count, ranges.RangePart("watts", "last", [], [], [gap, {**gap, "problem": None}])

    monkeypatch.setattr(ranges, "parts", answered)
    with pytest.warns(DataLacking, match="values are lacking: a to b: a segment is damaged") as told:
        found = power(client)
    assert told[0].filename == __file__
    assert [one["problem"] for one in found.attrs["problems"]] == ["a segment is damaged"]


def test_an_empty_frame_is_a_warning(client: Client) -> None:
    with pytest.warns(DataLacking, match="no node reported gpu_power_watts in this range; `eagle-eye") as told:
        found = client.query_range("gpu_power_watts", start=NOW + 3_600, end=NOW + 7_200, step=60)
    assert found.empty
    assert told[0].filename == __file__


def test_a_mistyped_metric_is_answered_with_the_nearest(client: Client) -> None:
    with pytest.raises(Refused, match="'gpu_power_watt' is not in the catalogue; did you mean gpu_power_watts"):
        client.query_range("gpu_power_watt", start=NOW, end=NOW + 9)


@pytest.mark.parametrize(("step_s", "border_s"), [(1.0, 3_600.0), (30.0, 3_600.0), (60.0, 3_600.0), (7_200.0, 7_200.0)])
def test_a_range_is_cut_between_buckets_of_the_history(step_s: float, border_s: float) -> None:
    steps = RangeSteps.between(NOW + 0.3, NOW + 30 * 3_600, step_s)
    middle = steps.middle(0, steps.count)
    assert 0 < middle < steps.count
    assert steps.time_s(middle) % border_s == 0.0


def test_within_an_hour_a_range_is_cut_between_minutes_or_in_its_middle() -> None:
    steps = RangeSteps.between(NOW, NOW + 1_200, 1.0)
    assert steps.time_s(steps.middle(0, 1_200)) % 60.0 == 0.0
    assert RangeSteps.between(NOW, NOW + 8, 1.0).middle(0, 8) == 4
    assert RangeSteps.between(NOW, NOW + 8, 0.3).middle(0, 2) == 1
