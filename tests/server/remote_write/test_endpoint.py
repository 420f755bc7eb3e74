from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.frame import CONTENT_TYPE, Frame, block, values_of
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.settings import DetectionSettings
from eagle_eye.server.model.errors import HistoryUnavailable, StoreUnavailable
from eagle_eye.server.model.records import Job
from eagle_eye.server.model.records import Scope as TokenScope
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import DRIVER_ERRORS, LAST_CODES, Change
from tests.server.builders import NOW, FakeClock, Running, body, frame, running
from tests.server.remote_write.requests import V1_HEADERS, V2_HEADERS, Written, field, series, snappy, v1, v2, varint

PATH = "/api/v1/write"
BODY_BYTES_MAX = 100_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(tmp_path: Path, clock: FakeClock) -> Iterator[Running]:
    with running(tmp_path, clock) as started:
        yield started


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all requests that change nothing."""
    folder = tmp_path_factory.mktemp("refusing")
    with running(folder, remote_write__body_bytes_max=BODY_BYTES_MAX) as started:
        yield started


def temperature(value: float, time_s: float, node: str = "n1", **labels: str) -> Written:
    return series("DCGM_FI_DEV_GPU_TEMP", value, time_s, gpu="0", Hostname=node, **labels)


def write(server: Running, *written: Written, **headers: str) -> httpx.Response:
    return server.client.post(PATH, content=snappy(v1(*written)), headers={**V1_HEADERS, **headers})


def scrape(server: Running, clock: FakeClock, every_s: float, times: int) -> None:
    """Have node n1 scraped and what was scraped written at once."""
    for _ in range(times):
        clock.advance(every_s)
        assert write(server, temperature(50.0, clock.time_s, eagle_eye_job="train")).status_code == 204


def rows(frames: list[Frame]) -> list[list[float]]:
    return [list(values_of(block)) for one in frames for block in one.blocks]


def observed(server: Running) -> list[Frame]:
    return [one for one, _, _ in server.watcher.frames]


def history(server: Running) -> list[Frame]:
    return [one.frame for one in server.dispatcher.services.history.query([], 0.0, NOW + 1e6)]


def test_what_is_written_is_durable_and_reaches_the_detection_loop_as_agents_frames_do(
    server: Running, clock: FakeClock
) -> None:
    scrape(server, clock, 15.0, 4)
    assert [one.time_s for one in history(server)] == [NOW + 15, NOW + 30, NOW + 45, NOW + 60]
    newest, received_s, offset_s = server.watcher.frames[-1]
    assert (newest.node, newest.job, newest.interval_s, rows([newest])) == ("n1", "train", 15.0, [[50.0]])
    assert (received_s, offset_s) == (NOW + 60, 0.0)
    assert [item["node"] for item in server.client.get("/api/v1/nodes").json()["items"]] == ["n1"]
    assert server.metric("remote_write_samples_total") == 4


def test_until_the_pace_is_known_rows_are_kept_and_not_judged_also_by_the_next_server(
    tmp_path: Path, clock: FakeClock
) -> None:
    with running(tmp_path, clock) as first:
        scrape(first, clock, 15.0, 3)
        assert rows(history(first)) == [[50.0]] * 3
        assert rows(observed(first)) == [[50.0]]
    with running(tmp_path, clock) as second:
        assert rows([one for one, _ in second.watcher.recovered]) == [[50.0]]
        scrape(second, clock, 15.0, 1)
        assert rows(observed(second)) == [[50.0]]


def test_version_2_is_answered_with_what_was_written(server: Running) -> None:
    beside = field(4, b"") + field(3, b"")
    content = snappy(v2(temperature(50.0, NOW), series("unknown", 1.0, NOW), beside=beside))
    answer = server.client.post(PATH, content=content, headers=V2_HEADERS)
    written = {name: answer.headers[f"x-prometheus-remote-write-{name}-written"] for name in
               ("samples", "histograms", "exemplars")}  # fmt: skip
    assert (answer.status_code, answer.content) == (204, b"")
    assert written == {"samples": "2", "histograms": "2", "exemplars": "2"}
    assert rows(history(server)) == [[50.0]]
    left_out = {reason: server.metric("remote_write_left_out_total", reason=reason) for reason in
                ("unmapped", "histogram", "exemplar")}  # fmt: skip
    assert left_out == {"unmapped": 1, "histogram": 2, "exemplar": 2}


def test_a_sender_of_which_nothing_is_mapped_is_named_on_readyz_until_something_is(
    server: Running, clock: FakeClock
) -> None:
    def notes(*written: Written) -> dict[str, str]:
        clock.advance(60.0)
        assert write(server, *written).status_code == 204
        said: dict[str, str] = server.client.get("/readyz").json()["notes"]
        return said

    names = ("scrape_samples_scraped", "up", "DCGM_FI_DEV_FB_USED_bytes", "gpu\npower")
    foreign = [series(name, 1.0, NOW, instance="n1:9400") for name in names]
    assert ["remote_write" in notes(*foreign) for _ in range(4)] == [False, False, False, True]
    said = notes(*foreign)["remote_write"]
    assert said.startswith(
        r"none of the series that local writes is mapped, among them 'DCGM_FI_DEV_FB_USED_bytes', 'gpu\npower', 'scrape"
    )
    assert "remote_write" not in notes(temperature(50.0, clock.time_s), *foreign)
    assert "remote_write" not in notes(*foreign)


def test_a_sender_that_is_silent_is_not_named(server: Running, clock: FakeClock) -> None:
    for _ in range(5):
        clock.advance(60.0)
        write(server, series("unknown", 1.0, NOW))
    assert "remote_write" in server.client.get("/readyz").json()["notes"]
    clock.advance(601.0)
    assert "remote_write" not in server.client.get("/readyz").json()["notes"]


GOOD = snappy(v1(temperature(50.0, NOW)))
BAD: list[tuple[str, bytes, dict[str, str], int, str]] = [
    ("no Snappy", b"no snappy", V1_HEADERS, 400, "snappy"),
    ("an empty body", b"", V1_HEADERS, 400, "snappy"),
    ("a damaged block", GOOD[:-3], V1_HEADERS, 400, "snappy"),
    ("a bomb", varint(1 << 31) + bytes(20), V1_HEADERS, 413, "oversized"),
    ("a body beyond the limit", bytes(BODY_BYTES_MAX + 1), V1_HEADERS, 413, "oversized"),
    ("no message", snappy(b"\xff" * 40), V1_HEADERS, 400, "protobuf"),
    ("a message cut short", snappy(v1(temperature(50.0, NOW))[:-2]), V1_HEADERS, 400, "truncated"),
    ("version 1 said to be 2", snappy(v2(temperature(50.0, NOW))[:-2]), V2_HEADERS, 400, "truncated"),
    ("JSON", b"{}", {**V1_HEADERS, "content-type": "application/json"}, 415, "content_type"),
    ("no content type", GOOD, {**V1_HEADERS, "content-type": ""}, 415, "content_type"),
    ("another message", GOOD, {**V1_HEADERS, "content-type": "application/x-protobuf;proto=x.Y"}, 415, "content_type"),
    ("another compression", GOOD, {**V1_HEADERS, "content-encoding": "gzip"}, 415, "content_encoding"),
    ("no compression", GOOD, {"content-type": "application/x-protobuf"}, 415, "content_encoding"),
]


@pytest.mark.parametrize(("content", "headers", "status", "reason"), [pytest.param(*c[1:], id=c[0]) for c in BAD])
def test_a_bad_request_is_refused_whole_counted_and_changes_nothing(
    refusing: Running, content: bytes, headers: dict[str, str], status: int, reason: str
) -> None:
    before = refusing.metric("remote_write_rejected_total", reason=reason)
    answer = refusing.client.post(PATH, content=content, headers=headers)
    assert (answer.status_code, answer.json()["reason"]) == (status, reason)
    assert answer.headers["content-type"] == "application/problem+json"
    assert len(answer.json()["detail"]) > 10
    assert refusing.metric("remote_write_rejected_total", reason=reason) == before + 1
    assert refusing.dispatcher.services.history.streams() == []


def test_other_methods_are_refused(refusing: Running) -> None:
    answer = refusing.client.get(PATH)
    assert (answer.status_code, answer.headers["allow"]) == (405, "OPTIONS, POST")


def test_of_a_request_with_a_bad_series_the_rest_is_kept_and_the_bad_named(server: Running) -> None:
    answer = write(server, temperature(50.0, NOW, node="n\x07"), temperature(51.0, NOW))
    assert (answer.status_code, answer.json()["reason"]) == (400, "node")
    assert "n\\x07" in answer.json()["detail"]
    assert rows(history(server)) == [[51.0]]


def test_nodes_beyond_the_configured_are_refused(tmp_path: Path) -> None:
    with running(tmp_path, ingest__nodes=["n*"], ingest__nodes_max=1) as server:
        assert write(server, temperature(50.0, NOW)).status_code == 204
        for node, reason in (("x1", "node"), ("n2", "too_many_nodes")):
            answer = write(server, temperature(50.0, NOW, node=node))
            assert (answer.status_code, answer.json()["reason"]) == (400, reason)
        assert {one.node for one in history(server)} == {"n1"}


def given_token(server: Running, scope: TokenScope, node: str | None = None, nodes: tuple[str, ...] = ()) -> str:
    text, token = mint(scope, node, NOW, None, nodes)
    server.dispatcher.services.store.commit(Change(tokens=(token,)))
    return f"Bearer {text}"


def test_a_token_speaks_for_the_nodes_that_it_was_made_for_and_for_nothing_else(server: Running) -> None:
    bearer = given_token(server, "remote_write", nodes=("n*",))
    assert write(server, temperature(50.0, NOW), authorization=bearer).status_code == 204
    answer = write(server, temperature(50.0, NOW, node="x1"), authorization=bearer)
    assert (answer.status_code, answer.json()["reason"]) == (400, "node")
    assert server.send(body(frame(node="n7")), authorization=bearer).status_code == 403
    assert server.client.get("/api/v1/nodes", headers={"authorization": bearer}).status_code == 403
    assert {one.node for one in history(server)} == {"n1"}


def test_tokens_of_other_scopes_may_not_write_and_nobody_without_one(server: Running) -> None:
    scopes: tuple[TokenScope, ...] = ("agent", "read", "operate")
    for scope in scopes:
        bearer = given_token(server, scope, "n1" if scope == "agent" else None)
        answer = write(server, temperature(50.0, NOW), authorization=bearer)
        assert (answer.status_code, answer.json()["reason"]) == (403, "scope")
    assert write(server, temperature(50.0, NOW)).status_code == 401


def test_the_token_may_be_the_password_of_basic_auth(server: Running) -> None:
    text = given_token(server, "remote_write", nodes=("n1",)).removeprefix("Bearer ")

    def answer(password: str, path: str = PATH) -> httpx.Response:
        content = snappy(v1(temperature(50.0, NOW)))
        return server.client.post(path, content=content, headers=V1_HEADERS, auth=("any", password))

    assert answer(text).status_code == 204
    assert rows(history(server)) == [[50.0]]
    assert [answer("").status_code, answer("ee_other").status_code] == [401, 401]
    assert answer(text, "/api/v1/frames").status_code == 401
    assert "basic auth with the token as password" in write(server, temperature(50.0, NOW)).json()["detail"]


def test_a_token_for_no_node_is_not_made() -> None:
    with pytest.raises(ValueError, match="--nodes"):
        mint("remote_write", None, NOW, None)


POD = {"k8s_pod_name": "dcgm-exporter-x7k2p", "instance": "10.0.0.7:9400"}


@pytest.mark.parametrize(
    ("labels", "node"),
    [
        ({"k8s_node_name": "n1", "node": "n2", "host_name": "otel-gateway"}, "n1"),
        ({"node": "n1", "host_name": "otel-gateway", "Hostname": "n2"}, "n1"),
        ({"host_name": "n1", "Hostname": "n2", **POD}, "n1"),
        ({"host_name": "localhost", "Hostname": "n1"}, "n1"),
        ({"host_name": "dcgm-exporter-x7k2p", **POD}, "10.0.0.7"),
        ({"host_name": "localhost", "instance": "n1.hpc.example.org:9400"}, "n1.hpc.example.org"),
        ({"k8s.node.name": "n1", "host.name": "otel-gateway"}, "n1"),
        ({"host.name": "dcgm-exporter-x7k2p", "k8s.pod.name": "dcgm-exporter-x7k2p", "host_name": "n1"}, "n1"),
        ({"k8s.node.name": "n1", "k8s.cluster.name": "west"}, "n1"),
    ],
)
@pytest.mark.parametrize(("version", "headers"), [(v1, V1_HEADERS), (v2, V2_HEADERS)])
def test_series_of_a_collector_are_of_the_node_that_they_name(
    server: Running, version: Callable[..., bytes], headers: dict[str, str], labels: dict[str, str], node: str
) -> None:
    content = snappy(version(series("DCGM_FI_DEV_GPU_TEMP", 50.0, NOW, gpu="0", **labels)))
    assert server.client.post(PATH, content=content, headers=headers).status_code == 204
    assert [one.node for one in history(server)] == [node]


def test_a_clusters_name_counts_in_either_spelling(server: Running) -> None:
    for cluster in ({"k8s_cluster_name": "west"}, {"k8s.cluster.name": "east"}):
        assert write(server, temperature(50.0, NOW, **cluster)).status_code == 204
    assert [one.node for one in history(server)] == ["n1", "n1@east"]


def test_a_node_with_an_agent_is_its_agents(server: Running) -> None:
    server.send(body(frame(1)))
    assert write(server, temperature(50.0, NOW), temperature(50.0, NOW, node="n2")).status_code == 204
    assert {(one.node, one.agent_version == "1.2") for one in history(server)} == {("n1", True), ("n2", False)}
    assert server.metric("remote_write_left_out_total", reason="has_agent") == 1


def test_what_the_history_does_not_take_is_asked_for_again_and_then_kept(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise HistoryUnavailable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(server.dispatcher.services.history, "submit", full)
        answer = write(server, temperature(50.0, NOW))
        assert (answer.status_code, answer.json()["reason"]) == (503, "storage")
        assert int(answer.headers["retry-after"]) > 0
        assert server.watcher.frames == []
    assert write(server, temperature(50.0, NOW)).status_code == 204
    assert rows(history(server)) == [[50.0]]
    assert write(server, temperature(50.0, NOW)).status_code == 204
    assert rows(history(server)) == [[50.0]]
    assert server.metric("remote_write_left_out_total", reason="duplicate") == 1


def test_the_job_is_the_one_that_was_declared_where_no_label_names_it(server: Running) -> None:
    job = Job(job="llama", attempt=0, state="running", ranks=[MemberRank(0, "n1", 0)], restart_owner="", updated_s=NOW)
    over = Job(job="old", attempt=0, state="finished", ranks=[MemberRank(0, "n1", 0)], restart_owner="", updated_s=NOW)
    server.dispatcher.services.store.commit(Change(jobs=(job, over)))
    write(server, temperature(50.0, NOW))
    write(server, temperature(50.0, NOW, node="n2", eagle_eye_job="mine"))
    assert {one.node: one.job for one in history(server)} == {"n1": "llama", "n2": "mine"}


def test_a_job_counts_however_many_are_newer(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.server.ingest.remote_write.endpoint.PAGE_LIMIT_MAX", 2)
    jobs = [Job(job=f"job{i}", attempt=0, state="running", ranks=[MemberRank(0, f"n{i}", 0)], restart_owner="",
                updated_s=NOW) for i in range(5)]  # fmt: skip
    server.dispatcher.services.store.commit(Change(jobs=tuple(jobs)))
    write(server, temperature(50.0, NOW, node="n0"))
    assert [one.job for one in history(server)] == ["job0"]


def scraped(time_s: float, code: float) -> tuple[Written, Written]:
    """Return what a scrape of n1's dcgm-exporter has: a temperature, and the last XID."""
    return temperature(50.0, time_s), series("DCGM_FI_DEV_XID_ERRORS", code, time_s, gpu="0", Hostname="n1")


