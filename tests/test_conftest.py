"""A file of tests that leaves something behind is itself the one that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVES = {
    "environment variable LEFT": "os.environ['LEFT'] = '1'",
    "working directory": "os.chdir('/')",
    "an event loop that runs": "asyncio._set_running_loop(asyncio.new_event_loop())",
    "child process": "subprocess.Popen(['sleep', '5'])",
}
TIDY = """
@pytest.fixture(scope="module", autouse=True)
def things():
    os.environ["TAKEN_BACK"] = "1"
    asyncio._set_running_loop(asyncio.new_event_loop())
    child = subprocess.Popen(["sleep", "60"])
    yield
    child.kill()
    child.wait()
    asyncio._set_running_loop(None)
    del os.environ["TAKEN_BACK"]

def test_it():
    pass
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of a file for each thing that is left, and of one that leaves none."""
    folder = tmp_path_factory.mktemp("tests")
    tests = [f"def test_it():\n    {leaves}\n" for leaves in LEAVES.values()]
    for number, test in enumerate([*tests, TIDY]):
        imports = "import asyncio, os, subprocess\nimport pytest\n\n"
        (folder / f"test_{number}.py").write_text(f"{imports}{test}", encoding="utf-8")
    words = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(folder), str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120.0,
    )
    return done.stdout


@pytest.mark.parametrize("what", LEAVES)
def test_what_a_file_leaves_behind_fails_it_and_is_named(what: str, said: str) -> None:
    number = list(LEAVES).index(what)
    assert f"this file leaves behind: {what}" in said
    assert f"/test_{number}.py .E" in said


def test_what_its_own_fixtures_take_back_is_not_left_behind(said: str) -> None:
    assert f"/test_{len(LEAVES)}.py .  " in said
    assert f"{len(LEAVES) + 1} passed, {len(LEAVES)} errors" in said
