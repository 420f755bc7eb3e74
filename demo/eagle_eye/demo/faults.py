"""Injects faults from outside: server, agents, launcher and training script are not informed."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Protocol

import psutil

from eagle_eye.demo.site import DemoSite, ranks_of
from eagle_eye.demo.stack import StageFailed

RUNS_S = STANDS_S = 0.02  # half of a process's CPU time


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
    throttle(ranks, STANDS_S)
    return time.time(), f"the ranks of {node} get half of their CPU time"


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


def throttle(processes: list[psutil.Process], stands_s: float) -> threading.Event:
    """From now on let the processes run only briefly, then stop them for ``stands_s``, repeatedly.

    Until they are gone, or the returned event is set.
    """
    over = threading.Event()
    threading.Thread(target=_throttle, args=(processes, stands_s, over), daemon=True).start()
    return over


def _throttle(processes: list[psutil.Process], stands_s: float, over: threading.Event) -> None:
    while processes and not over.is_set():
        for how, for_s in ((signal.SIGSTOP, stands_s), (signal.SIGCONT, RUNS_S)):
            processes = [process for process in processes if _signalled(process, how)]
            time.sleep(for_s)


def _signalled(process: psutil.Process, how: signal.Signals) -> bool:
    """Send the signal; False when the process is gone (psutil never hits a reused process id)."""
    try:
        process.send_signal(how)
    except psutil.NoSuchProcess:
        return False
    return True
