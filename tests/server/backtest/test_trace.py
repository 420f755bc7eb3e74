"""Traces as files: what the reader makes of them, however they were written, and what the writer writes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.frame import Frame, values_of
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.backtest.recorder import TraceWriter
from eagle_eye.server.backtest.trace import (
    FORMAT,
    BadTrace,
    Header,
    MembershipLine,
    Trace,
    TraceEvent,
    TraceNode,
    TraceRank,
)

START_S = 1_700_000_000.0
NODES = [{"node": "n0", "gpus": 2}, {"node": "n1", "gpus": 2}]
RANKS = [{"rank": 0, "node": "n0", "device": 0}, {"rank": 1, "node": "n1", "device": 0}]


def write(
    folder: Path, samples: pa.Table | None = None, events: Sequence[Mapping[str, Any]] = (), **header: Any
) -> Path:
    folder.mkdir()
    fields = {
        "format": FORMAT,
        "job": "j",
        "interval_s": 1.0,
        "start": START_S,
        "end": START_S + 10,
        "nodes": NODES,
        "ranks": RANKS,
    }
    (folder / "trace.json").write_text(json.dumps({**fields, **header}))
    pq.write_table(table(row(1, "n0", 0)) if samples is None else samples, folder / "samples.parquet")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def row(second: float, node: str | None, device: int | None, **values: Any) -> dict[str, Any]:
    return {"time": START_S + second, "node": node, "device": device, **(values or {"gpu_power_watts": 100.0})}


def table(*rows: dict[str, Any]) -> pa.Table:
    names = dict.fromkeys(name for one in rows for name in one)
    return pa.table({name: [one.get(name) for one in rows] for name in names})


def frames(folder: Path) -> list[Frame]:
    return [step.frame for step in Trace(folder).steps() if step.frame is not None]


def cells(frame: Frame) -> dict[tuple[str, int | str], float]:
    """Return a frame's observed values by metric and key."""
    found: dict[tuple[str, int | str], float] = {}
    for block in frame.blocks:
        values = iter(values_of(block))
        found |= {(metric, key): value for metric in block.metrics for key in block.keys for value in [next(values)]}
    return {place: value for place, value in found.items() if value == value}


def seen(folder: Path) -> list[tuple[float, str, dict[tuple[str, int | str], float]]]:
    return [(frame.time_s - START_S, frame.node, cells(frame)) for frame in frames(folder)]


def test_rows_of_a_moment_become_one_frame_with_device_and_node_blocks(tmp_path: Path) -> None:
    samples = table(row(1, "n0", 1), row(1, "n0", -1, node_blocked_tasks=3.0), row(1, "n0", 0))
    (frame,) = frames(write(tmp_path / "t", samples))
    assert [(block.scope, block.keys) for block in frame.blocks] == [(Scope.DEVICE, [0, 1]), (Scope.NODE, [-1])]
    assert cells(frame)["node_blocked_tasks", -1] == 3.0
    assert [rank.rank for rank in frame.ranks] == [0]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(12)))
