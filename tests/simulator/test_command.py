"""``eagle-eye simulate`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_eye.cli.main import main

FEW = ["--nodes", "2", "--gpus", "2", "--minutes", "2"]


def test_it_writes_a_trace_and_says_what_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path / "t"), "--fault", "straggler", *FEW]) == 0
    assert "expect exclude" in capsys.readouterr().out
    assert (tmp_path / "t" / "trace.json").exists()


def test_json_names_the_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path / "t"), "--fault", "hang", "--json", *FEW]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["labels"] == [json.loads((tmp_path / "t" / "faults.jsonl").read_text())]


def test_list_names_faults_situations_and_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {name}" in told for name in ("gpu_lost", "scancel", "remote_write"))
    assert main(["simulate", "--list", "--json"]) == 0
    assert "hang" in json.loads(capsys.readouterr().out)["profiles"]["no_hook"]["shows"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["OUT", "--fault", "gremlins"],
        ["OUT", "--profile", "psychic"],
        ["OUT", "--nodes", "0"],
        ["OUT", "--strength", "mighty"],
        ["OUT", "--minutes", "0"],
    ],
)
def test_wrong_usage_is_two_and_one_clear_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "t") if a == "OUT" else a for a in arguments]
    assert main(["simulate", *given]) == 2
    told = capsys.readouterr().err
    assert told.startswith("eagle-eye simulate: ")
    assert told.count("\n") == 1
    assert not (tmp_path / "t").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["simulate", str(tmp_path), *FEW]) == 2
    assert "notes.txt" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_disk_that_refuses_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "/proc/nowhere/trace", *FEW]) == 1
    assert "/proc/nowhere/trace" in capsys.readouterr().err
