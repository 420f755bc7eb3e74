"""State that survives this process: the restarts it has begun, and the jobs it holds. Touches one file.

Slurm has the rest. The number of restarts before ours is saved because it shows whether the restart that Slurm counts
is the requested one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from eagle_eye.orchestrators.errors import OrchestratorError
from eagle_eye.orchestrators.whole_file import write_whole

ENTRIES_MAX = 1_000
MEMORY_S = 14 * 86_400.0


class BegunRestart(msgspec.Struct, frozen=True):
    """A restart in progress or done; ``restarts`` is Slurm's count before it. Times are Unix seconds.

    ``without`` are the nodes that we wrote into the job's ExcNodeList; ``held`` says that we hold it for lack of nodes.
    For a job that follows a plan, ``job`` is its name in the plan and ``wanted`` how many nodes it wants; "" and 0 for
    others. ``became`` is the job that was submitted in its place, 0 for none.
    """

    slurm_id: int
    restarts: int
    without: list[str]
    at_s: float
    held: bool = False
    job: str = ""
    wanted: int = 0
    became: int = 0


class SlurmMemory:
    """The restarts begun, by action; thread-safe. Raises OrchestratorError for a file that is not ours."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._path = path
        self._now = now
        self._lock = threading.Lock()
        try:
            self._begun = msgspec.json.decode(path.read_bytes(), type=dict[str, BegunRestart])
        except FileNotFoundError:
            self._begun = {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OrchestratorError(f"{path} cannot be read: {error}; move it away to begin anew") from None

    def of(self, action_id: str) -> BegunRestart | None:
        """Return the restart that was begun for an action, None for none."""
        with self._lock:
            return self._begun.get(action_id)

    def keep(self, action_id: str, begun: BegunRestart) -> None:
        """Save it to disk; entries older than MEMORY_S, or beyond ENTRIES_MAX, are forgotten."""
        with self._lock:
            oldest_s = self._now() - MEMORY_S
            kept = {name: one for name, one in self._begun.items() if one.at_s > oldest_s and name != action_id}
            kept[action_id] = begun
            self._begun = dict(list(kept.items())[-ENTRIES_MAX:])
            write_whole(self._path, msgspec.json.encode(self._begun))

    def of_job(self, slurm_id: int) -> list[BegunRestart]:
        """Return the restarts of a job, oldest first, with those of the job that it was submitted to replace."""
        return [one for one in self.all().values() if slurm_id in (one.slurm_id, one.became)]

    def all(self) -> dict[str, BegunRestart]:
        """Return all that is known, oldest first."""
        with self._lock:
            return dict(self._begun)