def xids(server: Running) -> list[tuple[float, object]]:
    """Return the XIDs of the history: seconds since NOW, and codes."""
    return [(event.time_s - NOW, event.attributes["code"]) for one in history(server) for event in one.events]


def test_an_xid_of_while_the_server_was_down_is_reported_once_and_an_old_one_is_not(
    tmp_path: Path, clock: FakeClock
) -> None:
    reported = []
    for at, codes in ((0.0, [31.0]), (15.0, [79.0]), (30.0, [79.0, 0.0, 79.0])):
        with running(tmp_path, clock) as server:
            for place, code in enumerate(codes):
                clock.time_s = NOW + at + 15.0 * place
                assert write(server, *scraped(clock.time_s, code)).status_code == 204
            reported = xids(server)
    assert reported == [(15.0, 79), (60.0, 79)]


def test_a_code_is_not_remembered_before_the_event_that_tells_of_it_is_durable(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, clock) as server:
        write(server, *scraped(NOW, 0.0))

        def full(_batch: object) -> None:
            raise HistoryUnavailable("the disk is full")

        monkeypatch.setattr(server.dispatcher.services.history, "submit", full)
        clock.advance(15.0)
        assert write(server, *scraped(NOW + 15, 79.0)).status_code == 503
    with running(tmp_path, clock) as server:
        assert write(server, *scraped(NOW + 15, 79.0)).status_code == 204
        assert xids(server) == [(15.0, 79)]


