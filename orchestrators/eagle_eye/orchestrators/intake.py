"""Handles deliveries: records them in the ledger, refuses them with a report, or queues them as work."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from standardwebhooks import Webhook, WebhookVerificationError

from eagle_eye.orchestrators import cloudevent
from eagle_eye.orchestrators.acceptance import of_a_former_leader, refusal
from eagle_eye.orchestrators.errors import CannotCarryOutError, LowerEpochError
from eagle_eye.orchestrators.ledger import ActionState, Ledger
from eagle_eye.orchestrators.protocol import JobState
from eagle_eye.orchestrators.resumption import STEPS
from eagle_eye.schema.action import (
    ACTION_EXPIRED,
    ACTION_REQUESTED,
    ACTION_WITHDRAWN,
    NODE_READMITTED,
    ActionRequest,
    ReportState,
)

log = logging.getLogger(__name__)

QUEUE_MAX = 1_000
_CANCELLING = (ACTION_EXPIRED, ACTION_WITHDRAWN)


@dataclass(frozen=True)
class Readmission:
    """Nodes that the server has readmitted; ``key`` is its key in the ledger."""

    nodes: tuple[str, ...]
    key: str


@dataclass(frozen=True)
class Resumption:
    """An action that an earlier process had not finished when it exited, and how far it had come."""

    action: ActionRequest
    step: ActionState


Work = ActionRequest | Readmission | Resumption


class ReportTo(Protocol):
    """Accepts a report on an action; returns once it is durable."""

    def __call__(self, action: ActionRequest, state: ReportState, detail: str) -> None:
        """Make sure that the report will reach the server."""


@dataclass
class WebhookIntake:
    """Takes deliveries.

    ``secrets`` are the currently valid signing secrets, two during a rotation; with none, nothing is accepted.
    ``count`` is called with each delivery's outcome, one word.
    """

    ledger: Ledger
    job_state: Callable[[str], JobState | None]
    report: ReportTo
    secrets: Callable[[], Sequence[str]]
    clock: Callable[[], float] = time.time
    count: Callable[[str], None] = lambda _: None
    work: queue.Queue[Work] = field(default_factory=lambda: queue.Queue(QUEUE_MAX))
    # Two deliveries at once must not overtake each other between the ledger and the queue.
    _order: threading.Lock = field(default_factory=threading.Lock)

    def signed(self, body: bytes, headers: dict[str, str]) -> str | None:
        """Return why the signature is invalid, None where it is valid; timestamps may differ by 5 minutes."""
        reasons = [_verify(secret, body, headers) for secret in self.secrets()]
        return None if None in reasons else (reasons[0] if reasons else "no signing secret is known yet")

    def take(self, webhook_id: str, body: bytes) -> str:
        """Store the event durably; return its outcome.

        Raises UnacceptableEventError, queue.Full, and LowerEpochError: then it is taken once its epoch is high enough.
        """
        event = cloudevent.parse_event(body)
        with self._order:
            if self.ledger.seen(webhook_id) and not self._is_asked_anew(event):
                return self._known(event)
            if self.work.full() and event.type in (ACTION_REQUESTED, NODE_READMITTED):
                raise queue.Full
            self._check_epoch(event)
            if event.type == ACTION_REQUESTED:
                return self._request(webhook_id, cloudevent.parse_action(event))
            if event.type in _CANCELLING:
                action_id = cloudevent.parse_reference(event).action_id
                cancelled = self.ledger.withdraw(webhook_id, action_id, self.clock())
                return "cancelled" if cancelled else "nothing to cancel"
            if event.type == NODE_READMITTED:
                return self._readmit(webhook_id, event)
            # Heartbeats, pings, incidents: only acknowledged.
            self.ledger.record_delivery(webhook_id, self.clock())
            return "acknowledged"

    def resume(self) -> None:
        """Requeue an earlier process's unfinished work in order; actions it had begun come first.

        Blocks while the queue is full: a consumer must be running by then.
        """
        begun = [Resumption(action, step) for step in STEPS for action in self.ledger.actions(step)]
        readmissions = [Readmission(tuple(nodes), key) for key, nodes in self.ledger.readmissions()]
        left: tuple[Work, ...] = (*begun, *self.ledger.actions("queued"), *readmissions)
        for work in left:
            self.work.put(work)

    def _check_epoch(self, event: cloudevent.CloudEvent) -> None:
        """Note the event's epoch; raise LowerEpochError for a lower one, except where nothing is to be done."""
        epoch = cloudevent.epoch_of(event)
        highest = self.ledger.highest_epoch(epoch)
        former = of_a_former_leader(epoch, highest)
        if former is not None and event.type not in _CANCELLING:
            log.warning("%s %s is refused: %s", event.type, event.id, former)
            raise LowerEpochError(former, highest)

    def _request(self, webhook_id: str, action: ActionRequest) -> str:
        now_s = self.clock()
        if self.ledger.state_of(action.action_id) not in (None, "unknown"):
            self.ledger.record_delivery(webhook_id, now_s)
            return self._repeated(action)
        try:
            job = self.job_state(action.job)
            if job is None and not action.job:
                # A node without a job is left to its operator: a refusal here would end the action for the operator,
                # too.
                self.ledger.record_delivery(webhook_id, now_s)
                return "not ours"
            reason = refusal(action, job, now_s)
        except CannotCarryOutError as error:
            # An unknown state is no reason to refuse: it is checked again when the action's turn comes.
            log.warning("job %s: %s; will ask again", action.job, error)
            reason = None
        except Exception:
            # The later check reports it; an error here would only cause a redelivery.
            log.exception("job %s; will ask again", action.job)
            reason = None
        # No redelivery may follow: the next process can have another subscription. So neither stays without the other.
        with self.ledger.together():
            self.ledger.record_action(webhook_id, action, "refused" if reason else "queued", now_s)
            self.report(action, "refused" if reason else "accepted", reason or "")
        if reason is not None:
            log.warning("action %s (%s) refused: %s", action.action_id, action.kind, reason)
            return "refused"
        self.work.put_nowait(action)
        return "queued"

    def _is_asked_anew(self, event: cloudevent.CloudEvent) -> bool:
        """Whether it asks for an action that the server did not know when it was claimed: its records were lost."""
        if event.type != ACTION_REQUESTED:
            return False
        return self.ledger.state_of(cloudevent.parse_reference(event).action_id) == "unknown"

    def _known(self, event: cloudevent.CloudEvent) -> str:
        return self._repeated(cloudevent.parse_action(event)) if event.type == ACTION_REQUESTED else "known"

    def _repeated(self, action: ActionRequest) -> str:
        """Say again what became of a known action, where a later leader asks for it: its records may lack that."""
        before, last = self.ledger.asked_as(action.action_id), self.ledger.last_report(action.action_id)
        if before is not None and last is not None and action.epoch > before.epoch:
            self.report(action, last.state, last.detail)
        return "known"

    def _readmit(self, webhook_id: str, event: cloudevent.CloudEvent) -> str:
        nodes = cloudevent.parse_nodes(event)
        said_s = cloudevent.unix_seconds(event.time, "time") if event.time else self.clock()
        # A late readmission must not undo an exclusion that came after it.
        stale = self.ledger.named_after(nodes, said_s)
        if stale:
            log.warning("readmission of %s is older than its exclusion; ignored", ", ".join(stale))
        wanted = [node for node in nodes if node not in stale]
        self.ledger.record_readmission(webhook_id, wanted, self.clock())
        if not wanted:
            return "stale"
        self.work.put_nowait(Readmission(tuple(wanted), webhook_id))
        return "queued"


def _verify(secret: str, body: bytes, headers: dict[str, str]) -> str | None:
    try:
        Webhook(secret).verify(body, headers, json_parse=False)
    except WebhookVerificationError as error:
        return str(error)
    except ValueError:  # a signature that is not a list or not base64, a body that is not UTF-8
        return "malformed signature or body"
    return None
