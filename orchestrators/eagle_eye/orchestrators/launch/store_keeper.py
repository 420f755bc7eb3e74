"""Starts a node's store for in-memory checkpoints before its ranks. Touches processes.

So the job does not wait for a spare's store to start.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from eagle_eye.orchestrators.launch.own_process import note
from eagle_eye.schema.memory_steps import STORE_IDLE_S, STORE_SOCKET, spawn_store

LOOK_EVERY_S = STORE_IDLE_S / 3  # connecting also keeps it from exiting
CONNECTED_WITHIN_S = 1.0
PROGRAM = [sys.executable, "-m", "eagle_eye.cli.main"]


class StoreKeeper:
    """Starts a store where there is none. It outlives the runner, and exits by itself once no longer contacted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s = 0.0

    def keep(self, folder: Path, node: str) -> None:
        """Make sure that a store serves the folder or starts. Never raises: ranks start one too, and report errors."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + LOOK_EVERY_S
        if serves(folder):
            return
        try:
            spawn_store(PROGRAM, folder, node)
        except (OSError, subprocess.SubprocessError) as error:
            note(f"no store for checkpoints in memory is started: {error}")


def serves(folder: Path) -> bool:
    """Whether a store accepts connections there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECTED_WITHIN_S)
        try:
            probe.connect(str(folder / STORE_SOCKET))
        except OSError:
            return False
    return True
