"""Attempts of a job that are killed for good: each rank a fork of a process that has imported everything, and holds the
store at which the ranks meet.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

from tests.agent.two_ranks import end_with

WITHIN_S = 100.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def attempt(train: Callable[[], None], world: int) -> list[int]:
    """Return how each rank ended: its exit code, negative the signal."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's
    sys.stdout.flush()
    ranks = [_forked(train, rank, world, store.port) for rank in range(world)]
    codes: dict[int, int] = {}
    end_s = time.monotonic() + WITHIN_S
    while len(codes) < world:
        for pid in ranks:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end_s:
                    os.kill(pid, signal.SIGABRT)
        time.sleep(0.005)
    return [codes[pid] for pid in ranks]


def _forked(train: Callable[[], None], rank: int, world: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), ROLE_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    return end_with(train)
