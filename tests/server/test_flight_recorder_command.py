from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_eye.cli.main import main
from tests.server.test_flight_recorder import dump, entry, write


@pytest.fixture
def behind(tmp_path: Path) -> Path:
    late, others = dump(entry(6, "completed")), dump(entry(6, "completed"), entry(7))
    return write(tmp_path / "dumps", others, others, late, others)


def test_people_are_told_who_is_waited_for_and_by_whom(behind: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (behind / "broken_rank_9").write_bytes(b"nonsense")
    assert main(["flight-recorder", str(behind)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("behind: rank 2\n")
    assert "in it:      0, 1, 3\n    not in it:  2" in told.out
    assert "broken_rank_9" in told.err


def test_programs_are_told_as_json(behind: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flight-recorder", str(behind), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["culprits"], told["application"], told["dumps"]) == ("behind", [2], False, 4)
    assert told["waits"][0] == {
        "group": "0",
        "description": "default_pg",
        "sequence": 7,
        "operation": "nccl:all_reduce",
        "waiting": [0, 1, 3],
        "absent": [2],
    }


def test_cannot_tell_is_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "dumps", *[dump(entry(6, "completed"))] * 4)
    assert main(["flight-recorder", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("cannot tell: no rank has an unfinished operation")
    assert main(["flight-recorder", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] is None


def test_no_dumps_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flight-recorder", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
