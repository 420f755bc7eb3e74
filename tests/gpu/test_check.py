"""``eagle-eye check`` on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pynvml
import pytest

from tests.gpu.conftest import Keep
from tests.gpu.machine import TorchPython, needs_gpu

pytestmark = needs_gpu


def check(*flags: str) -> dict[str, Any]:
    """Return the report of a check."""
    done = subprocess.run(
        [sys.executable, "-m", "eagle_eye.cli.main", "check", "--json", *flags],
        check=False,
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    assert not report["refused"], report["reason"]
    return report


@pytest.fixture
def gpus() -> int:
    pynvml.nvmlInit()
    count: int = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    return count


def test_the_gpus_of_this_host_are_found_and_their_records_are_read(gpus: int, keep: Keep) -> None:
    (facts,) = check("--quick", "--only", "gpu_facts", "--gpus", str(gpus))["checks"]
    keep("gpu_facts", facts)
    assert facts["state"] == "passed", facts["reason"]


def test_a_gpu_that_is_missing_is_told(gpus: int) -> None:
    report = check("--quick", "--only", "gpu_facts", "--gpus", str(gpus + 1))
    assert report["verdict"] == "sick", report["reason"]


def test_a_gpu_multiplies_and_remembers_rightly(cuda_python: TorchPython, keep: Keep) -> None:
    report = check("--quick", "--only", "gemm", "memory", "--deadline", "90", "--torch-python", cuda_python.path)
    keep("check", report)
    assert {one["name"]: one["state"] for one in report["checks"]} == {"gemm": "passed", "memory": "passed"}
    devices = {value["device"] for one in report["checks"] for value in one["values"]}
    assert "cpu" not in devices


@pytest.mark.slow
def test_clocks_and_links_are_judged_under_load(cuda_python: TorchPython, keep: Keep) -> None:
    (gemm,) = check("--only", "gemm", "--deadline", "90", "--torch-python", cuda_python.path)["checks"]
    keep("under_load", gemm)
    assert gemm["state"] == "passed", gemm["reason"]
    assert {"throttled_ratio", "pcie_link_width"} <= {value["name"] for value in gemm["values"]}
