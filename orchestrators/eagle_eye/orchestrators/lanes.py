"""Runs independent work in parallel; work on the same job or node runs in order of arrival."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

POLL_S = 0.05
WAITING_MAX = 1_000

WorkT = TypeVar("WorkT")


class Lanes(Generic[WorkT]):
    """Takes work from a queue, from ``start`` to ``stop``, and runs it on up to ``parallel`` threads.

    ``keys`` returns what a piece of work concerns: it starts once all earlier work with a common key is finished.
    """

    def __init__(
        self,
        work: queue.Queue[WorkT],
        do: Callable[[WorkT], None],
        keys: Callable[[WorkT], frozenset[Hashable]],
        parallel: int,
    ) -> None:
        self._work = work
        self._do = do
        self._keys = keys
        self._parallel = parallel
        self._waiting: list[WorkT] = []
        self._running: dict[threading.Thread, frozenset[Hashable]] = {}
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="subscriber", daemon=True)

    @property
    def waiting(self) -> int:
        """How many pieces of work have not started."""
        return len(self._waiting) + self._work.qsize()

    @property
    def running(self) -> int:
        """How many pieces of work are running."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """Whether work is being accepted."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start working."""
        self._thread.start()

    def stop(self, within_s: float) -> bool:
        """Start no further work; return whether all running work ended within ``within_s``."""
        until_s = time.monotonic() + within_s
        self.stopping.set()
        for thread in (self._thread, *list(self._running)):
            if thread.is_alive():
                thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in list(self._running))

    def _run(self) -> None:
        while not self.stopping.is_set():
            if len(self._waiting) < WAITING_MAX:
                with contextlib.suppress(queue.Empty):
                    self._waiting.append(self._work.get(timeout=POLL_S))
            else:
                self.stopping.wait(POLL_S)
            self._begin()

    def _begin(self) -> None:
        self._running = {thread: keys for thread, keys in self._running.items() if thread.is_alive()}
        taken = frozenset[Hashable]().union(*self._running.values())
        still: list[WorkT] = []
        for work in self._waiting:
            keys = self._keys(work)
            if keys & taken or len(self._running) >= self._parallel:
                still.append(work)
            else:
                # Daemons: work that blocks forever must not keep the process alive; the ledger records its progress.
                thread = threading.Thread(target=self._one, args=(work,), name="action", daemon=True)
                self._running[thread] = keys
                thread.start()
            taken |= keys
        self._waiting = still

    def _one(self, work: WorkT) -> None:
        try:
            self._do(work)
        except Exception:
            # Writing the ledger failed. The lanes must survive for the next piece of work.
            log.exception("work was not done")
