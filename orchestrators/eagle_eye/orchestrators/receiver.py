"""Webhooks of all subscribers: verified, durable, idempotent; then refused with a report, or queued as work.

Standard Webhooks signatures, CloudEvents bodies. A 2xx answer means that the event is on disk.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import uvicorn
from standardwebhooks import Webhook, WebhookVerificationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from eagle_eye.orchestrators import cloudevent
from eagle_eye.orchestrators.cloudevent import unix_seconds
from eagle_eye.orchestrators.ledger import ActionState, Ledger
from eagle_eye.orchestrators.protocol import (
    CannotCarryOutError,
    Cause,
    Exclusion,
    JobState,
    LowerEpochError,
    OrchestratorError,
    Restart,
    UnacceptableEventError,
)
from eagle_eye.schema import problem
from eagle_eye.schema.action import (
    ACTION_EXPIRED,
    ACTION_REQUESTED,
    ACTION_WITHDRAWN,
    EPOCH_HEADER,
    NODE_READMITTED,
    ActionRequest,
    ReportState,
    RestartScope,
)
from eagle_eye.schema.checkpoint_files import MEMORY_PREFIX
from eagle_eye.schema.service import why_not_listening


def of_a_former_leader(epoch: int, highest: int) -> str | None:
    """Return why an event of this epoch is refused where the highest was seen; None where it is taken."""
    if epoch == 0 or epoch >= highest:
        return None
    return (
        f"epoch {epoch} is lower than {highest}, which was seen: it is from a server that leads no more, or from a"
        " database that was restored, whose server raises its epoch now (docs/how-to/two-servers.md)"
    )


def refusal(action: ActionRequest, job: JobState | None, now_s: float) -> str | None:
    """Return why the action is refused, as text for its report; None where it may be carried out."""
    if now_s >= unix_seconds(action.expires, "expires"):
        return f"expired at {action.expires}"
    if job is None:
        return f"job {action.job!r} is not run here"
    if action.attempt < job.attempt:
        return f"asked for attempt {action.attempt}; the job is at attempt {job.attempt} already"
    unknown = sorted(set(action.exclude) - job.nodes)
    if unknown:
        return f"unknown nodes: {', '.join(repr(name[:64]) for name in unknown[:8])}"
    runs_on = {rank.node for rank in action.ranks}
    if job.nodes and runs_on and runs_on.isdisjoint(job.nodes):
        return f"job {action.job!r} runs on other nodes here: it is not the one that is meant"
    if action.kind in ("exclude_node", "drain_node") and not action.exclude:
        return f"{action.kind} names no node"
    return None


# After these faults, checkpoints may contain the damage itself.
FAULTS_THAT_SPOIL_CHECKPOINTS = frozenset({"loss_not_finite", "loss_divergence", "silent_data_corruption"})

Verb = Exclusion | Restart


def verbs(action: ActionRequest, tell: Callable[[str], None] = lambda _: None) -> tuple[Verb, ...]:
    """Return the verbs in order; empty for a notice, and for a checkpoint, which cannot be made."""
    cause = Cause(
        incident_id=action.incident_id,
        action_id=action.action_id,
        fault=action.fault,
        summary=action.summary,
        repair=action.repair,
        detected_s=unix_seconds(action.detected, "detected"),
        expires_s=unix_seconds(action.expires, "expires"),
        tell=tell,
    )
    nodes = tuple(action.exclude)
    since_s = distrust_since_s(action) if restarts(action) else None
    asked: list[Verb] = []
    if action.kind in ("exclude_node", "drain_node"):
        asked.append(Exclusion(action.job, action.attempt, nodes, restarts(action), cause, since_s))
    if restarts(action):
        scope: RestartScope = action.restart_scope or "job"
        asked.append(Restart(action.attempt, since_s, cause, nodes, action.job, resume_from(action), scope))
    return tuple(asked)


def restarts(action: ActionRequest) -> bool:
    """Whether the job is to be restarted; where another system does that, nodes are only excluded."""
    return action.kind == "restart_job" or (action.kind == "exclude_node" and action.restart)


def resume_from(action: ActionRequest) -> str:
    """Return what the next attempt must resume from: the newest trusted step, where later ones are not.

    Otherwise "": the attempt finds the newest step itself, and the job may have progressed since the action was made.
    """
    if action.resume_from is None or distrust_since_s(action) is None:
        return ""
    return f"{MEMORY_PREFIX}{action.resume_from.step}"  # or the newest older one, in memory or on storage


def distrust_since_s(action: ActionRequest) -> float | None:
    """Return the Unix time from which on checkpoints are not trusted; None where they all are."""
    if action.fault not in FAULTS_THAT_SPOIL_CHECKPOINTS:
        return None
    return unix_seconds(action.onset, "onset")


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

    def store_event(self, webhook_id: str, body: bytes) -> str:
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


BODY_BYTES_MAX = 1_048_576
BODY_S_MAX = 10.0
WEBHOOK_ID_CHARACTERS_MAX = 256
START_DEADLINE_S = 10.0


def create_app(intake: WebhookIntake, pages: Sequence[Route] = ()) -> Starlette:
    """Return the ASGI application: POST / takes deliveries; GET /healthz and ``pages`` answer."""

    async def deliver(request: Request) -> Response:
        refused = _refused_by_headers(request)
        if refused is not None:
            return refused
        try:
            async with asyncio.timeout(BODY_S_MAX):
                body = await _body(request)
        except ClientDisconnect:
            return _problem(400, "disconnected", "the body ended early")
        except TimeoutError:
            slow = _problem(408, "slow", f"the body did not arrive within {BODY_S_MAX:g} s")
            slow.headers["connection"] = "close"
            return slow
        if body is None:
            return _problem(413, "body-too-large", f"the body is over {BODY_BYTES_MAX} bytes")
        unsigned = await run_in_threadpool(intake.signed, body, dict(request.headers))
        if unsigned is not None:
            intake.count("bad signature")
            return _problem(401, "bad-signature", unsigned)
        return await run_in_threadpool(_taken, intake, request.headers["webhook-id"], body)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[Route("/", deliver, methods=["POST"]), *(pages or [Route("/healthz", health)])],
        exception_handlers={
            404: lambda _, __: _problem(404, "not-found", "deliveries go to /"),
            405: lambda _, __: _problem(405, "method-not-allowed", "deliveries are sent by POST"),
            500: lambda _, __: _problem(500, "internal", "the delivery was not recorded; send it again"),
        },
    )


def listen_on(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free one. Raises OrchestratorError where that is not possible."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128, reuse_port=False
        )
    except OSError as error:
        raise OrchestratorError(
            f"{why_not_listening(error, host, port)}; --listen takes another address or port"
        ) from None


def url_of(listening: socket.socket) -> str:
    """Return the URL for deliveries to the socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class Receiver:
    """Accepts deliveries on its own thread, from ``start`` to ``stop``. The caller keeps the socket."""

    def __init__(self, intake: WebhookIntake, listening: socket.socket, pages: Sequence[Route] = ()) -> None:
        self._socket = listening
        # asyncio and h11: the same behaviour whatever else is installed.
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(intake, pages), loop="asyncio", http="h11", ws="none", lifespan="off",
                log_config=None, log_level="warning", access_log=False, server_header=False, timeout_keep_alive=10,
                timeout_graceful_shutdown=3, limit_concurrency=64,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._serve, name="receiver", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether deliveries are accepted."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start accepting deliveries. Raises OrchestratorError where the server does not come up."""
        self._thread.start()
        until_s = time.monotonic() + START_DEADLINE_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until_s:
                raise OrchestratorError(f"the receiver on {url_of(self._socket)} did not start")
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop accepting deliveries; finish those in progress."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(START_DEADLINE_S)

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


