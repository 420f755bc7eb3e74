"""What agent and hook cost a training step by FSDP on a GPU (asked for: below 0.3%)."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.agent.fakes import until
from tests.gpu.conftest import Keep
from tests.gpu.machine import PROGRAMS, TorchPython, child_environment, needs_gpu
from tests.loopback import free_port

pytestmark = needs_gpu
OVERHEAD_RATIO_MAX = 0.003
PAIRS, STEPS = 24, 50
DEADLINE_S = 420.0


@contextlib.contextmanager
def agent(folder: Path) -> Iterator[psutil.Process]:
    """An agent at 1 Hz with all its collectors, whose server is not there."""
    command = [sys.executable, "-m", "eagle_eye.cli.main", "agent", "--node", "overhead"]
    command += ["--server", f"http://127.0.0.1:{free_port()}", "--spool", str(folder / "spool")]
    command += ["--hook-socket", str(folder / "hook.sock")]
    with (folder / "agent.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            until((folder / "hook.sock").exists, 60.0)
            yield psutil.Process(process.pid)
        finally:
            process.kill()


@pytest.mark.slow
def test_agent_and_hook_cost_a_step_by_fsdp_next_to_nothing(
    cuda_python: TorchPython, tmp_path: Path, keep: Keep
) -> None:
    program = PROGRAMS / "fully_sharded.py"
    with agent(tmp_path) as process:
        command = [cuda_python.path, str(program), str(tmp_path / "hook.sock"), str(tmp_path / "rendezvous")]
        command += [str(process.pid), str(PAIRS), str(STEPS)]
        done = subprocess.run(
            command,
            env=child_environment(EAGLE_EYE_JOB="overhead"),
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr[-4_000:]
        times, memory = process.cpu_times(), process.memory_info()
    reported = json.loads(done.stdout.splitlines()[-1])
    more = [seen_s / bare_s - 1 for seen_s, bare_s in zip(reported["seen_s"], reported["bare_s"], strict=True)]
    error = statistics.stdev(more) / math.sqrt(len(more))
    keep("step_s", statistics.median(reported["bare_s"]))
    keep("overhead_ratio", statistics.fmean(more))
    keep("overhead_standard_error_ratio", error)
    keep("agent_processor_s", times.user + times.system)
    keep("agent_resident_bytes", memory.rss)
    assert reported["failures"] == 0
    assert statistics.fmean(more) - 2 * error <= OVERHEAD_RATIO_MAX, "surely more than is allowed"
