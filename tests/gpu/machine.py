"""What this machine has for tests that need a GPU: NVML's GPUs, and a Python whose torch computes on them."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pynvml
import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
NAMED = "EAGLE_EYE_TEST_TORCH_PYTHON"
PROBE_S = 180.0  # a first import of torch from a cold disk
# The hook is what these programs bring along, so it must load there, too.
PROBE = "import torch, eagle_eye.agent.hook; print(torch.__version__ if torch.cuda.is_available() else 'no GPU')"


@functools.cache
def no_gpu() -> str:
    """Return why there is nothing to test on, "" where there is."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        pynvml.nvmlInit()
    except (OSError, pynvml.NVMLError) as error:
        return f"no NVIDIA GPU with its driver: {error}"
    try:
        return "" if pynvml.nvmlDeviceGetCount() else "NVML lists no GPU"
    except pynvml.NVMLError as error:
        return f"NVML does not list its GPUs: {error}"
    finally:
        pynvml.nvmlShutdown()


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(no_gpu()), reason=no_gpu())]


class TorchPython(NamedTuple):
    """A Python whose torch sees a GPU, or why there is none."""

    path: str
    version: str = ""
    missing: str = ""


@functools.cache
def torch_python() -> TorchPython:
    """Return the first Python with torch for CUDA: the one that is named, this one, or any on the PATH."""
    looked = []
    for path in pythons(os.environ):
        said = _asked(path)
        if said[:1].isdigit():
            return TorchPython(path, said)
        looked.append(f"{path}: {said}")
    return TorchPython("", missing=f"no Python with torch for CUDA ({'; '.join(looked)}): name one by {NAMED}")


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of a program on the first GPU that imports the hook from these sources."""
    sources = f"{ROOT / 'schema'}{os.pathsep}{ROOT / 'agent'}"
    first = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as NVML counts
    return {**os.environ, **first, "PYTHONPATH": sources, **more}


def pythons(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the Pythons to ask, in their order."""
    if NAMED in environ:
        yield environ[NAMED]
        return
    yield sys.executable
    for folder in dict.fromkeys(environ.get("PATH", "").split(os.pathsep)):
        path = Path(folder, "python3")
        if folder and os.access(path, os.X_OK) and path.absolute() != Path(sys.executable).absolute():
            yield str(path)


def _asked(path: str) -> str:
    """Return the version of a Python's torch, or what stands against using it."""
    try:
        done = subprocess.run(
            [path, "-c", PROBE], env=child_environment(), check=False, capture_output=True, text=True, timeout=PROBE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be asked: {error}"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return done.stdout.strip()
