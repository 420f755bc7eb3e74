from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Exclusion, JobState, Orchestrator, Restart
from eagle_eye.orchestrators.receiver import Readmission, verbs
from eagle_eye.orchestrators.subscriber import Subscriber, SubscriberSettings, carry_out, would
from eagle_eye.schema.action import ActionRequest, ReportState, ResumeFrom
from tests.orchestrators.builders import action, rfc3339

NOW_S = 1_800_000_000.0


class Recording:
    """An orchestrator that does nothing but remember; ``fails`` is raised by every verb."""

    name = "recording"
    resumes = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.job = JobState(1, frozenset({"n1", "n2"}), running=True)
        self.fails: Exception | None = None
        self.mends_after = -1
        self.unknown: list[Exception] = []  # what state() raises, one after the other

    def state(self, job: str) -> JobState | None:
        if self.unknown:
            raise self.unknown.pop(0)
        return self.job if job == "j" else None

    def stop(self, job: str, reason: str) -> str:
        return self._done("stop", job)

    def exclude(self, request: Exclusion) -> str:
        return self._done("exclude", request.job, request.nodes, request.now)

    def restart(self, job: str, request: Restart) -> str:
        return self._done("restart", job, request.over_attempt, request.distrust_since_s)

    def readmit(self, nodes: Sequence[str]) -> str:
        return self._done("readmit", tuple(nodes))

    def _done(self, *call: Any) -> str:
        if self.fails is not None and self.mends_after != 0:
            self.mends_after -= 1
            raise self.fails
        self.calls.append(call)
        return f"{call[0]} done"


class Delivered:
    def __init__(self, folder: Path) -> None:
        self.orchestrator = Recording()
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.reports: list[tuple[str, str]] = []
        self.now_s = NOW_S
        self.clock_step_s = 0.0
        self.subscriber = Subscriber(
            self.orchestrator,
            self.ledger,
            queue.Queue(),
            self._report,
            self._clock,
            settings=SubscriberSettings(ask_again_s=0.01),
        )

    def _clock(self) -> float:
        self.now_s += self.clock_step_s
        return self.now_s

    def _report(self, action: ActionRequest, state: ReportState, detail: str) -> None:
        self.reports.append((state, detail))

    def does(self, **changes: Any) -> list[tuple[str, str]]:
        """The reports on an action that was received and comes to its turn."""
        wanted = action(NOW_S, **changes)
        self.ledger.record_action(f"evt-{wanted.action_id}", wanted, "queued", NOW_S)
        self.subscriber.do(wanted)
        return self.reports


@pytest.fixture
def delivered(tmp_path: Path) -> Iterator[Delivered]:
    made = Delivered(tmp_path)
    yield made
    made.ledger.close()


def test_an_exclusion_excludes_and_then_restarts(delivered: Delivered) -> None:
    assert delivered.does() == [("running", ""), ("done", "exclude done; restart done")]
    assert delivered.orchestrator.calls == [("exclude", "j", ("n2",), True), ("restart", "j", 1, None)]
    assert delivered.ledger.state_of("act-1") == "finished"


def test_where_somebody_else_restarts_it_only_excludes(delivered: Delivered) -> None:
    delivered.does(restart=False)
    assert delivered.orchestrator.calls == [("exclude", "j", ("n2",), False)]


@pytest.mark.parametrize("fault", ["loss_not_finite", "loss_divergence", "silent_data_corruption"])
def test_faults_of_loss_and_data_distrust_checkpoints_since_the_onset(delivered: Delivered, fault: str) -> None:
    delivered.does(kind="restart_job", exclude=[], fault=fault, onset=rfc3339(NOW_S - 30))
    assert delivered.orchestrator.calls == [("restart", "j", 1, NOW_S - 30)]


@pytest.mark.parametrize(
    ("fault", "known", "reported"),
    [
        ("loss_divergence", ResumeFrom(40, "memory", ["n1"]), "memory:40"),
        ("silent_data_corruption", ResumeFrom(20, "storage", []), "memory:20"),
        ("loss_not_finite", None, ""),
        ("hang", ResumeFrom(40, "memory", ["n1"]), ""),
    ],
)
def test_where_to_resume_is_said_where_later_steps_are_not_to_be_trusted(
    fault: str, known: ResumeFrom | None, reported: str
) -> None:
    asked = verbs(action(NOW_S, fault=fault, resume_from=known))
    assert [verb.resume_from for verb in asked if isinstance(verb, Restart)] == [reported]


def test_a_restart_has_the_scope_that_is_safe_and_all_of_the_job_where_nobody_says() -> None:
    scopes = [
        verb.scope
        for scope in ("process_group", "rank", None)
        for verb in verbs(action(NOW_S, restart_scope=scope))
        if isinstance(verb, Restart)
    ]
    assert scopes == ["process_group", "rank", "job"]


def test_an_exclusion_says_what_its_restart_will_distrust_and_a_drain_does_not() -> None:
    spoilt = {"fault": "silent_data_corruption", "onset": rfc3339(NOW_S - 30)}
    assert [verb.distrust_since_s for verb in verbs(action(NOW_S, **spoilt))] == [NOW_S - 30, NOW_S - 30]
    assert [verb.distrust_since_s for verb in verbs(action(NOW_S, kind="drain_node", **spoilt))] == [None]


def test_a_drain_touches_nothing_now_and_a_notice_nothing_at_all(delivered: Delivered) -> None:
    delivered.does(kind="drain_node", restart=False)
    assert delivered.does(kind="notify", action_id="act-2", exclude=[])[-1][0] == "done"
    assert delivered.orchestrator.calls == [("exclude", "j", ("n2",), False)]


