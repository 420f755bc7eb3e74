"""The load generator: fresh values at their sources' resolution, honest counts, obedience."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.cli.main import main
from eagle_eye.schema.frame import values_of
from eagle_eye.simulator.load.connection import BadHttpAnswer, cut_answer, load_target
from eagle_eye.simulator.load.fleet import EXACT, METRICS, PLAIN, FleetValues, Readings
from eagle_eye.simulator.load.sender import LatencyHistogram, Tally
from tests.simulator.load_server import FrameServer, Said, frame_server

FEW = ["--nodes", "3", "--gpus", "2", "--interval", "0.1", "--duration", "0.2", "--json"]
BUSY: Said = (503, {"reason": "busy", "detail": "come back"}, "Retry-After: 0\r\n")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.simulator.load.sender.BACKOFF_S_MIN", 0.01)
    monkeypatch.setattr("eagle_eye.simulator.load.sender.BACKOFF_S_MAX", 0.05)


def loaded(server: FrameServer, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    main(["loadtest", "--server", server.url, *FEW, *more])
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def readings(intervals: int, nodes: int = 6, gpus: int = 2) -> list[Readings]:
    values = FleetValues(np.arange(nodes) // 3, gpus, 1.0, 2.0, 1_000.0, seed=1)
    return [values.read(0, nodes, 1_000.0 + second) for second in range(intervals)]


def course(name: str, found: list[Readings]) -> np.ndarray[Any, Any]:
    if name in EXACT:
        return np.array([one.exact[:, EXACT.index(name)] for one in found])
    return np.array([one.plain[:, PLAIN.index(name)] for one in found])


@pytest.fixture(scope="module")
def quiet() -> tuple[dict[str, Any], FrameServer]:
    """Return what a load test without any trouble printed, and what its server got."""
    printed = io.StringIO()
    with frame_server() as server, contextlib.redirect_stdout(printed):
        main(["loadtest", "--server", server.url, *FEW])
    return json.loads(printed.getvalue()), server


def test_every_frame_arrives_once_in_order_with_the_samples_that_are_counted(
    quiet: tuple[dict[str, Any], FrameServer],
) -> None:
    figures, server = quiet
    by_node: dict[str, list[int]] = {}
    for frame in server.frames:
        by_node.setdefault(frame.node, []).append(frame.sequence)
    assert by_node == {f"load-{node:05d}": [1, 2, 3] for node in (1, 2, 3)}
    arrived = sum(len(values_of(block)) for frame in server.frames for block in frame.blocks)
    assert figures["samples_acknowledged"] == figures["samples_sent"] == arrived == 3 * 2 * 2 * len(METRICS)
    assert figures["frames_lost"] == 0


def test_each_node_has_one_connection_and_says_its_template_once_on_it(
    quiet: tuple[dict[str, Any], FrameServer],
) -> None:
    _, server = quiet
    assert server.connections == 3
    assert server.templates == 3 + 3  # and one for the goodbye, which has no numbers


def test_the_last_frame_of_each_node_announces_its_silence(quiet: tuple[dict[str, Any], FrameServer]) -> None:
    _, server = quiet
    last = {frame.node: frame for frame in server.frames}
    assert [event.kind for frame in last.values() for event in frame.events] == ["agent_stop"] * 3


def test_nodes_of_a_job_name_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with frame_server() as server:
        loaded(server, capsys, "--job-nodes", "2")
    ranks = {(rank.job, rank.rank, rank.world_size) for frame in server.frames for rank in frame.ranks}
    assert ranks == {("load-job-000", rank, 4) for rank in range(4)} | {("load-job-001", rank, 2) for rank in range(2)}


def test_what_is_refused_for_now_is_sent_again_and_nothing_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with frame_server(lambda number: BUSY if number % 3 == 0 else None) as server:
        figures = loaded(server, capsys)
    assert figures["asked_to_wait"]["503 busy"] >= 1
    assert figures["frames_lost"] == 0
    assert figures["frames_acknowledged"] == 3 * 3


def test_a_200_that_does_not_reach_the_frame_is_no_acknowledgement(capsys: pytest.CaptureFixture[str]) -> None:
    nothing: Said = (200, {"accepted": 0, "duplicates": 0, "watermark": 0}, "")
    with frame_server(lambda _number: nothing) as server:
        figures = loaded(server, capsys, "--drain", "0.1")
    assert figures["frames_acknowledged"] == figures["samples_acknowledged"] == 0
    assert figures["frames_lost"] == 3 * 3
    assert figures["errors"]["watermark"] >= 1


def test_a_frame_that_will_never_be_taken_is_refused_alone_and_counts_as_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad: Said = (400, {"reason": "metric", "detail": "no such metric"}, "")
    with frame_server(lambda number: bad if number == 1 else None) as server:
        figures = loaded(server, capsys)
    assert (figures["frames_refused"], figures["frames_lost"]) == (1, 1)
    assert figures["details"] == {"400 metric": "no such metric"}


def test_a_template_that_the_server_does_not_know_is_sent_with_the_same_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unknown: Said = (409, {"reason": "outline", "detail": "not known"}, "")
    with frame_server(lambda number: unknown if number == 4 else None) as server:
        figures = loaded(server, capsys)
    assert server.templates == 3 + 3 + 1
    assert figures["frames_lost"] == 0


def test_a_connection_that_the_server_closes_is_opened_again(capsys: pytest.CaptureFixture[str]) -> None:
    last: Said = (503, {"reason": "busy"}, "Connection: close\r\nRetry-After: 0\r\n")
    with frame_server(lambda number: last if number == 1 else None) as server:
        figures = loaded(server, capsys)
    assert server.connections == 4
    assert figures["frames_lost"] == 0


def test_the_token_may_be_named_by_the_environment_as_for_other_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("ee_admin\n")
    monkeypatch.setenv("EAGLE_EYE_TOKEN_FILE", str(tmp_path / "token"))
    with frame_server() as server:
        loaded(server, capsys)
    assert server.heads
    assert all("Authorization: Bearer ee_admin\r\n" in head for head in server.heads)


def test_each_node_is_enrolled_with_the_join_token_and_sends_with_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    join = tmp_path / "join"
    join.write_text("ee_join\n")

    def said(_number: int) -> Said | None:
        if not server.paths[-1].endswith("/enrol"):
            return None
        node = json.loads(server.bodies[-1])["node"]
        return 201, {"id": "t", "node": node, "token": f"ee_{node}"}, ""

    with frame_server(said) as server:
        figures = loaded(server, capsys, "--join-token-file", str(join))
    assert figures["frames_lost"] == 0
    heads = [head for head, path in zip(server.heads, server.paths, strict=True) if path.endswith("/enrol")]
    assert len(heads) == 3
    assert all("Authorization: Bearer ee_join" in head for head in heads)
    for head, request in zip(server.heads, server.requests, strict=True):
        assert all(f"Authorization: Bearer ee_{frame.node}\r\n" in head for frame in request)


def test_a_server_on_another_machine_is_loaded_only_when_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loadtest", "--server", "http://192.0.2.1:8470", "--nodes", "1"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert load_target("http://[::1]:1").is_loopback
    assert not load_target("http://loopback.example:1").is_loopback


@pytest.mark.parametrize(
    ("flag", "value"), [("--nodes", "0"), ("--spread", "2"), ("--interval", "0"), ("--server", "8470")]
)
def test_wrong_values_are_named(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loadtest", flag, value]) == 2
    assert flag in capsys.readouterr().err


def test_nobody_there_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loadtest", "--server", "http://127.0.0.1:1", "--nodes", "1"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_readings_have_their_sources_resolution() -> None:
    found = readings(20)
    steps = {"gpu_temperature_celsius": 1.0, "gpu_sm_clock_hertz": 15e6, "gpu_pcie_rx_bytes_per_second": 1e3}
    for name, step in steps.items():
        values = course(name, found).astype(np.float64)
        np.testing.assert_allclose(values, step * np.rint(values / step), rtol=1e-7)  # float32's own
    percent = 100.0 * course("gpu_utilization_ratio", found).astype(np.float64)
    assert np.abs(percent - np.rint(percent)).max() < 1e-4
    assert 0.0 <= percent.min() <= percent.max() <= 100.0


def test_values_are_fresh_for_each_node_and_interval() -> None:
    power = course("gpu_power_watts", readings(50))
    assert len(np.unique(power)) > 0.98 * power.size
    assert (course("gpu_pcie_tx_bytes_per_second", readings(2))[0] != course("gpu_power_watts", readings(2))[0]).all()


def test_counters_and_steps_only_rise_and_a_job_agrees_on_its_step() -> None:
    found = readings(40)
    for name in EXACT:
        assert (np.diff(course(name, found), axis=0) >= 0).all()
    steps = course("train_step", found)
    assert (np.diff(steps, axis=0).sum(axis=0) >= 18).all()
    assert (steps[:, :3] == steps[:, :1, :1]).all()


def test_training_values_repeat_until_the_next_step() -> None:
    found = readings(40)
    steps, loss = course("train_step", found), course("train_loss", found)
    same = np.diff(steps, axis=0) == 0
    assert (np.diff(loss, axis=0)[same] == 0).all()
    assert (np.diff(loss, axis=0)[~same] != 0).mean() > 0.95


def test_a_slow_time_shows_in_its_part_of_the_run_alone() -> None:
    tally = Tally()
    tally.divide(begin_s=100.0, duration_s=25.0)
    for due_s, took_s in ((100.0, 0.01), (109.9, 0.01), (110.0, 4.0), (124.0, 0.01)):
        tally.acknowledge(1, due_s, due_s + took_s)
    parts = tally.figures(25.0)["acknowledged_seconds_by_part"]
    assert [(part["from"], round(part["max"], 6)) for part in parts] == [(0.0, 0.01), (10.0, 4.0), (20.0, 0.01)]


def test_goodbyes_are_counted_apart() -> None:
    tally = Tally()
    tally.divide(begin_s=100.0, duration_s=20.0)
    tally.settled_s, tally.goodbye_s = 105.0, 120.0
    for due_s, took_s in ((101.0, 0.5), (119.0, 0.01), (120.0, 8.0), (120.5, 8.0)):
        tally.acknowledge(1, due_s, due_s + took_s)
    figures = tally.figures(20.0)
    names = ("acknowledged_seconds", "acknowledged_seconds_settled", "acknowledged_seconds_goodbye")
    assert [round(figures[name]["max"], 6) for name in names] == [0.5, 0.01, 8.0]
    assert round(figures["acknowledged_seconds_by_part"][-1]["max"], 6) == 0.01
    assert figures["frames_acknowledged"] == 4


@given(st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_quantiles_are_upper_bounds_within_a_bucket(durations: list[float], share: float) -> None:
    latencies = LatencyHistogram()
    for seconds in durations:
        latencies.add(seconds)
    exact = sorted(durations)[max(int(np.ceil(share * len(durations) - 1e-9)) - 1, 0)]
    reported = latencies.quantile_s(share)
    assert reported is not None
    assert exact <= reported * (1 + 1e-9)
    assert reported <= max(exact * 2 ** (1 / 16) * (1 + 1e-9), 1e-4)


@given(st.binary(max_size=200), st.integers(0, 200))
def test_an_answer_is_cut_out_wherever_the_bytes_were_divided(body: bytes, at: int) -> None:
    data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX: y\r\n\r\n%b" % (len(body), body)
    if at < len(data):
        assert cut_answer(data[:at]) is None
    found = cut_answer(data + b"next")
    assert found is not None
    assert (found[0].body, found[1]) == (body, b"next")


@pytest.mark.parametrize("head", [b"SSH-2.0", b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK\r\nContent-Length: 99999999"])
def test_what_is_no_answer_with_a_length_is_refused(head: bytes) -> None:
    with pytest.raises(BadHttpAnswer):
        cut_answer(head + b"\r\n\r\n")