def test_codes_that_could_not_be_written_down_are_with_the_next_samples(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, clock) as server:
        store = server.dispatcher.services.store

        def commit(change: Change) -> None:
            if change.last_codes and not failed:
                failed.append(change)
                raise StoreUnavailable("the disk is full")
            kept(change)

        failed: list[Change] = []
        kept = store.commit
        monkeypatch.setattr(store, "commit", commit)
        assert write(server, *scraped(NOW, 0.0)).status_code == 204
        assert store.all(LAST_CODES) == []
        assert server.metric("internal_errors_total", place="last codes") == 1
        clock.advance(15.0)
        write(server, *scraped(NOW + 15, 0.0))
        assert [one.devices[0].code for one in store.all(LAST_CODES)] == [0.0]


def test_an_xid_counts_in_its_nodes_past(server: Running, clock: FakeClock) -> None:
    clock.advance(15.0)
    write(server, *scraped(NOW, 0.0), *scraped(NOW + 15, 79.0))
    server.dispatcher.services.bookkeeper.write_changes([], clock.now_s())
    (error,) = server.dispatcher.services.store.all(DRIVER_ERRORS)
    assert (error.node, error.device, error.code, error.count) == ("n1", 0, 79, 1)


def test_samples_of_an_outage_are_kept_and_are_no_news_but_for_what_stays_true(
    server: Running, clock: FakeClock
) -> None:
    for at in (0.0, 15.0, 30.0):
        clock.time_s = NOW + at
        write(server, *scraped(NOW + at, 0.0))
    clock.advance(3_600.0)
    del server.watcher.frames[:]
    assert write(server, *scraped(NOW + 45, 79.0)).status_code == 204
    assert history(server)[-1].time_s == NOW + 45
    assert [(one.blocks, [event.kind for event in one.events]) for one in observed(server)] == [([], ["xid"])]
    assert server.dispatcher.services.fleet.last("n1").time_s == NOW + 30  # type: ignore[union-attr]


