"""What a launcher must still know after it was started again: one file, owned by one launcher at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from eagle_eye.orchestrators.errors import OrchestratorError
from eagle_eye.orchestrators.launch.checkpoints import Span
from eagle_eye.orchestrators.whole_file import write_whole


class Memory(msgspec.Struct, frozen=True):
    """The last attempt's number, the nodes that are out, and the times whose checkpoints are spoiled."""

    job: str
    attempt: int = 0
    excluded: list[str] = []
    draining: list[str] = []
    distrusted: list[Span] = []


class MemoryFile:
    """The file in the state folder, locked until ``close``."""

    def __init__(self, folder: Path, job: str) -> None:
        """Raise OrchestratorError where another launcher uses the folder or it belongs to another job."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "launch.json"
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.memory = self._read(job)
        except BlockingIOError:
            os.close(self._lock)
            raise OrchestratorError(f"another launcher uses {folder}") from None
        except BaseException:
            os.close(self._lock)
            raise

    def keep(self, memory: Memory) -> None:
        """The memory is on disk."""
        write_whole(self._path, msgspec.json.format(msgspec.json.encode(memory)))
        self.memory = memory

    def close(self) -> None:
        """Another launcher may use the folder."""
        os.close(self._lock)

    def _read(self, job: str) -> Memory:
        try:
            memory = msgspec.json.decode(self._path.read_bytes(), type=Memory)
        except FileNotFoundError:
            return Memory(job)
        except msgspec.DecodeError as error:
            raise OrchestratorError(f"{self._path}: {error}; repair or remove it") from None
        if memory.job != job:
            raise OrchestratorError(f"{self._path} belongs to job {memory.job!r}; use another --state-dir")
        return memory
