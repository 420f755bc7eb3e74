"""What waits for a scheduler's word, what does not, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from eagle_eye.schema.action import MemberRank
from eagle_eye.server.engine.judgement import FAILED_S, MARGIN_S, Judgement, SchedulerContact, SchedulerReports
from eagle_eye.server.engine.policy import decide
from eagle_eye.server.model.records import Job
from tests.server.engine.frames import Fleet
from tests.server.engine.situations import NOW_S, incident, past, situation

PATIENCE_S = 30.0


class Site(Fleet):
    """A job that a scheduler runs, or seems to."""

    def says(self, state: str = "running", attempt: int = 0, nodes: tuple[str, ...] = ("n0", "n1", "n2")) -> None:
        """The scheduler is asked and answers."""
        job = Job(
            job="j",
            attempt=attempt,
            state=state,
            ranks=[],
            restart_owner="",
            updated_s=self.now_s,
            source="slurm",
            nodes=list(nodes),
            scheduled_as="slurm:1",
            scheduled_state=state,
            since_s=self.now_s,
        )
        self.engine.observe_job(job)
        self.hear()

    def hear(self) -> None:
        self.engine.observe_scheduler(SchedulerReports("slurm", self.now_s, frozenset({"j"}), PATIENCE_S))

    def die(self, exit_code: int = 1) -> None:
        """All ranks end within a second, and do nothing any more."""
        for rank, node in enumerate(self.nodes):
            self.happens(node, "process_exit", exit_code=exit_code, rank=rank, pid=100 + rank, goodbye=False, job="j")
        self.stopped = True


def faults(judgements: list[Judgement]) -> set[str]:
    return {verdict.fault for judgement in judgements for verdict in judgement.verdicts}


def ran(seconds: int = 20) -> Site:
    site = Site()
    site.run(seconds)
    site.says()
    return site


def test_without_a_scheduler_the_end_of_all_ranks_is_a_crash_within_seconds() -> None:
    site = Site()
    site.run(20)
    site.die()
    assert faults(site.run(5)) == {"process_crash"}


def test_with_one_it_waits_for_its_word_and_asks_for_it() -> None:
    site = ran()
    site.die()
    judgements = site.run(5)
    assert faults(judgements) == set()
    assert [judgement.awaiting for judgement in judgements][-2:] == [True, True]


def test_a_job_that_was_cancelled_meanwhile_is_not_spoken_of() -> None:
    site = ran()
    site.die()
    judgements = site.run(4)
    site.says("cancelled")
    judgements += site.run(120)
    assert faults(judgements) == set()


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_job_that_nobody_stopped_has_crashed(state: str) -> None:
    site = ran()
    site.die()
    site.run(4)
    site.says(state)
    assert faults(site.run(2)) == {"process_crash"}


def test_a_failed_job_is_looked_at_for_a_minute_and_no_longer() -> None:
    site = ran()
    site.says("failed")
    site.die()
    site.run(3)
    site.hear()
    assert faults(site.run(3)) == {"process_crash"}
    site.run(int(FAILED_S))
    assert faults(site.run(5)) == set()


def test_a_scheduler_that_is_not_heard_delays_but_does_not_silence() -> None:
    site = ran()
    site.die()
    assert faults(site.run(int(PATIENCE_S) - 1)) == set()
    assert "process_crash" in faults(site.run(3))


def test_a_gpu_that_is_lost_is_reported_at_once_and_asked_about() -> None:
    site = ran()
    site.run(5)
    site.happens("n1", "xid", code=79, text="GPU has fallen off the bus")
    judgements = site.run(4)
    assert "gpu_lost" in faults(judgements)
    assert judgements[-1].awaiting
    site.hear()
    assert not site.run(1)[0].awaiting


def test_a_job_that_began_after_the_last_word_may_be_the_schedulers() -> None:
    site = Site()
    site.engine.observe_scheduler(SchedulerReports("slurm", site.now_s, frozenset(), PATIENCE_S))
    site.run(8)
    site.die()
    assert faults(site.run(4)) == set()
    site.engine.observe_scheduler(SchedulerReports("slurm", site.now_s, frozenset(), PATIENCE_S))
    assert faults(site.run(2)) == {"process_crash"}


def test_the_schedulers_nodes_become_members_as_their_agents_are_heard() -> None:
    site = Site()
    site.mute = {"n2"}
    site.run(5)
    site.says(nodes=("n0", "n1", "n2", "elsewhere"))
    (judgement,) = site.run(1)
    assert judgement.members == 2
    site.mute = set()
    assert site.run(1)[0].members == 3


def test_a_node_of_which_no_rank_is_known_is_a_member_by_the_schedulers_word() -> None:
    site = Site()
    site.run(2)
    site.says(nodes=("n0", "n1", "n2", "exporter"))
    site.engine.observe(replace(site.frame("n0"), node="exporter", ranks=[], stream="x"), site.now_s)
    (judgement,) = site.run(1)
    assert judgement.members == 4


def test_the_next_attempt_begins_with_the_schedulers_word() -> None:
    site = ran()
    site.says("pending", nodes=())
    site.attempt = 1
    site.says(attempt=1)
    (judgement,) = site.run(1)
    assert (judgement.attempt, judgement.state) == (1, "running")


def test_a_launchers_failed_job_is_not_judged() -> None:
    site = Site()
    site.run(20)
    ranks = [MemberRank(i, node, 0) for i, node in enumerate(site.nodes)]
    job = Job(job="j", attempt=0, state="failed", ranks=ranks, restart_owner="", updated_s=site.now_s)
    site.engine.observe_job(job)
    site.die()
    assert faults(site.run(10)) == set()


CRASH = incident(fault="process_crash", fact=True, onset_s=NOW_S - 60)
LOST = incident(fault="gpu_lost", fact=True, onset_s=NOW_S - 60)
PENDING = incident(fault="gpu_memory_error", fact=True, asks="drain_node", onset_s=NOW_S - 60)


def reported(heard_age_s: float | None, what: Any = CRASH) -> tuple[str, str, bool, tuple[str, ...]]:
    heard_s = None if heard_age_s is None else NOW_S - heard_age_s
    decision = decide(what, situation(hearing=SchedulerContact("slurm", heard_s, PATIENCE_S)))
    return decision.rule, decision.kind, decision.restart, decision.exclude


@pytest.mark.parametrize("heard_age_s", [None, 61.0, 60.0 - MARGIN_S + 0.1])
def test_a_restart_waits_for_the_schedulers_word(heard_age_s: float | None) -> None:
    assert reported(heard_age_s)[0] == "scheduler"


def test_and_goes_on_once_it_was_heard_since() -> None:
    assert reported(60.0 - MARGIN_S) == ("", "restart_job", True, ())


def test_a_proof_against_hardware_excludes_and_restarts_nothing() -> None:
    assert reported(None, LOST) == ("", "exclude_node", False, ("n1",))
    assert reported(5.0, LOST) == ("", "exclude_node", True, ("n1",))
    assert reported(None, PENDING)[:2] == ("", "drain_node")


def test_a_fresh_proof_waits_for_the_word_so_that_the_job_can_be_restarted_with_it() -> None:
    fresh = replace(LOST, onset_s=NOW_S - PATIENCE_S + 1)
    assert reported(60.0, fresh)[0] == "scheduler"
    assert reported(1.0, fresh) == ("", "exclude_node", True, ("n1",))


def test_a_node_that_went_alone_leaves_the_restart_to_be_asked_for() -> None:
    alone = past(attempt=CRASH.attempt, state="done", restart=False, exclude=["n1"])
    assert decide(CRASH, situation(actions=[alone])).rule == ""
    for other in (replace(alone, restart=True, updated_s=CRASH.onset_s), replace(alone, state="running")):
        assert decide(CRASH, situation(actions=[other])).rule == "under_way"


def test_an_inference_waits_as_well() -> None:
    assert reported(None, incident(onset_s=NOW_S - 60))[0] == "scheduler"


def test_the_reason_says_how_long_it_was_not_heard_and_where_to_look() -> None:
    decision = decide(CRASH, situation(hearing=SchedulerContact("slurm", NOW_S - 300, PATIENCE_S)))
    assert "last heard 300 s ago" in decision.hold
    assert "/readyz" in decision.hold


def test_a_job_that_failed_by_itself_may_be_restarted() -> None:
    heard = SchedulerContact("slurm", NOW_S, PATIENCE_S)
    assert decide(CRASH, situation(job_state="failed", crashed=True, hearing=heard)).kind == "restart_job"
    assert decide(CRASH, situation(job_state="failed", hearing=heard)).rule == "job_state"


def test_the_cost_counts_no_more_time_than_the_limit_leaves() -> None:
    slow = incident(fault="pcie_degraded", slowdown_ratio=0.3)
    assert decide(slow, situation(ends_s=NOW_S + 900)).rule == "cost"
    assert decide(slow, situation(ends_s=NOW_S + 86_400)).kind == "exclude_node"
