"""What is done to nodes, from outside, and how a site repairs it."""

from __future__ import annotations

import contextlib
import signal
import time

import msgspec
import psutil

from benchmarks.recovery.site import FireStack
from eagle_eye.demo.faults import DemoJob, inject, throttle
from eagle_eye.demo.stack import StageFailed, ranks_of

LASTING = frozenset({"unreachable", "nan"})  # a restart on the same node would meet it again
ENDING = frozenset({"crash", "kill", "gpu_memory"})  # the job's other ranks end within milliseconds
GPU_DEAD = "gpu_lost"
SPAWNED_WITHIN_S = 5.0
XIDS = {"gpu_lost": 79, "gpu_memory": 95}
DRIVER_FIRST_S = 0.2  # from the driver's word to what becomes of the process
FLAPS, FLAP_DOWN_S, FLAP_UP_S = 3, 1.0, 2.0


class Harm(msgspec.Struct, frozen=True):
    """One fault: what, where, since when (Unix seconds)."""

    kind: str
    node: str
    at_s: float


def harm(stack: FireStack, kind: str, node: str) -> Harm:
    """The fault is there. Raises StageFailed where the node runs nothing that could be harmed."""
    if kind in XIDS:
        ranks = _ranks(stack, node)
        at_s = time.time()
        stack.gpus.xid(node, XIDS[kind])
        time.sleep(DRIVER_FIRST_S)
        # A GPU that has left the bus leaves its process waiting; a memory error ends it.
        _signal(ranks, signal.SIGSTOP if kind == GPU_DEAD else signal.SIGABRT)
        return Harm(kind, node, at_s)
    if kind == "slow":
        ranks, at_s = _ranks(stack, node), time.time()
        stack.slow[node] = throttle(ranks)
        return Harm(kind, node, at_s)
    return harm_any(stack, kind, node)


def harm_any(job: DemoJob, kind: str, node: str) -> Harm:
    """Do what needs no stack of ours. Raises StageFailed where the node runs nothing that could be harmed."""
    if kind == "kill":
        ranks, at_s = _ranks(job, node), time.time()
        _signal(ranks, signal.SIGKILL)
        return Harm(kind, node, at_s)
    at_s, _ = inject(kind, job, node)
    return Harm(kind, node, at_s)


def flap(stack: FireStack, node: str) -> Harm:
    """The node's ranks halt and go on, three times: shorter than what counts as a hang."""
    ranks, at_s = _ranks(stack, node), time.time()
    for _ in range(FLAPS):
        _signal(ranks, signal.SIGSTOP)
        time.sleep(FLAP_DOWN_S)
        _signal(ranks, signal.SIGCONT)
        time.sleep(FLAP_UP_S)
    return Harm("flapping", node, at_s)


def repair(stack: FireStack, node: str) -> None:
    """Nothing of what was done to the node is left; its agent runs."""
    stack.site.mend(node)
    if node in stack.slow:
        stack.slow.pop(node).set()
    (stack.corruption / node).unlink(missing_ok=True)
    stack.gpus.mend(node)
    go_on(stack, node)
    if stack.ended(f"agent-{node}") is not None:
        stack.start_agent(node)


def go_on(job: DemoJob, node: str) -> None:
    """The node's ranks run, where they were stopped."""
    _signal(ranks_of(job.job, node, job.script.name), signal.SIGCONT)


def spawned(stack: FireStack, node: str) -> None:
    """Wait for the node's ranks, for a moment. Raises StageFailed where none comes."""
    until_s = time.monotonic() + SPAWNED_WITHIN_S
    while not ranks_of(stack.job, node, stack.script.name):
        if time.monotonic() > until_s:
            raise StageFailed(f"{node} runs no rank that could be harmed")
        time.sleep(0.05)


def _ranks(job: DemoJob, node: str) -> list[psutil.Process]:
    ranks = ranks_of(job.job, node, job.script.name)
    if not ranks:
        raise StageFailed(f"{node} runs no rank that could be harmed")
    return ranks


def _signal(ranks: list[psutil.Process], how: signal.Signals) -> None:
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(how)
