"""An agent's end of the hook's socket that always listens, as the agent does."""

from __future__ import annotations

import threading
from pathlib import Path

from eagle_eye.agent.training_hook.message import HookMessage
from tests.agent.fakes import Listener


class Hearing(Listener):
    """Reads in a thread, so that the socket's queue of some ten messages never fills."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._heard: list[HookMessage] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def read(self) -> list[HookMessage]:
        with self._lock:
            heard = [*self._heard, *super().read()]
            self._heard = []
        return heard

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        super().close()

    def _hear(self) -> None:
        while not self._over.wait(0.002):
            with self._lock:
                self._heard += super().read()
