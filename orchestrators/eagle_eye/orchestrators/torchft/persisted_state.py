"""State that outlives the subscriber: excluded nodes, and the replicas each action has ended."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from eagle_eye.orchestrators.errors import OrchestratorError
from eagle_eye.orchestrators.whole_file import write_whole

ACTIONS_MAX = 200  # the latest are kept


class Kept(msgspec.Struct, frozen=True):
    """``excluded``: action by node. ``doomed``: the replicas that each action ends, by action."""

    excluded: dict[str, str] = {}
    doomed: dict[str, list[str]] = {}


class TorchftMemory:
    """A state file, and another with the excluded nodes, one per line, for the launcher of replica groups."""

    def __init__(self, file: Path, exclude_file: Path) -> None:
        """Raise OrchestratorError where the state file is not ours or the other cannot be written."""
        self._file, self._exclude_file = file, exclude_file
        self._lock = threading.Lock()
        try:
            self._kept = msgspec.json.decode(file.read_bytes(), type=Kept)
        except FileNotFoundError:
            self._kept = Kept()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OrchestratorError(f"{file}: {error}; repair or remove it") from None
        try:
            self._publish()
        except OSError as error:
            raise OrchestratorError(f"--exclude-file {exclude_file}: {error.strerror}") from None

    @property
    def excluded(self) -> dict[str, str]:
        """Return the excluded nodes, and the action of each."""
        return self._kept.excluded

    def doomed(self, action_id: str) -> list[str] | None:
        """Return the replicas that the action ends, None where it ends none yet."""
        return self._kept.doomed.get(action_id)

    def exclude(self, nodes: Sequence[str], action_id: str) -> None:
        """Add the nodes to both files."""
        with self._lock:
            self._keep(Kept({**self._kept.excluded, **dict.fromkeys(nodes, action_id)}, self._kept.doomed))
            self._publish()

    def readmit(self, nodes: Sequence[str]) -> list[str]:
        """Remove the nodes; return those that were excluded."""
        with self._lock:
            were = [node for node in nodes if node in self._kept.excluded]
            left = {node: action for node, action in self._kept.excluded.items() if node not in were}
            self._keep(Kept(left, self._kept.doomed))
            self._publish()
        return were

    def doom(self, action_id: str, replicas: Sequence[str]) -> None:
        """Record that the action ends these replicas, also if it is repeated."""
        with self._lock:
            doomed = {**self._kept.doomed, action_id: list(replicas)}
            self._keep(Kept(self._kept.excluded, dict(list(doomed.items())[-ACTIONS_MAX:])))

    def _keep(self, kept: Kept) -> None:
        write_whole(self._file, msgspec.json.encode(kept))
        self._kept = kept

    def _publish(self) -> None:
        lines = "".join(f"{node}\n" for node in sorted(self._kept.excluded))
        write_whole(self._exclude_file, lines.encode())
        # For the launchers of other users: node names are not secret.
        self._exclude_file.chmod(0o644)
