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
    reported = capsys.readouterr()
    assert reported.out.startswith("behind: rank 2\n")
    assert "in it:      0, 1, 3\n    not in it:  2" in reported.out
    assert "broken_rank_9" in reported.err


def test_programs_are_told_as_json(behind: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flight-recorder", str(behind), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["kind"], reported["culprits"], reported["application"], reported["dumps"]) == (
        "behind",
        [2],
        False,
        4,
    )
    assert reported["waits"][0] == {
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


def test_where_a_dump_is_missing_that_is_the_headline_and_nobody_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 1 and 2 are both behind: whoever looks at three dumps is not to go after rank 2 alone."""
    late, others = dump(entry(6, "completed")), dump(entry(6, "completed"), entry(7))
    folder = write(tmp_path / "dumps", others, late, late, others)
    assert main(["flight-recorder", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("behind: rank 1, rank 2\n")
    (gone,) = [path for path in folder.iterdir() if path.name.endswith("1")]
    gone.unlink()
    assert main(["flight-recorder", str(folder)]) == 0
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first == "no dump of rank 1: it may be what holds the job up"
    assert second == "of the ranks with a dump, behind: rank 2"
    assert last == "3 dumps read; no dump of 1"
    assert main(["flight-recorder", str(folder), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["certain"], reported["without_dump"], reported["culprits"]) == (False, [1], [2])


def test_a_dump_that_cannot_be_read_is_missing_as_well(behind: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (victim,) = [path for path in behind.iterdir() if path.name.endswith("0")]
    victim.write_bytes(b"nonsense")
    assert main(["flight-recorder", str(behind)]) == 0
    assert capsys.readouterr().out.startswith("no dump of rank 0: it may be what holds the job up\n")


def test_with_all_dumps_the_answer_is_certain(behind: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flight-recorder", str(behind), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["certain"], reported["without_dump"]) == (True, [])


def test_a_missing_rank_that_all_wait_for_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "dumps", *[dump(entry(6, "completed"), entry(7))] * 4)
    (gone,) = [path for path in folder.iterdir() if path.name.endswith("3")]
    gone.unlink()
    assert main(["flight-recorder", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(("missing: rank 3\nrank 3 left no dump", "no dump of rank 3"))


def test_where_nothing_can_be_told_a_missing_dump_is_the_headline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "dumps", *[dump(entry(6, "completed"))] * 4)
    (gone,) = [path for path in folder.iterdir() if path.name.endswith("1")]
    gone.unlink()
    assert main(["flight-recorder", str(folder)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "no dump of rank 1: it may be what holds the job up"
    assert second.startswith("cannot tell: ")


def test_a_second_culprit_that_went_on_enqueuing_is_said_to_be_hidden(
    behind: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 3's GPU hangs, too, but its process has enqueued what the waiting ranks have: these dumps are its, too."""
    hidden = "these dumps can't tell a second culprit that went on enqueuing from the 3 ranks that wait: XIDs"
    assert main(["flight-recorder", str(behind)]) == 0
    assert hidden in capsys.readouterr().out
    assert main(["flight-recorder", str(behind), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hidden"].startswith(hidden)


def test_where_nobody_is_named_nobody_is_said_to_be_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "dumps", *[dump(entry(6, "completed"), entry(7))] * 4)
    assert main(["flight-recorder", str(folder), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["kind"], reported["hidden"]) == ("symmetric", "")
