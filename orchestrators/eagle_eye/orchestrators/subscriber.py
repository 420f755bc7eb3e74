"""Actions carried out, one after the other, through an Orchestrator, with a report on every step."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from eagle_eye.orchestrators.acceptance import refusal
from eagle_eye.orchestrators.cloudevent import unix_seconds
from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.protocol import Cause, Exclusion, Orchestrator, Restart
from eagle_eye.orchestrators.receiver import Readmission, ReportTo, Work
from eagle_eye.schema.action import ActionRequest

log = logging.getLogger(__name__)

# After these, what a checkpoint holds may be the damage itself.
FAULTS_THAT_SPOIL_CHECKPOINTS = frozenset({"loss_not_finite", "loss_divergence", "silent_data_corruption"})
INTERRUPTED = "the subscriber ended while it carried this out"


def distrust_since_s(action: ActionRequest) -> float | None:
    """Return the Unix time from which on checkpoints are not to be trusted; None where they all are."""
    if action.fault not in FAULTS_THAT_SPOIL_CHECKPOINTS:
        return None
    return unix_seconds(action.onset, "onset")


def carry_out(orchestrator: Orchestrator, action: ActionRequest) -> str:
    """The action is done; returns what was done, for people. Raises CannotCarryOutError with the reason."""
    cause = Cause(action.incident_id, action.action_id, action.fault, action.summary, action.repair)
    nodes = tuple(action.exclude)
    done: list[str] = []
    if action.kind in ("exclude_node", "drain_node"):
        now = action.kind == "exclude_node" and action.restart
        done.append(orchestrator.exclude(Exclusion(action.job, action.attempt, nodes, now, cause)))
    elif action.kind in ("notify", "none"):
        return "noted; nothing was changed"
    elif action.kind == "checkpoint_now":
        raise CannotCarryOutError(f"{orchestrator.name} cannot make the job write a checkpoint")
    if action.kind == "restart_job" or (action.kind == "exclude_node" and action.restart):
        request = Restart(action.attempt, distrust_since_s(action), cause, nodes)
        done.append(orchestrator.restart(action.job, request))
    return "; ".join(text for text in done if text)


class Subscriber:
    """Takes work from the receiver's queue on a thread of its own, from ``start`` to ``stop``."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        ledger: Ledger,
        work: queue.Queue[Work],
        report: ReportTo,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._orchestrator = orchestrator
        self._ledger = ledger
        self._work = work
        self._report = report
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="subscriber", daemon=True)

    def start(self) -> None:
        """Work is being done."""
        self._thread.start()

    def stop(self, within_s: float) -> None:
        """No further work is begun; what was in progress has ended, or ``within_s`` has passed."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                work = self._work.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                self.do(work)
            except Exception:
                # The ledger could not be written. The next piece of work must find this thread alive.
                log.exception("work was not done")

    def do(self, work: Work) -> None:
        """The work is done or refused, and reported. Raises only where the ledger cannot be written."""
        if isinstance(work, Readmission):
            self._readmit(work)
            return
        action = work
        # Asked again: it may have waited behind another action that restarted the job.
        reason = refusal(action, self._orchestrator.state(action.job), self._clock())
        if reason is not None:
            self._ledger.refuse(action.action_id)
            self._report(action, "refused", reason)
            return
        if not self._ledger.begin(action.action_id):
            log.info("action %s was withdrawn before its turn", action.action_id)
            return
        self._report(action, "running", "")
        try:
            detail = carry_out(self._orchestrator, action)
        except CannotCarryOutError as error:
            self._report(action, "failed", str(error))
        except Exception as error:
            # The server must hear of it, and the next action must find this thread alive.
            log.exception("action %s (%s)", action.action_id, action.kind)
            self._report(action, "failed", f"unexpected {type(error).__name__} in {self._orchestrator.name}")
        else:
            self._report(action, "done", detail)
        self._ledger.finish(action.action_id)

    def _readmit(self, work: Readmission) -> None:
        try:
            log.info("readmission: %s", self._orchestrator.readmit(work.nodes))
        except CannotCarryOutError as error:
            log.warning("readmission of %s: %s", ", ".join(work.nodes), error)