def _refused_by_headers(request: Request) -> Response | None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != cloudevent.CONTENT_TYPE:
        return _problem(415, "content-type", f"expected {cloudevent.CONTENT_TYPE}")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal():
        return _problem(400, "content-length", "expected a number of bytes")
    if int(length) > BODY_BYTES_MAX:
        return _problem(413, "body-too-large", f"the body is over {BODY_BYTES_MAX} bytes")
    if not 0 < len(request.headers.get("webhook-id", "")) <= WEBHOOK_ID_CHARACTERS_MAX:
        return _problem(401, "bad-signature", f"webhook-id: expected 1 to {WEBHOOK_ID_CHARACTERS_MAX} characters")
    return None


def _taken(intake: WebhookIntake, webhook_id: str, body: bytes) -> Response:
    try:
        outcome = intake.store_event(webhook_id, body)
    except UnacceptableEventError as error:
        intake.count("malformed")
        return _problem(400, "malformed-event", str(error))
    except LowerEpochError as error:
        intake.count("lower epoch")
        lower = _problem(409, "epoch", str(error))
        lower.headers[EPOCH_HEADER] = str(error.seen)
        return lower
    except queue.Full:
        intake.count("busy")
        busy = _problem(503, "busy", f"{QUEUE_MAX} actions wait already")
        busy.headers["retry-after"] = "5"
        return busy
    intake.count(outcome)
    return JSONResponse({"outcome": outcome}, status_code=202 if outcome == "queued" else 200)


async def _body(request: Request) -> bytes | None:
    """Return the body, None as soon as it is longer than allowed (chunked bodies announce no length)."""
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > BODY_BYTES_MAX:
            return None
    return bytes(parts)


def _problem(status: int, reason: str, detail: str) -> JSONResponse:
    return JSONResponse(problem.problem(status, reason, detail), status_code=status, media_type=problem.CONTENT_TYPE)
