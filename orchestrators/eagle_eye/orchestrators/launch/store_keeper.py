"""The store of a node, where a job keeps checkpoints in memory: there before its ranks are. Touches processes.

A spare then needs none to be started while the job waits for it.
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

LOOK_EVERY_S = STORE_IDLE_S / 3  # which also keeps it from ending
CONNECTED_WITHIN_S = 1.0
PROGRAM = [sys.executable, "-m", "eagle_eye.cli.main"]


class StoreKeeper:
    """Starts a store where none is. It outlives the runner, and ends by itself once nobody looks for it any more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s = 0.0

    def keep(self, folder: Path, node: str) -> None:
        """A store serves the folder, or is starting. Never raises: ranks start one as well, and say what is wrong."""
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
    """Whether a store takes connections there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECTED_WITHIN_S)
        try:
            probe.connect(str(folder / STORE_SOCKET))
        except OSError:
            return False
    return True