class Keeping(Recording):
    """One that sees which steps its jobs keep."""

    def checkpoint(self, job: str) -> str:
        return self._done("checkpoint", job)


def test_who_sees_which_steps_a_job_keeps_answers_once_one_is_whole() -> None:
    asked = action(NOW_S, kind="checkpoint_now")
    assert carry_out(Keeping(), asked) == "checkpoint done"
    assert would(Keeping(), asked).startswith("dry run: would wait")


def test_what_cannot_be_done_is_reported_as_failed_with_the_reason(delivered: Delivered) -> None:
    assert delivered.does(kind="checkpoint_now")[-1] == ("failed", "recording cannot make the job write a checkpoint")
    delivered.orchestrator.fails = CannotCarryOutError("no spare")
    assert delivered.does(action_id="act-2")[-1] == ("failed", "no spare")
    delivered.orchestrator.fails = RuntimeError("secret path")
    assert delivered.does(action_id="act-3")[-1] == ("failed", "unexpected RuntimeError in recording")
    assert delivered.ledger.actions("begun") == []


def test_the_server_hears_of_it_where_asking_how_the_job_is_goes_wrong(delivered: Delivered) -> None:
    delivered.orchestrator.unknown = [RuntimeError("secret path")]
    ((state, detail),) = delivered.does()
    assert (state, detail) == ("failed", "the state of job 'j' is not known: unexpected RuntimeError in recording")
    assert (delivered.orchestrator.calls, delivered.ledger.state_of("act-1")) == ([], "finished")


def test_the_server_hears_of_it_where_a_preview_goes_wrong(tmp_path: Path) -> None:
    class Previewing(Recording):
        def preview(self, verb: Exclusion | Restart) -> str:
            raise RuntimeError("secret path")

    ledger = Ledger(tmp_path / "ledger.sqlite")
    reports: list[Any] = []
    wanted = action(NOW_S)
    ledger.record_action("evt-1", wanted, "queued", NOW_S)
    tell = lambda _, state, detail: reports.append((state, detail))  # noqa: E731
    dry = SubscriberSettings(dry_run=True)
    Subscriber(Previewing(), ledger, queue.Queue(), tell, lambda: NOW_S, settings=dry).do(wanted)
    assert reports == [("refused", "dry run: would fail: unexpected RuntimeError in recording")]
    ledger.close()


def test_an_action_that_waited_too_long_is_refused_when_its_turn_comes(delivered: Delivered) -> None:
    delivered.orchestrator.job = JobState(2, frozenset({"n1", "n2"}), running=True)
    ((state, detail),) = delivered.does()
    assert (state, delivered.orchestrator.calls) == ("refused", [])
    assert "attempt 2 already" in detail
    assert delivered.ledger.state_of("act-1") == "refused"


def test_a_withdrawn_action_is_dropped_in_silence(delivered: Delivered) -> None:
    wanted = action(NOW_S)
    delivered.ledger.record_action("evt-1", wanted, "queued", NOW_S)
    assert delivered.ledger.withdraw("evt-2", "act-1", NOW_S)
    delivered.subscriber.do(wanted)
    assert (delivered.orchestrator.calls, delivered.reports) == ([], [])


def test_readmissions_reach_the_orchestrator(delivered: Delivered) -> None:
    delivered.subscriber.do(Readmission(("n2",), "evt-2"))
    assert delivered.orchestrator.calls == [("readmit", ("n2",))]


@pytest.mark.parametrize("trouble", [CannotCarryOutError("slurmctld does not answer"), RuntimeError("a fault of ours")])
def test_a_readmission_that_fails_is_tried_again_and_kept_until_it_is_done(
    delivered: Delivered, trouble: Exception
) -> None:
    delivered.ledger.record_readmission("evt-2", ["n2"], NOW_S)
    delivered.orchestrator.fails = trouble
    delivered.orchestrator.mends_after = 2
    delivered.subscriber.do(Readmission(("n2",), "evt-2"))
    assert delivered.orchestrator.calls == [("readmit", ("n2",))]
    assert delivered.ledger.readmissions() == []


def test_a_readmission_is_given_up_in_the_end(delivered: Delivered) -> None:
    delivered.ledger.record_readmission("evt-2", ["n2"], NOW_S)
    delivered.orchestrator.fails = CannotCarryOutError("no")
    delivered.clock_step_s = 400.0
    delivered.subscriber.do(Readmission(("n2",), "evt-2"))
    assert delivered.ledger.readmissions() == []


def test_the_thread_takes_work_in_order_and_stops(tmp_path: Path) -> None:
    delivered = Delivered(tmp_path)
    work: queue.Queue[Any] = queue.Queue()
    subscriber = Subscriber(delivered.orchestrator, delivered.ledger, work, delivered._report, lambda: NOW_S)
    subscriber.start()
    for name in ("n1", "n2"):
        work.put(Readmission((name,), name))
    until_s = time.monotonic() + 5.0
    while len(delivered.orchestrator.calls) < 2 and time.monotonic() < until_s:
        time.sleep(0.01)
    subscriber.stop(5.0)
    assert delivered.orchestrator.calls == [("readmit", ("n1",)), ("readmit", ("n2",))]
    delivered.ledger.close()


def test_the_protocol_is_what_the_recording_orchestrator_is() -> None:
    orchestrator: Orchestrator = Recording()
    assert carry_out(orchestrator, action(NOW_S, kind="none")) == "noted; nothing was changed"
