"""What is read back: from real stores, and put beside what the server still has."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from eagle_eye.schema.frame import encode_frame
from eagle_eye.schema.metrics import BY_NAME
from eagle_eye.server.history.remote_history import Figures, RemoteHistory, SeriesQuery, slices, with_past
from eagle_eye.server.history.remote_sender import Post, SegmentManifest, send
from eagle_eye.server.history.remote_store import PositionFile, SenderReport
from eagle_eye.server.history.settings import RemoteStoreSettings
from eagle_eye.server.model.clock import rfc3339
from eagle_eye.server.model.errors import RemoteStoreSilent
from tests.server.builders import NOW
from tests.server.remote_store.real_stores import PROMETHEUS, VICTORIA_METRICS, listening, show
from tests.server.remote_store.strict_store import keep, order, second
from tests.server.segments.kept import compact, opened

POWER = BY_NAME["gpu_power_watts"]


def past(http: httpx.Client, url: str = "http://store", **more: Any) -> RemoteHistory:
    return RemoteHistory(http, RemoteStoreSettings(read_url=url, **more), Figures(CollectorRegistry()))


def answering(*results: dict[str, Any]) -> httpx.Client:
    body = {"status": "success", "data": {"resultType": "matrix", "result": list(results)}}
    return httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, json=body)))


@pytest.mark.parametrize("store", [PROMETHEUS, VICTORIA_METRICS])
def test_what_a_real_store_was_sent_is_read_back_the_same(store: str, tmp_path: Path) -> None:
    begin_s = float(int(time.time())) - 60.0
    said: list[SenderReport] = []
    with opened(tmp_path / "data") as history, listening(store, tmp_path) as url, httpx.Client() as http:
        frames = [second(at, node, begin_s) for at in range(30) for node in ("n1", "n2")]
        keep(history, *frames)
        compact(history)
        asked = order(url=f"{url}/api/v1/write", external_labels={"cluster": "a"}, request_samples_max=1_000)
        manifest, file = SegmentManifest(history.journal.path), PositionFile(tmp_path)
        post = Post(http, asked.url, lambda _s: None, lambda *_: None)
        send(asked, history.segment_store.folder, manifest, file, post, said.append)
        manifest.close()
        file.close()
        show(url, store)
        reader = past(http, url, external_labels={"cluster": "a"}, interval_s=1.0)
        read = reader.points(SeriesQuery(POWER, "n2", None, begin_s, 5.0), 7)
        back = {(one.frame.node, one.frame.time_s): one.frame for one in reader.frames("job", begin_s, begin_s + 30.0)}
        other = past(http, url, external_labels={"cluster": "b"}).points(
            SeriesQuery(POWER, None, None, begin_s, 5.0), 7
        )
    assert sum(reported.taken for reported in said) == 30 * 2 * 6
    assert read == {("n2", device): {i: 300.1 + 5 * i + 4 + device for i in range(6)} for device in (0, 1)}
    assert other == {}
    assert len(back) == 60
    of_job = {block.scope: block for block in back["n1", begin_s + 7].blocks}
    [device] = [block for scope, block in of_job.items() if scope.value == "device"]
    assert device.keys == [1]  # the other GPU was nobody's
    assert sorted(device.metrics) == ["gpu_power_watts", "train_step"]
    assert {scope.value for scope in of_job} == {"device", "node", "link"}


def answer_with(past_: RemoteHistory | None, begins_s: float | None, steps: int = 10) -> dict[str, Any]:
    embedded = [{"node": "n1", "device": 0, "points": [[rfc(at), float(at)] for at in range(4, 10)]}]
    return with_past(
        {"series": embedded}, past_, begins_s, SeriesQuery(POWER, None, None, NOW, 1.0), steps, lambda v: v
    )


def rfc(at: int) -> str:
    return rfc3339(NOW + at)


def course(values: dict[int, str], **labels: str) -> dict[str, Any]:
    return {
        "metric": {"node": "n1", "device": "0", **labels},
        "values": [[NOW + at + 0.999, v] for at, v in values.items()],
    }


def test_each_step_comes_from_one_source_and_the_answer_says_which() -> None:
    with answering(course({at: str(100 + at) for at in range(6)})) as http:
        body = answer_with(past(http), NOW + 5.5)
    assert [value for _, value in body["series"][0]["points"]] == [100, 101, 102, 103, 104, 105, 6, 7, 8, 9]
    assert body["sources"] == [
        {"source": "remote_store", "start": rfc(0), "end": rfc(6), "problem": None},
        {"source": "embedded", "start": rfc(6), "end": rfc(10), "problem": None},
    ]


def test_series_that_only_one_of_them_has_are_there() -> None:
    with answering(course({0: "1"}, device="3"), course({1: "NaN"}, device="4"), {"metric": {}, "values": []}) as http:
        body = answer_with(past(http), NOW + 5.0)
    assert [(one["device"], len(one["points"])) for one in body["series"]] == [(0, 6), (3, 1)]


def test_a_store_that_gives_no_answer_is_named_and_the_rest_shown() -> None:
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(500, text="oh"))) as http:
        body = answer_with(past(http), NOW + 5.0)
    assert [value for _, value in body["series"][0]["points"]] == [4, 5, 6, 7, 8, 9]
    assert "HTTP 500" in body["sources"][0]["problem"]


def test_what_the_server_still_has_is_not_asked_for() -> None:
    def never(_request: httpx.Request) -> httpx.Response:
        raise AssertionError

    with httpx.Client(transport=httpx.MockTransport(never)) as http:
        body = answer_with(past(http), NOW - 5.0)
    assert [source["source"] for source in body["sources"]] == ["embedded"]
    assert answer_with(None, None)["sources"] == body["sources"]


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={"status": "success", "data": {"result": 7}}),
        httpx.Response(200, text='{"more": ' + "[" * 100_000),
        httpx.Response(200, json={"status": "error", "error": "no"}),
        httpx.Response(200, content=b" " * (2 << 20)),
        httpx.Response(302, headers={"Location": "http://elsewhere/"}),
    ],
)
def test_an_answer_that_is_none_is_refused(answer: httpx.Response) -> None:
    with (
        httpx.Client(transport=httpx.MockTransport(lambda _: answer)) as http,
        pytest.raises(RemoteStoreSilent, match=r"http://store|Prometheus"),
    ):
        past(http, answer_bytes_max=1 << 20).points(SeriesQuery(POWER, None, None, NOW, 1.0), 3)


def test_what_is_too_large_is_asked_for_in_smaller_pieces() -> None:
    asked: list[tuple[float, float]] = []

    def ask(start_s: float, end_s: float) -> list[Any]:
        if end_s - start_s > 10.0:
            raise RemoteStoreSilent("too much", too_large=True)
        asked.append((start_s, end_s))
        return []

    list(slices(0.0, 100.0, ask, 10_000.0))
    assert asked[0][0] == 0.0
    assert asked[-1][1] == 100.0
    assert all(before[1] == after[0] for before, after in pairwise(asked))


def test_frames_are_as_the_wire_wants_them() -> None:
    with answering(course({1: "2.5"}, __name__="eagle_eye_gpu_power_watts", job="train")) as http:
        [one] = list(past(http, interval_s=15.0).frames("train", NOW, NOW + 10.0))
    assert (one.frame.node, one.frame.job, one.frame.time_s, one.frame.interval_s) == ("n1", "train", NOW + 1.999, 15.0)
    assert encode_frame(one.frame)
