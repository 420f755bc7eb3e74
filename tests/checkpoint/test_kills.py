"""The benchmark of random kills, with a few of them; and that it says so where something is not as it was."""

from __future__ import annotations

import json

import pytest

from benchmarks.checkpoint.kills import Kill, figures, lines, main


@pytest.mark.slow
def test_after_a_few_kills_all_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--kills", "4", "--seed", "2", "--json"])
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (code, found["kills"], found["wrong"]) == (0, 4, 0), said.err


def test_what_is_not_as_it_was_is_counted_where_it_happened() -> None:
    kills = [
        Kill("rank", "any time", "n1", step=9, whole=8, restored=8, back_s=1.0),
        Kill("node", "during copy", "n2", step=9, whole=8, restored=7, back_s=1.0, wrong=["another state"]),
    ]
    found = figures(kills, 1, 2.0)
    assert [(row["victim"], row["steps_lost_max"], row["wrong"]) for row in found["rows"]] == [
        ("rank", 1, 0),
        ("node", 2, 1),
    ]
    assert lines(found)[-1] == "2 kills in 2 s: 1.50 steps lost on average, 2 at most; 1 were not as they had been"
