"""A rank of the reference job with one way of saving after the other, as ``peers.py`` says. Run as ``-m``."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint.peers import PEERS_VARIABLE, PeersPlan
from benchmarks.checkpoint.rank import begun, ended
from benchmarks.checkpoint.reference_job import Job

WARM_STEPS = 2
LOOK_EVERY_S = 0.02


def main() -> None:
    """Measure, and write what was found."""
    if path := os.environ.get(PEERS_VARIABLE):
        sys.path.append(path)
    rank, work, _, disk, plan = begun(PeersPlan)
    ways = Ways(plan, disk)
    order = random.Random(plan.seed)
    for way in plan.ways:
        ways.open(way)
    for number in range(plan.rounds):
        names = list(ways.savers)
        order.shuffle(names)
        for way in names:
            ways.block(way, warm_steps=0 if number else WARM_STEPS)
    for way in list(ways.savers):
        ways.savers[way].close()
    ended(work, rank, ways.found)


class Ways:
    """The job, its savers, and what was found of each."""

    def __init__(self, plan: PeersPlan, disk: Path) -> None:
        self.plan = plan
        self.disk = disk
        self.job = Job(plan.width, plan.blocks, plan.step_s, plan.seed)
        self.step = 0
        self.savers: dict[str, Any] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def open(self, way: str) -> None:
        """There is a saver, or it is said why not."""
        from benchmarks.checkpoint.savers import SAVERS

        try:
            self.savers[way] = SAVERS[way](self.job, self.disk)
        except Exception as error:  # noqa: BLE001 - whatever somebody else's library raises is what is to be reported
            self._failed(way, error)
            return
        self.found[way] = {"steps_s": [], "blocked_s": [], "behind_steps": [], "survives": self.savers[way].survives}

    def block(self, way: str, warm_steps: int) -> None:
        """So many steps, each saved if it may be; of those that warm up nothing counts."""
        saver, found = self.savers[way], self.found[way]
        dist.barrier()
        first, lock = self.step, threading.Lock()
        for _ in range(warm_steps):
            if not self._one(way, lock, counts=False):
                return
        with looked_at(saver, lock, lambda: self.step, first) as behind:
            for _ in range(self.plan.steps):
                if not self._one(way, lock):
                    return
        found["behind_steps"] += behind
        saver.settle()

    def _one(self, way: str, lock: threading.Lock, *, counts: bool = True) -> bool:
        """Whether a step went well, with its save. It ``counts``, or warms up."""
        saver, found = self.savers[way], self.found[way]
        began_s = time.perf_counter()
        self.job.step()
        self.step += 1
        stepped_s = time.perf_counter() - began_s
        took_s, failed = 0.0, None
        with lock:
            ready = saver.ready()
        ready = _all(ready)
        if ready:
            at_s = time.perf_counter()
            try:
                with lock:
                    saver.save(self.step)
            except Exception as error:  # noqa: BLE001 - as above
                failed = error
            took_s = time.perf_counter() - at_s
            if not _all(failed is None):
                self._failed(way, failed or RuntimeError("it fails on the other rank"))
                self.savers.pop(way).close()
                return False
        if counts:
            # Of agreeing with the other rank, which the benchmark does, nothing counts.
            found["steps_s"].append(stepped_s + took_s)
            if ready and saver.saves:
                found["blocked_s"].append(took_s)
        return True

    def _failed(self, way: str, error: Exception) -> None:
        text = str(error).strip().splitlines()
        self.found[way] = {"error": f"{type(error).__name__}: {text[0] if text else ''}"[:300]}


@contextlib.contextmanager
def looked_at(saver: Any, lock: threading.Lock, step: Callable[[], int], first: int) -> Iterator[list[int]]:
    """Yield how many steps the newest checkpoint lies behind, at moments that training does not choose.

    What it saved before the ``first`` step does not count. While it saves (the ``lock``) there is no newer one.
    """
    behind: list[int] = []
    ended = threading.Event()

    def look() -> None:
        newest = first
        while not ended.wait(LOOK_EVERY_S):
            if lock.acquire(blocking=False):
                try:
                    newest = max(newest, saver.newest())
                finally:
                    lock.release()
            behind.append(max(0, step() - newest))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield behind
    finally:
        ended.set()
        thread.join()


def _all(ready: bool) -> bool:
    reported = torch.tensor(int(ready))
    dist.all_reduce(reported, dist.ReduceOp.MIN)
    return bool(reported)


if __name__ == "__main__":
    main()
