"""The hook's CUDA events on a GPU: they measure what the program measures, and never wait for it."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from eagle_eye.agent.collector import Drops, Observed
from eagle_eye.agent.collectors.nvml import NvmlCollector
from eagle_eye.agent.collectors.training import TrainingCollector
from tests.agent.fakes import until
from tests.gpu.conftest import Keep
from tests.gpu.machine import PROGRAMS, TorchPython, child_environment, needs_gpu

pytestmark = needs_gpu
TRAINING_S = 10
ROW = 5  # no local rank: a row with this number was found by the GPU's UUID


@pytest.mark.slow
def test_a_steps_compute_is_what_the_program_measures(cuda_python: TorchPython, tmp_path: Path, keep: Keep) -> None:
    nvml = NvmlCollector()
    nvml.collect(time.time())
    rows = dict.fromkeys(nvml.devices_by_uuid, ROW)
    nvml.close()
    collector = TrainingCollector(tmp_path / "hook.sock", Drops(), devices_by_uuid=rows)
    collector.open()
    seen: list[Observed] = []
    command = [cuda_python.path, str(PROGRAMS / "data_parallel.py"), str(tmp_path / "hook.sock")]
    command += [str(tmp_path / "rendezvous"), str(TRAINING_S)]
    environ = child_environment(EAGLE_EYE_JOB="hook")
    try:
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:

            def look() -> bool:
                time.sleep(0.5)
                seen.append(collector.collect(time.time()))
                return process.poll() is not None

            try:
                until(look, 240.0)
            finally:
                process.kill()
            assert process.stdout is not None
            said = process.stdout.read()
        assert process.returncode == 0
    finally:
        collector.close()
    reported = json.loads(said.splitlines()[-1])
    assert {device for each in seen for device in each.devices} == {ROW}
    found = [row["train_compute_seconds"] for each in seen for row in each.devices.values() if _measured(row)]
    keep("steps", reported["steps"])
    keep("compute_s", {"program": reported["compute_s"], "hook": statistics.median(found) if found else None})
    assert len(found) >= 3
    assert reported["failures"] == 0, "the hook waited for the GPU, or failed otherwise"
    assert statistics.median(found) == pytest.approx(reported["compute_s"], rel=0.15)
    assert any("train_loss" in row for each in seen for row in each.devices.values())


def _measured(row: dict[str, float]) -> bool:
    return "train_compute_seconds" in row
