"""docs/reference/compatibility.md: each promise is held by tests that are there and run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace(" ", "-"))
def test_each_promise_names_tests_that_there_are(row: list[str]) -> None:
    _, _, held = row
    named = re.findall(r"`(tests/[\w/]+\.py)`", held)
    assert named
    for name in named:
        assert re.search(r"^ *(?:async )?def test_", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE), name


def test_whatever_is_recorded_of_earlier_versions_is_promised() -> None:
    recordings = {f"tests/compatibility/{file.name}" for file in (ROOT / "tests/compatibility").glob("test_*er_*.py")}
    assert recordings <= set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
