"""``eagle-eye plan profile`` on a GPU: its layers together take what the whole model takes."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.gpu.conftest import Keep
from tests.gpu.machine import PROGRAMS, ROOT, TorchPython, child_environment, needs_gpu

pytestmark = needs_gpu
PORTIONS = ("schema", "agent", "planning", "cli")
BYTES = 4  # of a float32


def said(cuda_python: TorchPython, *arguments: str) -> dict[str, Any]:
    """Return what a program says as JSON."""
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / portion) for portion in PORTIONS)
    done = subprocess.run(
        [cuda_python.path, *arguments],
        cwd=PROGRAMS,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=240.0,
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"{cuda_python.path}: {done.stderr.splitlines()[-1]}: install eagle-eye there")
    assert done.returncode == 0, done.stderr[-2_000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_the_layers_together_take_what_the_whole_model_takes(cuda_python: TorchPython, keep: Keep) -> None:
    whole = said(cuda_python, "layered.py")
    profile = said(cuda_python, "-m", "eagle_eye.cli.main", "plan", "profile", "layered:job", "--device", "cuda")
    layers = profile["layers"]
    together_s = sum(layer["forward_s"] + layer["backward_s"] for layer in layers)
    keep("step_s", {"whole": whole["step_s"], "layers": together_s})
    keep("layer", layers[0])
    assert len(layers) == 6
    assert sum(layer["parameter_bytes"] for layer in layers) == BYTES * whole["parameters"]
    assert together_s == pytest.approx(whole["step_s"], rel=0.15)
