"""Process setup for the launcher's processes on a node: prctl, the log, torch's environment."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import MutableMapping

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def set_defaults(environ: MutableMapping[str, str], ranks_per_node: int) -> None:
    """Set the environment that ranks need for torch, unless already set. Some is read when torch is imported."""
    # Without the flight recorder a hang cannot be attributed to a rank.
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if ranks_per_node > 1:  # as torchrun does, or every rank would use every core
        environ.setdefault("OMP_NUM_THREADS", "1")


def write(descriptor: int, content: bytes) -> None:
    """Write all of it. Raises OSError."""
    while content:
        content = content[os.write(descriptor, content) :]


def prctl(option: int, value: int) -> None:
    """Call prctl; a refusal is logged."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        note(f"prctl {option}: {os.strerror(ctypes.get_errno())}; ranks might outlive a killed runner")


def note(text: str) -> None:
    """Write the line to the runner's log."""
    sys.stderr.write(f"runner: {text}\n")
    sys.stderr.flush()