def test_any_order_of_rows_tells_the_same_in_order_of_time_and_node(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    rows = [row(s, n, d, gpu_power_watts=s * 10.0 + d) for s in (1, 2, 3) for n in ("n0", "n1") for d in (0, 1)]
    folder = tmp_path_factory.mktemp("order")
    reported = seen(write(folder / "t", table(*(rows[i] for i in order))))
    assert [(s, n) for s, n, _ in reported] == [(s, n) for s in (1, 2, 3) for n in ("n0", "n1")]
    assert reported[3][2] == {("gpu_power_watts", 0): 20.0, ("gpu_power_watts", 1): 21.0}


def test_of_duplicates_the_last_counts(tmp_path: Path) -> None:
    samples = table(*(row(1, "n0", 0, gpu_power_watts=watts) for watts in (1.0, 2.0, 3.0)))
    trace = Trace(write(tmp_path / "t", samples))
    (step,) = [step for step in trace.steps() if step.frame is not None]
    assert step.frame is not None
    assert cells(step.frame) == {("gpu_power_watts", 0): 3.0}
    assert trace.ignored["duplicate row"] == 2


def test_null_and_nan_are_not_observed_and_infinity_is(tmp_path: Path) -> None:
    samples = pa.table(
        {
            "time": [START_S + 1] * 3,
            "node": ["n0"] * 3,
            "device": [0, 1, 2],
            "train_loss": pa.array([None, float("nan"), float("inf")], pa.float32()),
            "gpu_power_watts": pa.array([None, None, None], pa.float32()),
        }
    )
    (frame,) = frames(write(tmp_path / "t", samples))
    assert cells(frame) == {("train_loss", 2): float("inf")}
    assert frame.blocks[0].metrics == ["train_loss"], "a metric that no row has is not in the block"


def test_rows_without_time_node_or_device_are_left_out_and_counted(tmp_path: Path) -> None:
    samples = table(row(1, "n0", 0), row(2, None, 0), row(3, "n0", None), row(float("nan"), "n0", 0))
    trace = Trace(write(tmp_path / "t", samples))
    assert sum(step.frame is not None for step in trace.steps()) == 1
    assert trace.ignored == {"row without time, node or device": 3}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.large_string())])
def test_node_names_come_as_any_kind_of_text(tmp_path: Path, kind: pa.DataType) -> None:
    samples = table(row(1, "n1", 0), row(1, "n0", 0))
    samples = samples.set_column(1, "node", pa.chunked_array([pa.array(["n1"], kind), pa.array(["n0"], kind)]))
    assert [node for _, node, _ in seen(write(tmp_path / "t", samples))] == ["n0", "n1"]


def test_columns_of_integers_and_unknown_columns_are_no_trouble(tmp_path: Path) -> None:
    samples = pa.table(
        {
            "time": pa.array([int(START_S) + 1], pa.int64()),
            "node": ["n0"],
            "device": pa.array([0], pa.int64()),
            "train_step": pa.array([2**53], pa.int64()),
            "gpu_power_watts": pa.array([300], pa.uint16()),
            "mood": ["good"],
        }
    )
    (frame,) = frames(write(tmp_path / "t", samples))
    assert cells(frame) == {("train_step", 0): 2.0**53, ("gpu_power_watts", 0): 300.0}


def test_a_metric_that_holds_no_numbers_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"samples.parquet: column 'train_loss'"):
        frames(write(tmp_path / "t", table(row(1, "n0", 0, train_loss="bad"))))


def test_a_row_without_any_value_still_says_that_the_agent_was_heard(tmp_path: Path) -> None:
    (frame,) = frames(write(tmp_path / "t", table(row(1, "n0", -1, gpu_power_watts=None))))
    assert frame.blocks[0].keys == [-1]


def write_links(folder: Path, *rows: dict[str, Any]) -> None:
    pq.write_table(table(*rows), folder / "links.parquet")


def link_row(second: float, node: str, link: str | None, **values: Any) -> dict[str, Any]:
    return {"time": START_S + second, "node": node, "link": link, **values}


def test_links_join_the_frame_of_their_moment_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "t")
    write_links(
        folder,
        link_row(1, "n0", "mlx5_1", link_up=0.0),
        link_row(1, "n0", "mlx5_0", link_up=0.0),
        link_row(1, "n0", "mlx5_0", link_up=1.0),
        link_row(2, "n0", "mlx5_0", link_up=1.0),
        link_row(2, "n0", None, link_up=1.0),
    )
    reported = seen(folder)
    assert reported[0][2] == {("gpu_power_watts", 0): 100.0, ("link_up", "mlx5_0"): 1.0, ("link_up", "mlx5_1"): 0.0}
    assert reported[1] == (2.0, "n0", {("link_up", "mlx5_0"): 1.0})


