"""What every orchestrator has to be, whatever it works with: the same claims, run over each of them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Protocol

import pytest

from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Cause, Exclusion, Orchestrator, Previews, Restart
from eagle_eye.orchestrators.receiver import Readmission, WebhookIntake, Work, refusal
from eagle_eye.orchestrators.subscriber import Subscriber, SubscriberSettings
from eagle_eye.schema.action import ActionRequest, ReportState
from tests.orchestrators.builders import action, event_body


class World(Protocol):
    """A job that runs, and the orchestrator that has it in hand; real, or played where the real thing is not there."""

    orchestrator: Orchestrator
    job: str
    node: str
    """A node of the job that it can do without."""

    def runs_on(self) -> frozenset[str]:
        """Return the nodes on which the job runs now; empty while it stands still."""

    def out(self) -> frozenset[str]:
        """Return the nodes that nothing new is started on."""

    def snapshot(self) -> Hashable:
        """Return all that an orchestrator might change outside, such that equal means untouched."""

    def reopened(self) -> Orchestrator:
        """Return another orchestrator with the same state folder, as after a kill -9 of the first."""


def cause(action_id: str = "act-1") -> Cause:
    return Cause("inc-1", action_id, "gpu_lost", "XID 79 on gpu 3", "replace")


def exclusion(world: World, *, now: bool, action_id: str = "act-1") -> Exclusion:
    return Exclusion(world.job, attempt(world), (world.node,), now, cause(action_id))


def attempt(world: World) -> int:
    state = world.orchestrator.state(world.job)
    assert state is not None
    return state.attempt


class Delivered:
    """The shared parts around an orchestrator, from a delivery to its reports, without the network."""

    def __init__(self, orchestrator: Orchestrator, folder: Path, *, dry_run: bool = False) -> None:
        self.reports: list[tuple[str, str]] = []
        self.ledger = Ledger(folder / "delivered.sqlite")
        work: queue.Queue[Work] = queue.Queue()
        self.intake = WebhookIntake(self.ledger, orchestrator.state, self._report, list, work=work)
        settings = SubscriberSettings(dry_run=dry_run, ask_again_s=0.01)
        self.subscriber = Subscriber(orchestrator, self.ledger, work, self._report, settings=settings)

    def _report(self, action: ActionRequest, state: ReportState, detail: str) -> None:
        self.reports.append((state, detail))

    def takes(self, wanted: ActionRequest, event_id: str = "evt-1") -> list[tuple[str, str]]:
        """The reports once the action came and had its turn."""
        self.intake.store_event(event_id, event_body(wanted, event_id=event_id))
        while not self.intake.work.empty():
            self.subscriber.do(self.intake.work.get_nowait())
        return self.reports


class OrchestratorContract:
    """Subclass it in a test file, with a fixture ``world``.

    ``counts_attempts`` False: the job has no attempts that an action could be too old for; ``can_stop`` False: who
    starts the job is somebody else, and would start it again. Both have to be the nature of the thing.
    """

    counts_attempts = True
    can_stop = True

    @pytest.fixture
    def ledger_folder(self, tmp_path: Path) -> Path:
        return tmp_path / "delivered"

    def wanted(self, world: World, **changes: Any) -> ActionRequest:
        given = {"job": world.job, "attempt": attempt(world), "exclude": [world.node], **changes}
        return action(time.time(), **given)

    def test_a_job_of_somebody_else_is_not_known(self, world: World) -> None:
        assert world.orchestrator.state("somebody-elses-job") is None

    def test_it_says_how_its_job_is(self, world: World) -> None:
        state = world.orchestrator.state(world.job)
        assert state is not None
        assert (state.running, state.attempt >= 0) == (True, True)
        assert world.node in state.nodes
        assert world.runs_on() <= state.nodes

    def test_asking_changes_nothing(self, world: World) -> None:
        before = world.snapshot()
        world.orchestrator.state(world.job)
        world.orchestrator.state("somebody-elses-job")
        if isinstance(world.orchestrator, Previews):
            assert world.orchestrator.preview(exclusion(world, now=True))
            assert world.orchestrator.preview(Restart(attempt(world), None, cause(), (world.node,)))
        assert world.snapshot() == before

    def test_an_exclusion_and_a_restart_move_the_job_off_the_node(self, world: World, ledger_folder: Path) -> None:
        before = attempt(world)
        reports = Delivered(world.orchestrator, ledger_folder).takes(self.wanted(world))
        assert [state for state, _ in reports][:2] == ["accepted", "running"]
        assert reports[-1][0] == "done", reports
        assert reports[-1][1]
        state = world.orchestrator.state(world.job)
        assert state is not None
        assert (state.running, state.attempt > before) == (True, self.counts_attempts)
        assert world.node not in world.runs_on()
        assert world.node in world.out()

    def test_the_same_action_again_does_nothing(self, world: World, ledger_folder: Path) -> None:
        delivered, wanted = Delivered(world.orchestrator, ledger_folder), self.wanted(world)
        delivered.takes(wanted)
        before, reported = world.snapshot(), list(delivered.reports)
        delivered.takes(wanted)
        delivered.takes(wanted, "evt-2")
        assert (world.snapshot(), delivered.reports) == (before, reported)

    def test_an_action_for_an_attempt_that_is_over_is_refused(self, world: World, ledger_folder: Path) -> None:
        old = self.wanted(world, action_id="act-old")
        delivered = Delivered(world.orchestrator, ledger_folder)
        delivered.takes(self.wanted(world, action_id="act-new"))
        before = world.snapshot()
        state, detail = delivered.takes(old, "evt-2")[-1]
        assert (state, world.snapshot() == before) == ("refused" if self.counts_attempts else "done", True)
        assert "already" in detail or not self.counts_attempts

    def test_a_restart_over_an_attempt_that_is_over_does_not_happen_twice(self, world: World) -> None:
        over = attempt(world)
        world.orchestrator.restart(world.job, Restart(over, None, cause()))
        now, after = attempt(world), world.snapshot()
        assert (now > over) == self.counts_attempts
        assert world.orchestrator.restart(world.job, Restart(over, None, cause()))
        assert (attempt(world), world.snapshot()) == (now, after)

    def test_a_drain_leaves_the_job_alone(self, world: World, ledger_folder: Path) -> None:
        before, nodes = attempt(world), world.runs_on()
        reports = Delivered(world.orchestrator, ledger_folder).takes(
            self.wanted(world, kind="drain_node", restart=False)
        )
        assert reports[-1][0] == "done", reports
        assert (attempt(world), world.runs_on()) == (before, nodes)

    def test_a_dry_run_changes_nothing_and_says_what_would_be_done(self, world: World, ledger_folder: Path) -> None:
        before = world.snapshot()
        delivered = Delivered(world.orchestrator, ledger_folder, dry_run=True)
        delivered.takes(self.wanted(world))
        delivered.subscriber.do(Readmission((world.node,), "evt-9"))
        assert world.snapshot() == before
        assert [state for state, _ in delivered.reports] == ["accepted", "refused"]
        assert delivered.reports[-1][1].startswith("dry run: would ")
        assert world.node in delivered.reports[-1][1]

    def test_what_was_taken_out_can_come_back_also_after_a_crash(self, world: World) -> None:
        world.orchestrator.exclude(exclusion(world, now=False))
        later = world.reopened()
        assert later.readmit((world.node,))
        assert world.node not in world.out()

    def test_a_node_that_was_not_taken_out_from_here_is_not_readmitted(self, world: World) -> None:
        before = world.snapshot()
        world.orchestrator.readmit((world.node, "no-such-node"))
        assert world.snapshot() == before

    def test_an_exclusion_again_for_the_same_action_changes_nothing(self, world: World) -> None:
        if not world.orchestrator.resumes:
            pytest.skip("this orchestrator is not asked twice for one action")
        wanted = exclusion(world, now=True)
        world.orchestrator.exclude(wanted)
        out = world.out()
        assert world.reopened().exclude(wanted)
        assert world.out() == out

    def test_how_a_job_is_can_be_asked_while_it_is_restarted(self, world: World) -> None:
        asked = Restart(attempt(world), None, cause())
        restarting = threading.Thread(target=world.orchestrator.restart, args=(world.job, asked))
        restarting.start()
        answers = [world.orchestrator.state(world.job)]
        restarting.join(60.0)
        assert not restarting.is_alive()
        assert answers[0] is not None
        assert refusal(self.wanted(world), world.orchestrator.state(world.job), time.time()) is None

    def test_a_stopped_job_does_not_run(self, world: World) -> None:
        if not self.can_stop:
            before = world.snapshot()
            with pytest.raises(CannotCarryOutError):
                world.orchestrator.stop(world.job, "a test")
            assert world.snapshot() == before
            return
        assert world.orchestrator.stop(world.job, "a test")
        state = world.orchestrator.state(world.job)
        assert state is None or not state.running
        assert world.runs_on() == frozenset()
