"""A subscriber made of the shipped orchestrators' parts, which writes down what it gets and what it carries out.

    python -m benchmarks.failover.subscriber --servers http://A,http://B --folder FOLDER --port P --asked-at Q

The folder has ``site.json`` (jobs and their nodes) and ``token``; lines go to ``said.jsonl`` in it, each on disk before
anything else happens. It listens on port P, and is asked on port Q, from where a relay leads to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.failover.said import Said
from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.protocol import Exclusion, JobState, LowerEpochError, Restart
from eagle_eye.orchestrators.receiver import Receiver, WebhookIntake, listen_on
from eagle_eye.orchestrators.server_client import Claims, Reporter, ServerClient
from eagle_eye.orchestrators.subscriber import Subscriber, SubscriberSettings
from eagle_eye.orchestrators.subscription import SubscriptionKeeper, WantedSubscription
from eagle_eye.schema.action import ACTION_REQUESTED, JobUpdate, MemberRank

PARALLEL = 4
STOP_S = 5.0


class SubscribedSite(msgspec.Struct):
    """The jobs, their nodes in the order of their ranks, and how many ranks each node has."""

    jobs: dict[str, list[str]]
    gpus: int


class Lines:
    """A file of lines, each on disk when ``say`` returns; thread-safe."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("ab")
        self._lock = threading.Lock()

    def say(self, line: Said) -> None:
        """Append a line."""
        with self._lock:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())


@dataclass
class Intake(WebhookIntake):
    """Writes down the requests to act."""

    lines: Lines | None = None
    highest: int = 0

    def store_event(self, webhook_id: str, body: bytes) -> str:
        """See WebhookIntake."""
        event = json.loads(body)
        data, before, outcome = event["data"], self.highest, "not taken"
        epoch = data.get("epoch", 0)
        self.highest = max(before, epoch)
        try:
            outcome = super().store_event(webhook_id, body)
        except LowerEpochError:
            outcome = "lower epoch"
            raise
        finally:
            if event["type"] == ACTION_REQUESTED and self.lines is not None:
                self.lines.say(
                    Said(
                        what="delivery", time_s=time.time(), action=data["action_id"], job=data["job"],
                        attempt=data["attempt"], fault=data["fault"], epoch=epoch, highest=before, outcome=outcome,
                    )
                )  # fmt: skip
        return outcome


class Jobs:
    """The orchestrator: a job's next attempt begins at once when it is asked for."""

    name = "failover"
    resumes = True

    def __init__(self, site: SubscribedSite, lines: Lines) -> None:
        self._site = site
        self._lines = lines
        self._attempts = dict.fromkeys(site.jobs, 0)
        self.subscription: SubscriptionKeeper | None = None

    def state(self, job: str) -> JobState | None:
        """See Orchestrator."""
        nodes = self._site.jobs.get(job)
        return None if nodes is None else JobState(self._attempts[job], frozenset(nodes), running=True)

    def stop(self, job: str, reason: str) -> str:
        """See Orchestrator."""
        return f"{job} goes on: {reason}"

    def exclude(self, request: Exclusion) -> str:
        """See Orchestrator."""
        self._say("exclusion", request.job, request.attempt, request.cause.action_id, request.cause.fault)
        return f"{', '.join(request.nodes)} noted"

    def restart(self, job: str, request: Restart) -> str:
        """See Orchestrator. Every call is written down, whatever the job's attempt is."""
        self._say("restart", job, request.over_attempt, request.cause.action_id, request.cause.fault)
        self._attempts[job] = max(self._attempts[job], request.over_attempt + 1)
        self.tell(job)
        return f"attempt {self._attempts[job]}"

    def readmit(self, nodes: Sequence[str]) -> str:
        """See Orchestrator."""
        return ", ".join(nodes)

    def tell(self, job: str) -> None:
        """Have the server know the job's attempt, now or as soon as one leads."""
        ranks = [
            MemberRank(place * self._site.gpus + device, node, device)
            for place, node in enumerate(self._site.jobs[job])
            for device in range(self._site.gpus)
        ]
        if self.subscription is not None:
            self.subscription.report_job(
                job, JobUpdate(self._attempts[job], "running", ranks, restart_owner="eagle-eye")
            )

    def _say(self, what: str, job: str, attempt: int, action: str, fault: str) -> None:
        line = {"what": what, "time_s": time.time(), "action": action, "job": job, "attempt": attempt, "fault": fault}
        self._lines.say(msgspec.convert(line, Said))


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--asked-at", type=int, required=True)
    args = parser.parse_args()
    folder: Path = args.folder
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    site = msgspec.json.decode((folder / "site.json").read_bytes(), type=SubscribedSite)
    lines = Lines(folder / "said.jsonl")
    with contextlib.ExitStack() as parts:
        client = ServerClient(args.servers, (folder / "token").read_text(encoding="utf-8"))
        parts.callback(client.close)
        listening = parts.enter_context(contextlib.closing(listen_on("127.0.0.1", args.port)))
        ledger = parts.enter_context(contextlib.closing(Ledger(folder / "ledger.sqlite")))
        reporter = Reporter(client, ledger)
        jobs = Jobs(site, lines)
        wanted = WantedSubscription(f"http://127.0.0.1:{args.asked_at}/", tuple(site.jobs), lasting=True)
        jobs.subscription = subscription = SubscriptionKeeper(client, wanted, folder / "subscription.json")
        intake = Intake(ledger, jobs.state, reporter, subscription.secrets, lines=lines)
        claims, settings = Claims(client, ledger), SubscriberSettings(PARALLEL)
        subscriber = Subscriber(jobs, ledger, intake.work, reporter, claim=claims, settings=settings)
        receiver = Receiver(intake, listening)
        subscriber.start()
        receiver.start()
        reporter.start()
        subscription.start()
        for job in site.jobs:
            jobs.tell(job)
        signal.sigwait((signal.SIGTERM, signal.SIGINT))
        receiver.stop()
        subscriber.stop(STOP_S)
        reporter.stop(STOP_S)
        subscription.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
