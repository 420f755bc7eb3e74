"""Determines what is left of an action that an earlier process did not finish. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eagle_eye.orchestrators.cloudevent import unix_seconds
from eagle_eye.orchestrators.ledger import ActionState
from eagle_eye.orchestrators.protocol import JobState
from eagle_eye.orchestrators.verbs import restarts
from eagle_eye.schema.action import ActionRequest

INTERRUPTED = "the subscriber ended while it carried this out"

# Progress of an action; states of the ledger.
STEPS: tuple[ActionState, ...] = ("begun", "excluded", "restarting")


@dataclass(frozen=True)
class Remainder:
    """What is left to do, or how the action ended, in ``report`` and ``detail``."""

    todo: Literal["everything", "restart", "nothing"]
    report: Literal["running", "done", "failed"] = "running"
    detail: str = "resumed after an interruption"


def remainder(action: ActionRequest, step: ActionState, job: JobState | None, now_s: float) -> Remainder:
    """Return what is left of an action that had come as far as ``step``, given the job as it is now.

    A started exclusion is finished only where the action could still be accepted: the same attempt, in time. A started
    restart is always finished, since the job may have been stopped for it, except where the job still runs unchanged
    and the action has expired.
    """
    if job is None:
        return _failed(f"job {action.job!r} is not run here any more")
    over = job.attempt > action.attempt
    late = now_s >= unix_seconds(action.expires, "expires")
    out = ", ".join(action.exclude)
    if step == "restarting":
        if not over and late and job.running:
            return _failed(f"the job still runs as attempt {job.attempt}, and the action expired at {action.expires}")
        return Remainder("restart")
    if step == "excluded":
        if not restarts(action):
            return Remainder("nothing", "done", f"{out} excluded before the subscriber was interrupted")
        if over:
            return Remainder("nothing", "done", f"{out} excluded; somebody else restarted the job meanwhile")
        if late:
            return _failed(f"{out} excluded; the job was not restarted: the action expired at {action.expires}")
        return Remainder("restart")
    if over:
        return _failed(f"somebody else restarted the job meanwhile (attempt {job.attempt}){_look(out)}")
    if late:
        return _failed(f"the action expired at {action.expires}{_look(out)}")
    return Remainder("everything")


def _failed(why: str) -> Remainder:
    return Remainder("nothing", "failed", f"{INTERRUPTED}; {why}")


def _look(out: str) -> str:
    return f"; {out} may have been excluded or not" if out else ""
