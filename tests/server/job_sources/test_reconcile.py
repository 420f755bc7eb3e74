"""Launchers, schedulers and agents brought together: whose word counts, and whose job is whose."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from eagle_eye.schema.action import JobUpdate, MemberRank
from eagle_eye.server.jobs.reconcile import (
    UNSEEN_S,
    Knowledge,
    ObservedJob,
    Reconciled,
    agreed_state,
    declared_job,
    reconcile,
)
from eagle_eye.server.jobs.source import ScheduledJob
from eagle_eye.server.model.identity import NodeNames
from eagle_eye.server.model.records import Job

NOW = 10_000.0
NODES = ("n1", "n2", "n3", "n4")


def scheduled(id_: str = "17", state: Any = "running", **more: Any) -> ScheduledJob:
    fields: dict[str, Any] = {"nodes": ("n1", "n2"), "started_s": NOW - 1_000, "said": state.upper()}
    return ScheduledJob(id_, id_, state, **{**fields, **more})


def seen(attempt: int = 0, *nodes: str) -> ObservedJob:
    return ObservedJob(attempt, frozenset(nodes or ("n1", "n2")))


class Site:
    """What is on record, told by the scheduler again and again."""

    def __init__(self, **seen_jobs: ObservedJob) -> None:
        self.seen = {name.removeprefix("job"): what for name, what in seen_jobs.items()}
        self.jobs: dict[str, Job] = {}
        self.now_s = NOW
        self.scraped: frozenset[str] = frozenset()
        self.reserved: frozenset[str] = frozenset()

    def reported(self, *jobs: ScheduledJob) -> Reconciled:
        self.now_s += 10.0
        known = Knowledge(self.jobs, self.seen, NodeNames(NODES), self.scraped, self.reserved)
        result = reconcile("slurm", jobs, known, "", self.now_s)
        self.jobs.update({job.job: job for job in result.jobs})
        return result

    def declared(
        self, name: str, state: str = "running", attempt: int = 0, nodes: tuple[str, ...] = ("n1",), owner: str = ""
    ) -> None:
        ranks = [MemberRank(rank, node, 0) for rank, node in enumerate(nodes)]
        update = JobUpdate(attempt, state, ranks, "launcher", owner)
        self.jobs[name] = declared_job(name, update, self.jobs.get(name), self.now_s)


def test_a_job_that_agents_see_gets_its_state_and_members_from_the_scheduler() -> None:
    site = Site(job17=seen(0, "n1"))
    reported = site.reported(scheduled(ends_s=NOW + 600))
    job = site.jobs["17"]
    assert (job.state, job.nodes, job.source, job.scheduled_as) == ("running", ["n1", "n2"], "slurm", "slurm:17")
    assert (job.ends_s, job.attempt, reported.speaks_for) == (NOW + 600, 0, frozenset({"17"}))


def test_the_same_word_again_changes_nothing() -> None:
    site = Site(job17=seen())
    site.reported(scheduled())
    assert site.reported(scheduled()) == Reconciled((), frozenset({"17"}), site.reported(scheduled()).left_out)


@pytest.mark.parametrize(
    "state", ["cancelled", "preempted", "timeout", "failed", "finished", "suspended", "completing"]
)
def test_the_schedulers_word_on_the_end_is_the_jobs_state(state: str) -> None:
    site = Site(job17=seen())
    site.reported(scheduled())
    site.reported(scheduled(state=state))
    assert (site.jobs["17"].state, site.jobs["17"].since_s) == (state, site.now_s)


def test_a_requeued_job_keeps_its_attempt_until_it_runs_again_and_gets_its_new_nodes_then() -> None:
    site = Site(job17=seen())
    site.reported(scheduled())
    site.reported(scheduled(state="completing", attempt=1))  # Slurm counts the restart before the old run has ended
    assert (site.jobs["17"].attempt, site.jobs["17"].nodes) == (0, ["n1", "n2"])
    site.reported(scheduled(state="pending", attempt=1, nodes=()))
    assert (site.jobs["17"].attempt, site.jobs["17"].state) == (0, "pending")
    site.reported(scheduled(attempt=1, nodes=("n3", "n4")))
    assert (site.jobs["17"].attempt, site.jobs["17"].state, site.jobs["17"].nodes) == (1, "running", ["n3", "n4"])


def test_restarts_that_only_agents_count_are_attempts_of_the_same_job() -> None:
    site = Site(job17=seen(2))
    site.reported(scheduled())
    assert site.jobs["17"].attempt == 2


def test_a_job_that_the_scheduler_names_no_more_is_over() -> None:
    site = Site(job17=seen())
    site.reported(scheduled())
    reported = site.reported()
    assert (site.jobs["17"].state, site.jobs["17"].said) == ("finished", "gone")
    assert reported.speaks_for == {"17"}


def test_one_that_had_ended_before_keeps_the_word_on_how() -> None:
    site = Site(job17=seen())
    site.reported(scheduled())
    site.reported(scheduled(state="cancelled"))
    site.reported()
    assert site.jobs["17"].state == "cancelled"


def test_a_job_under_a_name_of_its_own_is_the_schedulers_whose_nodes_it_has() -> None:
    site = Site(llama=seen(0, "n1"))
    site.reported(scheduled())
    job = site.jobs["llama"]
    assert (job.scheduled_as, job.nodes, list(site.jobs)) == ("slurm:17", ["n1"], ["llama"])
    del site.seen["llama"]
    site.reported(scheduled(state="cancelled", nodes=()))
    assert site.jobs["llama"].state == "cancelled"


def test_where_two_of_the_schedulers_jobs_share_a_node_nobody_guesses() -> None:
    site = Site(llama=seen(0, "n1", "n2"))
    reported = site.reported(scheduled("17"), scheduled("18", nodes=("n2",)))
    assert (site.jobs, reported.speaks_for) == ({}, frozenset())


def test_a_job_with_a_node_that_the_scheduler_gave_to_nobody_is_not_its() -> None:
    site = Site(llama=seen(0, "n1", "n3"))
    assert site.reported(scheduled()).speaks_for == frozenset()


def test_a_job_that_moves_on_to_another_of_the_schedulers_goes_with_it() -> None:
    site = Site(llama=seen(0, "n1"))
    site.reported(scheduled())
    site.reported(scheduled(state="failed", nodes=()), scheduled("23"))
    assert (site.jobs["llama"].scheduled_as, site.jobs["llama"].state) == ("slurm:23", "running")


def test_a_job_of_which_no_agent_speaks_is_taken_after_a_while_and_left_to_its_own_name_again() -> None:
    site = Site()
    site.reported(scheduled(started_s=NOW - UNSEEN_S + 50))
    assert site.jobs == {}
    site.now_s += 60
    site.reported(scheduled(started_s=NOW - UNSEEN_S + 50))
    assert site.jobs["17"].state == "running"
    site.seen["llama"] = seen(0, "n1")
    reported = site.reported(scheduled())
    assert (site.jobs["llama"].state, site.jobs["17"].state) == ("running", "finished")
    assert site.reported(scheduled()).jobs == ()
    assert reported.speaks_for == {"llama", "17"}


def test_nodes_of_which_only_prometheus_tells_have_their_job_at_once() -> None:
    site = Site()
    site.scraped = frozenset(NODES)
    site.reported(scheduled(started_s=NOW))
    assert site.jobs["17"].nodes == ["n1", "n2"]


def test_jobs_on_nodes_that_are_none_of_ours_are_left() -> None:
    site = Site()
    site.reported(scheduled(nodes=("cpu1", "cpu2")))
    assert site.jobs == {}


def test_a_launchers_members_and_attempt_come_before_the_schedulers() -> None:
    site = Site(job17=seen(0, "n1"))
    site.declared("17", attempt=3, nodes=("n1", "n2"))
    site.reported(scheduled(nodes=("n1", "n2", "n3")))
    job = site.jobs["17"]
    assert (job.attempt, len(job.ranks), job.nodes, job.source) == (3, 2, [], "launcher")
    assert (job.scheduled_as, job.restart_owner) == ("slurm:17", "launcher")


def test_a_jobs_owner_is_the_schedulers_word_where_the_launcher_has_none() -> None:
    site = Site(job17=seen(0, "n1"))
    site.reported(scheduled(owner="ada"))
    assert site.jobs["17"].owner == "ada"
    site.declared("17")
    assert site.jobs["17"].owner == "ada"
    site.declared("17", owner="bob")
    site.reported(scheduled(owner="ada"))
    assert site.jobs["17"].owner == "bob"


def test_the_next_job_of_a_name_does_not_belong_to_the_last_ones_owner() -> None:
    site = Site()
    site.declared("llm", owner="ada")
    site.declared("llm", state="finished")
    assert site.jobs["llm"].owner == "ada"
    site.declared("llm")
    assert site.jobs["llm"].owner == ""


def test_a_launcher_that_died_with_its_job_is_overruled_and_says_so_in_vain() -> None:
    site = Site(job17=seen())
    site.declared("17")
    site.reported(scheduled(state="cancelled"))
    assert site.jobs["17"].state == "cancelled"
    site.declared("17")
    assert site.jobs["17"].state == "cancelled"


def test_a_launcher_that_gave_up_is_believed_while_its_allocation_lives() -> None:
    site = Site(job17=seen())
    site.declared("17", state="finished")
    site.reported(scheduled())
    assert site.jobs["17"].state == "finished"


def test_a_later_run_of_a_finished_launchers_job_is_the_schedulers() -> None:
    site = Site(job17=seen())
    site.declared("17", state="finished")
    site.reported(scheduled(started_s=site.now_s + 5))
    assert (site.jobs["17"].state, site.jobs["17"].source, site.jobs["17"].ranks) == ("running", "slurm", [])


def test_what_they_differ_in_is_said() -> None:
    site = Site(job17=seen(0, "n1", "n4"))
    site.declared("17", nodes=("n1", "n3"))
    site.reported(scheduled(attempt=2))
    assert site.jobs["17"].conflict == (
        "the launcher: ranks on n3, where slurm gave it no node; agents: ranks on n4, where slurm gave it no node;"
        " the launcher is at attempt 0, slurm at 2"
    )


def test_a_job_in_a_maintenance_reservation_is_in_maintenance() -> None:
    site = Site(job17=seen())
    site.reserved = frozenset({"n2"})
    site.reported(scheduled())
    assert site.jobs["17"].state == "maintenance"


def test_a_word_that_is_not_known_leaves_the_state_as_it_was() -> None:
    site = Site(job17=seen())
    site.reported(scheduled())
    site.reported(replace_state(scheduled(), ""))
    assert site.jobs["17"].state == "running"


def replace_state(job: ScheduledJob, state: Any) -> ScheduledJob:
    return ScheduledJob(job.id, job.name, state, job.attempt, job.nodes, job.started_s, job.ends_s, "NEWS")


def test_two_jobs_of_one_name_are_neither() -> None:
    site = Site(train=seen())
    jobs = [ScheduledJob(f"{space}/train", "train", "running", 0, ("n3",)) for space in ("a", "b")]
    reported = site.reported(*jobs)
    assert (reported.speaks_for, reported.left_out["shared_name"]) == (frozenset(), 1)


def test_a_record_of_an_older_server_is_its_launchers() -> None:
    site = Site(job17=seen())
    site.declared("17", state="finished")
    site.jobs["17"] = replace(site.jobs["17"], declared_state="")
    site.reported(scheduled())
    assert site.jobs["17"].state == "finished"


OVER = ("cancelled", "preempted", "timeout", "failed", "finished")
states = st.sampled_from(["", "running", "completing", "maintenance", *OVER])


@given(states, states | st.sampled_from(["pending", "suspended"]))
def test_whoever_says_that_the_job_is_over_is_right(declared: str, reported: str) -> None:
    agreed = agreed_state(declared, reported)
    assert (agreed in OVER) == (declared in OVER or reported in OVER)
    assert agreed in (declared, reported)
