"""``eagle-eye replay`` to a server that listens: what its history and its detection loop get of a trace."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from eagle_eye.cli.main import main
from eagle_eye.schema.frame import Frame
from eagle_eye.server.backtest.recorder import TraceWriter
from eagle_eye.server.backtest.trace import Header, Label, MembershipLine, TraceEvent, TraceNode, TraceRank
from eagle_eye.server.model.clock import SystemClock
from eagle_eye.server.model.records import Job
from tests.server.builders import running

START = 1_600_000_000.0
ROWS = 40  # a second apart
SILENT_FROM = 20  # node b is not heard any more
SPEED = 100.0


class Replayed(NamedTuple):
    """One replay: its exit code, what it printed, what the server's detection loop got."""

    code: int
    said: dict[str, Any]
    frames: dict[str, list[Frame]]
    observed: list[tuple[Frame, float, float]]
    jobs: list[Job]
    begun_s: float


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "trace"
    ranks = [TraceRank(0, "a", 0), TraceRank(1, "b", 0)]
    keys = [(START + row, node) for row in range(1, ROWS + 1) for node in "ab" if node == "a" or row < SILENT_FROM]
    with TraceWriter(folder) as writer:
        writer.samples(
            {
                "time": [time_s for time_s, _ in keys],
                "node": [node for _, node in keys],
                "device": np.zeros(len(keys), dtype=np.int16),
                "gpu_power_watts": [time_s - START for time_s, _ in keys],
                "train_step_seconds": np.full(len(keys), 2.0),
            }
        )
        header = Header(
            format="eagle-eye-trace/1",
            job="llm",
            interval_s=1.0,
            start=START,
            end=START + ROWS,
            nodes=[TraceNode("a", 1), TraceNode("b", 1)],
        )
        events = [
            TraceEvent(START + 10.0, "xid", "b", 0, {"code": 79}),
            TraceEvent(START + 30.0, "job_state", None, -1, {"state": "completing"}),
        ]
        label = Label(START + 10.0, START + ROWS, ["b"], "gpu_lost", "exclude")
        writer.finish(header, events, [MembershipLine(START, 0, ranks)], [label])
    return folder


def replay(folder: Path, trace: Path, *more: str) -> Replayed:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, running(folder, SystemClock()) as server:
        patch.setattr("eagle_eye.cli.replaying.SETTLE_S", 0.05)
        begun_s = time.time()
        with contextlib.redirect_stdout(printed):
            code = main(["replay", str(trace), "--server", server.url, "--speed", str(SPEED), "--json", *more])
    frames: dict[str, list[Frame]] = {}
    for frame, _, _ in server.watcher.frames:
        frames.setdefault(frame.node, []).append(frame)
    said = json.loads(printed.getvalue())
    return Replayed(code, said, frames, server.watcher.frames, server.watcher.jobs, begun_s)


@pytest.fixture(scope="module")
def done(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    return replay(tmp_path_factory.mktemp("server"), trace)


def powers(frames: list[Frame]) -> list[float]:
    found: list[float] = []
    for frame in frames:
        for block in frame.blocks:
            found += np.frombuffer(block.values, "<f8")[block.metrics.index("gpu_power_watts") :][
                : len(block.keys)
            ].tolist()
    return found


def test_every_row_arrives_in_order_in_one_stream_a_node(done: Replayed) -> None:
    frames = done.frames
    assert done.code == 0
    assert powers(frames["a"]) == list(range(1, ROWS + 1))
    assert powers(frames["b"]) == list(range(1, SILENT_FROM))
    for of_node in frames.values():
        assert len({frame.stream for frame in of_node}) == 1
        assert [frame.sequence for frame in of_node] == list(range(1, len(of_node) + 1))


def test_times_begin_now_and_pass_at_the_speed_asked_for_while_values_stay(done: Replayed) -> None:
    frames = done.frames
    rows = [frame for frame in frames["a"] if frame.blocks]
    times_s = np.array([frame.time_s for frame in rows])
    np.testing.assert_allclose(np.diff(times_s), 1.0 / SPEED, atol=1e-4)
    assert done.begun_s <= times_s[0] <= done.begun_s + 30.0
    assert {frame.interval_s for frame in rows} == {1.0 / SPEED}
    assert {frame.job for frame in rows} == {"llm"}
    received = [received_s for frame, received_s, _ in done.observed if frame.blocks and frame.node == "a"]
    late_s = np.array(received) - times_s  # a machine that is busy with more may make some of them late
    assert -0.01 <= late_s.min() <= 1.0


def test_an_event_comes_at_its_moment_on_its_node(done: Replayed) -> None:
    frames = done.frames
    (event,) = [event for frame in frames["b"] for event in frame.events]
    assert (event.kind, event.attributes["code"]) == ("xid", 79)
    begin_s = frames["a"][0].time_s - 1.0 / SPEED
    assert event.time_s - begin_s == pytest.approx(10.0 / SPEED, abs=1e-4)


def test_the_job_is_declared_as_its_scheduler_did(done: Replayed) -> None:
    assert [(job.job, job.attempt, job.state) for job in done.jobs] == [
        ("llm", 0, "running"),
        ("llm", 0, "completing"),
    ]
    assert [(rank.rank, rank.node) for rank in done.jobs[0].ranks] == [(0, "a"), (1, "b")]


def test_nodes_say_goodbye_at_the_traces_end_but_not_those_that_were_silent(done: Replayed) -> None:
    frames = done.frames
    assert [event.kind for event in frames["a"][-1].events] == ["agent_stop"]
    assert all(event.kind != "agent_stop" for frame in frames["b"] for event in frame.events)


def test_a_suffix_gives_job_and_nodes_other_names(trace: Path, tmp_path: Path) -> None:
    done = replay(tmp_path, trace, "--suffix=-2")
    frames = done.frames
    assert set(frames) == {"a-2", "b-2"}
    assert {(frame.job, rank.job) for frame in frames["a-2"] for rank in frame.ranks} == {("llm-2", "llm-2")}
    assert {job.job for job in done.jobs} == {"llm-2"}


def test_what_the_trace_says_and_what_the_server_found_stand_together(done: Replayed) -> None:
    said = done.said
    assert said["frames_acknowledged"] == said["frames_sent"] == ROWS + SILENT_FROM - 1 + 1 + 1
    assert said["samples_acknowledged"] == 2 * (ROWS + SILENT_FROM - 1)
    (label,) = said["labels"]
    assert (label["fault"], label["nodes"]) == ("gpu_lost", ["b"])
    assert label["start"] - said["start"] == pytest.approx(10.0 / SPEED, abs=1e-4)
    assert said["incidents"] == []


@pytest.mark.parametrize("speed", ["0", "0.5", "nan", "1e9"])
def test_a_speed_that_means_nothing_is_wrong_usage(speed: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--speed", speed]) == 2
    assert "--speed" in capsys.readouterr().err


def test_a_folder_that_is_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path), "--server", "http://127.0.0.1:1"]) == 1
    assert "trace.json" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--server", "http://127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be reached" in line
