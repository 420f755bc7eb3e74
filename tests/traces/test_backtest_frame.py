"""``backtest`` from Python: the command's verdicts and report, as a data frame."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eagle_eye import traces
from eagle_eye.cli.main import main
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import simulate
from eagle_eye.simulator.writer import write
from tests.docs.pages import blocks

COLUMNS = {
    "trace": "str",
    "id": "str",
    "time": "datetime64[us, UTC]",
    "onset": "datetime64[us, UTC]",
    "job": "str",
    "fault": "str",
    "nodes": "object",
    "node": "object",
    "device": "int16",
    "action": "str",
    "confidence": "float64",
    "detectors": "object",
    "summary": "str",
    "evidence": "object",
}


def simulated(folder: Path, fault: str) -> Path:
    write(simulate(Scenario(fault=fault, nodes=4, gpus=2, minutes=4.0, interval_s=2.0, seed=3, habits=False)), folder)
    return folder


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("faulty") / "gpu-lost", "gpu_lost")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("healthy") / "none", "none")


def as_lines(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the rows as the command prints them."""
    for row in frame.to_dict("records"):
        times = {name: row[name].timestamp() for name in ("time", "onset")}
        yield {**row, **times, "device": None if row["device"] == -1 else row["device"]}


def test_it_gives_what_the_command_gives(faulty: Path, healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", str(faulty), str(healthy), "--json"]) == 0
    *told, last = map(json.loads, capsys.readouterr().out.splitlines())
    found = traces.backtest(faulty, str(healthy))
    assert told
    assert found.attrs["report"] == last["report"]
    lines = list(as_lines(found))
    exact = [{key: value for key, value in line.items() if key not in ("time", "onset")} for line in lines]
    assert exact == [{key: value for key, value in line.items() if key not in ("time", "onset")} for line in told]
    for name in ("time", "onset"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in told], abs=1e-6, rel=0)


def test_columns_have_their_types_with_verdicts_and_without(faulty: Path, healthy: Path) -> None:
    for trace in (faulty, healthy):
        found = traces.backtest(trace)
        assert {name: str(kind) for name, kind in found.dtypes.items()} == COLUMNS
        assert found.empty == (trace == healthy)


def test_no_verdict_is_no_health(healthy: Path) -> None:
    report = traces.backtest(healthy).attrs["report"]
    assert report["blind_ratio"]
    assert report["false_exclusions"] == 0


def test_a_trace_that_was_read_will_do_and_progress_ends_at_all(faulty: Path) -> None:
    told: list[float] = []
    found = traces.backtest(traces.read(faulty), config=None, progress=told.append)
    assert list(found["trace"].unique()) == [str(faulty)]
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0, abs=0.01)


def test_it_judges_by_the_configuration_that_it_is_given(faulty: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[policy]\nnever_exclude = "yes"\n')
    with pytest.raises(ConfigurationError, match="never_exclude"):
        traces.backtest(faulty, config=file)


def test_what_was_left_out_is_counted(faulty: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    for file in faulty.iterdir():
        (odd / file.name).write_bytes(file.read_bytes())
    with (odd / "events.jsonl").open("a") as events:
        events.write(json.dumps({"time": traces.read(faulty).header.start + 1, "kind": "mood", "node": None}) + "\n")
    assert sum(traces.backtest(odd).attrs["ignored"].values()) == 1


def test_without_any_trace_it_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="at least one trace folder"):
        traces.backtest()
    with pytest.raises(traces.BadTrace, match=r"a trace is a folder with trace\.json"):
        traces.backtest(tmp_path / "none")


def test_the_document_shows_how(
    faulty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/reference/traces.md"""
    (tmp_path / "OUT").symlink_to(faulty)
    monkeypatch.chdir(tmp_path)
    page = blocks("docs/reference/traces.md")
    (block,) = (one for one in page if one.mark == "run by tests/traces/test_backtest_frame.py")
    exec(block.text, {})
    assert "gpu_lost" in capsys.readouterr().out