def test_what_a_gpu_is_called_reaches_the_judgement(server: Running, clock: FakeClock) -> None:
    labels = {"eagle_eye_job": "train", "modelName": "NVIDIA H100 80GB HBM3"}
    for _ in range(6):
        clock.advance(15.0)
        assert write(server, temperature(50.0, clock.time_s, **labels)).status_code == 204
    engine = Engine(DetectionSettings(), watching_since_s=NOW)
    for one, received_s, _ in server.watcher.frames:
        engine.observe(one, received_s)
    assert engine.tick(clock.time_s)[0].gpu_models == {"n1": ("NVIDIA H100 80GB HBM3",)}


@pytest.mark.parametrize(("every_s", "others_s"), [(15.0, 15.0), (60.0, 60.0), (15.0, 1.0), (60.0, 1.0)])
def test_a_scrape_gap_is_no_silence_and_a_lasting_one_is(
    server: Running, clock: FakeClock, every_s: float, others_s: float
) -> None:
    scrape(server, clock, every_s, 8)
    engine = Engine(DetectionSettings(), watching_since_s=NOW)
    for node in ("n2", "n3"):  # others of the job, who go on
        for at in range(1, int(8 * every_s) + 1_000):
            blocks = [block(Scope.DEVICE, {0: {"gpu_power_watts": 100.0}})]
            other = frame(1, node, NOW + at, job="train", ranks=[], interval_s=others_s, blocks=blocks)
            engine.observe(other, NOW + at)
    for one, received_s, _ in server.watcher.frames:
        engine.observe(one, received_s)

    def accused(after_s: float) -> set[str | None]:
        judgements = engine.tick(clock.time_s + after_s)
        verdicts = [verdict for judgement in judgements for verdict in judgement.verdicts]
        return {verdict.node for verdict in verdicts if verdict.fault == "node_unreachable"}

    assert accused(3.5 * every_s) == set()
    assert accused(900.0) == {"n1"}


