"""The launcher's state across restarts: one file, owned by one launcher at a time."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

import msgspec

from eagle_eye.orchestrators.errors import OrchestratorError
from eagle_eye.orchestrators.launch.blame import Raised
from eagle_eye.orchestrators.launch.checkpoints import Span
from eagle_eye.orchestrators.launch.state import ENDED, KnownStarts, LauncherNodes, Phase, State
from eagle_eye.orchestrators.whole_file import write_whole


class LauncherMemory(msgspec.Struct, frozen=True):
    """The saved part of the state (state.py), and the id shared by the ranks of this folder's launchers.

    ``phase`` is the last launcher's; after a kill it is not a final one.
    """

    job: str
    attempt: int = 0
    excluded: list[str] = []
    draining: list[str] = []
    distrusted: list[Span] = []
    distrust_since_s: float | None = None
    suspected: list[float] = []
    doubted_s: float | None = None
    members: list[str] = []
    restarts: int = 0
    step_max: int | None = None
    starts: KnownStarts = KnownStarts()
    raised_before: Raised = Raised()
    phase: str = Phase.FINISHED.value
    launch: str = ""


def remember(memory: LauncherMemory, state: State) -> LauncherMemory:
    """Return the part of the state to save."""
    return msgspec.structs.replace(
        memory,
        attempt=state.attempt,
        excluded=sorted(state.excluded),
        draining=sorted(state.draining),
        distrusted=list(state.distrusted),
        distrust_since_s=state.distrust_since_s,
        suspected=list(state.suspected),
        doubted_s=state.doubted_s,
        members=list(state.members),
        restarts=state.restarts,
        step_max=state.step_max,
        starts=state.starts,
        raised_before=state.raised_before,
        phase=state.phase.value,
    )


def resume(memory: LauncherMemory, fleet: LauncherNodes, attempts_before: int = 0) -> State:
    """Return the next launcher's initial state: a new attempt, whatever the last one was doing.

    ``attempts_before`` is the attempt that the server knows of: requests about those attempts are void. The restart
    budget is reset where the last launcher exited by itself, and kept where it was killed.
    """
    known = frozenset(fleet.nodes)
    ended = memory.phase in ENDED
    excluded = frozenset(memory.excluded) & known
    return State(
        attempt=max(memory.attempt, attempts_before) + 1,
        members=tuple(node for node in memory.members if node in known)[: fleet.wanted],
        excluded=excluded,
        lost=excluded,  # no runner is started there: once readmitted, it is not waited for before it is ready
        draining=frozenset(memory.draining) & known,
        distrusted=tuple(memory.distrusted),
        distrust_since_s=memory.distrust_since_s,
        suspected=tuple(memory.suspected),
        doubted_s=memory.doubted_s,
        restarts=0 if ended else memory.restarts,
        step_max=memory.step_max,
        starts=memory.starts,
        raised_before=Raised() if ended else memory.raised_before,
    )


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

    def keep(self, state: State) -> None:
        """Save the state to disk. Raises OSError."""
        memory = remember(self.memory, state)
        if memory != self.memory:
            write_whole(self._path, msgspec.json.format(msgspec.json.encode(memory)))
            self.memory = memory

    def close(self) -> None:
        """Release the folder for another launcher."""
        os.close(self._lock)

    def _read(self, job: str) -> LauncherMemory:
        try:
            memory = msgspec.json.decode(self._path.read_bytes(), type=LauncherMemory)
        except FileNotFoundError:
            memory = LauncherMemory(job)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OrchestratorError(f"{self._path}: {error}; repair or remove it") from None
        if memory.job != job:
            raise OrchestratorError(f"{self._path} belongs to job {memory.job!r}; use another --state-dir")
        return memory if memory.launch else msgspec.structs.replace(memory, launch=secrets.token_hex(8))