def test_the_topology_is_what_the_header_says(tmp_path: Path) -> None:
    nodes = [
        {"node": "n0", "gpus": 8, "switch": "leaf1", "links": [{"link": "a", "switch": "leaf2"}, {"link": "b"}]},
        {"node": "n1", "gpus": 8},
    ]
    topology = Trace(write(tmp_path / "t", nodes=nodes)).topology()
    assert topology.switch_of_node == {"n0": "leaf1"}
    assert topology.switch_of_link == {"n0": {"a": "leaf2", "b": "leaf1"}}


def event(second: float, kind: str, node: str | None = None, **attributes: Any) -> dict[str, Any]:
    return {"time": START_S + second, "node": node, "device": -1, "kind": kind, "attributes": attributes}


def test_an_event_is_known_when_it_happens_and_one_of_the_job_on_all_nodes(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", events=[event(0.5, "oom_kill", "n0"), event(0.75, "phase", name="eval")])
    reported = [(f.time_s - START_S, f.node, f.events[0].kind if f.events else "rows") for f in frames(folder)]
    assert reported == [(0.5, "n0", "oom_kill"), (0.75, "n0", "phase"), (0.75, "n1", "phase"), (1.0, "n0", "rows")]


def test_events_of_unknown_kinds_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path / "t", events=[event(1, "earthquake", "n0"), event(2, "earthquake", "n0")]))
    assert all(not step.frame.events for step in trace.steps() if step.frame)
    assert trace.ignored["event of unknown kind 'earthquake'"] == 2