def test_a_fleet_that_is_scraped_every_minute_is_fresh_between_scrapes(server: Running, clock: FakeClock) -> None:
    scrape(server, clock, 60.0, 4)
    said = []
    for _ in range(2):
        clock.advance(100.0)
        said.append(server.client.get("/readyz").json()["checks"]["agents"])
    assert said == ["ok", "no agent was heard for 200 s (ingest.fresh_s)"]


def test_a_scrape_that_comes_in_many_requests_ends_as_whole_rows(server: Running) -> None:
    requests = [snappy(v1(series(name, 50.0, NOW, gpu=str(gpu), Hostname="n1")))
                for name in ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_SM_CLOCK") for gpu in range(8)]  # fmt: skip
    for content in requests:
        assert server.client.post(PATH, content=content, headers=V1_HEADERS).status_code == 204
    newest = history(server)[-1]
    assert {tuple(block.metrics): block.keys for block in newest.blocks} == {
        ("gpu_temperature_celsius", "gpu_sm_clock_hertz"): list(range(8))
    }


def test_of_a_prometheus_that_is_ahead_the_rows_are_of_now_and_the_troubles_say_so(
    server: Running, clock: FakeClock
) -> None:
    for at in (0.0, 15.0, 30.0, 45.0):
        clock.time_s = NOW + at + 1.0
        assert write(server, temperature(50.0, NOW + at + 3_600.0)).status_code == 204
    assert [round(seen.time_s - NOW - received_s + NOW, 3) for seen, received_s, _ in server.watcher.frames] == [
        0.0
    ] * 4
    assert server.metric("ingest_moved_times_total", of="sample") == 4
    troubles = server.client.get("/api/v1/nodes/n1").json()["agent"]["troubles"]
    assert troubles["clock"] == "4 times that it sent cannot be and were moved to when they came"


def test_samples_of_a_prometheus_that_is_ahead_keep_their_distance(server: Running, clock: FakeClock) -> None:
    clock.time_s = NOW + 1.0
    ahead = [temperature(50.0, NOW + 3_600.0 - age_s, node) for node, age_s in (("n1", 0.0), ("n2", 0.0), ("n3", 10.0))]
    assert write(server, *ahead).status_code == 204
    times = {seen.node: seen.time_s - clock.time_s for seen, *_ in server.watcher.frames}
    assert times == {"n1": 0.0, "n2": 0.0, "n3": -10.0}


def test_the_agents_word_beats_series_of_its_machine(server: Running, clock: FakeClock) -> None:
    server.client.post("/api/v1/frames", content=body(frame(node="n1")), headers={"content-type": CONTENT_TYPE})
    clock.advance(1.0)
    for uuid in ("GPU-0", "GPU-1", "GPU-0"):
        clock.advance(15.0)
        written = temperature(50.0, clock.time_s, "", instance="N1.hpc.example.org:9400", UUID=uuid)
        assert write(server, written).status_code == 204
    assert [one["node"] for one in server.client.get("/api/v1/nodes").json()["items"]] == ["n1"]
    assert server.metric("remote_write_left_out_total", reason="has_agent") == 3
    assert server.metric("nodes_disputed") == 0


def test_a_disputed_name_is_named_on_readyz_page_and_metric(server: Running, clock: FakeClock) -> None:
    for uuid in ("GPU-0", "GPU-1", "GPU-0"):
        clock.advance(5.0)
        write(server, temperature(50.0, clock.time_s, UUID=uuid))
    said = "two machines report as n1: GPU 0 is GPU-0 and GPU-1 by turns"
    assert said in server.client.get("/readyz").json()["notes"]["identity"]
    assert server.client.get("/api/v1/nodes/n1").json()["agent"]["troubles"]["identity"] == said
    assert server.metric("nodes_disputed") == 1
    assert server.metric("remote_write_left_out_total", reason="identity") == 2


def test_clusters_keep_their_names_over_a_restart(tmp_path: Path, clock: FakeClock) -> None:
    with running(tmp_path, clock) as server:
        write(server, temperature(50.0, clock.time_s, cluster="a"), temperature(50.0, clock.time_s, cluster="b"))
        assert "clusters a, b" in server.client.get("/readyz").json()["notes"]["identity"]
    clock.advance(15.0)
    with running(tmp_path, clock) as server:
        write(server, temperature(50.0, clock.time_s, cluster="b"), temperature(50.0, clock.time_s, cluster="a"))
        assert {one["node"] for one in server.client.get("/api/v1/nodes").json()["items"]} == {"n1", "n1@b"}
