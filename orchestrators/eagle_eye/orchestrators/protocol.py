"""The interface between Eagle Eye's actions and what restarts jobs: the verbs of each orchestrator, and the errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from eagle_eye.schema.action import JobUpdate, RestartScope

# Errors between Eagle Eye and the system that restarts a job.
#
# OrchestratorError
# ├── CannotCarryOutError     the orchestrator may not or cannot do what was asked; the message is the report
# ├── UnacceptableEventError  the webhook's body is signed but not understood
# ├── LowerEpochError         the webhook is from a server that leads no more, or whose database was restored
# └── ServerUnreachableError  Eagle Eye's server did not answer, or not with what was expected
#     └── RejectedError       it answered, and said no


class OrchestratorError(Exception):
    """The base class of this package's errors."""


class CannotCarryOutError(OrchestratorError):
    """The request cannot be carried out; the message says why and is reported to the server unchanged."""


class UnacceptableEventError(OrchestratorError):
    """A correctly signed delivery that is not a CloudEvent that this package understands."""


class LowerEpochError(OrchestratorError):
    """An event's epoch is lower than ``seen``, the highest that was seen; nothing of it is kept."""

    def __init__(self, message: str, seen: int) -> None:
        super().__init__(message)
        self.seen = seen


class ServerUnreachableError(OrchestratorError):
    """The server did not answer or refused; worth retrying later. The message holds no secret."""


class RejectedError(ServerUnreachableError):
    """The server answered with an error; ``status`` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether the server may accept the same request later: after a token is renewed, or an overload is over."""
        return self.status >= 500 or self.status in (401, 403, 408, 425, 429)


@dataclass(frozen=True)
class JobState:
    """An orchestrator's view of a job: the current attempt and the nodes that may be named."""

    attempt: int
    nodes: frozenset[str]
    running: bool


def _silent(_text: str) -> None:
    """Ignore the text."""


@dataclass(frozen=True)
class Cause:
    """The reason for a request: the incident and action, for people who find its traces later.

    ``repair`` is what would repair the node (schema/action.py); "" where unknown. ``tell`` reports progress ("requeued;
    waits for a free node"), which the server shows at once. ``detected_s`` is when the fault was reported and
    ``expires_s`` when the action expires, both Unix times; None where unknown.
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
        """Return the fault and its evidence in one line."""
        return f"{self.fault}: {self.summary}"


@dataclass(frozen=True)
class Exclusion:
    """Nodes that the job's next attempt must not use.

    ``now`` says that a restart without them follows at once: it is refused where the job could not run without them.
    Otherwise it applies to the next restart (a drain). ``attempt`` is the one in which they failed.
    ``distrust_since_s`` is that of the restart that follows: saved with the exclusion, it also applies where the
    restarting process is killed in between and restarts for another reason.
    """

    job: str
    attempt: int
    nodes: tuple[str, ...]
    now: bool
    cause: Cause
    distrust_since_s: float | None = None


@dataclass(frozen=True)
class Restart:
    """How the next attempt must start.

    ``distrust_since_s`` is a Unix time: checkpoints written from then on must not be resumed from; None trusts them
    all. ``over_attempt`` is the attempt to end: if the job is already past it, the restart has happened and must not be
    repeated. ``without`` names the nodes that were excluded just before. ``job`` is the one that ``restart`` is called
    with, for a preview; "" where unknown. ``resume_from`` is the value the next attempt must find in
    EAGLE_EYE_RESUME_FROM; "" where it may resume from the newest step that it finds. ``scope`` is the smallest restart
    that is safe: an orchestrator that cannot do less restarts every process.
    """

    over_attempt: int
    distrust_since_s: float | None
    cause: Cause
    without: tuple[str, ...] = ()
    job: str = ""
    resume_from: str = ""
    scope: RestartScope = "job"


class Orchestrator(Protocol):
    """Carries out actions.

    Calls may block. They come from several threads, but never two changing ones at once for one job or one node.
    ``state`` may be called at any time, also meanwhile.

    Every method raises CannotCarryOutError with the reason where it cannot do its work, before it has changed anything
    (or saying what it has changed). Node names were matched against ``state(job).nodes`` before they get here.

    ``resumes`` says that a verb may be repeated for an action that an earlier process left half-done: ``exclude``
    changes nothing more for a ``cause.action_id`` whose nodes are out already, ``restart`` nothing where the job is
    past ``over_attempt``, and both return the current state. Where it is False, such an action is reported as failed.
    """

    name: str
    resumes: bool

    def state(self, job: str) -> JobState | None:
        """Return what is known about the job now, within seconds; None for a job that is not this orchestrator's.

        For the job "" an orchestrator that manages nodes without a job returns those nodes; for all others it is an
        unknown job. Raises CannotCarryOutError where the state is not available now: the call is repeated.
        """

    def stop(self, job: str, reason: str) -> str:
        """Stop the job for good; return what happened, for people."""

    def exclude(self, request: Exclusion) -> str:
        """Exclude the nodes from the next attempt; return what happened, for people."""

    def restart(self, job: str, request: Restart) -> str:
        """Stop what still runs of the job and start its next attempt; return its description."""

    def readmit(self, nodes: Sequence[str]) -> str:
        """Allow the nodes again from the next start on; unknown ones are ignored."""


@runtime_checkable
class Previews(Protocol):
    """An orchestrator that can describe what it would do: a dry run then uses its text."""

    def preview(self, request: Exclusion | Restart) -> str:
        """Return what the verb would do, after "would ", without changes; raises what the verb would raise."""


@runtime_checkable
class Checkpoints(Protocol):
    """An orchestrator that sees which steps a job has saved."""

    def checkpoint(self, job: str) -> str:
        """Return, for people, a step after now that is saved whole. Raises CannotCarryOutError if none comes soon."""


@runtime_checkable
class ReportsJobs(Protocol):
    """An orchestrator that reports its jobs to the server, for lack of a better source."""

    def jobs(self) -> Mapping[str, JobUpdate]:
        """Return the jobs and their states, called every few seconds. Raises CannotCarryOutError."""


@runtime_checkable
class FollowsPlans(Protocol):
    """An orchestrator whose jobs continue with fewer nodes by plan, and that knows whether there are spares."""

    def pace_left(self) -> Mapping[str, float | None]:
        """Return the remaining pace ratio of such jobs without one of their nodes, if no spare replaces it.

        0 where a job could not run then, None where a spare replaces it. Called every few seconds; raises
        CannotCarryOutError.
        """


@runtime_checkable
class Closes(Protocol):
    """An orchestrator that holds resources."""

    def close(self) -> None:
        """Release them; a verb in progress may fail."""