def test_a_device_of_null_is_the_node(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", events=[{**event(1, "kernel_panic", "n0"), "device": None}])
    assert frames(folder)[0].events[0].device == -1


def jobs(folder: Path) -> list[tuple[float, int, str, int]]:
    steps = [step.job for step in Trace(folder).steps() if step.job is not None]
    return [(job.updated_s - START_S, job.attempt, job.state, len(job.ranks)) for job in steps]


def test_a_job_state_without_an_attempt_is_of_the_attempt_then_under_way(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "t",
        events=[
            event(2, "job_state", state="maintenance"),
            event(6, "job_state", state="cancelled", attempt=None),
            event(7, "job_state", state="running", attempt=0),
        ],
    )
    later = [
        {"time": START_S + 5, "attempt": 2, "ranks": RANKS[1:]},
        {"time": START_S + 3, "attempt": 1, "ranks": RANKS},
    ]
    (folder / "membership.jsonl").write_text("".join(json.dumps(line) + "\n" for line in later))
    assert jobs(folder) == [
        (0, 0, "running", 2),
        (2, 0, "maintenance", 0),
        (3, 1, "running", 2),
        (5, 2, "running", 1),
        (6, 2, "cancelled", 0),
        (7, 0, "running", 0),
    ]


def test_frames_carry_the_ranks_of_the_attempt_under_way(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", table(row(1, "n0", 0), row(6, "n0", 0), row(6, "n1", 0)))
    line = {"time": START_S + 5, "attempt": 1, "ranks": RANKS[1:]}
    (folder / "membership.jsonl").write_text(json.dumps(line) + "\n")
    assert [[rank.attempt for rank in frame.ranks] for frame in frames(folder)] == [[0], [], [1]]


def test_a_membership_at_the_start_takes_the_place_of_the_headers(tmp_path: Path) -> None:
    folder = write(tmp_path / "t")
    line = {"time": START_S, "attempt": 3, "ranks": RANKS}
    (folder / "membership.jsonl").write_text(json.dumps(line) + "\n")
    assert jobs(folder) == [(0, 3, "running", 2)]


def test_a_trace_without_ranks_has_frames_without_ranks(tmp_path: Path) -> None:
    assert frames(write(tmp_path / "t", ranks=[]))[0].ranks == []


def test_steps_come_in_order_and_are_read_anew_each_time(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path / "t", events=[event(9, "agent_stop", "n1"), event(0, "agent_start", "n1")]))
    first, second = list(trace.steps()), list(trace.steps())
    assert first == second
    assert [step.time_s for step in first] == sorted(step.time_s for step in first)
    assert [step.frame.sequence for step in first if step.frame] == [1, 2, 3]


class TestWriter:
    header = Header(FORMAT, "j", 1.0, START_S, START_S + 10, [TraceNode("n0", 1)], [TraceRank(0, "n0", 0)])

    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        with TraceWriter(tmp_path / "t") as writer:
            for second in (1, 2):
                writer.samples(
                    {"time": [START_S + second], "node": ["n0"], "device": [0], "train_step": np.array([2.0**40])}
                )
            writer.links({"time": [START_S + 1], "node": ["n0"], "link": ["ib0"], "link_up": [1.0]})
            writer.finish(
                self.header,
                [TraceEvent(START_S + 1, "oom_kill", "n0", 0, {"process": "python"})],
                [MembershipLine(START_S + 2, 1, self.header.ranks)],
            )
        trace = Trace(tmp_path / "t")
        assert trace.header == self.header
        assert trace.labels() is None
        reported = seen(tmp_path / "t")
        assert [s for s, _, values in reported if ("train_step", 0) in values] == [1, 2]
        assert ("link_up", "ib0") in reported[1][2]

    def test_a_silent_rank_survives(self, tmp_path: Path) -> None:
        with TraceWriter(tmp_path / "t") as writer:
            silence = {"rank_silent_seconds": [4.5, 0.0]}
            writer.samples({"time": [START_S + 1, START_S + 2], "node": ["n0"] * 2, "device": [0, 0], **silence})
            writer.finish(self.header)
        assert [frame.ranks[0].silent_s for frame in frames(tmp_path / "t")] == [4.5, 0.0]

    def test_a_trace_may_have_no_rows(self, tmp_path: Path) -> None:
        with TraceWriter(tmp_path / "t") as writer:
            writer.finish(self.header)
        assert frames(tmp_path / "t") == []

    def test_nothing_is_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "t").mkdir()
        with pytest.raises(BadTrace, match="exists already"):
            TraceWriter(tmp_path / "t")

    def test_what_failed_leaves_nothing_behind(self, tmp_path: Path) -> None:
        def fail() -> None:
            with TraceWriter(tmp_path / "t") as writer:
                writer.samples({"time": [START_S], "node": ["n0"], "device": [0]})
                raise RuntimeError

        with pytest.raises(RuntimeError):
            fail()
        assert list(tmp_path.iterdir()) == []

    def test_a_metric_that_the_catalogue_lacks_is_an_error(self, tmp_path: Path) -> None:
        with TraceWriter(tmp_path / "t") as writer, pytest.raises(KeyError, match="mood"):
            writer.samples({"time": [], "node": [], "device": [], "mood": []})


def test_a_second_of_32_nodes_with_8_gpus_is_read_in_milliseconds(tmp_path: Path) -> None:
    seconds, nodes, gpus = 60, 32, 8
    moments = seconds * nodes
    device = np.tile(np.arange(-1, gpus), moments)
    columns: dict[str, Any] = {
        "time": np.repeat(START_S + 1 + np.arange(seconds), nodes * (gpus + 1)),
        "node": np.tile(np.repeat([f"n{i:02d}" for i in range(nodes)], gpus + 1), seconds).tolist(),
        "device": device,
    }
    for spec in catalogue.METRICS:
        if spec.scope is not Scope.LINK:
            columns[spec.name] = np.where((device < 0) == (spec.scope is Scope.NODE), 1.0, np.nan)
    names = [TraceNode(f"n{i:02d}", gpus) for i in range(nodes)]
    with TraceWriter(tmp_path / "t") as writer:
        writer.samples(columns)
        writer.finish(msgspec.structs.replace(TestWriter.header, nodes=names, end=START_S + seconds))
    trace = Trace(tmp_path / "t")
    started = time.process_time()
    assert sum(step.frame is not None for step in trace.steps()) == moments
    # About 1 ms on an idle core; the limit only tells of a reader that has become ten times slower.
    assert (time.process_time() - started) / seconds < 0.010
