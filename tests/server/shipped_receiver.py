"""The receiver of the shipped orchestrators, which takes deliveries for one job and does nothing."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.protocol import JobState
from eagle_eye.orchestrators.receiver import Receiver, WebhookIntake, listen_on, url_of
from eagle_eye.schema.action import ActionRequest


@dataclass
class Shipped:
    """A receiver that listens at ``url``."""

    url: str
    ledger: Ledger
    intake: WebhookIntake

    def queued(self) -> list[ActionRequest]:
        """Return the actions that are to be carried out."""
        found: list[ActionRequest] = []
        while True:
            try:
                work = self.intake.work.get_nowait()
            except queue.Empty:
                return found
            assert isinstance(work, ActionRequest)
            found.append(work)


@contextmanager
def shipped(folder: Path, job: JobState, secret: str) -> Iterator[Shipped]:
    """Take deliveries that are signed with the secret while the block runs."""
    with closing(Ledger(folder / "ledger.sqlite")) as ledger, closing(listen_on("127.0.0.1", 0)) as listening:
        intake = WebhookIntake(ledger, lambda _: job, lambda *_: None, lambda: [secret])
        receiver = Receiver(intake, listening)
        receiver.start()
        try:
            yield Shipped(url_of(listening), ledger, intake)
        finally:
            receiver.stop()
