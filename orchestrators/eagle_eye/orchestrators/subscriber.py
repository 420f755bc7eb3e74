"""Carries out actions through an Orchestrator, in order per job, with a report on every step."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from eagle_eye.orchestrators.cloudevent import unix_seconds
from eagle_eye.orchestrators.ledger import ActionState, Ledger
from eagle_eye.orchestrators.protocol import (
    CannotCarryOutError,
    Checkpoints,
    Exclusion,
    JobState,
    Orchestrator,
    Previews,
)
from eagle_eye.orchestrators.receiver import (
    INTERRUPTED,
    Readmission,
    ReportTo,
    Resumption,
    Verb,
    Work,
    refusal,
    remainder,
    verbs,
)
from eagle_eye.orchestrators.server_client import StoppingError
from eagle_eye.schema.action import ActionRequest
from eagle_eye.schema.backoff import Backoff


def would(orchestrator: Orchestrator, action: ActionRequest) -> str:
    """Return the report of a dry run, which begins with "dry run:"."""
    if action.kind == "checkpoint_now" and isinstance(orchestrator, Checkpoints):
        return "dry run: would wait for a step that is kept whole"
    if action.kind == "checkpoint_now":
        return f"dry run: would fail: {orchestrator.name} cannot make the job write a checkpoint"
    asked = verbs(action)
    if not asked:
        return "dry run: would note it and change nothing"
    try:
        return "dry run: would " + "; then ".join(_in_words(orchestrator, action.job, verb) for verb in asked)
    except CannotCarryOutError as error:
        return f"dry run: would fail: {error}"


def _in_words(orchestrator: Orchestrator, job: str, verb: Verb) -> str:
    if isinstance(orchestrator, Previews):
        return orchestrator.preview(verb)
    if isinstance(verb, Exclusion):
        return f"exclude {', '.join(verb.nodes)} from job {job}" + ("" if verb.now else " at its next restart")
    without = f" without {', '.join(verb.without)}" if verb.without else ""
    return f"restart job {job}, now at attempt {verb.over_attempt},{without}".rstrip(",")


POLL_S = 0.05
WAITING_MAX = 1_000

WorkT = TypeVar("WorkT")


class Lanes(Generic[WorkT]):
    """Takes work from a queue, from ``start`` to ``stop``, and runs it on up to ``parallel`` threads.

    ``keys`` returns what a piece of work concerns: it starts once all earlier work with a common key is finished.
    """

    def __init__(
        self,
        work: queue.Queue[WorkT],
        do: Callable[[WorkT], None],
        keys: Callable[[WorkT], frozenset[Hashable]],
        parallel: int,
    ) -> None:
        self._work = work
        self._do = do
        self._keys = keys
        self._parallel = parallel
        self._waiting: list[WorkT] = []
        self._running: dict[threading.Thread, frozenset[Hashable]] = {}
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="subscriber", daemon=True)

    @property
    def waiting(self) -> int:
        """How many pieces of work have not started."""
        return len(self._waiting) + self._work.qsize()

    @property
    def running(self) -> int:
        """How many pieces of work are running."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """Whether work is being accepted."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start working."""
        self._thread.start()

    def stop(self, within_s: float) -> bool:
        """Start no further work; return whether all running work ended within ``within_s``."""
        until_s = time.monotonic() + within_s
        self.stopping.set()
        for thread in (self._thread, *list(self._running)):
            if thread.is_alive():
                thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in list(self._running))

    def _run(self) -> None:
        while not self.stopping.is_set():
            if len(self._waiting) < WAITING_MAX:
                with contextlib.suppress(queue.Empty):
                    self._waiting.append(self._work.get(timeout=POLL_S))
            else:
                self.stopping.wait(POLL_S)
            self._begin()

    def _begin(self) -> None:
        self._running = {thread: keys for thread, keys in self._running.items() if thread.is_alive()}
        taken = frozenset[Hashable]().union(*self._running.values())
        still: list[WorkT] = []
        for work in self._waiting:
            keys = self._keys(work)
            if keys & taken or len(self._running) >= self._parallel:
                still.append(work)
            else:
                # Daemons: work that blocks forever must not keep the process alive; the ledger records its progress.
                thread = threading.Thread(target=self._one, args=(work,), name="action", daemon=True)
                self._running[thread] = keys
                thread.start()
            taken |= keys
        self._waiting = still

    def _one(self, work: WorkT) -> None:
        try:
            self._do(work)
        except Exception:
            # Writing the ledger failed. The lanes must survive for the next piece of work.
            log.exception("work was not done")


log = logging.getLogger(__name__)

PARALLEL_MAX = 8
ASK_AGAIN_S = 2.0
# The state of a job that was stopped for a restart is worth retrying for longer than the action was valid.
RESUME_WITHIN_S = 600.0
READMIT_WITHIN_S = 600.0
READMIT_PAUSE_S_MAX = 60.0

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class SubscriberSettings:
    """How a subscriber works.

    Up to ``parallel`` independent actions at once. With ``dry_run`` nothing is changed, and actions are refused with
    what would have been done as the reason. A job's state that is not available is asked for again after
    ``ask_again_s``.
    """

    parallel: int = 1
    dry_run: bool = False
    ask_again_s: float = ASK_AGAIN_S


ONE_AT_A_TIME = SubscriberSettings()


class Subscriber:
    """Takes work from the receiver's queue, from ``start`` to ``stop``.

    Before anything is changed, ``claim`` returns why it must not be, or None.
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
        settings: SubscriberSettings = ONE_AT_A_TIME,
    ) -> None:
        self._orchestrator = orchestrator
        self._ledger = ledger
        self._report = report
        self._clock = clock
        self._claim = claim
        self._dry_run = settings.dry_run
        self._ask_again_s = settings.ask_again_s
        self.lanes = Lanes(work, self.do, concerns, settings.parallel)

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
