"""For all tests: on a busy machine an example may take long, and that is no failure; no file leaves anything behind.

Hundreds of files share a process. What one leaves in it fails others, far from its cause: it is named at its own end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")

# What pytest sets, and what scikit-learn, torch, Lightning and polars set for themselves when they are imported.
OTHERS_OWN = ("PYTEST_", "KMP_", "PYTORCH_", "TORCHINDUCTOR_", "_RJEM_")
# Python's own helper of shared memory and semaphores: it lives as long as the process that it serves.
PYTHONS_OWN = "multiprocessing.resource_tracker"


def pytest_configure() -> None:
    """Keep EAGLE_EYE_DATA, the folder with recorded data, from the commands under test: no setting of theirs.

    They would name it as a variable that nothing reads. Tests find the folder in EAGLE_EYE_TEST_DATA.
    """
    folder = os.environ.pop("EAGLE_EYE_DATA", None)
    if folder is not None:
        os.environ["EAGLE_EYE_TEST_DATA"] = folder


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail at the end of a file that leaves the process other than it was, once its own fixtures are torn down."""
    environ, folder, loop, children = _environ(), Path.cwd(), _loop_runs(), _children()
    yield
    left = [f"environment variable {name}" for name, _ in sorted(_environ() ^ environ)]
    if Path.cwd() != folder:
        left.append(f"working directory {Path.cwd()}")
        os.chdir(folder)
    if _loop_runs() and not loop:
        left.append("an event loop that runs: each asyncio.run() after it fails")
    left += [f"child process {child}" for child in sorted(_children() - children)]
    assert not left, f"this file leaves behind: {', '.join(dict.fromkeys(left))}"


def _environ() -> set[tuple[str, str]]:
    return {(name, value) for name, value in os.environ.items() if not name.startswith(OTHERS_OWN)}


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _children() -> set[str]:
    """Return this process's living children, each with its number and command line."""
    found = set()
    for child in psutil.Process().children():
        try:
            command = " ".join(child.cmdline())
        except psutil.Error:
            continue  # it has ended meanwhile
        if PYTHONS_OWN not in command and child.is_running() and command:
            found.add(f"{child.pid} ({command[:120]})")
    return found
