"""One subscriber, from its start to a signal: wires receiver, ledger, lanes, reports and subscription."""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from eagle_eye.orchestrators.command_line import token
from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.orchestrate.settings import OrchestratorKind
from eagle_eye.orchestrators.protocol import (
    CannotCarryOutError,
    Closes,
    FollowsPlans,
    JobState,
    Orchestrator,
    OrchestratorError,
    ReportsJobs,
    ServerUnreachableError,
)
from eagle_eye.orchestrators.receiver import Receiver, WebhookIntake, listen_on, url_of
from eagle_eye.orchestrators.server_client import Claims, Reporter, ServerClient
from eagle_eye.orchestrators.subscriber import PARALLEL_MAX, Subscriber, SubscriberSettings
from eagle_eye.orchestrators.subscription import SubscriptionKeeper, WantedSubscription
from eagle_eye.schema.action import ActionRequest, JobUpdate, ReportState

log = logging.getLogger(__name__)

SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64


class SecretFile:
    """The secrets in a file, one a line, ``whsec_`` and base64; two during a rotation. Ignores empty lines and #...

    If the file becomes unreadable or empty, the last secrets stay valid.
    """

    def __init__(self, path: Path) -> None:
        """Raise OrchestratorError where the file cannot be used."""
        self._path = path
        self._read_at = self._changed()
        self._secrets = self._read()

    def __call__(self) -> list[str]:
        """Return the currently valid secrets."""
        try:
            changed = self._changed()
            if changed != self._read_at:
                self._read_at = changed
                self._secrets = self._read()
                log.info("%s: %d signing secrets", self._path, len(self._secrets))
        except OrchestratorError as error:
            log.warning("%s; the secrets read before go on to count", error)
        return self._secrets

    def _changed(self) -> tuple[int, int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise OrchestratorError(f"--secret-file {self._path}: {error.strerror}") from None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino  # ctime: permissions changed

    def _read(self) -> list[str]:
        try:
            lines = self._path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OrchestratorError(f"--secret-file {self._path}: {type(error).__name__}") from None
        secrets = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        for number, secret in enumerate(secrets, 1):
            if not _usable(secret):
                raise OrchestratorError(
                    f"--secret-file {self._path}: secret {number} is none; expected whsec_ and base64 of 24 to 64 bytes"
                )
        if not secrets:
            raise OrchestratorError(f"--secret-file {self._path}: holds no secret; expected whsec_... on a line")
        return secrets


def _usable(secret: str) -> bool:
    """Whether the server would sign with it. The library would accept any text as base64, even an empty one."""
    head, _, encoded = secret.partition("whsec_")
    try:
        decoded = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        return False
    return not head and SECRET_BYTES_MIN <= len(decoded) <= SECRET_BYTES_MAX


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "eagle_eye_orchestrate_"


class Metrics:
    """Counters since the process started, and gauges that are read on scrape."""

    def __init__(self, kind: str) -> None:
        self._registry = CollectorRegistry()
        self._kind = kind
        self._deliveries = Counter(
            f"{_PREFIX}deliveries_total",
            "Webhook deliveries, by what became of them.",
            ["kind", "outcome"],
            registry=self._registry,
        )
        self._reports = Counter(
            f"{_PREFIX}reports_total",
            "Reports made on actions, by the action and what was reported.",
            ["kind", "action", "state"],
            registry=self._registry,
        )

        self._claims = Counter(
            f"{_PREFIX}claims_total",
            "Actions claimed at the server before they were begun, by what came of it.",
            ["kind", "outcome"],
            registry=self._registry,
        )

    def delivered(self, outcome: str) -> None:
        """Count an answered delivery."""
        self._deliveries.labels(self._kind, outcome).inc()

    def reported(self, action: str, state: str) -> None:
        """Count a report."""
        self._reports.labels(self._kind, action, state).inc()

    def claimed(self, outcome: str) -> None:
        """Count a claim."""
        self._claims.labels(self._kind, outcome).inc()

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge with the value returned by ``read``."""
        Gauge(_PREFIX + name, help_text, ["kind"], registry=self._registry).labels(self._kind).set_function(read)

    def page(self) -> bytes:
        """Return the page in Prometheus' format."""
        return generate_latest(self._registry)


WATCH_S = 0.5
REPORTED_AGAIN_S = 60.0  # the remaining pace of jobs: the server may have lost it
# Work still in progress after this time is left to the next process.
FINISH_WITHIN_S = 5.0
REPORTS_WITHIN_S = 3.0
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - recognised, not listened on


class Service:
    """Open until ``close``. Opening raises OrchestratorError or ValueError for an unusable option."""

    def __init__(self, kind: OrchestratorKind, options: argparse.Namespace) -> None:
        self._options = options
        self._parts = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._told_to_stop = ""
        try:
            self._open(kind, options)
        except BaseException:
            self._parts.close()
            raise

    def _open(self, kind: OrchestratorKind, options: argparse.Namespace) -> None:
        folder: Path = options.state_dir
        _own(folder, self._parts)
        client = self._client = ServerClient(options.server, token(options.token_file))
        self._parts.callback(client.close)
        self._orchestrator: Orchestrator = kind.load().build(options)
        if isinstance(self._orchestrator, Closes):
            self._parts.callback(self._orchestrator.close)
        listening = listen_on(*options.listen)
        self._parts.callback(listening.close)
        ledger = Ledger(folder / "ledger.sqlite")
        self._parts.callback(ledger.close)
        self._reporter = Reporter(client, ledger)
        self._metrics = Metrics(kind.name)
        secret_file = SecretFile(options.secret_file) if options.secret_file else None
        url = _reachable(options, url_of(listening))
        wanted = None if secret_file else WantedSubscription(url, tuple(options.jobs), lasting=True)
        self._subscription = SubscriptionKeeper(client, wanted, folder / "subscription.json", changed=_say)
        self._intake = WebhookIntake(
            ledger,
            self._state,
            self._report,
            secret_file or self._subscription.secrets,
            count=self._metrics.delivered,
        )
        self._subscriber = Subscriber(
            self._orchestrator,
            ledger,
            self._intake.work,
            self._report,
            claim=Claims(client, ledger, self._metrics.claimed),
            settings=SubscriberSettings(PARALLEL_MAX, dry_run=options.dry_run),
        )
        self._receiver = Receiver(self._intake, listening, self._pages())
        lanes = self._subscriber.lanes
        watch = self._metrics.watch
        watch("waiting_actions", "Actions and readmissions that have not begun.", lambda: lanes.waiting)
        watch("running_actions", "Actions and readmissions in progress.", lambda: lanes.running)
        watch("owed_reports", "Reports that the server has not confirmed.", lambda: len(ledger.owed()))
        watch("in_touch", "1 where the server delivers here.", lambda: float(self._subscription.in_touch))
        watch(
            "out_of_touch_seconds",
            "For how long the server has not delivered here; 0 where it does.",
            lambda: self._subscription.out_of_touch_s,
        )
        watch("dry_run", "1 where nothing is changed.", lambda: float(options.dry_run))
        self._ledger = ledger
        self._reported: dict[str, JobUpdate] = {}
        self._pace_reported: dict[str, tuple[float | None, float]] = {}  # and when, on the monotonic clock
        self._url = url

    def close(self) -> None:
        """Release everything."""
        self._parts.close()

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns 0, or 1 where a part has failed."""

        def signalled(number: int, _frame: object) -> None:
            self.stop(signal.Signals(number).name)

        former = {number: signal.signal(number, signalled) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self.serve()
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def stop(self, why: str) -> None:
        """Make serving end soon."""
        self._told_to_stop = why
        self._stopping.set()

    def serve(self) -> int:
        """Serve until stopped; returns 0, or 1 where a part has failed."""
        # Leftover work goes before new work.
        self._subscriber.start()
        self._intake.resume()
        self._receiver.start()
        for part in (self._reporter, self._subscription):
            part.start()
        log.info(
            "%s for %s at %s%s", self._orchestrator.name, self._options.server, self._url,
            "; dry run: nothing is changed" if self._options.dry_run else "",
        )  # fmt: skip
        try:
            return self._watch()
        finally:
            self._end()

    def _watch(self) -> int:
        if isinstance(self._orchestrator, ReportsJobs):
            self._start_telling("jobs", self._tell_jobs)
        if isinstance(self._orchestrator, FollowsPlans):
            self._start_telling("plans", self._tell_pace_left)
        while not self._stopping.wait(WATCH_S):
            dead = [name for name, part in self._threads() if not part.alive]
            if dead:
                log.error("%s ended; leaving, to be started again", ", ".join(dead))
                return 1
        log.info("%s: ending", self._told_to_stop)
        return 0

    def _threads(self) -> tuple[tuple[str, Receiver | Reporter | SubscriptionKeeper | Subscriber], ...]:
        return (
            ("receiver", self._receiver),
            ("subscriber", self._subscriber),
            ("reports", self._reporter),
            ("subscription", self._subscription),
        )

    def _end(self) -> None:
        self._stopping.set()
        self._receiver.stop()
        if not self._subscriber.stop(FINISH_WITHIN_S):
            log.warning("an action is in progress; the next start goes on with it")
        if not self._reporter.stop(REPORTS_WITHIN_S):
            log.warning("reports are still owed; the next start sends them")
        self._subscription.stop()

    def _state(self, job: str) -> JobState | None:
        return self._orchestrator.state(job) if self._is_ours(job) else None

    def _is_ours(self, job: str) -> bool:
        globs: Sequence[str] = self._options.jobs
        return not globs or any(fnmatchcase(job, glob) for glob in globs)

    def _report(self, action: ActionRequest, state: ReportState, detail: str) -> None:
        self._reporter(action, state, detail)
        self._metrics.reported(action.kind, state)
        log.info("action %s (%s, job %s): %s", action.action_id, action.kind, action.job, f"{state} {detail}".strip())
        if self._options.json:
            said = {"action_id": action.action_id, "kind": action.kind, "job": action.job, "state": state}
            sys.stdout.write(json.dumps({"event": "action", **said, "detail": detail}) + "\n")
            sys.stdout.flush()

    def _start_telling(self, what: str, tell: Callable[[], None]) -> None:
        threading.Thread(target=self._keep_telling, args=(what, tell), name=what, daemon=True).start()

    def _keep_telling(self, what: str, tell: Callable[[], None]) -> None:
        """Call ``tell`` every few seconds; a failure is logged once."""
        complained = ""
        while not self._stopping.is_set():
            try:
                tell()
                complained = ""
            except (CannotCarryOutError, ServerUnreachableError) as error:
                if complained != str(error):
                    log.warning("%s: %s", what, error)
                complained = str(error)
            except Exception:
                log.exception("%s", what)
            self._stopping.wait(self._options.poll)

    def _tell_jobs(self) -> None:
        """Report each changed job to the server; nothing while a state is unavailable."""
        for job, update in self._jobs().items():
            if self._is_ours(job) and self._reported.get(job) != update:
                self._subscription.report_job(job, update)
                self._reported[job] = update

    def _tell_pace_left(self) -> None:
        """Report the remaining pace of jobs without one of their nodes; raises what prevents that."""
        assert isinstance(self._orchestrator, FollowsPlans)  # noqa: S101 - asked for above
        left = {job: ratio for job, ratio in self._orchestrator.pace_left().items() if self._is_ours(job)}
        self._pace_reported = {job: pace for job, pace in self._pace_reported.items() if job in left}
        now_s = time.monotonic()
        unreported = []
        for job, ratio in left.items():
            known, reported_s = self._pace_reported.get(job, (None, float("-inf")))
            if known == ratio and now_s - reported_s < REPORTED_AGAIN_S:
                continue
            try:
                self._client.call("PUT", f"/api/v1/jobs/{quote(job, safe='')}/pace-left", {"pace_left_ratio": ratio})
                self._pace_reported[job] = (ratio, now_s)
            except ServerUnreachableError as error:
                unreported.append(str(error))
        if unreported:
            raise ServerUnreachableError("; ".join(unreported))

    def _jobs(self) -> dict[str, JobUpdate]:
        return dict(self._orchestrator.jobs()) if isinstance(self._orchestrator, ReportsJobs) else {}

    def _pages(self) -> list[Route]:
        def health(_: Request) -> Response:
            return JSONResponse({"status": "ok", **self._condition()})

        def ready(_: Request) -> Response:
            condition = self._condition()
            status = 200 if condition["in_touch"] else 503
            return JSONResponse({"status": "ready" if status == 200 else "not in touch", **condition}, status)

        def metrics(_: Request) -> Response:
            return Response(self._metrics.page(), media_type=CONTENT_TYPE)

        return [Route("/healthz", health), Route("/readyz", ready), Route("/metrics", metrics)]

    def _condition(self) -> dict[str, object]:
        lanes = self._subscriber.lanes
        return {
            "orchestrator": self._orchestrator.name,
            "dry_run": self._options.dry_run,
            "in_touch": self._subscription.in_touch,
            "waiting": lanes.waiting,
            "running": lanes.running,
            "owed_reports": len(self._ledger.owed()),
        }


def _say(reason: str, away_s: float) -> None:
    if reason:
        log.warning("no server: nothing new is excluded, restarted or readmitted; what is in progress is finished")
    else:
        log.info("the server is back after %.0f s", away_s)


def _own(folder: Path, parts: contextlib.ExitStack) -> None:
    """Create the folder, accessible only to this user. Raises OrchestratorError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OrchestratorError(f"--state-dir {folder}: {error.strerror}") from None
    parts.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OrchestratorError(f"--state-dir {folder}: another orchestrator uses it; give each its own") from None


def _reachable(options: argparse.Namespace, url: str) -> str:
    if options.webhook_url:
        return str(options.webhook_url)
    if options.listen[0] in _EVERYWHERE and not options.secret_file:
        raise OrchestratorError(
            f"--webhook-url is missing: --listen {options.listen[0]} is no address that the server can send to"
        )
    return url
