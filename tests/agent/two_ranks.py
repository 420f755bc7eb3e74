"""Runs a training function as two ranks of one job, with torchrun's variables; what both import is imported once."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

TIMEOUT_S = 120.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def job(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return how a script ended that can import ``tests``; raises TimeoutExpired."""
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def run(train: Callable[[], None]) -> None:
    """``train`` has ended well in this process, as rank 0, and in a copy of it, as rank 1; else it ends ill."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's, on a port that was free
    peer = os.fork()
    if not peer:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = "0" if peer else "1"
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, ROLE_RANK=rank, GROUP_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    if not peer:
        end_with(train)
    train()
    if os.waitpid(peer, 0)[1]:
        sys.exit("rank 1 failed")


def end_with(train: Callable[[], None]) -> NoReturn:
    """The process ends at once: what it has of its parent's, such as the store, has no threads here."""
    code = 0
    try:
        train()
    except BaseException:  # noqa: BLE001 - whatever it was, nothing may go on from here
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
