"""Carries out actions through an Orchestrator, in order per job, with a report on every step."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar

from eagle_eye.orchestrators.acceptance import refusal
from eagle_eye.orchestrators.claims import StoppingError
from eagle_eye.orchestrators.cloudevent import unix_seconds
from eagle_eye.orchestrators.dry_run import would
from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.intake import Readmission, ReportTo, Resumption, Work
from eagle_eye.orchestrators.lanes import Lanes
from eagle_eye.orchestrators.ledger import ActionState, Ledger
from eagle_eye.orchestrators.protocol import Checkpoints, Exclusion, JobState, Orchestrator
from eagle_eye.orchestrators.resumption import INTERRUPTED, remainder
from eagle_eye.orchestrators.verbs import verbs
from eagle_eye.schema.action import ActionRequest
from eagle_eye.schema.backoff import Backoff

log = logging.getLogger(__name__)

PARALLEL_MAX = 8
ASK_AGAIN_S = 2.0
# The state of a job that was stopped for a restart is worth retrying for longer than the action was valid.
RESUME_WITHIN_S = 600.0
READMIT_WITHIN_S = 600.0
READMIT_PAUSE_S_MAX = 60.0

AnswerT = TypeVar("AnswerT")


class Subscriber:
    """Takes work from the receiver's queue, from ``start`` to ``stop``.

    Up to ``parallel`` independent actions at once. Before anything is changed, ``claim`` returns why it must not be, or
    None. With ``dry_run`` nothing is changed, and actions are refused with what would have been done as the reason.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        ledger: Ledger,
        work: queue.Queue[Work],
        report: ReportTo,
        clock: Callable[[], float] = time.time,
        *,
        claim: Callable[[ActionRequest, threading.Event], str | None] = lambda _action, _stopping: None,
        parallel: int = 1,
        dry_run: bool = False,
        ask_again_s: float = ASK_AGAIN_S,
    ) -> None:
        self._orchestrator = orchestrator
        self._ledger = ledger
        self._report = report
        self._clock = clock
        self._claim = claim
        self._dry_run = dry_run
        self._ask_again_s = ask_again_s
        self.lanes = Lanes(work, self.do, concerns, parallel)

    @property
    def alive(self) -> bool:
        """Whether work is being accepted."""
        return self.lanes.alive

    def start(self) -> None:
        """Start working."""
        self.lanes.start()

    def stop(self, within_s: float) -> bool:
        """Start no further work; return whether running work ended within ``within_s``."""
        return self.lanes.stop(within_s)

    def do(self, work: Work) -> None:
        """Do the work or refuse it, and report. Raises only where the ledger cannot be written."""
        if isinstance(work, Readmission):
            self._readmit(work)
        elif isinstance(work, Resumption):
            self._resume(work)
        else:
            self._take_up(work)

    def _take_up(self, action: ActionRequest) -> None:
        # Checked again: it may have waited behind another action that restarted the job.
        try:
            job = self._state(action, unix_seconds(action.expires, "expires"))
        except CannotCarryOutError as error:
            if self._ledger.begin(action.action_id):
                self._end(action, "failed", f"the state of job {action.job!r} is not known: {error}")
            return
        except StoppingError:
            return
        reason = refusal(action, job, self._clock())
        if reason is None and self._dry_run:
            reason = self._would(action)
        if reason is not None:
            if self._ledger.refuse(action.action_id):
                self._report(action, "refused", reason)
            return
        if not self._may_begin(action):
            return
        if not self._ledger.begin(action.action_id):
            log.info("action %s was withdrawn before its turn", action.action_id)
            return
        self._report(action, "running", "")
        self._carry_out(action, skip_exclusion=False)

    def _may_begin(self, action: ActionRequest) -> bool:
        """Return whether the server lets the action begin; what changes nothing is not asked for."""
        try:
            no = self._claim(action, self.lanes.stopping) if verbs(action) else None
        except StoppingError:
            return False
        if no is not None and self._ledger.refuse(action.action_id):
            # Not reported: the action may be another subscriber's, or is over.
            log.warning("action %s (%s) is not begun: %s", action.action_id, action.kind, no)
        return no is None

    def _resume(self, work: Resumption) -> None:
        action = work.action
        if self._dry_run or not self._orchestrator.resumes:
            self._end(action, "failed", INTERRUPTED + ("; this one runs dry" if self._dry_run else ""))
            return
        try:
            job = self._state(action, max(unix_seconds(action.expires, "expires"), self._clock() + RESUME_WITHIN_S))
        except CannotCarryOutError as error:
            self._end(action, "failed", f"{INTERRUPTED}; the state of job {action.job!r} is not known: {error}")
            return
        except StoppingError:
            return
        left = remainder(action, work.step, job, self._clock())
        if left.todo == "nothing":
            self._end(action, left.report, left.detail)
            return
        self._report(action, left.report, left.detail)
        self._carry_out(action, skip_exclusion=left.todo == "restart")

    def _carry_out(self, action: ActionRequest, *, skip_exclusion: bool) -> None:
        mark = partial(self._ledger.mark, action.action_id)
        does = partial(carry_out, self._orchestrator, action, self._tell(action), mark, skip_exclusion=skip_exclusion)
        try:
            detail = self._answer(does)
        except CannotCarryOutError as error:
            self._end(action, "failed", str(error))
        else:
            self._end(action, "done", detail)

    def _end(self, action: ActionRequest, state: str, detail: str) -> None:
        # The report first: a crash in between repeats a harmless report; the other order would lose it.
        self._report(action, "done" if state == "done" else "failed", detail)
        self._ledger.finish(action.action_id)

    def _tell(self, action: ActionRequest) -> Callable[[str], None]:
        return lambda text: self._report(action, "running", text)

    def _answer(self, asked: Callable[[], AnswerT]) -> AnswerT:
        """Return the orchestrator's answer. Raises only CannotCarryOutError, whatever goes wrong in it."""
        try:
            return asked()
        except CannotCarryOutError:
            raise
        except Exception as error:
            # The server must be told, and the next action must find us alive.
            log.exception("in %s", self._orchestrator.name)
            raise _UnexpectedError(f"unexpected {type(error).__name__} in {self._orchestrator.name}") from error

    def _would(self, action: ActionRequest) -> str:
        try:
            return self._answer(partial(would, self._orchestrator, action))
        except CannotCarryOutError as error:
            return f"dry run: would fail: {error}"

    def _state(self, action: ActionRequest, until_s: float) -> JobState | None:
        """Return the job's state, retrying until it is available. Raises CannotCarryOutError after ``until_s``."""
        while True:
            try:
                return self._answer(partial(self._orchestrator.state, action.job))
            except _UnexpectedError:
                raise
            except CannotCarryOutError as error:
                if self._clock() + self._ask_again_s >= until_s:
                    raise
                log.warning("job %s: %s; will ask again", action.job, error)
            if self.lanes.stopping.wait(self._ask_again_s):
                raise StoppingError

    def _readmit(self, work: Readmission) -> None:
        names = ", ".join(work.nodes)
        if self._dry_run:
            log.info("dry run: would readmit %s", names)
            self._ledger.readmitted(work.key)
            return
        until_s = self._clock() + READMIT_WITHIN_S
        pause = Backoff(self._ask_again_s, READMIT_PAUSE_S_MAX)
        while True:
            try:
                log.info("readmission: %s", self._answer(partial(self._orchestrator.readmit, work.nodes)))
                break
            except CannotCarryOutError as error:
                wait_s = pause.next_s()
                if self._clock() + wait_s >= until_s:
                    log.error("readmission of %s: %s; given up", names, error)  # noqa: TRY400 - the message says it
                    break
                log.warning("readmission of %s: %s; will try again", names, error)
            if self.lanes.stopping.wait(wait_s):
                return
        self._ledger.readmitted(work.key)


