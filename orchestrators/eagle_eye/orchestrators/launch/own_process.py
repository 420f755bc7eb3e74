"""What the launcher's processes on a node do with themselves: the kernel's promises, the log, torch's environment."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import MutableMapping

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def set_defaults(environ: MutableMapping[str, str], ranks_per_node: int) -> None:
    """What ranks need of torch is in the environment, unless somebody has set it. Some is read as torch is imported."""
    # Without the flight recorder nobody can tell which rank a hang waits for.
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if ranks_per_node > 1:  # as torchrun does, or every rank would take every core
        environ.setdefault("OMP_NUM_THREADS", "1")


def write(descriptor: int, content: bytes) -> None:
    """All of it was written. Raises OSError."""
    while content:
        content = content[os.write(descriptor, content) :]


def prctl(option: int, value: int) -> None:
    """The kernel was told; where it refuses, that stands in the log."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        note(f"prctl {option}: {os.strerror(ctypes.get_errno())}; ranks might outlive a killed runner")


def note(text: str) -> None:
    """The line stands in the runner's log."""
    sys.stderr.write(f"runner: {text}\n")
    sys.stderr.flush()
