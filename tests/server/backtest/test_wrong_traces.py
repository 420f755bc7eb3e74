"""Traces as careless and hostile hands leave them: refused in one line with the file, the value and the remedy."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from eagle_eye.cli.main import main
from eagle_eye.server.backtest.trace import RowSpan, Trace, clock_offsets
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import simulate
from eagle_eye.simulator.writer import write

NODES = 4
MEMORY_BYTES_MAX = 300 << 20  # of what a hostile file may cost beside the program itself


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A job of four nodes of which one loses a GPU."""
    folder = tmp_path / "t"
    write(simulate(Scenario(fault="gpu_lost", nodes=NODES, gpus=2, minutes=3, seed=1)), folder)
    return folder


def restate(folder: Path, **fields: Any) -> None:
    header = json.loads((folder / "trace.json").read_text())
    (folder / "trace.json").write_text(json.dumps({**header, **fields}))


def retime(folder: Path, change: Callable[[Any, Any], Any]) -> None:
    """Have ``change(times, nodes)`` give the rows' times."""
    for name in ("samples.parquet", "links.parquet"):
        table = pq.read_table(folder / name)
        nodes = np.array(pc.cast(table["node"], pa.string()).to_pylist())
        times = pa.array(change(table["time"].to_numpy(), nodes))
        pq.write_table(table.set_column(table.schema.names.index("time"), "time", times), folder / name)


