"""Delays the removal of replaced folders until readers that may use them have finished."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryUnavailable

READ_S_MAX = 3_600.0  # readers that take longer are asked to query less


class FolderRemoval:
    """Folders to be removed, and the readers that they wait for. For any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._readers: dict[object, float] = {}
        self._folders: dict[Path, tuple[float, set[object]]] = {}
        self._gone: dict[str, float] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the current folders while the block reads, for an hour at most."""
        reader = object()
        with self._lock:
            self._readers[reader] = self._clock.monotonic_s()
        try:
            yield
        finally:
            with self._lock:
                del self._readers[reader]
            self.sweep()

    def remove(self, folder: Path) -> None:
        """Remove the folder once no reader is left that began before now."""
        with self._lock:
            self._folders[folder] = (self._clock.monotonic_s(), set(self._readers))
        self.sweep()

    def sweep(self) -> None:
        """Remove the folders that no reader needs any more."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            due = [
                folder
                for folder, (since_s, readers) in self._folders.items()
                if now_s - since_s >= READ_S_MAX or readers.isdisjoint(self._readers)
            ]
            for folder in due:
                self._gone[folder.name] = now_s
                del self._folders[folder]
            oldest_s = min(self._readers.values(), default=now_s)
            self._gone = {name: at_s for name, at_s in self._gone.items() if at_s >= oldest_s}
        for folder in due:
            shutil.rmtree(folder, ignore_errors=True)

    def check(self, name: str) -> None:
        """Raise HistoryUnavailable if a folder of this name was removed during a read."""
        with self._lock:
            gone = name in self._gone
        if gone:
            raise HistoryUnavailable(
                f"the frames have moved on: reading took more than {READ_S_MAX:.0f} s; ask for less at a time"
            )
