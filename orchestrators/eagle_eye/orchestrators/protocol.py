"""The seam between Eagle Eye's actions and what restarts jobs: one protocol, a file per orchestrator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class JobState:
    """What an orchestrator knows about a job: the attempt that counts and the nodes that may be named."""

    attempt: int
    nodes: frozenset[str]
    running: bool


@dataclass(frozen=True)
class Cause:
    """Why something is asked for: the incident and action, for people who find the traces of it later.

    ``repair`` is what would mend the node (schema/action.py); "" where nobody knows.
    """

    incident_id: str
    action_id: str
    fault: str
    summary: str
    repair: str = ""

    @property
    def reason(self) -> str:
        """Return the fault and what was seen, in one line."""
        return f"{self.fault}: {self.summary}"


@dataclass(frozen=True)
class Exclusion:
    """Nodes that the job's next attempt does without.

    ``now`` says that a restart without them follows at once: it is refused where the job could not run without
    them. Otherwise it is a wish for the next restart (a drain). ``attempt`` is the one in which they failed.
    """

    job: str
    attempt: int
    nodes: tuple[str, ...]
    now: bool
    cause: Cause


@dataclass(frozen=True)
class Restart:
    """How the next attempt shall start.

    ``distrust_since_s`` is a Unix time: checkpoints written from then on must not be resumed from; None
    trusts them all. ``over_attempt`` is the attempt to be ended: where the job is further already, the
    restart has happened and must not happen twice. ``without`` names the nodes that were excluded just before.
    """

    over_attempt: int
    distrust_since_s: float | None
    cause: Cause
    without: tuple[str, ...] = ()


class Orchestrator(Protocol):
    """What carries actions out. Calls come from one thread, one at a time, and may block.

    Every method raises CannotCarryOutError with the reason where it cannot do what it says, before it has
    changed anything. Node names were matched against ``state(job).nodes`` before they get here.
    """

    name: str

    def state(self, job: str) -> JobState | None:
        """Return what is known about the job now; None for a job that is not this orchestrator's."""

    def stop(self, job: str, reason: str) -> str:
        """No process of the job runs and none will be started; returns what happened, for people."""

    def exclude(self, request: Exclusion) -> str:
        """The next attempt does without the nodes; returns what happened, for people."""

    def restart(self, job: str, request: Restart) -> str:
        """What still ran of the job is stopped and its next attempt runs; returns its description."""

    def readmit(self, nodes: Sequence[str]) -> str:
        """The nodes may be used again from the next start on; unknown ones are ignored."""