def header(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    return said


def in_milliseconds(folder: Path) -> None:
    retime(folder, lambda times, _: times * 1_000.0)


def all_in_milliseconds(folder: Path) -> None:
    in_milliseconds(folder)
    said = header(folder)
    restate(folder, start=said["start"] * 1_000.0, end=said["end"] * 1_000.0)


def from_zero_in_milliseconds(folder: Path) -> None:
    start = header(folder)["start"]
    retime(folder, lambda times, _: (times - start) * 1_000.0)
    restate(folder, start=0.0, end=header(folder)["end"] - start)


def event_in_milliseconds(folder: Path) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": header(folder)["end"] * 1e3, "node": None, "kind": "phase"}) + "\n")


def of_another_day(folder: Path) -> None:
    retime(folder, lambda times, _: times + 3_600.0)
    (folder / "events.jsonl").write_text("")


def a_fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def a_directory(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def a_device(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/zero")

    return make


FILES = ("trace.json", "samples.parquet", "links.parquet", "events.jsonl", "membership.jsonl", "faults.jsonl")
CASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "milliseconds": (in_milliseconds, "samples.parquet", "looks like Unix milliseconds: write seconds, "),
    "all in milliseconds": (all_in_milliseconds, "trace.json", "start is 1.*it looks like Unix milliseconds"),
    "from 0 in ms": (
        from_zero_in_milliseconds,
        "samples.parquet",
        "are 1000 apart where interval_s is 1: are they ",
    ),
    "an event in ms": (event_in_milliseconds, "events.jsonl", "looks like Unix milliseconds"),
    "another hour": (of_another_day, "trace.json", "hold none of the rows"),
    "far end": (lambda f: restate(f, end=4.0e9), "trace.json", "days after the last row or event; at most 1 day"),
    "far start": (lambda f: restate(f, start=0.0), "trace.json", "days before the first row or event; at most 1 day"),
    "year 1e18": (
        lambda f: restate(f, end=1e18),
        "trace.json",
        "end is 1e.18; expected Unix seconds, from 1970",
    ),
    "interval 1e-9": (
        lambda f: restate(f, interval_s=1e-9),
        "trace.json",
        "interval_s is 1e-09; expected 0.01 to",
    ),
    "interval 1e9": (
        lambda f: restate(f, interval_s=1e9),
        "trace.json",
        "interval_s is 1000000000.0; expected",
    ),
    "interval < 0": (lambda f: restate(f, interval_s=-1), "trace.json", "interval_s is -1.0; expected"),
    "interval NaN": (lambda f: restate(f, interval_s=float("nan")), "trace.json", "JSON is malformed"),
    **{f"{name} a FIFO": (a_fifo(name), name, "expected a file, found a FIFO") for name in FILES},
    **{f"{name} a directory": (a_directory(name), name, "expected a file, found a directory") for name in FILES},
    **{f"{name} a device": (a_device(name), name, "expected a file, found a device") for name in FILES},
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_trace_is_refused_in_one_line_with_file_and_value(
    case: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, file, why = CASES[case]
    spoil(trace)
    assert main(["backtest", str(trace)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"eagle-eye backtest: {trace}/{file}:")
    with pytest.raises(AssertionError, match=why):  # the pattern is read as one
        raise AssertionError(err)


@pytest.mark.parametrize("spread_s", [400 * 86_400.0])
def test_a_trace_of_more_judgements_than_are_made_is_refused(
    trace: Path, spread_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    start = header(trace)["start"]
    with (trace / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": start + spread_s, "node": None, "kind": "phase", "attributes": {}}) + "\n")
    restate(trace, end=start + spread_s)
    assert main(["backtest", str(trace)]) == 1
    assert "asks for 34560001 judgements; at most 10000000 are made" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["events.jsonl", "faults.jsonl", "membership.jsonl"])
def test_a_line_without_end_is_refused_before_it_is_read(trace: Path, file: str) -> None:
    with (trace / file).open("wb") as sparse:
        sparse.truncate(4 << 30)
    program = (
        "import resource, sys; from eagle_eye.cli.main import main\n"
        "from eagle_eye.server.backtest import command\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "code = main(sys.argv[1:])\n"
        "print(code, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)"
    )
    command = [sys.executable, "-c", program, "backtest", str(trace)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE_EYE_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    code, grown = map(int, done.stdout.split())
    assert code == 1
    assert done.stderr.count("\n") == 1
    assert f"{trace}/{file}:1: too long; a line has at most" in done.stderr
    assert grown < (MEMORY_BYTES_MAX if file != "membership.jsonl" else 3 * MEMORY_BYTES_MAX)


@pytest.mark.parametrize("offset_s", [3_600.0, -3_600.0, 7 * 86_400.0, 120.0])
def test_one_node_with_a_wrong_clock_is_named_and_judged_at_the_others_time(
    trace: Path, offset_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["backtest", str(trace), "--json"]) == 0
    usual = capsys.readouterr()
    assert usual.err == ""
    nodes = [node["node"] for node in header(trace)["nodes"]]
    labels = [json.loads(line) for line in (trace / "faults.jsonl").read_text().splitlines()]
    faulty = labels[0]["nodes"]
    off = next(node for node in nodes if node not in faulty)
    retime(trace, lambda times, of: times + np.where(of == off, offset_s, 0.0))
    report = tmp_path / "report.json"
    assert main(["backtest", str(trace), "--json", "--report", str(report)]) == 0
    out, err = capsys.readouterr()
    *lines, summary = out.splitlines()
    *usual_lines, _ = usual.out.splitlines()
    reported, expected = ([json.loads(line) for line in some] for some in (lines, usual_lines))
    assert [(line["fault"], line["nodes"], line["action"]) for line in reported] == [
        (line["fault"], line["nodes"], line["action"]) for line in expected
    ]
    assert [line["time"] for line in reported] == pytest.approx([line["time"] for line in expected], abs=2.0)
    side = "ahead of" if offset_s > 0 else "behind"
    assert err == (
        f"eagle-eye backtest: {trace}: the clock of node {off!r} is {abs(offset_s):.0f} s {side} the others';"
        " what it tells is judged at their time\n"
    )
    said = json.loads(report.read_text())["clock_offset_s"]
    assert said == {str(trace): {off: pytest.approx(offset_s, abs=1.0)}}
    assert json.loads(summary)["report"]["clock_offset_s"] == said


def test_rows_outside_of_the_traces_time_are_counted(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = header(trace)
    restate(trace, end=said["end"] - 60.0)
    assert main(["backtest", str(trace)]) == 0
    assert "left out: row after the trace's end (" in capsys.readouterr().err


EVEN = {f"n{k}": RowSpan(0.0, 1_000.0) for k in range(5)}


class TestClockOffsets:
    @pytest.mark.parametrize(
        ("span", "why"),
        [
            (RowSpan(500.0, 1_000.0), "joined late"),
            (RowSpan(0.0, 400.0), "fell silent"),
            (RowSpan(300.0, 600.0), "joined late and fell silent"),
            (RowSpan(20.0, 1_020.0), "less than half a minute is for the detectors"),
            (RowSpan(-200.0, 1_500.0), "was there before and after the others"),
            (RowSpan(500.0, 1_200.0), "took a place and stayed for longer"),
        ],
    )
    def test_what_is_no_clocks_fault_is_not_called_one(self, span: RowSpan, why: str) -> None:
        assert clock_offsets({**EVEN, "odd": span}, 1.0) == {}, why

    def test_a_clock_that_is_off_moves_both_ends(self) -> None:
        assert clock_offsets({**EVEN, "odd": RowSpan(3_600.0, 4_600.0)}, 1.0) == {"odd": 3_600.0}
        assert clock_offsets({**EVEN, "odd": RowSpan(-60.0, 939.0)}, 1.0) == {"odd": -60.5}

    def test_among_two_nodes_nobody_is_the_odd_one(self) -> None:
        assert clock_offsets({"a": RowSpan(0.0, 10.0), "b": RowSpan(3_600.0, 3_610.0)}, 1.0) == {}


def test_an_interval_that_no_trace_has_costs_no_memory(trace: Path) -> None:
    """Frames may say it too: the window's room does not grow with it."""
    from eagle_eye.server.engine.job_track import GRID_LINES_MAX, JobTrack

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    JobTrack("j", 0, 1e-300, 900.0, 0.0)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MEMORY_BYTES_MAX
    assert GRID_LINES_MAX * 16 * 3 < MEMORY_BYTES_MAX
    assert len(list(Trace(trace).steps())) > 100
