"""Checkpoints in memory of a state on a GPU: each is of its step alone, and the host does not wait for the copies."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.fakes import until
from tests.gpu.conftest import Keep
from tests.gpu.machine import PROGRAMS, ROOT, TorchPython, child_environment, needs_gpu

pytestmark = needs_gpu
ROUNDS, PARAMETERS = 10, 100_000_000
DEADLINE_S = 300.0


@contextlib.contextmanager
def store(folder: Path) -> Iterator[None]:
    """A store in shared memory, of this Python: the one with torch for CUDA need not have what a store needs."""
    command = [sys.executable, "-m", "eagle_eye.cli.main", "checkpoint", "store", "--folder", str(folder)]
    with subprocess.Popen([*command, "--listen", "127.0.0.1:0", "--node", "gpu"]) as process:
        try:
            until((folder / "socket").exists, 60.0)
            yield
        finally:
            process.kill()


@pytest.mark.slow
def test_what_is_captured_is_the_state_at_its_step_and_the_host_does_not_wait(
    cuda_python: TorchPython, tmp_path: Path, keep: Keep
) -> None:
    folder = Path("/dev/shm") / f"eagle-eye-gpu-test-{os.getpid()}"
    folder.mkdir(mode=0o700)
    environment = child_environment(EAGLE_EYE_CHECKPOINT_STORE=str(folder), EAGLE_EYE_NODE="gpu")
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'checkpoint'}"
    found = subprocess.run(
        [cuda_python.path, "-c", "import msgspec, xxhash"], env=environment, check=False, capture_output=True, text=True
    )
    if found.returncode:
        pytest.skip(f"{cuda_python.path} has no msgspec or no xxhash: install eagle-eye[checkpoint] there")
    try:
        with store(folder):
            command = [cuda_python.path, str(PROGRAMS / "checkpoint.py"), str(tmp_path / "checkpoints")]
            done = subprocess.run(
                [*command, str(ROUNDS), str(PARAMETERS)],
                env=environment,
                check=False,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert done.returncode == 0, done.stderr[-2000:]
    reported = json.loads(done.stdout.splitlines()[-1])
    keep("blocked_s", reported["blocked_s"])
    keep("captured_bytes", reported["bytes"])
    keep("whole_s", reported["whole_s"])
    keep("pinned_bytes_per_s", reported["pinned_bytes_per_s"])
    keep("checkpoint_step_s", reported["step_s"])
    assert reported["wrong"] == []
    assert reported["blocked_s"] < 0.5 * reported["bytes"] / reported["pinned_bytes_per_s"], (
        "the host waited for the copies"
    )
