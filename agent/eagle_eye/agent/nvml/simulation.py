"""Simulated GPUs: replaces this process's NVML with a library compiled from ``simulated.c``, on any host.

Touches: a compiler, a cache folder. The GPUs' readings can be changed while the agent runs, through the file named by
EAGLE_EYE_SIMULATED_GPUS; ``simulated.c`` describes its format.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pynvml

from eagle_eye.agent.nvml.connection import SIMULATED_MARK

SONAME = "libnvidia-ml.so.1"  # the name by which the binding loads the library
SOURCE = Path(__file__).with_name("simulated.c")
COMPILE_S_MAX = 60.0  # it takes half a second

_OPTIONS = ("-std=gnu11", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{SONAME}")


class SimulationFailed(Exception):
    """The simulated library is unavailable; the message is one line with the remedy."""


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the compiled library."""
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "/")) / ".cache")
    return Path(base) / "eagle-eye"


def simulate(folder: Path) -> Path:
    """Replace this process's NVML with the simulated one, before anything opens it; return the library's path.

    It is compiled on first use and cached in ``folder``. Raises SimulationFailed.
    """
    if pynvml.nvmlLib is not None:
        raise SimulationFailed("NVML is open already: GPUs must be simulated from the start")
    library = compiled(folder)
    try:
        # The dynamic loader resolves a soname to a library already loaded with the same soname.
        ctypes.CDLL(str(library))
        taken = hasattr(ctypes.CDLL(SONAME), SIMULATED_MARK)
    except OSError as error:
        raise SimulationFailed(f"{library} cannot be loaded: {error}") from None
    if not taken:
        raise SimulationFailed(f"the dynamic loader does not take {library} for {SONAME}: GPUs are simulated on glibc")
    return library


def compiled(folder: Path, *options: str) -> Path:
    """Return the library, compiled unless ``folder`` has it from the same source. Raises SimulationFailed."""
    source = SOURCE.read_bytes()
    digest = hashlib.sha256(b"\0".join((source, *(option.encode() for option in (*_OPTIONS, *options))))).hexdigest()
    library = folder / f"simulated-nvml-{digest[:16]}.so"
    try:
        _make_private(folder)
        if not library.exists():
            _compile(library, options)
    except OSError as error:
        raise SimulationFailed(f"{folder}: {error.strerror or error}; name another with XDG_CACHE_HOME") from None
    return library


def _make_private(folder: Path) -> None:
    """Create the folder with access for us only: its contents are executed. Raises OSError, SimulationFailed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SimulationFailed(f"{folder} can be written by others, and what lies in it would be run: chmod 700 it")


def _compile(library: Path, options: tuple[str, ...]) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SimulationFailed("simulated GPUs need a C compiler: apt-get install gcc libc6-dev, or dnf install gcc")
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        made = Path(place) / library.name
        command = [compiler, *_OPTIONS, *options, "-o", str(made), str(SOURCE), "-lm"]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, errors="replace", timeout=COMPILE_S_MAX
            )
        except subprocess.TimeoutExpired:
            raise SimulationFailed(f"{compiler} did not compile {SOURCE} within {COMPILE_S_MAX:.0f} s") from None
        if done.returncode != 0:
            said = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
            raise SimulationFailed(f"{compiler} does not compile {SOURCE}: {said} (is libc6-dev installed?)")
        made.replace(library)  # atomic, for others that start now
