"""Runs calls that may never return, so that none of them blocks the others or the caller."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

STALL_S = 0.1  # calls still waiting after this get another thread; a healthy GPU answers everything within 10 ms
THREADS_MAX = 64  # each runs its own call; no host has more GPUs than this

T = TypeVar("T")


class _Batch(Generic[T]):
    """Pending calls by key, and the answers so far."""

    def __init__(self, calls: Mapping[int, Callable[[], T]]) -> None:
        self.waiting = deque(calls.items())
        self.answers: dict[int, T | Exception] = {}
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # a token whenever a thread found no call left


class _Worker(Generic[T]):
    """One thread: its batch, and the key of its current call. Both None: it is idle."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[_Batch[T] | None] = queue.SimpleQueue()
        self.batch: _Batch[T] | None = None
        self.key: int | None = None


class GuardedCalls(Generic[T]):
    """Runs calls one after the other in one thread while they return; for a single caller thread.

    A hung driver call cannot be cancelled. It keeps its thread until it returns, the others continue in another thread,
    and no call with the same key is made meanwhile: there are never more threads than keys plus one idle.
    """

    def __init__(self, name: str, stall_s: float = STALL_S, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._stall_s = stall_s
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._workers: list[_Worker[T]] = []

    def busy(self) -> set[int]:
        """Return the keys of the calls that have not returned."""
        with self._lock:
            return {worker.key for worker in self._workers if worker.key is not None}

    def run(self, calls: Mapping[int, Callable[[], T]], limit_s: float) -> dict[int, T | Exception]:
        """Return the calls' results or exceptions within ``limit_s``, by key.

        A key is missing when its call did not return in time, or was not made: an earlier one is still pending, or time
        was up. Late results are discarded.
        """
        busy = self.busy()
        batch = _Batch({key: call for key, call in calls.items() if key not in busy})
        expected = len(batch.waiting)
        deadline_s = self._monotonic_s() + limit_s
        if expected:
            self._add_worker(batch)
        while len(batch.answers) < expected:
            left_s = deadline_s - self._monotonic_s()
            if left_s <= 0.0:
                break
            try:
                batch.ended.get(timeout=min(self._stall_s, left_s))
            except queue.Empty:
                if batch.waiting:
                    self._add_worker(batch)
        with self._lock:
            batch.waiting.clear()
            return dict(batch.answers)

    def close(self) -> None:
        """End the threads; a hung one ends when its call returns."""
        for worker in self._workers:
            worker.batches.put(None)
        self._workers = []

    def _add_worker(self, batch: _Batch[T]) -> None:
        with self._lock:
            worker = next((worker for worker in self._workers if worker.batch is None), None)
            if worker is None:
                if len(self._workers) >= THREADS_MAX:
                    return
                worker = _Worker()
                self._workers.append(worker)
                threading.Thread(target=self._work, args=(worker,), name=self._name, daemon=True).start()
            worker.batch = batch
        worker.batches.put(batch)

    def _work(self, worker: _Worker[T]) -> None:
        while (batch := worker.batches.get()) is not None:
            while self._make_next_call(worker, batch):
                pass
            batch.ended.put(None)

    def _make_next_call(self, worker: _Worker[T], batch: _Batch[T]) -> bool:
        """Make the batch's next call; return whether there was one. With none left the thread becomes idle."""
        with self._lock:
            if not batch.waiting:
                worker.batch = worker.key = None
                return False
            worker.key, call = batch.waiting.popleft()
            key = worker.key
        answer: T | Exception
        try:
            answer = call()
        except Exception as error:  # noqa: BLE001 - it is the answer; whoever asked judges it
            answer = error
        with self._lock:
            batch.answers[key] = answer
        return True
