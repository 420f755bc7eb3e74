"""The verbs on a played Slurm: what every orchestrator must do, and what happens where one dies or Slurm does."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_eye.orchestrators.protocol import CannotCarryOutError, OrchestratorError, Restart
from eagle_eye.orchestrators.slurm.orchestrator import SlurmOrchestrator
from eagle_eye.orchestrators.slurm.restarting import RestartTimeouts, Time
from tests.orchestrators.contract import OrchestratorContract
from tests.orchestrators.slurm.builders import Server, cause, exclusion, orchestrator, restart
from tests.orchestrators.slurm.played import Played


class Clock:
    """Time that passes by waiting alone."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def time(self) -> Time:
        return Time(lambda: self.now_s, lambda: self.now_s, self.sleep)


class World:
    """Job 17 on a played cluster."""

    job = "17"
    node = "n1"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Played()
        self.clock = Clock()
        self.orchestrator = self.reopened()

    def reopened(self) -> SlurmOrchestrator:
        return orchestrator(
            self.cluster, self.folder, RestartTimeouts(10.0, 10.0), self.clock.time(), Server(llm="kubernetes:x")
        )

    def runs_on(self) -> frozenset[str]:
        return frozenset(self.cluster.hosts(self.cluster.job.nodes))

    def out(self) -> frozenset[str]:
        return frozenset(node.name for node in self.cluster.nodes() if node.drained)

    def snapshot(self) -> Hashable:
        return (self.cluster.job, self.cluster.nodes(), self.cluster.avoided, tuple(self.cluster.done))


class TestContract(OrchestratorContract):
    @pytest.fixture
    def world(self, tmp_path: Path) -> World:
        return World(tmp_path)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_job_is_stopped_held_told_what_to_avoid_and_only_then_released(world: World) -> None:
    world.orchestrator.exclude(exclusion("17", "n1"))
    world.orchestrator.restart("17", restart("n1"))
    assert world.cluster.done == ["drain n1", "requeue", "exclude n1", "release"]


def test_a_node_that_runs_no_job_is_drained_and_no_job_is_touched(world: World) -> None:
    state = world.orchestrator.state("")
    assert state is not None
    assert (state.attempt, state.running, "n1" in state.nodes) == (0, False, True)
    request = exclusion("", "n1", now=False)
    assert world.orchestrator.preview(request).startswith("drain n1 ")
    assert world.orchestrator.exclude(request).startswith("n1 drained")
    assert world.cluster.done == ["drain n1"]


@pytest.mark.parametrize("at", ["drain", "requeue", "exclude", "release"])
def test_wherever_slurm_stops_answering_the_next_try_finishes_and_repeats_nothing(world: World, at: str) -> None:
    world.cluster.fails = at
    with pytest.raises(CannotCarryOutError, match="no answer"):  # noqa: PT012 - whichever comes to it first
        world.orchestrator.exclude(exclusion("17", "n1"))
        world.orchestrator.restart("17", restart("n1"))
    world.cluster.fails = ""
    later = world.reopened()
    later.exclude(exclusion("17", "n1"))
    assert later.restart("17", restart("n1")).endswith("job 17 runs again as attempt 1 on n2, n3")
    assert world.cluster.done == ["drain n1", "requeue", "exclude n1", "release"]


def test_a_restart_that_torchrun_counts_and_slurm_does_not_is_not_done_twice(world: World) -> None:
    """Its attempt is above Slurm's count: only our own memory knows which restart was ours."""
    world.orchestrator.restart("17", restart("n1", over=7))
    world.reopened().restart("17", restart("n1", over=7))
    assert (world.cluster.job.restarts, world.cluster.done.count("requeue")) == (1, 1)


def test_a_job_that_its_user_cancels_meanwhile_stays_cancelled(world: World) -> None:
    world.cluster.instead_of_requeue = ("CANCELLED",), 0
    with pytest.raises(CannotCarryOutError, match=r"ended meanwhile \(CANCELLED\)"):
        world.orchestrator.restart("17", restart("n1"))
    assert world.cluster.done == ["requeue"]


def test_a_job_whose_processes_do_not_end_stays_held_and_is_reported(world: World) -> None:
    world.cluster.instead_of_requeue = ("COMPLETING",), 1
    with pytest.raises(CannotCarryOutError, match="its processes have not ended after 10 s; it stays held"):
        world.orchestrator.restart("17", restart("n1"))


@pytest.mark.parametrize("words", [("PENDING", "REQUEUE_HOLD", "COMPLETING"), ("FAILED", "COMPLETING")])
def test_a_requeued_job_is_waited_for_while_its_last_run_ends(world: World, words: tuple[str, ...]) -> None:
    world.cluster.instead_of_requeue = words, 0
    with pytest.raises(CannotCarryOutError, match="its processes have not ended after 10 s; it stays held"):
        world.orchestrator.restart("17", restart("n1"))
    assert world.cluster.done == ["requeue"]


def test_a_job_whose_nodes_still_boot_is_not_said_to_run(world: World) -> None:
    world.cluster.instead_of_requeue = ("RUNNING", "CONFIGURING"), 1
    said = world.orchestrator.restart("17", restart("n1"))
    assert said.endswith("job 17 has n1, n2, which still boot after 10 s")


def test_a_job_held_for_want_of_nodes_goes_on_when_one_is_readmitted(world: World) -> None:
    world.cluster.job = replace(world.cluster.job, nodes_wanted=4, nodes="n1,n2,n3,n4")
    world.orchestrator.exclude(exclusion("17", "n1"))
    with pytest.raises(CannotCarryOutError, match="is held: it wants 4 nodes and 3 can be used"):
        world.orchestrator.restart("17", restart("n1"))
    later = world.reopened()
    assert later.readmit(["n1"]) == "n1 is in service; job 17 is released"
    assert world.cluster.avoided == ()
    assert world.cluster.jobs(17)[0].phase == "running"


