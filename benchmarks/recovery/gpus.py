"""The nodes' simulated GPUs: at work while the job makes steps, waiting while it makes none; and they can fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path

WORKS_S = 1.0  # after the newest step: three of them, of which one may be late
LOOK_S = 0.2


class Gpus:
    """One GPU a node, each shown by a file in ``folder``; from ``start`` to ``close`` they follow the job.

    GPUs that are held up by a peer spin in a collective and draw a third of their power. Ones that drew it all would
    say that the job computes something, which excuses that it makes no step.
    """

    def __init__(self, folder: Path, nodes: Iterable[str], step_log: Path) -> None:
        """``step_log`` is written to with each step of the job."""
        self._folder = folder
        self._shown: dict[str, tuple[str, ...]] = dict.fromkeys(nodes, ())
        self._step_log = step_log
        self._working = False
        self._serial = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="gpus", daemon=True)
        folder.mkdir()
        self._write(self._shown)

    def start(self) -> None:
        """They follow the job."""
        self._thread.start()

    def close(self) -> None:
        """They stay as they are."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def file(self, node: str) -> Path:
        """Return what the node's agent reads."""
        return self._folder / node

    def xid(self, node: str, code: int) -> None:
        """The driver of the node tells an XID of its GPU."""
        with self._lock:
            self._serial += 1
            self._shown[node] = (f"xid 0 {code} {self._serial}",)
            self._write([node])

    def mend(self, node: str) -> None:
        """The node's GPU is well."""
        with self._lock:
            self._shown[node] = ()
            self._write([node])

    def _follow(self) -> None:
        while not self._closing.wait(LOOK_S):
            working = self._step_log.exists() and time.time() - self._step_log.stat().st_mtime < WORKS_S
            with self._lock:
                if working != self._working:
                    self._working = working
                    self._write(self._shown)

    def _write(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            lines = ("gpus 1", "steady", *(() if self._working else ("waiting 0",)), *self._shown[node])
            new = self._folder / f"{node}.new"
            new.write_text("".join(f"{line}\n" for line in lines))
            new.replace(self.file(node))
