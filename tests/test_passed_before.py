"""Continuous integration runs no test twice that has passed, and each other one again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each test runs pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import os
import pytest

HERE = os.environ.get("HERE")

def test_passes():
    pass

@pytest.mark.skipif(not HERE, reason="not here")
def test_waits_for_a_program():
    pass

def test_fails_without_it():
    assert HERE

@pytest.fixture
def broken_end():
    yield
    assert HERE

def test_fails_at_its_end(broken_end):
    pass
"""


def run(folder: Path, *words: str, **environ: str) -> str:
    """Return the last line of what pytest says."""
    places = (
        "-p",
        "xdist",
        "-p",
        "tests.passed_before",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "-o",
        f"cache_dir={folder}/cache",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *places, *words, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ},  # others take seconds to import
        capture_output=True,
        text=True,
        check=False,
        timeout=120.0,
    )
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("workers", [(), ("--numprocesses", "2")])
def test_what_passed_is_left_out_and_what_failed_or_was_skipped_is_not(tmp_path: Path, workers: tuple[str]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    assert "1 failed, 2 passed, 1 skipped, 1 error" in run(tmp_path, *workers)
    assert "3 passed" in run(tmp_path, *workers, HERE="1")
    assert "deselected" in run(tmp_path, HERE="1")


def test_what_passed_in_a_run_of_some_alone_is_left_out_too(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    run(tmp_path)
    assert "2 passed" in run(tmp_path, "--last-failed", HERE="1")
    assert "1 passed, 3 deselected" in run(tmp_path, HERE="1")