def test_a_job_that_somebody_else_holds_is_not_released_by_a_readmission(world: World) -> None:
    world.orchestrator.exclude(exclusion("17", "n1"))
    world.orchestrator.restart("17", restart("n1"))
    world.cluster.job = replace(world.cluster.job, words=("PENDING",), nodes="", held=True, restarts=2)
    assert world.orchestrator.readmit(["n1"]) == "n1 is in service"
    assert world.cluster.job.held


def test_what_the_user_excludes_stays_excluded(world: World) -> None:
    world.cluster.avoided = ("n4",)
    world.orchestrator.exclude(exclusion("17", "n1"))
    world.orchestrator.restart("17", restart("n1"))
    assert world.cluster.excluded(world.cluster.job) == "n4,n1"
    world.cluster.job = replace(world.cluster.job, words=("PENDING",), nodes="", held=True)
    world.orchestrator.readmit(["n1"])
    assert world.cluster.excluded(world.cluster.job) == "n4"


def test_a_damaged_checkpoint_is_warned_of(world: World) -> None:
    said = world.orchestrator.restart("17", Restart(0, 0.0, cause(fault="loss_not_finite")))
    assert "checkpoints written since 1970-01-01T00:00:00+00:00 are suspect" in said


def suspect(*without: str) -> Restart:
    """A restart after damage, from the step before it."""
    return Restart(0, 0.0, cause(fault="loss_not_finite"), without, resume_from="memory:40")


def test_where_to_resume_stands_in_the_jobs_comment_for_the_attempt_to_come(world: World) -> None:
    world.cluster.said = "try 3, lr 1e-4"
    said = world.orchestrator.restart("17", suspect("n1"))
    assert world.cluster.said == "eagle-eye:attempt=1:resume_from=memory:40 try 3, lr 1e-4"
    assert world.cluster.done == ["requeue", "comment", "exclude n1", "release"]
    assert said.startswith("job 17 requeued, told in its comment to resume from memory:40; job 17 runs again")
    assert "its script's choice" not in said


def test_the_comment_says_it_of_one_attempt_at_a_time(world: World) -> None:
    world.cluster.said = "eagle-eye:attempt=1:resume_from=memory:7"
    world.cluster.job = replace(world.cluster.job, restarts=1)
    world.orchestrator.restart("17", replace(suspect(), over_attempt=1))
    assert world.cluster.said == "eagle-eye:attempt=2:resume_from=memory:40"


def test_a_job_that_may_choose_where_to_resume_has_its_comment_left_alone(world: World) -> None:
    world.cluster.said = "eagle-eye:attempt=1:resume_from=memory:7 try 3"
    world.cluster.job = replace(world.cluster.job, restarts=1)
    world.orchestrator.restart("17", replace(restart(), over_attempt=1))
    assert world.cluster.said == "eagle-eye:attempt=1:resume_from=memory:7 try 3"


@pytest.mark.parametrize("at", ["comment", "release"])
def test_a_subscriber_that_ends_meanwhile_has_told_it_or_tells_it(world: World, at: str) -> None:
    world.cluster.fails = at
    with pytest.raises(CannotCarryOutError, match="no answer"):
        world.orchestrator.restart("17", suspect())
    world.cluster.fails = ""
    assert "told in its comment to resume from memory:40" in world.reopened().restart("17", suspect())
    assert world.cluster.done.count("comment") == 1


def test_a_job_whose_comment_may_not_be_written_runs_again_and_is_reported_as_not_told(world: World) -> None:
    world.cluster.refuses = "comment"
    said = world.orchestrator.restart("17", suspect())
    assert said.startswith(
        "job 17 requeued, and not told to resume from memory:40: Access/permission denied; job 17 runs"
    )


def test_a_job_that_somebody_released_too_early_is_reported_as_not_told(world: World) -> None:
    world.cluster.instead_of_requeue = ("RUNNING",), 1
    said = world.orchestrator.restart("17", suspect())
    assert "job 17 requeued, and started before it was told to resume from memory:40" in said


def test_a_dry_run_names_the_commands_and_what_would_be_refused(world: World) -> None:
    would = world.orchestrator.preview(exclusion("17", "n1"))
    assert would.startswith(
        'drain n1 (scontrol update NodeName=n1 State=DRAIN Reason="eagle-eye [node_problem] incident:'
    )
    would = world.orchestrator.preview(replace(restart("n1"), job="17"))
    assert would == "requeue job 17 (scontrol requeuehold Incomplete 17, release) with n1 in its ExcNodeList"
    would = world.orchestrator.preview(replace(suspect("n1"), job="17"))
    assert would.endswith(" with n1 in its ExcNodeList and where to resume from (memory:40) in its comment")
    world.cluster.job = replace(world.cluster.job, words=("CANCELLED",))
    with pytest.raises(CannotCarryOutError, match="was cancelled"):
        world.orchestrator.preview(exclusion("17", "n1"))
    assert world.cluster.done == []


def test_a_job_whose_number_is_only_its_name_is_none_of_slurms(tmp_path: Path) -> None:
    ours = orchestrator(Played(), tmp_path, server=Server(**{"17": "kubernetes:x", "llm": "slurm:17"}))
    assert ours.state("17") is None
    state = ours.state("llm")
    assert state is not None
    assert state.nodes == {"n1", "n2"}


def test_a_memory_that_is_damaged_is_an_error_and_not_forgotten(tmp_path: Path) -> None:
    (tmp_path / "slurm.json").write_text("{")
    with pytest.raises(OrchestratorError, match="move it away to begin anew"):
        orchestrator(Played(), tmp_path)
