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
    reported = json.loads(capsys.readouterr().out)
    assert reported["labels"] == [json.loads((tmp_path / "t" / "faults.jsonl").read_text())]


def test_list_names_faults_situations_and_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    reported = capsys.readouterr().out
    assert all(f"\n  {name}" in reported for name in ("gpu_lost", "scancel", "remote_write"))
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
        ["OUT", "--physics", "vulgar"],
        ["OUT", "--minutes", "0"],
    ],
)
def test_wrong_usage_is_two_and_one_clear_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "t") if a == "OUT" else a for a in arguments]
    assert main(["simulate", *given]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith("eagle-eye simulate: ")
    assert reported.count("\n") == 1
    assert not (tmp_path / "t").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["simulate", str(tmp_path), *FEW]) == 2
    assert "notes.txt" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_disk_that_refuses_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "/proc/nowhere/trace", *FEW]) == 1
    assert "/proc/nowhere/trace" in capsys.readouterr().err


def test_an_existing_trace_is_replaced_only_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t"
    assert main(["simulate", str(out), "--fault", "hang", *FEW]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()
    assert main(["simulate", str(out), *FEW]) == 2
    assert capsys.readouterr().err == (
        f"eagle-eye simulate: {out} holds a trace; name another folder, or add --overwrite to replace it\n"
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert main(["simulate", str(out), "--overwrite", *FEW]) == 0
    assert (out / "faults.jsonl").read_bytes() == b""


def test_overwrite_leaves_a_folder_of_something_else_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["simulate", str(tmp_path), "--overwrite", *FEW]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
