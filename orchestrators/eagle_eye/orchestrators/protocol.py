"""The seam between Eagle Eye's actions and what restarts jobs: one protocol, a file per orchestrator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from eagle_eye.schema.action import JobUpdate, RestartScope


@dataclass(frozen=True)
class JobState:
    """What an orchestrator knows about a job: the attempt that counts and the nodes that may be named."""

    attempt: int
    nodes: frozenset[str]
    running: bool


def _silent(_text: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Cause:
    """Why something is asked for: the incident and action, for people who find the traces of it later.

    ``repair`` is what would mend the node (schema/action.py); "" where nobody knows. ``tell`` says how it goes
    while it goes on ("requeued; waits for a free node"): the server shows it at once. ``detected_s`` is when the fault
    was told of and ``expires_s`` when nobody wants the action any more, both Unix times; None where nobody says.
    """

    incident_id: str
    action_id: str
    fault: str
    summary: str
    repair: str = ""
    detected_s: float | None = None
    expires_s: float | None = None
    tell: Callable[[str], None] = field(default=_silent, compare=False, repr=False)

    @property
    def reason(self) -> str:
        """Return the fault and what was seen, in one line."""
        return f"{self.fault}: {self.summary}"


@dataclass(frozen=True)
class Exclusion:
    """Nodes that the job's next attempt does without.

    ``now`` says that a restart without them follows at once: it is refused where the job could not run without
    them. Otherwise it is a wish for the next restart (a drain). ``attempt`` is the one in which they failed.
    ``distrust_since_s`` is that of the restart that follows: kept with the exclusion, it holds also where whoever
    restarts is killed in between and restarts for another reason.
    """

    job: str
    attempt: int
    nodes: tuple[str, ...]
    now: bool
    cause: Cause
    distrust_since_s: float | None = None


@dataclass(frozen=True)
class Restart:
    """How the next attempt shall start.

    ``distrust_since_s`` is a Unix time: checkpoints written from then on must not be resumed from; None
    trusts them all. ``over_attempt`` is the attempt to be ended: where the job is further already, the
    restart has happened and must not happen twice. ``without`` names the nodes that were excluded just before.
    ``job`` is the one that ``restart`` is called with, for a preview; "" where nobody says. ``resume_from`` is what
    the next attempt must find in EAGLE_EYE_RESUME_FROM; "" where it may go on at the newest step that it finds.
    ``scope`` is the smallest restart that is safe: an orchestrator that cannot do less restarts every process.
    """

    over_attempt: int
    distrust_since_s: float | None
    cause: Cause
    without: tuple[str, ...] = ()
    job: str = ""
    resume_from: str = ""
    scope: RestartScope = "job"


class Orchestrator(Protocol):
    """What carries actions out.

    Calls may block. They come from several threads, but those that change something never two at once for one
    job, nor for one node. ``state`` may be asked at any time, also meanwhile.

    Every method raises CannotCarryOutError with the reason where it cannot do what it says, before it has
    changed anything (or saying what it has changed). Node names were matched against ``state(job).nodes``
    before they get here.

    ``resumes`` says that a verb may be asked again for an action that an earlier process left half-done:
    ``exclude`` changes nothing more for a ``cause.action_id`` whose nodes are out already, ``restart`` nothing
    where the job is beyond ``over_attempt``, and both say what is so. Where it is False, such an action is
    reported as failed.
    """

    name: str
    resumes: bool

    def state(self, job: str) -> JobState | None:
        """Return what is known about the job now, within seconds; None for a job that is not this orchestrator's.

        Of job "" whoever keeps nodes that run no job tells those nodes; for all others it is one of nobody's.
        Raises CannotCarryOutError where that cannot be told now: it is asked again.
        """

    def stop(self, job: str, reason: str) -> str:
        """No process of the job runs and none will be started; returns what happened, for people."""

    def exclude(self, request: Exclusion) -> str:
        """The next attempt does without the nodes; returns what happened, for people."""

    def restart(self, job: str, request: Restart) -> str:
        """What still ran of the job is stopped and its next attempt runs; returns its description."""

    def readmit(self, nodes: Sequence[str]) -> str:
        """The nodes may be used again from the next start on; unknown ones are ignored."""


@runtime_checkable
class Previews(Protocol):
    """An orchestrator that can say what it would do: then a dry run says it in its words."""

    def preview(self, request: Exclusion | Restart) -> str:
        """Return what the verb would do, after "would ", nothing changed; raises what the verb would raise."""


@runtime_checkable
class Checkpoints(Protocol):
    """An orchestrator that sees which steps a job has kept."""

    def checkpoint(self, job: str) -> str:
        """Return, for people, which step after now is kept whole. Raises CannotCarryOutError where none comes soon."""


@runtime_checkable
class ReportsJobs(Protocol):
    """An orchestrator that tells the server of its jobs, because nobody tells it better."""

    def jobs(self) -> Mapping[str, JobUpdate]:
        """Return the jobs and how they are, asked every few seconds; raises CannotCarryOutError."""


@runtime_checkable
class FollowsPlans(Protocol):
    """An orchestrator whose jobs go on with fewer nodes by plan, and that sees whether there are spares."""

    def pace_left(self) -> Mapping[str, float | None]:
        """Return what is left of such jobs' pace without one of their nodes, whose place no spare takes.

        0 where a job could not run then, None where a spare takes it. Asked every few seconds; raises
        CannotCarryOutError.
        """


@runtime_checkable
class Closes(Protocol):
    """An orchestrator that holds something which has to be let go."""

    def close(self) -> None:
        """Nothing is held any more; a verb in progress may fail."""
