from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_eye.orchestrators.ledger import ActionState, Ledger
from eagle_eye.orchestrators.protocol import CannotCarryOutError, JobState
from eagle_eye.orchestrators.receiver import Resumption, remainder
from eagle_eye.orchestrators.subscriber import Subscriber, SubscriberSettings
from eagle_eye.schema.action import ActionRequest, ReportState
from tests.orchestrators.builders import action
from tests.orchestrators.test_subscriber import NOW_S, Recording

SAME = JobState(1, frozenset({"n1", "n2"}), running=True)
STOPPED = replace(SAME, running=False)
FURTHER = replace(SAME, attempt=2)


@pytest.mark.parametrize(
    ("step", "job", "late", "todo", "words"),
    [
        ("begun", SAME, False, "everything", "resumed"),
        ("begun", STOPPED, False, "everything", "resumed"),
        ("begun", FURTHER, False, "failed", "somebody else restarted the job meanwhile (attempt 2); n2 may have been"),
        ("begun", SAME, True, "failed", "expired"),
        ("begun", None, False, "failed", "not run here any more"),
        ("excluded", SAME, False, "restart", "resumed"),
        ("excluded", FURTHER, False, "done", "n2 excluded; somebody else restarted the job meanwhile"),
        ("excluded", SAME, True, "failed", "n2 excluded; the job was not restarted: the action expired"),
        ("restarting", SAME, False, "restart", "resumed"),
        ("restarting", STOPPED, True, "restart", "resumed"),
        ("restarting", FURTHER, True, "restart", "resumed"),
        ("restarting", SAME, True, "failed", "the job still runs as attempt 1, and the action expired"),
    ],
)
def test_what_is_left_of_an_action(step: ActionState, job: JobState | None, late: bool, todo: str, words: str) -> None:
    left = remainder(action(NOW_S), step, job, NOW_S + (61 if late else 0))
    assert (left.todo if left.todo != "nothing" else left.report) == todo
    assert words in left.detail


def test_an_exclusion_without_a_restart_was_done() -> None:
    left = remainder(action(NOW_S, kind="drain_node", restart=False), "excluded", SAME, NOW_S + 600)
    assert (left.todo, left.report) == ("nothing", "done")


class Delivered:
    def __init__(self, folder: Path, *, dry_run: bool = False) -> None:
        self.orchestrator = Recording()
        self.orchestrator.resumes = True
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.reports: list[tuple[str, str]] = []
        self.subscriber = Subscriber(
            self.orchestrator,
            self.ledger,
            queue.Queue(),
            self._report,
            lambda: NOW_S,
            settings=SubscriberSettings(dry_run=dry_run, ask_again_s=0.01),
        )

    def _report(self, action: ActionRequest, state: ReportState, detail: str) -> None:
        self.reports.append((state, detail))

    def resumes(self, step: ActionState) -> list[tuple[str, str]]:
        """The reports on an action that a process before this one had brought as far as ``step``."""
        wanted = action(NOW_S)
        self.ledger.record_action("evt-1", wanted, "queued", NOW_S)
        self.ledger.begin("act-1")
        self.ledger.mark("act-1", step)
        self.subscriber.do(Resumption(wanted, step))
        assert self.ledger.state_of("act-1") == "finished"
        return self.reports


@pytest.mark.parametrize(
    ("step", "verbs"), [("begun", ["exclude", "restart"]), ("excluded", ["restart"]), ("restarting", ["restart"])]
)
def test_what_was_left_is_done_and_nothing_else(tmp_path: Path, step: ActionState, verbs: list[str]) -> None:
    delivered = Delivered(tmp_path)
    assert delivered.resumes(step)[-1][0] == "done"
    assert [call[0] for call in delivered.orchestrator.calls] == verbs


def test_an_orchestrator_that_cannot_be_asked_again_is_not(tmp_path: Path) -> None:
    delivered = Delivered(tmp_path)
    delivered.orchestrator.resumes = False
    assert delivered.resumes("restarting") == [("failed", "the subscriber ended while it carried this out")]
    assert delivered.orchestrator.calls == []


def test_a_dry_run_finishes_nothing_that_an_earlier_process_began(tmp_path: Path) -> None:
    delivered = Delivered(tmp_path, dry_run=True)
    assert delivered.resumes("restarting")[0][0] == "failed"
    assert delivered.orchestrator.calls == []


def test_a_job_that_cannot_be_asked_for_is_asked_for_again(tmp_path: Path) -> None:
    delivered = Delivered(tmp_path)
    delivered.orchestrator.unknown = [CannotCarryOutError("slurmctld does not answer")] * 3
    assert delivered.resumes("restarting")[-1][0] == "done"


def test_somebody_elses_restart_is_not_repeated(tmp_path: Path) -> None:
    delivered = Delivered(tmp_path)
    delivered.orchestrator.job = FURTHER
    assert delivered.resumes("begun")[-1][0] == "failed"
    assert delivered.orchestrator.calls == []
