"""Injects faults from outside: server, agents, launcher and training script are not informed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil

from eagle_eye.demo.stack import DemoSite, StageFailed, ranks_of

RUNS_S = 0.02  # several of the kernel's turns: for the first one it prefers a process that has waited
# A machine that others keep busy makes some ranks' steps twice as long as others' by chance: the fault must be more.
SLOWER_TIMES = 8


class DemoJob(Protocol):
    """A training job on a site's nodes: its name, its script, and the folder that makes nodes compute NaN."""

    site: DemoSite
    job: str
    script: Path
    corruption: Path

    def pid(self, name: str) -> int:
        """Return the pid of "agent-NODE", which watches the node, and dies with it."""
        ...


def inject(fault: str, stack: DemoJob, node: str) -> tuple[float, str]:
    """Inject the fault. Return when it began (Unix seconds) and what was done, for people."""
    return _INJECTORS[fault](stack, node)


def _hang(stack: DemoJob, node: str) -> tuple[float, str]:
    began_s = time.time()
    for rank in _ranks(stack, node):
        rank.send_signal(signal.SIGSTOP)
    return began_s, f"the ranks of {node} were stopped (SIGSTOP)"


def _slow(stack: DemoJob, node: str) -> tuple[float, str]:
    ranks = _ranks(stack, node)
    throttle(ranks)
    return time.time(), f"the ranks of {node} get an eighth of their CPU time"


def _unreachable(stack: DemoJob, node: str) -> tuple[float, str]:
    began_s = time.time()
    how = stack.site.cut(node, stack.job, stack.pid(f"agent-{node}"))
    return began_s, f"{node} cannot be reached any more: {how}"


def _crash(stack: DemoJob, node: str) -> tuple[float, str]:
    began_s = time.time()
    rank = _ranks(stack, node)[0]
    rank.send_signal(signal.SIGSEGV)
    return began_s, f"a rank of {node} dies of SIGSEGV"


def _nan(stack: DemoJob, node: str) -> tuple[float, str]:
    began_s = time.time()
    (stack.corruption / node).touch()
    return began_s, f"{node} computes NaN gradients from now on, before the reduction"


NO_SPARE = "no-spare"  # a hang, where no node is left to replace the culprit
_INJECTORS = {
    "hang": _hang, "slow": _slow, "unreachable": _unreachable, "crash": _crash, "nan": _nan, NO_SPARE: _hang,
}  # fmt: skip
FAULTS = (*_INJECTORS, "none")


def _ranks(stack: DemoJob, node: str) -> list[psutil.Process]:
    ranks = ranks_of(stack.job, node, stack.script.name)
    if not ranks:
        raise StageFailed(f"{node} runs no rank that could be harmed")
    return ranks


def throttle(processes: list[psutil.Process]) -> threading.Event:
    """From now on let the processes run briefly, then stop them for the rest of ``SLOWER_TIMES`` as long, repeatedly.

    Until they are gone, or the returned event is set.
    """
    over = threading.Event()
    threading.Thread(target=_throttle, args=(processes, over), daemon=True).start()
    return over


def _throttle(
    processes: list[psutil.Process],
    over: threading.Event,
    sleep: Callable[[float], None] = time.sleep,
    monotonic_s: Callable[[], float] = time.monotonic,
) -> None:
    while processes and not over.is_set():
        began_s = monotonic_s()
        sleep(RUNS_S)
        processes = [process for process in processes if _signalled(process, signal.SIGSTOP)]
        # On a busy machine this thread wakes up late, so that they have run for longer.
        sleep((SLOWER_TIMES - 1) * (monotonic_s() - began_s))
        processes = [process for process in processes if _signalled(process, signal.SIGCONT)]


def _signalled(process: psutil.Process, how: signal.Signals) -> bool:
    """Send the signal; False when the process is gone (psutil never hits a reused process id)."""
    try:
        process.send_signal(how)
    except psutil.NoSuchProcess:
        return False
    return True
