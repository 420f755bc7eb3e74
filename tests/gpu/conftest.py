"""For tests on a GPU: one file at a time has it, and figures go into the report of ``make test-gpu``."""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.machine import TorchPython, torch_python

Keep = Callable[[str, object], None]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Files run in several processes, and a GPU that another one loads spoils what is measured."""
    with (Path(tempfile.gettempdir()) / "eagle-eye-gpu-tests.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def keep(record_property: Callable[[str, object], None]) -> Keep:
    """Keep a figure by its name, unit last: in pytest's report, from where ``benchmarks.gpu`` takes it."""
    return lambda name, value: record_property(name, json.dumps(value))


@pytest.fixture
def cuda_python() -> TorchPython:
    """A Python whose torch computes on the GPU; without one the test is skipped, and says where it looked."""
    found = torch_python()
    if found.missing:
        pytest.skip(found.missing)
    return found