class _UnexpectedError(CannotCarryOutError):
    """The orchestrator's program is at fault: retrying would not help."""


def carry_out(
    orchestrator: Orchestrator,
    action: ActionRequest,
    tell: Callable[[str], None] = lambda _: None,
    mark: Callable[[ActionState], None] = lambda _: None,
    *,
    skip_exclusion: bool = False,
) -> str:
    """Carry out the action; return what was done, for people. Raises CannotCarryOutError with the reason.

    ``mark`` is called with the progress before each next step. ``skip_exclusion``: an earlier process has done that
    part.
    """
    if action.kind == "checkpoint_now" and isinstance(orchestrator, Checkpoints):
        return orchestrator.checkpoint(action.job)
    if action.kind == "checkpoint_now":
        raise CannotCarryOutError(f"{orchestrator.name} cannot make the job write a checkpoint")
    asked = verbs(action, tell)
    if not asked:
        return "noted; nothing was changed"
    done: list[str] = []
    for verb in asked:
        if not isinstance(verb, Exclusion):
            mark("restarting")
            done.append(orchestrator.restart(action.job, verb))
        elif not skip_exclusion:
            done.append(orchestrator.exclude(verb))
            mark("excluded")
    return "; ".join(text for text in done if text)


def concerns(work: Work) -> frozenset[Hashable]:
    """Return the jobs, incidents and nodes that the work concerns."""
    if isinstance(work, Readmission):
        return frozenset(("node", node) for node in work.nodes)
    action = work.action if isinstance(work, Resumption) else work
    nodes = [("node", node) for node in action.exclude]
    return frozenset([("job", action.job), ("incident", action.incident_id), *nodes])
